"""Computes the rewards of samples, by name and weighted. A failed reward is not a 0, and neither is one that does not apply."""

import json
import logging
import math
import threading
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy

from rlgen.errors import CheckpointError, RewardError
from rlgen.files import write_text, written
from rlgen.recipe.judges import JudgeArgs, RewardModelArgs, settings_of
from rlgen.recipe.models import RewardRecipe, ScoringRecipe
from rlgen.redact import printable_json
from rlgen.rewards.load import RewardSource
from rlgen.rewards.resolve import MESSAGES, RewardFunction, resolve
from rlgen.types import Group, Ids, Sample, whole_conversation
from rlgen.worker_pool.failures import Failed
from rlgen.worker_pool.pool import Pool, WorkerLimits, limits_of
from rlgen.worker_pool.stream import CallOutcome, CallStream
from rlgen.worker_pool.worker import WorkerCall, ids_from

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RewardCall:
    """One call of a reward with its arguments, for one sample or for all samples of a group."""

    reward: RewardFunction
    group: Group
    samples: tuple[Sample, ...]
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorer:
    """All rewards of a recipe, and the processes that run them."""

    rewards: tuple[RewardFunction, ...]
    max_completion_tokens: int
    pools: Sequence[Pool]  # one of all functions, and one of each reward that asks a model
    places: Sequence[tuple[int, int]]  # of each reward: its pool, and its index there
    failures: Path | None  # folder for failed calls: the first of each reward, and the one that ends the run
    turns: bool = False  # completions are conversations of several turns: rewards may take their messages
    known: set[str] = field(default_factory=set)  # labels of rewards that have failed already

    @property
    def weights(self) -> dict[str, float]:
        """Returns the weight of each reward by label, in the recipe's order."""
        return {reward.label: reward.entry.weight for reward in self.rewards}

    def close(self) -> None:
        for pool in self.pools:
            pool.close()

    def open(self) -> CallStream:
        """Returns a stream for calls. Raises as `Pool.join` does."""
        return CallStream(self.pools, self.places)

    def run(self, calls: Sequence[WorkerCall]) -> Generator[CallOutcome, None, None]:
        """Yields the outcomes of calls as they arrive. Closing the generator early kills what still runs."""
        with closing(self.open()) as stream:
            stream.add(calls)
            yield from stream.outcomes()

    def score(self, groups: Sequence[Group], step: int) -> list[Group]:
        """Returns the same groups with `rewards`, `reward` and `reward_errors` of every sample filled in.

        Raises RewardError if a call of a reward with `on_error: fail` failed, or more calls of one than `max_error_fraction`.
        """
        with closing(EarlyScoring(self)) as scoring:
            return scoring.result(step, groups)

    def calls_of(self, group: Group, step: int, first: int) -> tuple[list[RewardCall], list[WorkerCall]]:
        """Returns the calls that a group needs, of each reward one, or one a sample, with every argument that the function takes;
        and the same in the form that workers are sent, numbered from `first` on.
        """
        prompt, samples = group.prompt, group.samples
        lists: dict[str, list[Any]] = {
            **{name: [value] * len(samples) for name, value in prompt.columns.items()},
            "prompt_ids": [SentIds(sample.prompt_ids) for sample in samples],
            "completion_ids": [SentIds(sample.completion_ids) for sample in samples],
            "finish_reason": [sample.finish_reason for sample in samples],
            "prompt_messages": [prompt.messages] * len(samples),
        }
        if self.turns:
            lists[MESSAGES] = [whole_conversation(sample.messages, sample.completion) for sample in samples]
        texts, completions = [prompt.text] * len(samples), [sample.completion for sample in samples]
        shared = {"max_completion_tokens": self.max_completion_tokens, "step": step}
        of_all = {**lists, "prompts": texts, "completions": completions, "finish_reasons": lists["finish_reason"], **shared}
        lists |= {"prompt": texts, "completion": completions}
        of_each = [{**dict(zip(lists, values, strict=True)), **shared} for values in zip(*lists.values(), strict=True)]
        asks: list[RewardCall] = []
        calls: list[WorkerCall] = []
        for source, reward in enumerate(self.rewards):
            whole = [(samples, of_all)] if samples else []  # none: all were dropped as too old
            each = [((sample,), given) for sample, given in zip(samples, of_each, strict=True)]
            for some, given in whole if reward.of_group else each:
                ask = RewardCall(reward, group, some, reward.arguments(given))
                calls.append(WorkerCall(first + len(asks), source, ask.arguments, len(some) if reward.of_group else None))
                asks.append(ask)
        return asks, calls

    def scored(self, group: Group, results: Iterable[tuple[RewardCall, Sequence[float | None] | Failed]]) -> Group:
        """Returns the group with the values of its rewards and their weighted sums. `results`: of its calls, in the order of
        `calls_of`, which is the recipe's.

        A failed call gives 0.0 if the reward's `on_error` is zero, else None, and an entry in `reward_errors`.
        """
        table: dict[int, dict[str, float | None]] = {sample.sample_index: {} for sample in group.samples}
        errors: dict[int, dict[str, str]] = {sample.sample_index: {} for sample in group.samples}
        for ask, result in results:
            label, values = ask.reward.label, result
            if isinstance(values, Failed):
                for sample in ask.samples:
                    errors[sample.sample_index][label] = f"{values.cause}: {values.message}"
                values = [0.0 if ask.reward.entry.on_error == "zero" else None] * len(ask.samples)
            for sample, value in zip(ask.samples, values, strict=True):
                table[sample.sample_index][label] = value
        samples: list[Sample] = []
        weights = self.weights
        for sample, total in zip(group.samples, weighted_sums(list(table.values()), weights), strict=True):
            rewards, wrong = table[sample.sample_index], errors[sample.sample_index]
            # The value of a failed reward is unknown: its sample is not compared with the others.
            known = all(rewards[label] is not None for label in wrong if weights[label])
            samples.append(replace(sample, rewards=rewards, reward=total if known else None, reward_errors=wrong))
        return replace(group, samples=tuple(samples))

    def failed(self, ask: RewardCall, failed: Failed, step: int, count: int, budget: int) -> None:
        """Logs and saves the first failure of a reward. Raises RewardError if its `on_error` is fail, or if `count`, its failures
        in this step, exceeds `budget`.
        """
        entry = ask.reward.entry
        first = entry.label not in self.known
        self.known.add(entry.label)
        ends = entry.on_error == "fail" or count > budget
        if not (first or ends):
            return
        what = f"{call_name(ask)}: {failed.message}"
        saved = self.save(ask, failed, step)
        where = f"; the sample is in {saved}" if saved else ""
        text = f"\n{failed.traceback}" if failed.traceback else ""
        if not ends:
            log.warning("%s (on_error: %s)%s%s", what, entry.on_error, where, text)
            return
        hint = ""
        if entry.on_error != "fail":
            hint = f"; {count} calls of this step failed, more than max_error_fraction {entry.max_error_fraction:g} of them"
        elif failed.cause == "timeout":
            hint = "; raise `timeout` of this entry of rewards, or let `on_error: skip` leave such samples out"
        raise RewardError(f"{what}{hint}{where}{text}")

    def save(self, ask: RewardCall, failed: Failed, step: int) -> Path | None:
        """Writes a failed call to a JSON file, so that it can be repeated. Returns the file; None: there is none."""
        if self.failures is None:
            return None
        sample = "" if ask.reward.of_group else f"_{ask.samples[0].sample_index}"
        path = self.failures / f"step_{step:06d}_{ask.reward.label}_{ask.group.group_id}{sample}.json"
        record = {
            "reward": ask.reward.label,
            "use": ask.reward.entry.use,
            "step": step,
            "group_id": ask.group.group_id,
            "sample_index": [one.sample_index for one in ask.samples],
            **asdict(failed),
            "arguments": ask.arguments,
        }
        try:
            with written(self.failures):
                self.failures.mkdir(parents=True, exist_ok=True)
            write_text(path, printable_json(json.dumps(record, indent=2, default=shown_as)) + "\n")
        except CheckpointError as error:  # a full disk does not end the run here
            log.warning("%s", error)
            return None
        return path


class EarlyScoring:
    """Scores groups while others of their step are still sampled, one step after the other.

    With `rollout.async_steps`, groups of the next step may arrive before those of the present step are scored: they wait until
    their step is open.
    """

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._lock = threading.Lock()  # guards the fields below
        self._closed = False
        self._waiting: dict[int, list[Group]] = {}  # by step
        self._step = 0  # the open one
        self._stream: CallStream | None = None  # of its calls; None: no step is open
        self._groups: dict[int, Group] = {}  # of the step, as they were added last, by id
        self._asks: list[RewardCall] = []  # the id of a call is its index
        self._outcomes: dict[int, CallOutcome] = {}  # that have been taken from the stream, by call, in the order of arrival
        self._calls: dict[int, range] = {}  # of each group, as indices into `_asks`

    def open(self, step: int) -> None:
        """Starts the calls for the groups of `step` that have arrived and will arrive, and gives up another step that is open."""
        with self._lock:
            self._open(step)

    def add(self, step: int, group: Group) -> None:
        """Starts the calls for a group with all its completions, or keeps it until `step` is open. Called from any thread."""
        with self._lock:
            if self._stream is not None and self._step == step:
                self._start(self._stream, group)
            elif not self._closed:
                self._waiting.setdefault(step, []).append(group)

    def settled(self, step: int) -> list[Group]:
        """Returns, without waiting, the groups of `step` whose calls have all returned since the last time, with their rewards.
        Failures are judged by `result`.
        """
        settled: list[Group] = []
        with self._lock:
            for outcome in self._stream.there() if self._stream is not None and self._step == step else ():
                self._outcomes[outcome.id] = outcome
                group = self._asks[outcome.id].group
                calls = self._calls[group.group_id]
                if outcome.id in calls and all(number in self._outcomes for number in calls):
                    settled.append(self._scored(group))
        return settled

    def result(self, step: int, groups: Sequence[Group]) -> list[Group]:
        """Waits for all calls of a step, closes it, and returns all its groups with their rewards, in this order.

        A group that was not added, or has changed since, is scored now; what was found for its earlier form does not count.
        Failures are judged only here: how many calls may fail depends on how many there are. Raises RewardError as `Scorer.score`
        does; calls that still run are then cancelled.
        """
        with self._lock:  # not while the calls are waited for: groups of the next step arrive
            stream = self._open(step)
            for group in groups:
                if self._groups.get(group.group_id) != group:
                    self._start(stream, group)
            counting = {number for calls in self._calls.values() for number in calls}
        calls = Counter(self._asks[number].reward.label for number in counting)
        spent: Counter[str] = Counter()
        with closing(stream):
            for outcome in chain(list(self._outcomes.values()), stream.outcomes()):
                self._outcomes[outcome.id] = outcome
                if outcome.id in counting and isinstance(outcome.value, Failed):
                    ask = self._asks[outcome.id]
                    label = ask.reward.label
                    spent[label] += 1
                    budget = math.ceil(ask.reward.entry.max_error_fraction * calls[label])
                    self._scorer.failed(ask, outcome.value, step, spent[label], budget)
        with self._lock:
            self._stream = None
        return [self._scored(group) for group in groups]

    def close(self) -> None:
        """Abandons the open step and ends its calls that still run. Ignores groups that arrive later."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
            if self._stream is not None:
                self._stream.close()
                self._stream = None

    def _open(self, step: int) -> CallStream:
        if self._stream is not None and self._step != step:
            self._stream.close()
            self._stream = None
        if self._stream is None:
            self._stream, self._step = self._scorer.open(), step
            self._groups, self._asks, self._outcomes, self._calls = {}, [], {}, {}
            for group in self._waiting.pop(step, ()):
                self._start(self._stream, group)
        return self._stream

    def _start(self, stream: CallStream, group: Group) -> None:
        asks, calls = self._scorer.calls_of(group, self._step, len(self._asks))
        self._groups[group.group_id] = group
        self._calls[group.group_id] = range(len(self._asks), len(self._asks) + len(asks))
        self._asks += asks
        stream.add(calls)

    def _scored(self, group: Group) -> Group:
        calls = self._calls[group.group_id]
        return self._scorer.scored(group, [(self._asks[number], self._outcomes[number].value) for number in calls])


class SentIds:
    """Token ids that are pickled as int32 bytes, and unpickled in the worker as a plain list of ints."""

    def __init__(self, ids: Ids) -> None:
        self.ids = ids

    def __reduce__(self) -> tuple[Any, ...]:
        return ids_from, (numpy.asarray(self.ids, dtype=numpy.int32).tobytes(),)


def open_scorer(
    entries: Sequence[RewardRecipe],
    columns: Collection[str],
    max_completion_tokens: int,
    scoring: ScoringRecipe,
    output: Path | None = None,
    failures: Path | None = None,
    turns: bool = False,
    answers: Path | None = None,
    group_size: int | None = None,
) -> Scorer:
    """Starts a worker that imports the functions, one for each model, and checks that every parameter will be filled.

    Args:
        columns: of the data set, `answer` included if the recipe maps it.
        output: file for what the functions print; None: standard error.
        failures: folder for samples whose reward failed; None: they are not kept.
        turns: whether a function may take the messages of conversations.
        answers: folder of the run for the answers of judges; None: the next attempt asks them again.
        group_size: completions of a prompt, by which a pairwise judge compares several groups at once; None: one after the other.

    Raises:
        DataError: a function has a parameter that is not a column of the data, and that nothing else provides.
        RewardError: a function is not there, its import fails or does not end, or it cannot be called by name.
        CheckpointError: the disk is full.
    """
    pools, places = pools_of(entries, limits_of(scoring), output, answers, group_size)
    try:
        for pool in pools:
            pool.start()  # all of them load at the same time
        facts = [pools[pool].facts()[place] for pool, place in places]
        columns = {*columns, MESSAGES} if turns else columns
        rewards = tuple(resolve(entry, fact, columns) for entry, fact in zip(entries, facts, strict=True))
    except BaseException:
        for pool in pools:
            pool.close()
        raise
    return Scorer(
        rewards=rewards, max_completion_tokens=max_completion_tokens, pools=pools, places=places, failures=failures, turns=turns
    )


def pools_of(
    entries: Sequence[RewardRecipe], limits: WorkerLimits, output: Path | None, answers: Path | None, group_size: int | None
) -> tuple[list[Pool], list[tuple[int, int]]]:
    """Returns the processes, not started yet, and the place of each reward: its pool, and its index there.

    Each reward that asks a model has a pool of its own. So a model is loaded once, in the only process that imports torch. It has
    a memory limit of its own, and its calls do not wait behind those of functions.
    """
    functions = [RewardSource(entry.use, entry.timeout) for entry in entries if settings_of(entry) is None]
    pools = [Pool(functions, limits, output)] if functions else []
    places: list[tuple[int, int]] = []
    for entry in entries:
        if (settings := settings_of(entry)) is None:
            places.append((0, sum(pool == 0 for pool, _ in places)))
            continue
        places.append((len(pools), 0))
        source = RewardSource(entry.use, entry.timeout, settings, entry.label, answers, limits.memory or 0)
        pools.append(Pool([source], limits_of_model(settings, limits, group_size), output))
    return pools, places


def limits_of_model(settings: RewardModelArgs | JudgeArgs, limits: WorkerLimits, group_size: int | None) -> WorkerLimits:
    """Returns the limits of the one process that asks a model."""
    if isinstance(settings, RewardModelArgs):  # it limits itself once the model is loaded
        return replace(limits, workers=1, memory=None, import_timeout=settings.load_timeout)
    # The timeout of a call covers its requests, so that they must not wait behind those of other calls.
    requests = 1 if not settings.pairwise else settings.concurrency if group_size is None else group_size * (group_size - 1)
    return replace(limits, workers=1, concurrency=max(1, settings.concurrency // max(1, requests)))


def shown_as(value: Any) -> Any:
    """Converts a value that JSON cannot encode: token ids to a list, anything else to its repr."""
    return numpy.asarray(value.ids).tolist() if isinstance(value, SentIds) else repr(value)


def weighted_sums(table: Sequence[dict[str, float | None]], weights: dict[str, float]) -> list[float | None]:
    """Returns the total reward of each sample of one group: the weighted sum of its rewards.

    A reward of weight 0, or one that applies to no sample of the group, is left out. If another applies to only some of the
    samples, those that it does not apply to cannot be compared with the others: their total is None. None never counts as 0.
    """
    applying = [label for label, weight in weights.items() if weight and any(row[label] is not None for row in table)]
    totals: list[float | None] = []
    for row in table:
        known = {label: value for label in applying if (value := row[label]) is not None}
        complete = bool(applying) and len(known) == len(applying)
        totals.append(sum(weights[label] * value for label, value in known.items()) if complete else None)
    return totals


def call_name(ask: RewardCall) -> str:
    which = "" if ask.reward.of_group else f", sample {ask.samples[0].sample_index}"
    return f"reward {ask.reward.label}, prompt at position {ask.group.group_id}{which}"
