"""What a step learns from: the answers to its prompts, and their rewards."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from rlgen.data import PromptStream
from rlgen.engines import Engine
from rlgen.processes import Processes, Seat
from rlgen.recipe.models import RolloutRecipe
from rlgen.rewards.score import Scorer
from rlgen.rollout.journal import Journal
from rlgen.rollout.sampler import Sampler
from rlgen.run.clock import Clock
from rlgen.run.signals import StopRequest
from rlgen.trainers.base import Algorithm, Scores
from rlgen.types import Group, Prompt, Sample


@dataclass(frozen=True, slots=True)
class Collected:
    """What was sampled for a step, with its rewards, in the order of the prompts."""

    samples: list[Sample]  # to learn from
    replaced: list[Sample]  # of groups without signal whose places others took
    dropped: int  # samples that were too old
    prompts: int  # taken from the data's order
    epoch: float  # passes over the data before this step


@dataclass(frozen=True, slots=True, kw_only=True)
class Collector:
    """prompts -> rollout -> rewards.

    Of several processes each samples and rewards its share of the prompts, whole groups. Then all have all samples of the step in
    the same order.
    """

    recipe: RolloutRecipe
    processes: Processes
    seat: Seat
    prompts: PromptStream
    engine: Engine
    sampler: Sampler
    scorer: Scorer
    journal: Journal
    algorithm: Algorithm

    def __call__(self, step: int, position: int, clock: Clock, stop: StopRequest) -> Collected:
        """Samples the prompts from `position` on; groups without signal give their places to further prompts, if the recipe says.

        All processes see all rewards, and so ask for the same number of further prompts.
        """
        got = Collected([], [], 0, 0, position / len(self.prompts.entries))
        wanted, left = self.recipe.prompts_per_step, self.recipe.refill
        while wanted:
            prompts = self.seat.share(self.prompts.take(position + got.prompts, wanted))
            # After a kill the journal may have all answers of one engine, and another one samples for as long as it takes.
            replays = step <= self.journal.newest and not self.seat.shared
            with clock("generate"):
                sample = partial(self.sample, step, prompts, not left)
                groups, dropped = self.processes.agreed(sample, talks=self.seat.shared, patient=replays)
            stop.check(self.processes)
            with clock("reward"):
                samples = self.rewarded(groups, step)
            stop.check(self.processes)
            silent = self.silent(samples) if left else frozenset()
            got = replace(
                got,
                samples=got.samples + [sample for sample in samples if sample.group_id not in silent],
                replaced=got.replaced + [sample for sample in samples if sample.group_id in silent],
                dropped=got.dropped + dropped,
                prompts=got.prompts + wanted,
            )
            if left and not silent:
                self.processes.agreed(self.engine.sleep, talks=self.seat.shared)
            wanted, left = len(silent), left - 1
        return got

    def sample(self, step: int, prompts: Sequence[Prompt], last: bool) -> tuple[list[Group], int]:
        """The groups of `prompts` and the number of samples dropped for their age; after the `last` ones the engine rests."""
        groups, dropped = self.sampler.groups(step, prompts)
        if last:
            self.engine.sleep()
        return groups, dropped

    def silent(self, samples: Sequence[Sample]) -> frozenset[int]:
        """Groups of which no sample has an advantage: nothing can be learned from them. A KL in the reward is no signal."""
        signal = self.algorithm.advantages(Scores.of(samples, self.scorer.weights))
        teaches = (signal.trained & (signal.advantages != 0)).tolist()
        speaking = {sample.group_id for sample, one in zip(samples, teaches, strict=True) if one}
        return frozenset(sample.group_id for sample in samples) - speaking

    def rewarded(self, groups: Sequence[Group], step: int) -> list[Sample]:
        """All samples of the step with their rewards, in the order of the prompts, from all processes to all."""

        def score_own() -> list[Sample]:
            scored = self.journal.score(step, groups, lambda fresh: self.scorer.score(fresh, step)) if self.seat.speaks else []
            return [sample for group in scored for sample in group.samples]

        return [sample for samples in self.processes.together(score_own, patient=True) for sample in samples]
