"""Samples to rewards by name and their weighted sum."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlgen.errors import RewardError
from rlgen.rewards.resolve import RewardFunction, user_line
from rlgen.types import Group, Sample

CONCURRENT = 64  # calls of async rewards under way at once


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a reward: for one sample, or for all of a group."""

    reward: RewardFunction
    group: Group
    samples: tuple[Sample, ...]
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Scorer:
    """All rewards of a recipe. It owns the event loop of the async ones, which lives as long as their HTTP clients."""

    rewards: tuple[RewardFunction, ...]
    max_completion_tokens: int
    loop: asyncio.Runner = field(default_factory=asyncio.Runner)

    def close(self) -> None:
        """Ends the event loop."""
        self.loop.close()

    def score(self, groups: Sequence[Group], step: int) -> list[Group]:
        """The same groups with `rewards` and `reward` of every sample filled in.

        Raises:
            RewardError: a function failed, or returned something that is neither a finite number nor None.
        """
        limit = self.max_completion_tokens
        calls = [call for group in groups for reward in self.rewards for call in calls_of(reward, group, step, limit)]
        values: dict[tuple[int, int], dict[str, float | None]] = {}
        # Not in the event loop: a function that is not async may run one of its own.
        done = [(call, call_now(call)) for call in calls if not call.reward.is_async]
        if waiting := [call for call in calls if call.reward.is_async]:
            done += zip(waiting, self.loop.run(run_all(waiting)), strict=True)
        for call, answer in done:
            for sample, value in zip(call.samples, answers(call, answer), strict=True):
                values.setdefault((sample.group_id, sample.sample_index), {})[call.reward.label] = value
        weights = {reward.label: reward.weight for reward in self.rewards}
        scored: list[Group] = []
        for group in groups:
            table = [
                {label: values[sample.group_id, sample.sample_index][label] for label in weights} for sample in group.samples
            ]
            totals = weighted_sums(table, weights)
            samples = tuple(
                replace(sample, rewards=rewards, reward=total)
                for sample, rewards, total in zip(group.samples, table, totals, strict=True)
            )
            scored.append(replace(group, samples=samples))
        return scored


def weighted_sums(table: Sequence[dict[str, float | None]], weights: dict[str, float]) -> list[float | None]:
    """The reward of each sample of one group.

    A reward that applies to no sample of the group is left out. Where one applies to some of them only, the others cannot be
    compared: their sum is None. None is never 0.
    """
    applying = [label for label in weights if any(row[label] is not None for row in table)]
    totals: list[float | None] = []
    for row in table:
        values = [row[label] for label in applying]
        known = [value for value in values if value is not None]
        complete = bool(applying) and len(known) == len(values)
        totals.append(sum(weights[label] * v for label, v in zip(applying, known, strict=True)) if complete else None)
    return totals


def calls_of(reward: RewardFunction, group: Group, step: int, max_completion_tokens: int) -> list[Call]:
    """The calls that a reward needs for a group, with everything a function may ask for by name."""
    prompt = group.prompt
    if reward.of_group:
        count = len(group.samples)
        available: dict[str, Any] = {
            **{name: [value] * count for name, value in prompt.columns.items()},
            "prompts": [prompt.text] * count,
            "completions": [sample.completion for sample in group.samples],
            "prompt_ids": [list(sample.prompt_ids) for sample in group.samples],
            "completion_ids": [list(sample.completion_ids) for sample in group.samples],
            "finish_reason": [sample.finish_reason for sample in group.samples],
            "finish_reasons": [sample.finish_reason for sample in group.samples],
            "max_completion_tokens": max_completion_tokens,
            "step": step,
        }
        return [Call(reward, group, group.samples, reward.arguments(available))]
    return [
        Call(
            reward,
            group,
            (sample,),
            reward.arguments(
                {
                    **prompt.columns,
                    "prompt": prompt.text,
                    "completion": sample.completion,
                    "prompt_ids": list(sample.prompt_ids),
                    "completion_ids": list(sample.completion_ids),
                    "finish_reason": sample.finish_reason,
                    "max_completion_tokens": max_completion_tokens,
                    "step": step,
                }
            ),
        )
        for sample in group.samples
    ]


def call_now(call: Call) -> Any:
    """The answer of a function that is not async."""
    try:
        return call.reward.function(**call.arguments)
    except (Exception, SystemExit) as error:  # the user's code raises whatever it likes; that is no reward of 0
        raise failed(call, error) from error


async def run_all(calls: Sequence[Call]) -> list[Any]:
    """The answers of async functions in the order of the calls. All have ended when the first failure is raised."""
    limit = asyncio.Semaphore(CONCURRENT)

    async def run(call: Call) -> Any:
        async with limit:
            try:
                return await call.reward.function(**call.arguments)
            except (Exception, SystemExit) as error:
                problem = failed(call, error)
                problem.__cause__ = error
                return problem

    outcomes = await asyncio.gather(*map(run, calls))
    for outcome in outcomes:
        if isinstance(outcome, RewardError):
            raise outcome
    return outcomes


def failed(call: Call, error: BaseException) -> RewardError:
    """The error for the user: which reward, which sample, which line."""
    line = user_line(error, call.reward.file)
    return RewardError(f"{place(call)}: {type(error).__name__}: {error} {line}")


def answers(call: Call, answer: Any) -> list[float | None]:
    """One value a sample.

    Raises:
        RewardError: not a number, not finite, or a list of another length than the group.
    """
    values = answer if call.reward.of_group else [answer]
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != len(call.samples):
        raise RewardError(f"{place(call)} returned {str(values)[:80]}, not a list of {len(call.samples)} rewards")
    return [None if value is None else finite(call, value) for value in values]


def finite(call: Call, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, str) or not math.isfinite(number):
        raise RewardError(f"{place(call)} returned {str(value)[:80]!r}; a reward is a finite number, or None: does not apply")
    return number


def place(call: Call) -> str:
    which = "" if call.reward.of_group else f", sample {call.samples[0].sample_index}"
    return f"reward {call.reward.label}, prompt at position {call.group.group_id}{which}"
