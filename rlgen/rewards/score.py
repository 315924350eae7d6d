"""Samples to rewards by name and their weighted sum. Failures stay apart from zeros, and from rewards that do not apply."""

import json
import logging
import math
import os
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlgen.errors import CheckpointError, RewardError
from rlgen.files import write_text, written
from rlgen.recipe.models import RewardRecipe, ScoringRecipe
from rlgen.redact import printable_json
from rlgen.rewards.pool import Limits, Pool
from rlgen.rewards.resolve import RewardFunction, resolve
from rlgen.rewards.worker import Call, Failed, Source
from rlgen.types import Group, Sample

MOST_WORKERS = 8  # unless the recipe says more: each has the user's imports in memory
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ask:
    """A call of a reward, for one sample or for all of a group, and what it is asked with."""

    reward: RewardFunction
    group: Group
    samples: tuple[Sample, ...]
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorer:
    """All rewards of a recipe, and the processes that run them."""

    rewards: tuple[RewardFunction, ...]
    max_completion_tokens: int
    pool: Pool
    failures: Path | None  # folder for samples whose reward failed: the first of each reward, and what ends the run
    known: set[str] = field(default_factory=set)  # labels of rewards that have failed before

    @property
    def weights(self) -> dict[str, float]:
        """By label, in the order of the recipe."""
        return {reward.label: reward.weight for reward in self.rewards}

    def close(self) -> None:
        """Ends the processes."""
        self.pool.close()

    def score(self, groups: Sequence[Group], step: int) -> list[Group]:
        """The same groups with `rewards`, `reward` and `reward_errors` of every sample filled in.

        Raises:
            RewardError: a call failed whose reward says `on_error: fail`, or more than `max_error_fraction` of a reward's calls.
        """
        asks, calls = self.calls(groups, step)
        budget = {
            reward.label: math.ceil(reward.max_error_fraction * sum(ask.reward is reward for ask in asks))
            for reward in self.rewards
        }
        values: dict[tuple[int, int], dict[str, float | None]] = {}
        errors: dict[tuple[int, int], dict[str, str]] = {}
        spent: Counter[str] = Counter()
        with closing(self.pool.run(calls)) as outcomes:
            for outcome in outcomes:
                ask, result = asks[outcome.id], outcome.values
                label = ask.reward.label
                if isinstance(result, Failed):
                    spent[label] += 1
                    self.failed(ask, result, step, spent[label], budget[label])
                    for sample in ask.samples:
                        errors.setdefault(key(sample), {})[label] = f"{result.cause}: {result.message}"
                    result = (0.0 if ask.reward.on_error == "zero" else None,) * len(ask.samples)
                for sample, value in zip(ask.samples, result, strict=True):
                    values.setdefault(key(sample), {})[label] = value
        return [self.scored(group, values, errors) for group in groups]

    def calls(self, groups: Sequence[Group], step: int) -> tuple[list[Ask], list[Call]]:
        """What is asked about the groups, and the same for a worker: the id of a call is its place."""
        labels, longest = [reward.label for reward in self.rewards], self.max_completion_tokens
        asks = [ask for group in groups for reward in self.rewards for ask in asks_of(reward, group, step, longest)]
        return asks, [
            Call(number, labels.index(ask.reward.label), ask.arguments, len(ask.samples) if ask.reward.of_group else None)
            for number, ask in enumerate(asks)
        ]

    def scored(
        self,
        group: Group,
        values: dict[tuple[int, int], dict[str, float | None]],
        errors: dict[tuple[int, int], dict[str, str]],
    ) -> Group:
        """The group with its values in the order of the recipe, and their sums."""
        weights = self.weights
        table = [{label: values[key(sample)][label] for label in weights} for sample in group.samples]
        samples: list[Sample] = []
        for sample, rewards, total in zip(group.samples, table, weighted_sums(table, weights), strict=True):
            wrong = errors.get(key(sample), {})
            # What a failed reward would have been is not known: its sample is not compared with the others.
            known = all(rewards[label] is not None for label in wrong)
            samples.append(replace(sample, rewards=rewards, reward=total if known else None, reward_errors=wrong))
        return replace(group, samples=tuple(samples))

    def failed(self, ask: Ask, failed: Failed, step: int, count: int, budget: int) -> None:
        """Takes down a failure, and raises RewardError where the recipe does not go on after it."""
        reward = ask.reward
        first = reward.label not in self.known
        self.known.add(reward.label)
        ends = reward.on_error == "fail" or count > budget
        what = f"{place(ask)}: {failed.message}"
        if not (first or ends):
            return
        saved = self.save(ask, failed, step)
        where = f"; the sample is in {saved}" if saved else ""
        text = f"\n{failed.traceback}" if failed.traceback else ""
        if not ends:
            log.warning("%s (on_error: %s)%s%s", what, reward.on_error, where, text)
            return
        hint = ""
        if reward.on_error == "fail" and failed.cause == "timeout":
            hint = "; raise `timeout` of this entry of rewards, or let `on_error: skip` leave such samples out"
        elif reward.on_error != "fail":
            hint = f"; {count} calls of this step failed, more than max_error_fraction {reward.max_error_fraction:g} of them"
        raise RewardError(f"{what}{hint}{where}{text}")

    def save(self, ask: Ask, failed: Failed, step: int) -> Path | None:
        """Writes down what a reward failed at, to be called with it again."""
        if self.failures is None:
            return None
        sample = "" if ask.reward.of_group else f"_{ask.samples[0].sample_index}"
        path = self.failures / f"step_{step:06d}_{ask.reward.label}_{ask.group.group_id}{sample}.json"
        record = {
            "reward": ask.reward.label,
            "use": ask.reward.use,
            "step": step,
            "group_id": ask.group.group_id,
            "sample_index": [one.sample_index for one in ask.samples],
            "cause": failed.cause,
            "message": failed.message,
            "traceback": failed.traceback,
            "arguments": ask.arguments,
        }
        try:
            with written(self.failures):
                self.failures.mkdir(parents=True, exist_ok=True)
            write_text(path, printable_json(json.dumps(record, indent=2, default=repr)) + "\n")
        except CheckpointError as error:  # a disk too full for a note is no reason to end a run
            log.warning("%s", error)
            return None
        return path


def open_scorer(
    entries: Sequence[RewardRecipe],
    columns: Collection[str],
    max_completion_tokens: int,
    scoring: ScoringRecipe,
    output: Path | None = None,
    failures: Path | None = None,
) -> Scorer:
    """Starts a worker that imports the functions, and checks that every parameter will be filled.

    Args:
        columns: of the data set, `answer` included if the recipe maps it.
        output: file for what the functions print; None: standard error.
        failures: folder for samples whose reward failed; None: they are not kept.

    Raises:
        DataError: a function takes what is no column of the data, and nobody else provides.
        RewardError: a function is not there, its import fails or does not end, or it cannot be called by name.
        CheckpointError: the disk is full.
    """
    beside = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # processes of this run on this machine: each has workers
    limits = Limits(
        workers=scoring.workers or max(1, min(MOST_WORKERS, cores() // beside)),
        memory=int(scoring.memory_gib * 2**30),
        import_timeout=scoring.import_timeout,
    )
    pool = Pool([Source(entry.use, entry.timeout) for entry in entries], limits, output)
    try:
        facts = pool.facts()
        rewards = tuple(resolve(entry, fact, columns) for entry, fact in zip(entries, facts, strict=True))
    except BaseException:
        pool.close()
        raise
    return Scorer(rewards=rewards, max_completion_tokens=max_completion_tokens, pool=pool, failures=failures)


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def key(sample: Sample) -> tuple[int, int]:
    return sample.group_id, sample.sample_index


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


def asks_of(reward: RewardFunction, group: Group, step: int, max_completion_tokens: int) -> list[Ask]:
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
        return [Ask(reward, group, group.samples, reward.arguments(available))]
    return [
        Ask(
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


def place(ask: Ask) -> str:
    which = "" if ask.reward.of_group else f", sample {ask.samples[0].sample_index}"
    return f"reward {ask.reward.label}, prompt at position {ask.group.group_id}{which}"
