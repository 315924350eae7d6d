"""Trains on the groups of a step that are complete while others are still sampled, by the same weights (`rollout.stream`).

A group runs forward and backward as soon as its rewards are there: its advantages or pairs need no other group. What its loss is
divided by is not known yet, so it is divided by counts that no step exceeds (`Stream.provisional`), and loss and gradient of the
whole step are brought to the true ones, by one factor, before the optimizer step. Everything else is `Updater`'s, as ever.

Time decides which group is trained first, and must decide nothing else. So the micro-batches of a group follow from its own rows,
gradients are added exactly (`ExactSum`), and all other numbers in the order of prompts. A step that is sampled again, or taken
from the journal after a kill, has the same bits.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import torch

from rlgen.algorithms.base import Signal
from rlgen.errors import EngineError
from rlgen.losses.inputs import Mean, Totals
from rlgen.metrics import Metric
from rlgen.processes import Processes
from rlgen.rewards.early import EarlyScoring
from rlgen.rollout.sampler import Sampler
from rlgen.rollout.table import RowTable
from rlgen.run.state import random_tensors, set_random
from rlgen.trainers.exact import ExactSum
from rlgen.trainers.update import Part, Updater
from rlgen.trainers.window import Window, WindowBuilder
from rlgen.types import Group, Prompt, Samples

POLL = 0.005  # seconds between two looks for scored groups

Sampled: TypeAlias = tuple[list[Group], int]  # as `Sampler.groups` returns it


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """One group, whose gradient is in the sums. All rows are numbered within the group, but for `window.rows`."""

    table: RowTable
    window: Window
    signal: Signal
    measured: Mapping[str, Any]
    part: Part


@dataclass(slots=True, kw_only=True)
class Stream:
    """Trains on the groups of a step in the calling thread, while a thread of its own waits for the engine.

    Gradients are held in `sums` until `finish` makes them those of the parameters; only `Updater` then changes weights. After an
    error nothing is left of the step.

    Args:
        threads: of torch, that training takes while the engine works in this process, too; the engine has the others. Training
            has as many in the whole step, because their number may decide last bits. None: the engine works elsewhere.
    """

    processes: Processes
    sampler: Sampler
    early: EarlyScoring
    labels: Sequence[str]  # of the rewards
    windows: WindowBuilder
    update: Updater
    sums: ExactSum
    provisional: Totals
    threads: int | None
    first_row: dict[int, int] = field(default_factory=dict)  # of each group of the step, by its id
    epoch: float = 0.0
    learned: dict[int, Learned] = field(default_factory=dict)  # by group id

    def while_sampling(self, step: int, prompts: Sequence[Prompt], epoch: float, sample: Callable[[], Sampled]) -> Sampled:
        """Returns what `sample` returns, which runs in a thread of its own. Trains on groups as soon as they are scored.

        Args:
            prompts: of the step.
            epoch: passes over the data before this step.

        Raises:
            RlgenError: as `sample`, the rewards and `Updater` raise it; sampling has then ended, and nothing is left of the step.
        """
        self.first_row = {prompt.position: place * self.sampler.group_size for place, prompt in enumerate(prompts)}
        self.epoch = epoch
        sampled: Future[Sampled] = Future()

        def work() -> None:
            if self.threads is not None:
                torch.set_num_threads(max(1, torch.get_num_threads() - self.threads))
            try:
                sampled.set_result(sample())
            except BaseException as error:
                sampled.set_exception(error)

        # The engine puts the random states back that it found, and activation checkpoints do: both at once leave others behind.
        draws = random_tensors()
        thread = threading.Thread(target=work, name="rlgen-stream", daemon=True)
        try:
            thread.start()
            with self.own_threads():
                while thread.is_alive():
                    for group in self.early.settled(step):
                        samples = Samples.of(group.samples, self.labels)
                        self.learn(RowTable.gather(samples, self.processes), samples)
                    thread.join(POLL)
            return sampled.result()
        except BaseException:
            self.sampler.give_up(EngineError("sampling was given up, as its step was"))
            self.drop()
            raise
        finally:
            thread.join()
            set_random(draws)

    def learn(self, table: RowTable, samples: Samples) -> None:
        """Runs forward and backward on the rows of one group, and adds the gradient to the sums."""
        group_id = int(table.group_id[0])
        window, signal, measured = self.windows.build(table, samples, self.epoch)
        running = replace(window, rows=window.rows + self.first_row[group_id], totals=self.provisional)
        part = self.update.run_first(running)
        self.sums.take()
        window = replace(running, totals=window.totals)
        self.learned[group_id] = Learned(table=table, window=window, signal=signal, measured=measured, part=part)

    def finish(self, table: RowTable, samples: Samples) -> tuple[Window, Signal, dict[str, Any], Part]:
        """Trains on the groups that are left, and makes the whole gradient that of the parameters.

        Returns:
            Window, signal and metrics of the whole step, as `WindowBuilder.build` does, and the result of its micro-batches.
        """
        try:
            with self.own_threads():
                for group_id, first in self.first_row.items():
                    rows = np.flatnonzero(table.group_id == group_id)
                    own = replace(table.take(rows), place=np.arange(len(rows)))
                    if group_id not in self.learned:
                        self.learn(own, samples.take(table.place[rows]))
                    same = np.array_equal(own.reward, self.learned[group_id].table.reward, equal_nan=True)
                    assert same and (rows == np.arange(first, first + len(rows))).all(), "a group has changed after its training"
                return self.joined()
        finally:
            self.learned.clear()
            self.sums.drop()

    def joined(self) -> tuple[Window, Signal, dict[str, Any], Part]:
        """Returns the sums over all groups of the step, in the order of prompts; see `finish`."""
        learned = [self.learned[group_id] for group_id in self.first_row]
        window = join_windows([one.window for one in learned])
        tokens, divisor = window.totals.tokens, self.update.algorithm.divides_by
        factor = getattr(self.provisional, divisor) / max(getattr(window.totals, divisor), 1)
        if tokens:
            self.sums.give(factor)
        part = scaled(Part.sum([one.part for one in learned]), factor, self.provisional.tokens / max(tokens, 1))
        measured = dict(learned[0].measured)
        if Metric.KL_REF_K1 in measured:
            sampled = [int(one.table.sampled_tokens.sum()) for one in learned]
            total = sum((one.measured[Metric.KL_REF_K1] or 0.0) * count for one, count in zip(learned, sampled, strict=True))
            measured[Metric.KL_REF_K1] = total / sum(sampled) if sum(sampled) else None
        return window, join_signals([one.signal for one in learned]), measured, part

    def drop(self) -> None:
        """Forgets the gradients of a step that is given up."""
        self.learned.clear()
        self.sums.drop()
        self.update.optimizer.zero_grad()

    @contextmanager
    def own_threads(self) -> Iterator[None]:
        """Lets torch compute with the threads of training inside the block."""
        before = torch.get_num_threads()
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def provisional_totals(prompts: int, group_size: int, max_tokens: int) -> Totals:
    """Returns denominators that no step exceeds."""
    rows = prompts * group_size
    return Totals(sequences=rows, tokens=rows * max_tokens, kept=rows * max_tokens, prompts=prompts, pairs=rows)


def join_windows(windows: Sequence[Window]) -> Window:
    """Returns the window of the rows of all `windows`, which ran with the same denominators, in their order."""
    firsts = np.cumsum([0, *(len(window.rows) for window in windows)]).tolist()
    pairs = np.cumsum([0, *(window.totals.pairs for window in windows)]).tolist()

    def moved(rows: tuple[int, ...], by: int) -> tuple[int, ...]:
        return tuple(row + by for row in rows)

    return Window(
        samples=Samples.join([window.samples for window in windows]),
        rows=np.concatenate([window.rows for window in windows]),
        advantages=torch.cat([window.advantages for window in windows]),
        pair_id=torch.cat([renumbered(window.pair_id, first) for window, first in zip(windows, pairs, strict=False)]),
        group_tokens=torch.cat([window.group_tokens for window in windows]),
        totals=Totals(
            **{name: sum(getattr(window.totals, name) for window in windows) for name in Totals.__dataclass_fields__},
        ),
        positions=sum(window.positions for window in windows),
        epoch=windows[0].epoch,
        micro_batches=tuple(
            moved(rows, by) for window, by in zip(windows, firsts, strict=False) for rows in window.micro_batches
        ),
        idle=tuple(moved(rows, by) for window, by in zip(windows, firsts, strict=False) for rows in window.idle),
        frozen={name: torch.cat([window.frozen[name] for window in windows]) for name in windows[0].frozen},
        computed={
            name: {
                moved(rows, by): values
                for window, by in zip(windows, firsts, strict=False)
                for rows, values in window.computed.get(name, {}).items()
            }
            for name in {name for window in windows for name in window.computed}
        },
        mismatches=[part for window in windows for part in window.mismatches],
    )


def join_signals(signals: Sequence[Signal]) -> Signal:
    """Returns the signal of the rows of all `signals`, in their order."""
    pairs = np.cumsum([0, *(int(signal.pair_id.max()) + 1 for signal in signals)]).tolist()
    return Signal(
        advantages=torch.cat([signal.advantages for signal in signals]),
        counted=torch.cat([signal.counted for signal in signals]),
        trained=torch.cat([signal.trained for signal in signals]),
        pair_id=torch.cat([renumbered(signal.pair_id, first) for signal, first in zip(signals, pairs, strict=False)]),
    )


def renumbered(pair_id: torch.Tensor, first: int) -> torch.Tensor:
    """Returns [B] with pairs numbered from `first` on; -1 stays."""
    return torch.where(pair_id < 0, pair_id, pair_id + first)


def scaled(part: Part, factor: float, token_factor: float) -> Part:
    """Returns the result of a step whose loss was divided by provisional denominators, as by the true ones.

    Args:
        factor: provisional over true denominator of the loss.
        token_factor: the same of the tokens; the mean `policy_loss` counts the share of a micro-batch in them.
    """
    stats = dict(part.stats)
    if Metric.POLICY_LOSS in stats:
        mean = stats[Metric.POLICY_LOSS]
        stats[Metric.POLICY_LOSS] = Mean(mean.total * factor, mean.count * token_factor)
    return replace(part, loss=part.loss * factor, stats=stats)
