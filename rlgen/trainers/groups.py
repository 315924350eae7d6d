"""Trains on a step group by group, in any order, with the result of the whole step (`rollout.stream`).

A group has its advantages or pairs in itself, and can run forward and backward as soon as it is scored. The denominator of its
loss is not known yet. So the loss is divided by counts that no step exceeds (`Groups.provisional`), and one factor corrects loss
and gradient of the whole step before the optimizer step. `Updater` does everything else, as without `rollout.stream`.

Time decides which group is trained first, and must decide nothing else. So the micro-batches of a group follow from its own rows,
gradients are added exactly (`ExactSum`), and all other numbers in the order of the step's table.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from rlgen.errors import EngineError, Fault, SentinelError
from rlgen.losses.inputs import Mean, Totals
from rlgen.metrics import Metric
from rlgen.processes import Processes
from rlgen.rewards.score import EarlyScoring
from rlgen.rollout.sampler import Sampler
from rlgen.rollout.samples import Samples
from rlgen.rollout.table import RowTable
from rlgen.run.state import random_tensors, set_random
from rlgen.trainers.results import UpdateResult
from rlgen.trainers.train_batch import Planned, TrainBatch, TrainBatchBuilder
from rlgen.trainers.update import Updater
from rlgen.types import Group

POLL = 0.005  # seconds between two looks for scored groups
# Parts are rounded to multiples of 2^-44 before they are added. Below 2^9, float64 holds every such multiple exactly.
GRID = -44
# Added to a float64 below 2^7 and subtracted again, this rounds it to a multiple of 2^GRID, the distance of neighbouring float64s
# between 2^(52 + GRID) and twice that.
SHIFT = 1.5 * 2.0 ** (52 + GRID)

Sampled: TypeAlias = tuple[list[Group], int]  # as `Sampler.groups` returns it


class ExactSum:
    """The sum of gradients of parameters, which are added part by part in any order: the same bits whatever the order.

    The rounding is 2^-45 at most, of each part. Where a number is above 2^7, as in a gradient that diverges, the sum is as exact
    as float64 is, but its last bits depend on the order. Holds 8 bytes for each number of the parameters.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._sums = [torch.zeros_like(parameter, dtype=torch.float64, requires_grad=False) for parameter in parameters]
        self._has = [False] * len(parameters)

    @torch.no_grad()
    def take(self) -> None:
        """Adds the gradients of the parameters to the sums, and removes them from the parameters."""
        for place, parameter in enumerate(self._parameters):
            if parameter.grad is None:
                continue
            self._sums[place] += parameter.grad.double().add_(SHIFT).sub_(SHIFT)
            self._has[place] = True
            parameter.grad = None

    @torch.no_grad()
    def give(self, factor: float) -> None:
        """Makes the sums, times `factor`, the gradients of the parameters, and begins again at 0.

        A parameter without a gradient in any part gets none.
        """
        for place, parameter in enumerate(self._parameters):
            if self._has[place]:
                parameter.grad = (self._sums[place] * factor).to(parameter.dtype)
        self.drop()

    def drop(self) -> None:
        for place, total in enumerate(self._sums):
            if self._has[place]:
                total.zero_()
        self._has = [False] * len(self._has)


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What is kept of one group, whose gradient is in the sums. Its rows are numbered from 0."""

    table: RowTable
    train_batch: TrainBatch
    kl: Tensor | None  # [B] to the reference, if the algorithm takes it from the reward
    part: UpdateResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Runs forward and backward on the groups of a step.

    Gradients are held in `sums` until `finish` makes them those of the parameters; only `Updater` then changes weights. For one
    process.
    """

    builder: TrainBatchBuilder
    update: Updater
    sums: ExactSum
    provisional: Totals
    # Threads of torch where the engine computes on the same machine and has the other cores. None: the engine is elsewhere.
    threads: int | None
    # A group with a completion of so many tokens is among the last to be sampled. It waits for the end, and then has all threads.
    # Their number may decide last bits, so which groups these are follows from the samples and not from time. None: none waits.
    late_from: int | None
    learned: dict[int, Learned] = field(default_factory=dict)  # by group id

    def waits(self, samples: Samples) -> bool:
        return self.late_from is not None and int(samples.sampled_tokens.max()) >= self.late_from

    def learn(self, table: RowTable, samples: Samples, epoch: float) -> None:
        """Runs forward and backward on the rows of one group, and adds the gradient to the sums."""
        with nullcontext() if self.waits(samples) else self.own_threads():
            kl = self.builder.kl(table, samples)
            train_batch, _, _ = self.builder.plan(table, samples, epoch, kl)
            self.builder.add_reference(train_batch)
            part = self.update.run_first(replace(train_batch, totals=self.provisional))
            self.sums.take()
        self.learned[int(table.group_id[0])] = Learned(table=table, train_batch=train_batch, kl=kl, part=part)

    def finish(self, table: RowTable, samples: Samples, epoch: float) -> tuple[Planned, UpdateResult]:
        """Trains on the groups that are left, and makes the whole gradient that of the parameters.

        `table` is that of the step, group by group. Returns what `TrainBatchBuilder.build` does, and the result of the
        micro-batches. Raises SentinelError if a group differs from what was trained.
        """
        try:
            of_step = []
            for group_id in dict.fromkeys(table.group_id.tolist()):
                rows = np.flatnonzero(table.group_id == group_id)
                own = replace(table.take(rows), place=np.arange(len(rows)))
                if group_id not in self.learned:
                    self.learn(own, samples.take(table.place[rows]), epoch)
                of_step.append(self.learned[group_id])
                same = np.array_equal(own.reward, of_step[-1].table.reward, equal_nan=True)
                if not same or rows[-1] - rows[0] != len(rows) - 1:
                    what = f"group {group_id} was trained with other rewards, or in another order, than in the step's table"
                    raise SentinelError(Fault.COMPLETION_ORDER, what)
            joined = self.joined(of_step, table, samples, epoch)
        except BaseException:
            self.drop()
            raise
        self.learned.clear()
        self.sums.drop()
        return joined

    def joined(self, of_step: Sequence[Learned], table: RowTable, samples: Samples, epoch: float) -> tuple[Planned, UpdateResult]:
        """Returns the train batch with what its groups have computed, and corrects gradient and loss to its totals."""
        kl = torch.cat([one.kl for one in of_step if one.kl is not None]) if of_step[0].kl is not None else None
        train_batch, advantages, measured = self.builder.plan(table, samples, epoch, kl)
        parts, first, first_trained = [], 0, 0
        for one in of_step:
            for name, values in one.train_batch.computed.items():
                moved = {tuple(row + first_trained for row in rows): value for rows, value in values.items()}
                train_batch.computed.setdefault(name, {}).update(moved)
            train_batch.mismatches.extend(one.train_batch.mismatches)
            parts.append(replace(one.part, nonfinite=frozenset(first + place for place in one.part.nonfinite)))
            first, first_trained = first + len(one.table), first_trained + len(one.train_batch.rows)
        tokens, divisor = train_batch.totals.tokens, self.update.algorithm.divides_by
        factor = getattr(self.provisional, divisor) / max(getattr(train_batch.totals, divisor), 1)
        if tokens:
            self.sums.give(factor)
        part = scaled(UpdateResult.sum(parts), factor, self.provisional.tokens / max(tokens, 1))
        return (train_batch, advantages, measured), part

    def drop(self) -> None:
        """Discards the gradients of a step that is given up."""
        self.learned.clear()
        self.sums.drop()
        self.update.optimizer.zero_grad()

    @contextmanager
    def own_threads(self) -> Iterator[None]:
        """Lets torch compute with `threads` inside the block, in the calling thread."""
        before = torch.get_num_threads()
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Trains in the calling thread, while a thread of its own waits for the engine. After an error nothing is left of the step.

    Only that thread asks the engine for samples, and it has ended before anything else is asked of the engine.
    """

    processes: Processes
    sampler: Sampler
    early: EarlyScoring
    labels: tuple[str, ...]  # of the rewards
    groups: Groups

    def while_sampling(self, step: int, epoch: float, sample: Callable[[], Sampled]) -> Sampled:
        """Returns what `sample` returns, which runs in a thread of its own. Trains on groups as soon as they are scored.

        After an error, sampling has ended, and nothing is left of the step.
        """
        sampled: Future[Sampled] = Future()

        def work() -> None:
            if self.groups.threads is not None:
                torch.set_num_threads(max(1, torch.get_num_threads() - self.groups.threads))
            try:
                sampled.set_result(sample())
            except BaseException as error:
                sampled.set_exception(error)

        # The engine restores the random states that it found, and so do activation checkpoints: both at once leave other states.
        draws = random_tensors()
        thread = threading.Thread(target=work, name="rlgen-stream", daemon=True)
        thread.start()
        try:
            while thread.is_alive():
                for group in self.early.settled(step):
                    samples = Samples.of(group.samples, self.labels)
                    if not self.groups.waits(samples):
                        self.groups.learn(RowTable.gather(samples, self.processes), samples, epoch)
                thread.join(POLL)
            return sampled.result()
        except BaseException:
            self.sampler.give_up(EngineError("sampling was given up together with its step"))
            self.groups.drop()
            raise
        finally:
            thread.join()
            set_random(draws)


def provisional_totals(prompts: int, group_size: int, max_tokens: int) -> Totals:
    """Returns denominators that no step exceeds."""
    rows = prompts * group_size
    return Totals(sequences=rows, tokens=rows * max_tokens, kept=rows * max_tokens, prompts=prompts, pairs=rows)


def scaled(part: UpdateResult, factor: float, token_factor: float) -> UpdateResult:
    """Returns the result of a step, corrected from the provisional denominators of its loss to the true ones.

    `factor` is provisional over true denominator; `token_factor` that of the tokens, by whose share the mean `policy_loss` counts
    a micro-batch.
    """
    stats = dict(part.stats)
    if Metric.POLICY_LOSS in stats:
        mean = stats[Metric.POLICY_LOSS]
        stats[Metric.POLICY_LOSS] = Mean(mean.total * factor, mean.count * token_factor)
    return replace(part, loss=part.loss * factor, stats=stats)
