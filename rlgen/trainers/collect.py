"""Collects what a step learns from: completions of its prompts, and their rewards."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from rlgen.algorithms.base import Algorithm
from rlgen.data import PromptStream
from rlgen.processes import EngineShare, Processes
from rlgen.recipe.models import RolloutRecipe
from rlgen.rewards.score import EarlyScoring, Scorer
from rlgen.rollout.parquet import Rollout
from rlgen.rollout.sampler import Sampler
from rlgen.rollout.table import RowTable
from rlgen.run.clock import Clock
from rlgen.run.signals import StopRequest
from rlgen.trainers.groups import Stream
from rlgen.types import Group, Prompt, Ragged, Samples


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Collector:
    """Runs prompts -> rollout -> rewards.

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

    def __call__(self, step: int, position: int, clock: Clock, stop: StopRequest) -> Collected:
        """Samples and scores the prompts of a step, from `position` on.

        With `rollout.dynamic_sampling`, further prompts replace groups without signal. All processes see all rewards, so they
        take the same number of further prompts. All must call this together. Raises StopNow if the run was asked to stop.
        """
        try:
            stop.check(self.processes, before_step=True)
            with stop.at_once(self.processes):
                return self.collected(step, position, clock, stop)
        except BaseException:  # a stop, too: no reward is computed any more
            self.early.close()
            if self.stream is not None:
                self.stream.groups.drop()
            raise

    def collected(self, step: int, position: int, clock: Clock, stop: StopRequest) -> Collected:
        tables: list[RowTable] = []
        held: list[Samples] = []
        taken = too_old = 0
        wanted, left = self.recipe.prompts_per_step, self.recipe.dynamic_sampling
        while wanted:
            prompts = self.engine_share.share(self.prompts.take(position + taken, wanted))
            self.early.open(step)
            with clock("generate"):
                sample = partial(self.sample, step, prompts, not left)
                # Patient: one engine may have much longer completions, or lose a server, or have to sample what the journals of
                # others still hold after a kill.
                if self.stream is not None:
                    sample = partial(self.stream.while_sampling, step, position / len(self.prompts), sample)
                groups, dropped = self.processes.run_all(sample, has_collectives=self.engine_share.shared, keepalive=True)
            stop.check(self.processes)
            with clock("reward"):
                held.append(self.rewarded(groups, step))
            stop.check(self.processes)
            table = RowTable.gather(held[-1], self.processes, sum(map(len, held[:-1])))
            silent = silent_groups(table, self.algorithm, self.scorer.weights) if left else np.zeros(0, dtype=np.int64)
            tables.append(replace(table, replaced=np.isin(table.group_id, silent)))
            taken, too_old = taken + wanted, too_old + (dropped if self.engine_share.first else 0)
            if left and not len(silent):
                self.processes.run_all(self.sampler.engine.sleep, has_collectives=self.engine_share.shared)
            wanted, left = len(silent), left - 1
        if self.recipe.async_steps:
            self.early.open(step + 1)  # whose groups arrive while this step trains
        samples, counts = Samples.join(held), None
        if self.sampler.dialogue is not None:
            counts = Counter[str]()
            own = sum(map(Counter, samples.counts), Counter[str]())
            for others in self.processes.gather([own]):
                counts.update(others)
        return Collected(
            table=RowTable.join(tables),
            samples=samples,
            dropped=sum(self.processes.gather([too_old])),
            counts=counts,
            prompts=taken,
            epoch=position / len(self.prompts),
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

    A KL in the reward does not count as a signal.
    """
    advantages = algorithm.advantages(table.scores(weights))
    has_gradient = (advantages.trained & (advantages.advantages != 0)).numpy()
    return np.setdiff1d(table.group_id, table.group_id[has_gradient])


def untrained(step: int, samples: Samples) -> Rollout:
    """Returns samples as they are written, without what follows from an update."""
    count = len(samples)
    nothing = Ragged(np.zeros(0, dtype=np.float32), np.zeros(count + 1, dtype=np.int64))
    advantage, trained = np.zeros(count), np.zeros(count, dtype=bool)
    return Rollout(step=step, samples=samples, policy_logp=nothing, advantage=advantage, trained=trained)
