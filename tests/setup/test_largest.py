"""The largest micro-batches, tried before step 1: nothing is left of them, and too little memory shows at once."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from conftest import Proof, Run
from helpers.before import before
from helpers.slow import slow_but
from helpers.spread import recipe, run
from helpers.waiting import HANGS

from rlgen.errors import SetupError
from rlgen.files import read_json
from rlgen.models.packed_attention import PackedRows
from rlgen.models.policy import Policy
from rlgen.recipe import load_recipe
from rlgen.run.compare import first_difference
from rlgen.setup.largest import Largest, Shape, made_up
from rlgen.trainers.train_batch import TrainBatch
from rlgen.trainers.update import Updater
from rlgen.types import MicroBatch

__all__ = ["recipe"]
ROOM = ("run.steps=2", "optim.micro_batch_tokens=300")


@pytest.mark.fault(43)
@pytest.mark.parametrize("trainer", slow_but(["{kind: grpo}", "{kind: online_dpo}"], "{kind: grpo}"))
# Prompts of 64 tokens and completions of 8: four rows fill either budget, and packed ones of a group have their prompt in common.
@pytest.mark.parametrize(("packing", "budget", "fullest"), [("false", 300, (5, 60)), ("true", 150, (5, 63))])
def test_the_largest_batch_leaves_no_trace(
    recipe: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    trainer: str,
    packing: str,
    budget: int,
    fullest: tuple[int, int],
    proof: Proof,
) -> None:
    seen, computed = list[tuple[int, ...]](), list[int]()
    settings = (*ROOM, f"trainer={trainer}", f"optim={{packing: {packing}, micro_batch_tokens: {budget}}}")

    def watch(policy: Policy, batch: MicroBatch, *arguments: Any) -> None:
        if torch.is_grad_enabled():
            seen.append(tuple(batch.input_ids.shape))
            rows = PackedRows.of(batch.lengths, batch.prompt_lengths, batch.same_prompt, batch.input_ids.device)
            computed.append(int(rows.ends[-1]) if policy.packed else batch.input_ids.numel())

    plain = run(recipe, *settings, name="plain")
    before(Policy, "forward", watch, monkeypatch.setattr)
    probed = run(recipe, *settings, "run.probe_max=true")
    assert seen[0] == (4, 72) and ("dpo" in trainer or seen[1] == fullest)
    assert 0.55 * budget < max(computed) <= budget
    assert "the largest micro-batches fit: 4 rows of 72 tokens" in capsys.readouterr().out
    assert (probed / "checkpoints" / "step_000001" / "state" / "random.safetensors").exists()
    assert first_difference(plain, probed) is None
    proof("4 rows of 72 tokens went through the model before step 1; weights, random states and rollouts are those without")


@pytest.mark.fault(43)
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_too_little_memory_for_the_largest_batch_shows_before_step_1(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, phase: str, proof: Proof
) -> None:
    fired: list[str] = []
    attempt = Updater.attempt

    def starved(updater: Updater, train_batch: TrainBatch) -> None:
        def forward(*arguments: Any) -> None:
            fired.append("forward")
            raise MemoryError("no room")

        def backward(*arguments: Any, **options: Any) -> None:
            fired.append("backward")
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

        with monkeypatch.context() as patch:
            patch.setattr(*(Policy, "forward", forward) if phase == "forward" else (torch.Tensor, "backward", backward))
            attempt(updater, train_batch)

    monkeypatch.setattr(Updater, "attempt", starved)
    with pytest.raises(SetupError, match=f"the {phase} pass of 8 rows of 72 tokens") as caught:
        run(recipe, *ROOM, "run.probe_max=true")
    assert "optim.micro_batch_tokens=150" in str(caught.value) and "model.gradient_checkpointing=true" in str(caught.value)
    status = read_json(recipe.parent / "run" / "status.json")
    assert (status["state"], status["exit_code"], status["step"]) == ("failed", 3, 0) and fired == [phase]
    proof(f"no memory in the {phase} pass of the largest batch: exit 3 before step 1")


def test_a_recipe_for_several_processes_is_tried_in_one(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It shares out its rows with nobody: 300 tokens are the budget, not 600."""
    run(recipe, "run.steps=1", ROOM[1], "processes={strategy: fsdp, context: 2}", "optim.packing=false", "run.probe_max=true")
    assert "the largest micro-batches fit: 4 rows of 72 tokens, 5 rows of 60 tokens" in capsys.readouterr().out


@dataclass(frozen=True)
class InThreads:
    """Processes that are threads of this one."""

    rank: int
    world: int
    sent: list[Any]  # by rank
    all_here: Barrier

    def gather(self, items: Sequence[Any]) -> list[Any]:
        self.sent[self.rank] = items
        self.all_here.wait(HANGS)
        found = [item for items in self.sent for item in items]
        self.all_here.wait(HANGS)
        return found

    def exchange(self, parts: Sequence[bytes]) -> list[bytes]:
        return [to[self.rank] for to in self.gather([parts])]


def test_no_process_tries_more_than_its_budget() -> None:
    """Three rows are no whole group of four: with the rest of it, another process would compute one more prompt."""
    sizes = {"prompt": 60, "completion": 10, "group_size": 4, "rows": 6, "budget": 90, "sharing": 1}
    most = Largest(**sizes, paired=False, packed=True, offloads=False, moments=None)
    assert most.longest() == Shape(3, 60, 10)
    sent, all_here = [list[Any]()] * 3, Barrier(3)

    def passes(rank: int) -> list[int]:
        batch = made_up(most, most.longest(), InThreads(rank, 3, sent, all_here))  # type: ignore[arg-type]
        groups = [batch.samples.group_id[list(own)] for own in batch.micro_batches]
        return [60 * len(set(own.tolist())) + 10 * len(own) for own in groups]

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(passes, range(3))) == [[90]] * 3


def test_it_is_a_flag_too(recipe: Path, rlgen: Run) -> None:
    done = rlgen("train", recipe, "--probe-max", "--dry-run", "--run-dir", recipe.parent / "dry")
    assert done.returncode == 0, done.stderr
    assert load_recipe(recipe.parent / "dry" / "resolved.yaml", []).recipe.run.probe_max is True
