"""Training on groups while others are sampled: what happens when, what an error leaves, and that runs are as without it."""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from collecting import ScriptedEngine, collected, collector
from conftest import read_jsonl
from helpers.before import before
from helpers.rollouts import rollout_rows
from helpers.spread import recipe
from helpers.waiting import until
from safetensors.torch import load_file

from rlgen.analysis.run import read_run
from rlgen.cli.train import train_command
from rlgen.engines.base import FollowUpQueue
from rlgen.errors import EngineError, RewardError, RlgenError, SentinelError, Stopped
from rlgen.processes import Processes
from rlgen.recipe.models import RewardRecipe, ScoringRecipe
from rlgen.rewards.score import Scorer, open_scorer
from rlgen.rollout.table import RowTable
from rlgen.run.compare import first_difference
from rlgen.run.signals import StopNow
from rlgen.setup.replay import Past, replay
from rlgen.trainers.collect import Collector
from rlgen.trainers.update import Updater

REWARD = """
def f(completion_ids):
    if {fails} == completion_ids[0]:
        raise ValueError("no")
    return float(completion_ids[0])
"""
Events = list[str]
__all__ = ["recipe"]


class Groups:
    """Takes down which groups are trained on, with which rewards, and in which thread."""

    threads = None

    def __init__(self, events: Events) -> None:
        self.events = events
        self.late: tuple[float, ...] = ()  # rewards of a group that waits
        self.found: dict[int, list[float]] = {}
        self.during: Callable[[], None] = lambda: None

    def waits(self, samples: Any) -> bool:
        return samples.reward.tolist() == list(self.late)

    def learn(self, table: RowTable, samples: Any, epoch: float) -> None:
        self.events.append(f"train {table.group_id[0]} in {threading.current_thread().name}")
        self.found[int(table.group_id[0])] = samples.reward.tolist()
        self.during()
        self.events.append(f"trained {table.group_id[0]}")

    def drop(self) -> None:
        self.events.append("drop")


@pytest.fixture
def open_collector(tmp_path: Path) -> Iterator[Callable[..., Collector]]:
    scorers: list[Scorer] = []

    def opened(engine: ScriptedEngine, groups: Groups, fails: int = -1) -> Collector:
        (tmp_path / "rewards.py").write_text(REWARD.format(fails=fails))
        scorers.append(open_scorer([RewardRecipe(use=f"{tmp_path}/rewards.py:f")], set(), 20, ScoringRecipe(workers=1)))
        return collector(engine, scorers[-1], tmp_path, groups=groups)

    yield opened
    for scorer in scorers:
        scorer.close()


@pytest.mark.parametrize("late", [(), (0.0, 1.0)])  # rewards of the group that waits
def test_complete_groups_are_trained_on_while_others_are_sampled(
    open_collector: Callable[..., Collector], late: tuple[float, ...]
) -> None:
    events: Events = []

    def before(place: int, further: FollowUpQueue) -> None:
        if place == 4:  # the first of the third group: not before two groups were trained on
            until(lambda: "trained 1" in events)

    groups = Groups(events)
    groups.late = late
    got = collected(open_collector(ScriptedEngine(before, events), groups))
    main = threading.current_thread().name
    assert events[0] == "begin in rlgen-stream" and main != "rlgen-stream"
    order = [event for event in events if event.startswith(("answer", "trained"))]
    assert order.index("answer 3") < order.index("trained 1") < order.index("answer 4"), order
    assert groups.found[1] == [2.0, 3.0] and f"train 1 in {main}" in events, "rewards are those of the group"
    if late:
        assert 0 not in groups.found
    else:
        assert groups.found[0] == [0.0, 1.0] and order.index("trained 0") < order.index("answer 4")
    assert [sample.reward for sample in got.samples] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_no_group_is_trained_on_before_its_last_completion(open_collector: Callable[..., Collector]) -> None:
    events: Events = []

    def before(place: int, further: FollowUpQueue) -> None:
        if place == 3:
            until(lambda: "trained 0" in events)
            time.sleep(0.1)
            assert not any(event.startswith("train 1") for event in events)

    collected(open_collector(ScriptedEngine(before, events), Groups(events)))
    assert "trained 0" in events


@pytest.mark.parametrize("what", ["engine", "stop", "training", "reward"])
def test_an_error_in_mid_stream_ends_sampling_and_leaves_nothing(open_collector: Callable[..., Collector], what: str) -> None:
    events: Events = []

    def before(place: int, further: FollowUpQueue) -> None:
        if place == 4 and what != "reward":
            until(lambda: "trained 0" in events or any(event.startswith("train 0") for event in events))
            if what == "engine":
                raise EngineError("gone")
            until(lambda: further.take() == [] and False)  # decodes on, until it is told that it need not

    groups = Groups(events)
    if what in ("stop", "training"):

        def during() -> None:
            raise StopNow if what == "stop" else RuntimeError("no kernel")

        groups.during = during
    collect = open_collector(ScriptedEngine(before, events), groups, fails=3 if what == "reward" else -1)
    expected: dict[str, type[BaseException]] = {
        "engine": EngineError,
        "stop": StopNow,
        "training": RuntimeError,
        "reward": RewardError,
    }
    with pytest.raises(expected[what]):
        collected(collect)
    assert "drop" in events
    assert not any(thread.name == "rlgen-stream" for thread in threading.enumerate())
    if what != "reward":
        assert events.index("ended by EngineError") < len(events), "sampling ended"
        assert "answer 4" not in events


# From here on: real vLLM.

STREAM = "rollout.stream=true"
LONGER = ["rollout={prompts_per_step: 12, group_size: 2, max_completion_tokens: 120}", "rewards=[{use: 'r.py:spread'}]"]
SERVER = "engine={kind: server, launch: true, start_timeout: 600.0}"


def run(recipe: Path, name: str, *overrides: str, resume: bool = False) -> Path:
    directory = recipe.parent / name
    train_command(recipe, [*LONGER, *overrides], resume, False, None, directory)
    return directory


def sampling() -> bool:
    """Whether an engine is being waited for in the background."""
    return any(thread.name == "rlgen-stream" for thread in threading.enumerate())


@pytest.fixture
def overlap(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each group that is trained on, whether others are being sampled."""
    beside: list[bool] = []
    before(Updater, "run_first", lambda *_: beside.append(sampling()), monkeypatch.setattr)
    return beside


def compare(plain: Path, streamed: Path, steps: int) -> None:
    """Ids are the same to the last; the rest to rounding."""
    ours, theirs = (
        [(row["step"], row["group_id"], row["sample_index"], row["completion_ids"]) for row in rollout_rows(one)]
        for one in (streamed, plain)
    )
    assert ours == theirs and len(ours) == steps * 24
    for mine, other in zip(read_jsonl(streamed / "metrics.jsonl"), read_jsonl(plain / "metrics.jsonl"), strict=True):
        assert mine.keys() == other.keys()
        for key in ("loss", "grad_norm", "reward/mean", "entropy", "tokens/trained", "policy_loss", "is/weight_mean"):
            if key in other:
                assert mine[key] == pytest.approx(other[key], rel=1e-5, abs=1e-6), key
        assert mine["updates/done"] == other["updates/done"] == 1 and mine["sampler/delta_max"] < 1e-4


@pytest.mark.slow
def test_runs_on_vllm_are_as_without_it_and_equal_to_the_last_bit(recipe: Path, overlap: list[bool]) -> None:
    settings = ["run.steps=3", "checkpoint={every: 1, keep: 9}"]
    plain = run(recipe, "plain", *settings)
    assert not overlap
    streamed, again = (run(recipe, name, STREAM, *settings) for name in ("streamed", "again"))
    assert len(overlap) == 2 * 3 * 12 and sum(overlap) >= 4, "nothing was trained on while vLLM sampled"
    assert first_difference(streamed, again) is None
    compare(plain, streamed, 3)
    read = read_run(streamed)  # computed anew in the order of prompts, when all of a step is there
    again_computed = replay(Past.of(read.path, read.recipe, read.attempts, read.metrics), 3, None, print, Processes.alone())
    assert again_computed.differences == {} and again_computed.first_off is None
    # The first moments after one step from the same weights are the gradients, times a number. Measured: 1.03e-6, which is what
    # float32 rounds where rows run in other micro-batches.
    moments = [load_file(one / "checkpoints" / "step_000001" / "state" / "optimizer.safetensors") for one in (plain, streamed)]
    whole, ours = (
        torch.cat([one[name].double().flatten() for name in sorted(one) if name.endswith("/exp_avg")]) for one in moments
    )
    assert len(whole) > 500_000 and whole.norm() > 0 and (ours - whole).norm() <= 2e-6 * whole.norm()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["colocated", "server"])
def test_a_stop_in_mid_stream_loses_nothing(recipe: Path, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    settings = [STREAM, "run.steps=3", "checkpoint={every: 1, keep: 9}", *([SERVER] if engine == "server" else [])]
    whole = run(recipe, "whole", *settings)
    calls = count(1)

    def stop(*_: Any) -> None:
        # In the second step, or in the third where the machine was too busy to sample beside it.
        if next(calls) > 12 and sampling():
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        before(Updater, "run_first", stop, patch.setattr)
        with pytest.raises(Stopped, match=r"after step [12] of 3"):
            run(recipe, "stopped", *settings)
    stopped = run(recipe, "stopped", *settings, resume=True)
    assert first_difference(whole, stopped) is None
    if engine == "server":
        compare(run(recipe, "plain", SERVER, "run.steps=3"), whole, 3)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["loss", "gradient", "drift"])
def test_what_is_wrong_in_mid_stream_moves_no_weight(recipe: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    real, calls = Updater.run_first, count(1)

    def wrong(update: Updater, train_batch: Any) -> Any:
        part = real(update, train_batch)
        if next(calls) != 13:  # the first group of the second step
            return part
        if what == "drift":
            held = train_batch.computed["old_at_sampling"]
            train_batch.computed["old_at_sampling"] = {rows: values + 0.5 for rows, values in held.items()}
        elif what == "loss":
            return replace(part, loss=math.nan)
        else:
            next(one for one in update.policy.parameters() if one.grad is not None).grad.view(-1)[3] = math.inf  # type: ignore[union-attr]
        return part

    monkeypatch.setattr(Updater, "run_first", wrong)
    settings = [STREAM, "run.steps=2", "optim.max_nonfinite=1", "checkpoint={every: 1, keep: 9}"]
    folder = recipe.parent / "run" / "checkpoints"
    if what == "drift":
        with pytest.raises(SentinelError):
            run(recipe, "run", *settings)
        assert [path.name for path in folder.iterdir()] == ["step_000001"]
        return
    run(recipe, "run", *settings)
    first, second = (load_file(folder / f"step_00000{step}" / "model.safetensors") for step in (1, 2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert [record["updates/skipped"] for record in read_jsonl(recipe.parent / "run" / "metrics.jsonl")] == [0, 1]


def test_it_is_refused_where_engine_and_trainer_share_a_gpu_or_several_processes_run() -> None:
    from rlgen.setup.trainer import build_stream

    def both(world: int, device: str, elsewhere: bool) -> Any:
        processes = SimpleNamespace(world=world, device=torch.device(device))
        return SimpleNamespace(processes=processes, engine=SimpleNamespace(abilities=SimpleNamespace(elsewhere=elsewhere)))

    parts: dict[str, Any] = {"sampler": None, "early": None, "weights": {"f": 1.0}}
    for given, words in (((2, "cpu", True), "in one process only"), ((1, "cuda", False), "on one GPU")):
        with pytest.raises(RlgenError, match=words):
            build_stream(both(*given), **parts, groups=Groups([]))  # type: ignore[arg-type]
    for given in ((1, "cpu", False), (1, "cuda", True)):
        assert build_stream(both(*given), **parts, groups=Groups([])) is not None  # type: ignore[arg-type]
    assert build_stream(both(2, "cuda", False), **parts, groups=None) is None
