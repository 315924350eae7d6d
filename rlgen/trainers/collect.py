"""Collects what a step learns from: completions of its prompts, and their rewards."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from rlgen.algorithms.base import Algorithm
from rlgen.data import PromptStream
from rlgen.metrics import Metric
from rlgen.processes import EngineShare, Processes
from rlgen.recipe.models import RolloutRecipe
from rlgen.rewards.score import EarlyScoring, Scorer
from rlgen.rollout.parquet import Rollout
from rlgen.rollout.sampler import Sampler
from rlgen.rollout.samples import Ragged, Samples
from rlgen.rollout.table import RowTable
from rlgen.run.clock import PhaseClock
from rlgen.run.signals import StopRequest
from rlgen.trainers.groups import Stream
from rlgen.types import Group, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """The samples of a step with their rewards."""

    table: RowTable  # the rows of all processes, including those of groups that were replaced
    samples: Samples  # of this process, in the order of their places in the table
    dropped: int  # samples of all processes that were dropped as too old
    counts: Mapping[str, int] | None  # of events in all replies of the step, by name; None: there are no replies
    prompts: int  # number of prompts taken, in the data's order
    epoch: float  # passes over the data before this step

    @property
    def learned_from(self) -> RowTable:
        """Returns the rows that are not replaced by those of further prompts."""
        return self.table.take(~self.table.replaced)


@dataclass(slots=True, kw_only=True)
class Draw:
    """The prompts of a step that are being sampled and scored."""

    step: int
    position: int  # of the first prompt
    clock: PhaseClock
    stop: StopRequest
    wanted: int  # prompts to sample next
    left: int  # times that prompts without signal may still be replaced
    taken: int = 0  # prompts so far
    dropped: int = 0  # samples of this process that were too old
    tables: list[RowTable] = field(default_factory=list)
    held: list[Samples] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collector:
    """Runs prompts -> rollout (`sampled`) -> rewards (`score`), in turns until a draw wants no more prompts.

    With several processes, each samples and scores whole groups of its share of the prompts, and keeps their tokens. Every
    process has the table of all rows of the step: a few numbers per row.
    """

    recipe: RolloutRecipe
    processes: Processes
    engine_share: EngineShare
    prompts: PromptStream
    sampler: Sampler
    scorer: Scorer
    early: EarlyScoring  # scores groups while others are sampled, if the sampler passes it groups, else afterwards
    algorithm: Algorithm
    stream: Stream | None = None  # trains on groups while others are sampled; None: training begins when all are there

    @contextmanager
    def drawing(self, step: int, position: int, clock: PhaseClock, stop: StopRequest) -> Iterator[Draw]:
        """Opens the draw of a step, from the prompt at `position` on. The block samples and scores until no prompt is wanted.

        After an error or a stop nothing is left of the step, and no reward is computed any more. All processes must call this
        together. Raises StopNow if the run was asked to stop.
        """
        try:
            stop.check(self.processes, before_step=True)
            with stop.at_once(self.processes):
                wanted, left = self.recipe.prompts_per_step, self.recipe.dynamic_sampling
                yield Draw(step=step, position=position, clock=clock, stop=stop, wanted=wanted, left=left)
        except BaseException:
            self.early.close()
            if self.stream is not None:
                self.stream.groups.drop()
            raise

    def sampled(self, draw: Draw) -> list[Group]:
        """Samples the prompts that are wanted. Returns the groups of this process."""
        prompts = self.engine_share.share(self.prompts.take(draw.position + draw.taken, draw.wanted))
        self.early.open(draw.step)
        with draw.clock(Metric.TIME_GENERATE):
            sample = partial(self.sample, draw.step, prompts, not draw.left)
            # Patient: one engine may have much longer completions, or lose a server, or have to sample what the journals of
            # others still hold after a kill.
            if self.stream is not None:
                sample = partial(self.stream.while_sampling, draw.step, draw.position / len(self.prompts), sample)
            groups, dropped = self.processes.run_all(sample, has_collectives=self.engine_share.shared, keepalive=True)
        draw.stop.check(self.processes)
        draw.dropped += dropped if self.engine_share.first else 0
        return groups

    def score(self, draw: Draw, groups: Sequence[Group]) -> None:
        """Scores groups, and adds them to the draw.

        With `rollout.dynamic_sampling`, further prompts are wanted in place of groups without signal. All processes see all
        rewards, so they want the same number.
        """
        with draw.clock(Metric.TIME_REWARD):
            samples = self.rewarded(groups, draw.step)
        draw.stop.check(self.processes)
        table = RowTable.gather(samples, self.processes, sum(map(len, draw.held)))
        silent = silent_groups(table, self.algorithm, self.scorer.weights) if draw.left else np.zeros(0, dtype=np.int64)
        draw.held.append(samples)
        draw.tables.append(replace(table, replaced=np.isin(table.group_id, silent)))
        if draw.left and not len(silent):
            self.processes.run_all(self.sampler.engine.sleep, has_collectives=self.engine_share.shared)
        draw.taken, draw.wanted, draw.left = draw.taken + draw.wanted, len(silent), draw.left - 1

    def collected(self, draw: Draw) -> Collected:
        """Returns what was drawn, when no more prompts are wanted."""
        if self.recipe.async_steps:
            self.early.open(draw.step + 1)  # whose groups arrive while this step trains
        samples, counts = Samples.join(draw.held), None
        if self.sampler.dialogue is not None:
            own = sum(map(Counter, samples.counts), Counter[str]())
            counts = sum(self.processes.gather([own]), Counter[str]())
        return Collected(
            table=RowTable.join(draw.tables),
            samples=samples,
            dropped=sum(self.processes.gather([draw.dropped])),
            counts=counts,
            prompts=draw.taken,
            epoch=draw.position / len(self.prompts),
        )

    def sample(self, step: int, prompts: Sequence[Prompt], last: bool) -> tuple[list[Group], int]:
        """Returns the groups of `prompts`, and how many samples were dropped as too old. With `last`, the engine then sleeps."""
        groups, dropped = self.sampler.groups(step, prompts)
        if last:
            self.sampler.engine.sleep()
        return groups, dropped

    def rewarded(self, groups: Sequence[Group], step: int) -> Samples:
        def score_own() -> Samples:
            scored = self.sampler.journal.score(step, groups, partial(self.early.result, step)) if self.engine_share.first else []
            return Samples.of([sample for group in scored for sample in group.samples], list(self.scorer.weights))

        return self.processes.run_all(score_own, keepalive=True)


def silent_groups(table: RowTable, algorithm: Algorithm, weights: Mapping[str, float]) -> NDArray[np.int64]:
    """Returns the ids of groups in which no trained sample has an advantage, so that nothing can be learned from them.

    A KL in the reward does not count as a signal: it is taken to be 0.
    """
    kl = torch.zeros(len(table), dtype=torch.float64) if algorithm.reference == "reward" else None
    advantages = algorithm.advantages(table.scores(weights, kl))
    has_gradient = (advantages.trained & (advantages.advantages != 0)).numpy()
    return np.setdiff1d(table.group_id, table.group_id[has_gradient])


def untrained(step: int, samples: Samples) -> Rollout:
    """Returns samples as they are written, without what follows from an update."""
    count = len(samples)
    nothing = Ragged(np.zeros(0, dtype=np.float32), np.zeros(count + 1, dtype=np.int64))
    advantage, trained = np.zeros(count), np.zeros(count, dtype=bool)
    return Rollout(step=step, samples=samples, policy_logp=nothing, advantage=advantage, trained=trained)
