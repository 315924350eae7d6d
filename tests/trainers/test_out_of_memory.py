"""Too little memory, in every phase of a run: phase, peak and what helps are told. torch's error is planted, on the CPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.slow import slow_but
from helpers.spread import SMALL, recipe, run, step_now
from helpers.torchrun import PRECISE, farthest, weights
from helpers.train_state import equal
from transformers import PreTrainedModel

from rlgen.engines.transformers import TransformersEngine
from rlgen.errors import EngineError, RlgenError, SetupError
from rlgen.files import read_json
from rlgen.models.policy import Policy
from rlgen.recipe import load_recipe
from rlgen.setup import largest, train_state
from rlgen.setup.policy import build_reference
from rlgen.setup.settings import TrainSettings
from rlgen.trainers import update as update_module

__all__ = ["recipe"]
Proof = Callable[[str], None]
TORCH_SAYS = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. Process 4711 has 70.00 GiB memory in use. If reserved but unallocated"
    " memory is large try setting something else."
)


class Starved:
    """Raises torch's error once: at a call of a method while step `step` trains, or at its call number `call`."""

    def __init__(
        self, owner: Any, method: str, step: int | None = None, call: int | None = None, after: bool = False, grad: bool = True
    ) -> None:
        self.place = (owner, method)
        self.step, self.call, self.after, self.grad = step, call, after, grad
        self.calls, self.fired = 0, 0

    def planted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        owner, method = self.place
        whole, now = getattr(owner, method), step_now(monkeypatch)

        def starving(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            in_step = now() == self.step and torch.is_grad_enabled() is self.grad
            due = in_step if self.step else self.calls == self.call
            if self.fired or not due:
                return whole(*arguments, **options)
            self.fired += 1
            if self.after:
                whole(*arguments, **options)
            raise torch.OutOfMemoryError(TORCH_SAYS)

        monkeypatch.setattr(owner, method, starving)


ROWS = r"\d rows of \d+ tokens"
AGAIN, LORA = "model.gradient_checkpointing=true", "model.lora.rank=16"
STARVED = {  # what is starved, the phase that is told, the first two settings that help, and those of the run
    "forward": (
        *(Starved(Policy, "forward", step=2), f"the forward pass of {ROWS}"),
        *(("optim.micro_batch_tokens=150", AGAIN), "optim.micro_batch_tokens=300"),
    ),
    "backward": (
        *(Starved(torch.Tensor, "backward", step=2), f"the backward pass of {ROWS}"),
        *((AGAIN, "rollout.max_completion_tokens=4"), "optim.micro_batch_tokens=72"),
    ),
    "entropy": (
        *(Starved(Policy, "forward", step=2, grad=False), f"the entropy of {ROWS}"),
        *(("optim.micro_batch_tokens=8192", AGAIN), "trainer={kind: grpo, top_entropy: 0.5}"),
    ),
    "gradients": (
        *(Starved(update_module, "get_total_norm", step=2), "the sum of the gradients"),
        *((LORA, "processes.strategy=fsdp"), "run.seed=0"),
    ),
    "model": (Starved(PreTrainedModel, "to", call=1), "the model", (LORA, "a smaller model"), "run.seed=0"),
    "engine": (Starved(PreTrainedModel, "to", call=2), "the engine's start", (LORA, "a smaller model"), "run.seed=0"),
    "sampling": (
        *(Starved(TransformersEngine, "_decode", call=1), r"sampling \d+ completions at a time"),
        *(("an engine.max_num_seqs below ", "a lower rollout.max_completion_tokens"), "run.seed=0"),
    ),
    "sentinel": (
        *(Starved(Policy, "forward", call=1), r"log-probs of \d+ rows of \d+ tokens"),
        *(("an optim.micro_batch_tokens below 16384", "a lower rollout.max_completion_tokens"), "run.seed=0"),
    ),
}


@pytest.mark.fault(41)
@pytest.mark.parametrize("what", slow_but(STARVED, *(what for what in STARVED if what not in ("entropy", "gradients"))))
def test_the_phase_the_peak_and_what_helps_are_told(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, what: str, proof: Proof
) -> None:
    starved, phase, helps, override = STARVED[what]
    error: type[RlgenError] = EngineError if what in ("engine", "sampling") else SetupError
    starved.planted(monkeypatch)
    peak = r"peak \d+\.\d\d GiB resident, of \d+\.\d\d GiB"
    match = (
        rf"the memory does not suffice for {phase}: CUDA out of memory\. .*70.00 GiB memory in use; {peak}\. What helps most: "
    )
    with pytest.raises(error, match=match) as caught:
        run(recipe, "run.steps=2", override)
    said, directory = str(caught.value), recipe.parent / "run"
    first, second = (said.index(text) for text in helps)
    assert first < second and " or " in said[first:second] and "setting something else" not in said
    begun = error is EngineError or (directory / "provenance.json").exists()
    assert directory.exists() == begun and starved.fired == 1
    status = read_json(directory / "status.json") if begun else {"state": "failed", "exit_code": 3, "message": said}
    assert (status["state"], status["exit_code"], status["message"]) == ("failed", 3 if error is SetupError else 6, said)
    kept = [path.name for path in (directory / "checkpoints").glob("step_*")]
    assert kept == (["step_000001"] if starved.step else [])
    proof(f"torch.OutOfMemoryError in {phase.partition(' of ')[0]}: exit {status['exit_code']}, {len(kept)} checkpoints")


@pytest.mark.fault(41)
def test_the_last_checkpoint_stands_after_half_a_step(recipe: Path, monkeypatch: pytest.MonkeyPatch, proof: Proof) -> None:
    """The optimizer has moved the weights when its memory runs out; the resumed run is the undisturbed one."""
    plain = run(recipe, "run.steps=2", name="plain")
    with monkeypatch.context() as patch:
        Starved(torch.optim.AdamW, "step", call=2, after=True).planted(patch)
        match = r"for the optimizer step: CUDA .* helps most: --set model\.lora\.rank=16 .* or processes\.strategy=fsdp in"
        with pytest.raises(SetupError, match=match):
            run(recipe, "run.steps=2")
    assert [path.name for path in (recipe.parent / "run" / "checkpoints").glob("step_*")] == ["step_000001"]
    assert read_json(recipe.parent / "run" / "status.json")["exit_code"] == 3
    with monkeypatch.context() as patch:
        Starved(train_state, "load_checkpoint", call=1).planted(patch)
        with pytest.raises(SetupError, match="for the checkpoint's optimizer state: CUDA out of memory"):
            run(recipe, "run.steps=2", resume=True)
    resumed = run(recipe, "run.steps=2", resume=True)
    assert equal(weights(resumed), weights(plain))
    assert read_json(resumed / "status.json")["exit_code"] == 0
    proof("out of memory after AdamW moved the weights of step 2: resumed from step 1, to the same bits")


class NoRoom:
    """torch, and a policy, of which there can be no other."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty_like(self, *_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError(TORCH_SAYS)

    __deepcopy__ = empty_like


@pytest.mark.fault(41)
def test_what_is_still_to_come_lacks_memory_before_step_1(recipe: Path, monkeypatch: pytest.MonkeyPatch, proof: Proof) -> None:
    reference: Any = NoRoom()
    with pytest.raises(SetupError, match=r"for the reference, a copy of the model: CUDA .* most: --set model\.lora\.rank=16 "):
        build_reference(TrainSettings.of(load_recipe(recipe, SMALL).recipe, ""), reference)
    monkeypatch.setattr(largest, "torch", NoRoom())
    with pytest.raises(SetupError, match=r"for the optimizer's state: CUDA .* most: --set model\.lora\.rank=16 "):
        run(recipe, "run.steps=2", "run.probe_max=true")
    assert read_json(recipe.parent / "run" / "status.json")["step"] == 0
    proof("torch.OutOfMemoryError for the copy of the reference, and for two moments of each weight with --probe-max")


@pytest.mark.fault(41)
def test_the_run_goes_on_with_what_helps(recipe: Path, monkeypatch: pytest.MonkeyPatch, proof: Proof) -> None:
    wide, helps = "optim.micro_batch_tokens=300", ("optim.micro_batch_tokens=150", "model.gradient_checkpointing=true")
    plain = run(recipe, "run.steps=2", wide, name="plain")
    with monkeypatch.context() as patch:
        Starved(torch.Tensor, "backward", step=2).planted(patch)
        with pytest.raises(SetupError, match=f"{helps[0]} .* or --set {helps[1]} "):
            run(recipe, "run.steps=2", wide)
    resumed = run(recipe, "run.steps=2", *helps, resume=True)
    assert farthest(weights(resumed), weights(plain)) <= PRECISE
    proof("a run that lacked memory in step 2, resumed with both settings that help: the same weights, to 1e-5")
