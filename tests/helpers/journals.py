"""Journals of attempts at a run, and answers that are written to them."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers import samples
from helpers.engines import engine_info
from rlgen.processes import Processes
from rlgen.rollout.journal import Journal
from rlgen.rollout.sample import sample_of
from rlgen.types import Completion, Group, Prompt, Request, Sampling, Span, ids_of

SAMPLING = Sampling(max_tokens=64, temperature=0.7, stop_ids=(257,))
REQUEST = Request(prompt_ids=ids_of((1, 2)), seed=5)
FACTS = engine_info()


def attempt(folder: Path, done: int = 0, say: Callable[[str], None] = print, judge: str = "judge", facts: Any = FACTS) -> Journal:
    """Of a run that goes on after step `done`."""
    return Journal.open(folder, done, Processes.alone(), facts, [judge], say)


def opened(folder: Path, rank: int = 0, judge: str = "judge", done: int = 0, say: Callable[[str], None] = print) -> Journal:
    """Of a run that begins."""
    journal = attempt(folder, done, say, judge)
    journal.rank = rank
    journal.starts_from(0, "w0")
    return journal


def completion(logp: Any, spans: tuple[Span, ...] | None = None) -> Completion:
    made = samples.completion(range(len(logp)), logp, (1, 2), 0, "length", cached_tokens=3)
    return made if spans is None else replace(made, spans=spans)


def answer_one(journal: Journal, step: int, group: int, given: Completion, index: int = 0, seed: int = REQUEST.seed) -> None:
    """Writes an answer of the engine, to the prompt that it names."""
    prompt = Prompt(position=group, row=0, text="", prompt_ids=given.prompt_ids, columns={})
    journal.answered(step, sample_of(prompt, index, seed, given, text=""), SAMPLING)


def answer_each(journal: Journal, step: int, groups: Iterable[int] = (0,), logp: float = -1.0) -> None:
    """Writes an answer of one token for each of these groups."""
    for group in groups:
        answer_one(journal, step, group, completion((logp,)))


def found(journal: Journal, group: int = 0, step: int = 1, request: Request = REQUEST) -> dict[int, Completion]:
    return journal.found(step, [(group, 0)], [request], SAMPLING, oldest=0)


def group_of(*ids: int, answer: str = "7") -> Group:
    prompt = Prompt(position=3, row=3, text="", prompt_ids=ids_of((5, 6)), columns={"answer": answer})
    made = tuple(
        samples.make_sample(
            group_id=3, sample_index=at, completion_ids=(one, 259), sampler_logp=(-0.5, -1.0), seed=at, completion="x"
        )
        for at, one in enumerate(ids)
    )
    return Group(group_id=3, prompt=prompt, samples=made)


def rewarded(groups: list[Group]) -> list[Group]:
    """The second reward fails."""
    got = {"rewards": {"a": 1 / 3, "b": None}, "reward": 1 / 3, "reward_errors": {"b": "timeout: no answer within 30 s"}}
    return [replace(group, samples=tuple(replace(s, **got) for s in group.samples)) for group in groups]  # type: ignore[arg-type]


def never(groups: list[Group]) -> list[Group]:
    raise AssertionError("scored again")


def scored_again(folder: Path, done: int = 0) -> None:
    """Rewards are taken again for what was rewarded, and for nothing else."""
    assert opened(folder, done=done).score(1, [group_of(7, 8)], never) == rewarded([group_of(7, 8)])
    for other in (
        lambda: opened(folder).score(1, [group_of(7, 9)], never),  # a neighbour is another one
        lambda: opened(folder).score(1, [group_of(7, 8, 9)], never),
        lambda: opened(folder, judge="edited").score(1, [group_of(7, 8)], never),
        lambda: opened(folder).score(1, [group_of(7, 8, answer="corrected")], never),
        lambda: opened(folder).score(2, [group_of(7, 8)], never),
    ):
        with pytest.raises(AssertionError, match="scored again"):
            other()
