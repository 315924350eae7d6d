"""Sampling ahead: which weights answer which prompts, what is dropped, and when the loop waits."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import read_jsonl

from rlgen.cli.train import train_command
from rlgen.errors import EngineError, Fault, SentinelError
from rlgen.models.tiny import byte_tokenizer
from rlgen.rollout.sampler import Sampler
from rlgen.trainers import build
from rlgen.types import Completion, Group, Prompt, Request, Sampling

Proof = Callable[[str], None]

STEPS, SIZE = 5, 2


class Scripted:
    """Answers at once with the version that it has, or as old as it is told to be."""

    def __init__(self, age: Callable[[int], int] = lambda place: 0) -> None:
        self.version, self.age = 0, age
        self.asked: list[tuple[int, ...]] = []  # prompt ids of each call

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        self.asked.append(tuple(request.prompt_ids[0] for request in requests[::SIZE]))
        return [
            Completion(
                token_ids=(7, 257),
                logp=(-1.0, -1.0),
                finish_reason="stop",
                weight_version=max(0, self.version - self.age(place)),
                prompt_ids=request.prompt_ids,
            )
            for place, request in enumerate(requests)
        ]

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> "Future[list[Completion]]":
        answered: Future[list[Completion]] = Future()
        try:
            answered.set_result(self.generate(requests, sampling))
        except EngineError as error:
            answered.set_exception(error)
        return answered


def prompts_of(step: int) -> list[Prompt]:
    positions = range(2 * step, 2 * step + 2) if step <= STEPS else ()
    return [Prompt(position=at, row=at, text="", prompt_ids=(at,), columns={}) for at in positions]


def sampler(engine: Scripted, ahead: bool, max_staleness: int = 1) -> Sampler:
    return Sampler(
        engine=engine,  # type: ignore[arg-type]
        prompts_of=prompts_of,
        sampling=Sampling(max_tokens=4, temperature=1.0, stop_ids=(257,)),
        group_size=SIZE,
        run_seed=0,
        tokenizer=byte_tokenizer(),
        submit_to=engine.submit if ahead else None,
        max_staleness=max_staleness,
        in_flight=False,
    )


def ages(engine: Scripted, taken: Sampler) -> list[list[int]]:
    """By step, how old its samples are; the engine takes the weights of each."""
    found = []
    for step in range(1, STEPS + 1):
        groups, dropped = taken.groups(step)
        assert dropped == 0 and [group.group_id for group in groups] == [2 * step, 2 * step + 1]
        assert all(sample.prompt_ids == (group.group_id,) for group in groups for sample in group.samples)
        found.append([step - 1 - sample.weight_version for group in groups for sample in group.samples])
        taken.before_sync()
        engine.version = step
    return found


def test_a_step_ahead_is_one_version_old() -> None:
    engine = Scripted()
    assert ages(engine, sampler(engine, ahead=True)) == [[0] * 4] + [[1] * 4] * (STEPS - 1)
    assert engine.asked == [(2 * step, 2 * step + 1) for step in range(1, STEPS + 1)]  # each once, none after the last


def test_strictly_on_policy_is_of_present_weights() -> None:
    engine = Scripted()
    assert ages(engine, sampler(engine, ahead=False)) == [[0] * 4] * STEPS


@pytest.mark.fault(59)
def test_older_ones_are_dropped_and_counted(proof: Proof) -> None:
    engine = Scripted(age=lambda place: 2 if place == 1 else 0)
    taken = sampler(engine, ahead=True, max_staleness=2)
    engine.version = 3
    groups, dropped = taken.groups(4)  # trained by version 3: ages 0 and 2
    assert dropped == 0
    engine.version = 4
    groups, dropped = taken.groups(5)  # sampled by version 3 and 1, trained by version 4: ages 1 and 3
    assert dropped == 1
    assert [[sample.sample_index for sample in group.samples] for group in groups] == [[0], [0, 1]]
    proof("samples three versions old in a step")


def test_on_policy_an_old_sample_is_a_fault() -> None:
    engine = Scripted(age=lambda place: 1)
    engine.version = 3
    with pytest.raises(SentinelError) as caught:
        sampler(engine, ahead=False).groups(4)
    assert caught.value.fault is Fault.STALE_ROLLOUTS


def test_newer_than_the_trainer_is_a_fault_ahead_too() -> None:
    engine = Scripted(age=lambda place: -1)
    with pytest.raises(SentinelError) as caught:
        sampler(engine, ahead=True).groups(1)
    assert caught.value.fault is Fault.STALE_ROLLOUTS


def test_a_failure_in_the_background_is_raised_by_the_step_it_belongs_to() -> None:
    engine = Scripted()
    taken = sampler(engine, ahead=True)
    generate = engine.generate

    def failing(requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        raise EngineError("gone")

    engine.generate = failing  # type: ignore[method-assign]
    taken.submit(2, engine.submit)
    engine.generate = generate  # type: ignore[method-assign]
    taken.before_sync()  # waits, and leaves the error to the step
    with pytest.raises(EngineError, match="gone"):
        taken.groups(2)


def test_a_step_without_samples_trains_nothing_and_is_counted(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = build.Sampler.groups

    def groups(taken: Sampler, step: int) -> tuple[list[Group], int]:
        found, dropped = real(taken, step)
        if step == 2:
            return [replace(group, samples=()) for group in found], sum(len(group.samples) for group in found)
        return found, dropped

    monkeypatch.setattr(build.Sampler, "groups", groups)
    run = recipe_file.parent / "run"
    train_command(recipe_file, ["engine={kind: transformers}", "run.steps=3"], False, False, None, run)
    first, empty, third = read_jsonl(run / "metrics.jsonl")
    assert empty["rollout/dropped_stale"] == 16 and empty["loss"] is None and empty["grad_norm"] is None
    assert empty["tokens/trained"] == empty["tokens/generated"] == 0 and empty["reward/mean"] is None
    assert first["loss"] is not None and third["loss"] is not None and third["sampler/delta_max"] < 1e-4
