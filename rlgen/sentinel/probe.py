"""What every rung needs: both sides, some prompts, and the way to sample and to score them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlgen.engines.base import Engine, Settings
from rlgen.models.policy import Policy
from rlgen.processes import Processes, Seat
from rlgen.rollout.batch import collate
from rlgen.rollout.sample import rollout
from rlgen.rollout.score import score, score_at
from rlgen.sentinel.bounds import Bounds
from rlgen.sentinel.gap import Gap, compare
from rlgen.types import Prompt, Sample, Sampling

PROMPTS = 16
TOKENS = 64  # of a completion at rung 1
FEWER_TOKENS = 32  # of later ones: a wrong weight shows at once


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSide:
    """Log-probs of samples under the weights that the policy holds now.

    Every process asks for the same samples at the same time, and has the same answer: a verdict is common to all.
    """

    policy: Policy
    budget: int  # tokens that go through the model together
    processes: Processes

    def logp(self, samples: Sequence[Sample], temperature: float) -> list[Tensor]:
        """[L] float32 of each sample."""
        return score(self.policy, samples, temperature, self.budget, self.processes)

    def logp_at(self, samples: Sequence[Sample], temperatures: tuple[float, ...]) -> list[Tensor]:
        """[K, L] float32 of each sample."""
        return score_at(self.policy, samples, temperatures, self.budget, self.processes)

    def gap(self, samples: Sequence[Sample], temperature: float) -> Gap:
        """To what the engine reported."""
        return compare(samples, self.logp(samples, temperature))

    @torch.no_grad()
    def distributions(self, sample: Sample, temperature: float) -> Tensor:
        """[L, V] float64 log-probs of all ids wherever one was sampled."""
        logits_LV = self.policy.logits(collate([sample], [0], self.processes.device))
        return (logits_LV.double() / temperature).log_softmax(-1).cpu()


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Both sides of the comparison, and how the run samples."""

    trainer: TrainerSide
    engine: Engine  # of this process
    seat: Seat
    expected: Settings  # of the engine, by the recipe
    tokenizer: PreTrainedTokenizerBase
    prompts: Sequence[Prompt]  # PROMPTS of them
    sampling: Sampling  # of the run
    bounds: Bounds
    seed: int
    version: int  # of the weights that both sides hold

    @property
    def policy(self) -> Policy:
        return self.trainer.policy

    @property
    def processes(self) -> Processes:
        return self.trainer.processes

    def sample(self, temperature: float, tokens: int, prompts: Sequence[Prompt] | None = None) -> list[Sample]:
        """One completion of each prompt, of the full distribution; of `tokens` at most and no more than the run has.

        Every engine of the run completes all of them: those of the first come first. All processes have all samples.
        """
        settings = Sampling(
            max_tokens=min(tokens, self.sampling.max_tokens), temperature=temperature, stop_ids=self.sampling.stop_ids
        )

        def of_engine() -> list[Sample]:
            groups = rollout(self.engine, prompts or self.prompts, settings, 1, self.seed, self.version, self.tokenizer)
            return [sample for group in groups for sample in group.samples] if self.seat.speaks else []

        return [sample for samples in self.processes.together(of_engine, talks=self.seat.shared) for sample in samples]

    def by_engine(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        """What `sample` returned, engine by engine."""
        each = len(samples) // self.seat.engines
        return [list(samples[each * engine : each * (engine + 1)]) for engine in range(self.seat.engines)]

    def bounded(self, bounds: Bounds) -> "Probe":
        return replace(self, bounds=bounds)
