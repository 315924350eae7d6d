"""Trains on a step group by group, in any order, with the result of the whole step (`rollout.stream`).

A group has its advantages or pairs in itself, and can run forward and backward as soon as it is scored. The denominator of its
loss is not known yet. So the loss is divided by counts that no step exceeds (`Groups.provisional`), and one factor corrects loss
and gradient of the whole step before the optimizer step. `Updater` does everything else, as without `rollout.stream`.

Time decides which group is trained first, and must decide nothing else. So the micro-batches of a group follow from its own rows,
gradients are added exactly (`ExactSum`), and all other numbers in the order of the step's table.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from rlgen.algorithms.base import Signal
from rlgen.errors import EngineError, Fault, SentinelError
from rlgen.losses.inputs import Mean, Totals
from rlgen.metrics import Metric
from rlgen.processes import Processes
from rlgen.rewards.early import EarlyScoring
from rlgen.rollout.sampler import Sampler
from rlgen.rollout.table import RowTable
from rlgen.run.state import random_tensors, set_random
from rlgen.trainers.update import Updater, UpdateResult
from rlgen.trainers.window import Window, WindowBuilder
from rlgen.types import Group, Samples

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
    window: Window
    signal: Signal
    measured: Mapping[str, Any]
    part: UpdateResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Runs forward and backward on the groups of a step.

    Gradients are held in `sums` until `finish` makes them those of the parameters; only `Updater` then changes weights. For one
    process.
    """

    windows: WindowBuilder
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
            window, signal, measured = self.windows.build(table, samples, epoch)
            part = self.update.run_first(replace(window, totals=self.provisional))
            self.sums.take()
        group_id = int(table.group_id[0])
        self.learned[group_id] = Learned(table=table, window=window, signal=signal, measured=measured, part=part)

    def finish(self, table: RowTable, samples: Samples, epoch: float) -> tuple[Window, Signal, dict[str, Any], UpdateResult]:
        """Trains on the groups that are left, and makes the whole gradient that of the parameters.

        Args:
            table: of the step, group by group.

        Returns:
            Window, signal and metrics of the whole step, as `WindowBuilder.build` does, and the result of its micro-batches.

        Raises:
            SentinelError: a group differs from what was trained.
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
            joined = self.joined(of_step)
        except BaseException:
            self.drop()
            raise
        self.learned.clear()
        self.sums.drop()
        return joined

    def joined(self, of_step: Sequence[Learned]) -> tuple[Window, Signal, dict[str, Any], UpdateResult]:
        window = join_windows([one.window for one in of_step], [len(one.table) for one in of_step])
        tokens, divisor = window.totals.tokens, self.update.algorithm.divides_by
        factor = getattr(self.provisional, divisor) / max(getattr(window.totals, divisor), 1)
        if tokens:
            self.sums.give(factor)
        measured = dict(of_step[0].measured)
        if Metric.KL_REF_K1 in measured:
            sampled = [int(one.table.sampled_tokens.sum()) for one in of_step]
            total = sum((one.measured[Metric.KL_REF_K1] or 0.0) * count for one, count in zip(of_step, sampled, strict=True))
            measured[Metric.KL_REF_K1] = total / sum(sampled) if sum(sampled) else None
        part = joined_parts([one.part for one in of_step], [len(one.table) for one in of_step])
        part = scaled(part, factor, self.provisional.tokens / max(tokens, 1))
        return window, join_signals([one.signal for one in of_step]), measured, part

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


def join_windows(windows: Sequence[Window], rows: Sequence[int]) -> Window:
    """Returns the window of all groups, in their order; `rows` are how many each has in the step's table."""
    at = firsts([len(window.rows) for window in windows])
    pairs = firsts([window.totals.pairs for window in windows])

    def moved(batches: Sequence[tuple[int, ...]], first: int) -> list[tuple[int, ...]]:
        return [tuple(row + first for row in batch) for batch in batches]

    computed: dict[str, dict[tuple[int, ...], Tensor]] = {}
    for window, first in zip(windows, at, strict=True):
        for name, values in window.computed.items():
            computed.setdefault(name, {}).update(zip(moved(list(values), first), values.values(), strict=True))
    return Window(
        samples=Samples.join([window.samples for window in windows]),
        rows=np.concatenate([window.rows + first for window, first in zip(windows, firsts(rows), strict=True)]),
        advantages=torch.cat([window.advantages for window in windows]),
        pair_id=torch.cat([renumbered(window.pair_id, first) for window, first in zip(windows, pairs, strict=True)]),
        group_tokens=torch.cat([window.group_tokens for window in windows]),
        totals=Totals(**{one.name: sum(getattr(window.totals, one.name) for window in windows) for one in fields(Totals)}),
        epoch=windows[0].epoch,
        micro_batches=tuple(
            rows for window, first in zip(windows, at, strict=True) for rows in moved(window.micro_batches, first)
        ),
        idle=tuple(rows for window, first in zip(windows, at, strict=True) for rows in moved(window.idle, first)),
        frozen={name: torch.cat([window.frozen[name] for window in windows]) for name in windows[0].frozen},
        computed=computed,
        mismatches=[gap for window in windows for gap in window.mismatches],
    )


def join_signals(signals: Sequence[Signal]) -> Signal:
    pairs = firsts([int(signal.pair_id.max()) + 1 for signal in signals])
    return Signal(
        advantages=torch.cat([signal.advantages for signal in signals]),
        counted=torch.cat([signal.counted for signal in signals]),
        trained=torch.cat([signal.trained for signal in signals]),
        pair_id=torch.cat([renumbered(signal.pair_id, first) for signal, first in zip(signals, pairs, strict=True)]),
    )


def joined_parts(parts: Sequence[UpdateResult], rows: Sequence[int]) -> UpdateResult:
    places = zip(parts, firsts(rows), strict=True)
    return UpdateResult.sum(
        [replace(part, nonfinite=frozenset(place + first for place in part.nonfinite)) for part, first in places]
    )


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


def firsts(counts: Sequence[int]) -> list[int]:
    begins: list[int] = np.cumsum([0, *counts])[:-1].tolist()
    return begins


def renumbered(pair_id: Tensor, first: int) -> Tensor:
    """Returns [B] with pairs numbered from `first` on; -1 stays."""
    return torch.where(pair_id < 0, pair_id, pair_id + first)
