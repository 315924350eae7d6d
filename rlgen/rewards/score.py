"""Groups in, scored groups out: every reward of every sample by name, and their weighted sum."""

import asyncio
import dataclasses
import math
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from types import TracebackType
from typing import Any

from rlgen.errors import RewardError
from rlgen.rewards.resolve import RewardFunction, describe
from rlgen.types import Group

MAX_CONCURRENT = 64


def weighted_sums(
    rewards: Sequence[Mapping[str, float | None]], weights: Mapping[str, float]
) -> list[float | None]:
    """The reward of each sample of one group: the weighted sum of the rewards that apply (algorithms.md 1.1, exclude).

    A reward that is None for the whole group is left out for that group. Where one is None for a part of the group, those
    samples cannot be compared with the others: their reward is None. So it is where no reward applies.

    weighted_sums([{"a": 1.0, "b": 0.5}, {"a": 0.0, "b": 2.0}], {"a": 1.0, "b": 0.5}) -> [1.25, 1.0]
    """
    active = [name for name in weights if any(row[name] is not None for row in rewards)]
    sums: list[float | None] = []
    for row in rewards:
        values = [(weights[name], value) for name in active if (value := row[name]) is not None]
        complete = bool(active) and len(values) == len(active)
        sums.append(math.fsum(weight * value for weight, value in values) if complete else None)
    return sums


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a reward: of one sample of a group, or of the whole group."""

    reward: RewardFunction
    group: int  # index in the list of groups
    sample: int | None  # index in the group; None: of the group
    arguments: Mapping[str, Any]
    place: str  # for messages: "group 17, sample 0"


class Scorer:
    """Calls the rewards of a recipe. Use it as a context manager: it owns the event loop of async rewards.

    The loop lives as long as the scorer, so that a reward's HTTP client can too.

    Raises:
        RewardError: two rewards have one name.
    """

    def __init__(self, rewards: Sequence[RewardFunction], max_concurrent: int = MAX_CONCURRENT) -> None:
        names = [reward.name for reward in rewards]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise RewardError(f"rewards: two have the name {', '.join(twice)}; give each a `name` of its own")
        self.rewards = tuple(rewards)
        self._max_concurrent = max_concurrent
        self._loop = asyncio.Runner()

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the event loop. A second call does nothing."""
        self._loop.close()

    def score(self, groups: Sequence[Group], step: int) -> list[Group]:
        """The same groups with `rewards` and `reward` in each sample.

        Rewards that are not async are called one after the other; the calls of all async ones run together, at most
        `max_concurrent` at a time.

        Raises:
            RewardError: a reward raised, or returned something else than a finite number or None (of a group: a list of as
                many); names the reward, the group, the sample and the line.
        """
        calls = [call for reward in self.rewards for call in plan_calls(reward, groups, step)]
        waiting = [call for call in calls if call.reward.is_async]
        # Outside the event loop: a reward may run one of its own.
        outcomes = [(call, call_now(call)) for call in calls if not call.reward.is_async]
        if waiting:
            outcomes += zip(waiting, self._loop.run(gather(waiting, self._max_concurrent)), strict=True)
        table: list[list[dict[str, float | None]]] = [[{} for _ in group.samples] for group in groups]
        for call, outcome in outcomes:
            members = range(len(table[call.group])) if call.sample is None else (call.sample,)
            for member, value in zip(members, check_outcome(call, outcome, len(members)), strict=True):
                table[call.group][member][call.reward.name] = value
        return [self._scored(group, rows) for group, rows in zip(groups, table, strict=True)]

    def _scored(self, group: Group, rows: Sequence[Mapping[str, float | None]]) -> Group:
        weights = {reward.name: reward.weight for reward in self.rewards}
        samples = tuple(
            # In the order of the recipe, whichever was called first.
            dataclasses.replace(sample, rewards={name: row[name] for name in weights}, reward=total)
            for sample, row, total in zip(group.samples, rows, weighted_sums(rows, weights), strict=True)
        )
        return dataclasses.replace(group, samples=samples)


def plan_calls(reward: RewardFunction, groups: Sequence[Group], step: int) -> list[Call]:
    """The calls of one reward: one a group, or one a sample. What comes from the sample goes before columns."""
    calls = []
    for index, group in enumerate(groups):
        prompt, samples, size = group.prompt, group.samples, len(group.samples)
        if reward.of_group:
            reasons = [sample.finish_reason for sample in samples]
            available = {name: [value] * size for name, value in prompt.columns.items()} | {
                "prompts": [prompt.text] * size,
                "completions": [sample.completion for sample in samples],
                "prompt_ids": [sample.prompt_ids for sample in samples],
                "completion_ids": [sample.completion_ids for sample in samples],
                "finish_reason": reasons,
                "finish_reasons": reasons,
                "step": step,
            }
            calls.append(Call(reward, index, None, reward.pick(available), f"group {group.group_id}"))
            continue
        for member, sample in enumerate(samples):
            available = dict(prompt.columns) | {
                "prompt": prompt.text,
                "completion": sample.completion,
                "prompt_ids": sample.prompt_ids,
                "completion_ids": sample.completion_ids,
                "finish_reason": sample.finish_reason,
                "step": step,
            }
            place = f"group {group.group_id}, sample {sample.sample_index}"
            calls.append(Call(reward, index, member, reward.pick(available), place))
    return calls


def call_now(call: Call) -> Any:
    """What the reward returned. Raises RewardError where it raised."""
    try:
        return call.reward.function(**call.arguments)
    except (Exception, SystemExit) as error:
        raise failed(call, error) from error


async def gather(calls: Sequence[Call], max_concurrent: int) -> list[Any]:
    """What the async rewards returned, in order. All end before the first failure in that order is raised."""
    free = asyncio.Semaphore(max_concurrent)

    async def run(call: Call) -> Any:
        async with free:
            awaitable: Awaitable[Any] = call.reward.function(**call.arguments)
            return await awaitable

    outcomes = await asyncio.gather(*map(run, calls), return_exceptions=True)
    for call, outcome in zip(calls, outcomes, strict=True):
        if isinstance(outcome, BaseException):
            raise failed(call, outcome) from outcome
    return outcomes


def failed(call: Call, error: BaseException) -> RewardError:
    """The error for the user: which reward, where in the step, which line."""
    return RewardError(
        f"reward {call.reward.name} failed on {call.place}: {describe(error, call.reward.file)}; "
        "return None where a reward does not apply"
    )


def check_outcome(call: Call, outcome: Any, size: int) -> list[float | None]:
    """One finite float or None for each of the `size` samples of the call. Raises RewardError for anything else."""
    where = f"reward {call.reward.name} on {call.place} ({call.reward.file or call.reward.function!r})"
    if call.sample is None:
        if not isinstance(outcome, Sequence) or isinstance(outcome, str | bytes) or len(outcome) != size:
            found = f"{len(outcome)} values" if isinstance(outcome, Sequence) else type(outcome).__name__
            raise RewardError(
                f"{where}: returned {found}; a reward of a group returns a list of {size}, one a sample"
            )
        values = list(outcome)
    else:
        values = [outcome]
    for value in values:
        if value is not None and not isinstance(value, Real):
            raise RewardError(
                f"{where}: returned {type(value).__name__} {value!r:.60}; return a number or None"
            )
        if value is not None and not math.isfinite(value):
            raise RewardError(
                f"{where}: returned {value!r}; return a finite number, or None where it does not apply"
            )
    return [None if value is None else float(value) for value in values]
