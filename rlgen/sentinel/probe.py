"""Holds what every check needs: engine and trainer, some prompts, and the methods to sample and to score them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlgen.engines.base import Engine, Settings
from rlgen.losses.logp import log_softmax
from rlgen.models.half import FP8, WIDER, nudged
from rlgen.models.policy import Policy
from rlgen.out_of_memory import is_out_of_memory
from rlgen.processes import EngineShare, Processes
from rlgen.rollout.batch import collate
from rlgen.rollout.sample import rollout
from rlgen.rollout.samples import Samples
from rlgen.rollout.score import score, shared_out
from rlgen.sentinel.bounds import ROUNDINGS, Bounds, Gap, Noise, engine_gap, where
from rlgen.sentinel.sync import send_weights
from rlgen.types import Distribution, MicroBatch, Prompt, Sample, Sampling

PROMPTS = 8
TOKENS = 64  # maximum length of a completion in check 1
FEWER_TOKENS = 16  # maximum length in later checks: a wrong weight changes the first tokens already


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSide:
    """Computes log-probs of samples under the current weights of the policy.

    Every process must ask for the same samples at the same time, and gets the same result, so that all reach the same verdict.
    """

    policy: Policy
    budget: int  # tokens of a micro-batch
    processes: Processes
    engine_dtype: torch.dtype | None  # in which the engine computes; None: quantised weights, whose rounding cannot be measured
    engine_holds: torch.dtype | None  # in which the engine holds its weights

    def logp(self, samples: Sequence[Sample], distribution: Distribution) -> list[Tensor]:
        """Returns the log-probs of each sample, [L] float32."""
        return score(self.policy, samples, distribution, self.budget, self.processes)

    def logp_at(self, samples: Sequence[Sample], distributions: Sequence[Distribution]) -> list[Tensor]:
        """Returns the log-probs of each sample under K distributions, [K, L] float32."""

        def compute(batch: MicroBatch) -> Tensor:
            return self.policy(batch, distributions).logp

        return shared_out(samples, self.budget, self.processes, compute, self.policy.sharing)

    def gap(self, samples: Sequence[Sample], distribution: Distribution) -> Gap:
        """Returns the gap between the trainer's log-probs of `samples` and those that the engine reported.

        Tokens at the edge of a truncation are left out: see `Truncation.sure`.
        """
        return engine_gap(samples, self.logp(samples, distribution), self.sure(samples, distribution))

    def sure(self, samples: Sequence[Sample], distribution: Distribution) -> list[Tensor] | None:
        """Returns `Truncation.sure` of the tokens of each sample, [L] bool; None if the distribution is not truncated."""
        if not distribution.truncated:
            return None

        def compute(batch: MicroBatch) -> Tensor:
            sure = self.policy(batch, (distribution,)).sure
            assert sure is not None
            return sure[None]

        return [sure_1L[0] for sure_1L in shared_out(samples, self.budget, self.processes, compute, self.policy.sharing)]

    def noise(self, samples: Sequence[Sample], distributions: Sequence[Distribution]) -> Noise | None:
        """Returns what rounding explains of a gap on these samples, the most over `distributions`; None if it cannot be measured.

        So it is with quantised weights of unknown rounding, if the model's code runs in no other dtype, or if no token is `sure`.
        """
        held, own, distributions = self.engine_holds, self.policy.dtype, tuple(dict.fromkeys(distributions))
        if self.engine_dtype is None or held is None:
            return None
        computed = self.engine_dtype if self.engine_dtype != own or held == FP8 else WIDER[own]

        def compute(batch: MicroBatch) -> Tensor:  # [2 * K, B, T]
            return self.policy.scores_in(batch, distributions, held, computed).flatten(0, 1)

        try:
            found = shared_out(samples, self.budget, self.processes, compute, sharing=1)  # padded
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:  # architectures have code of their own
            if is_out_of_memory(error):
                raise
            return None
        logp, beside = self.logp_at(samples, distributions), [one.unflatten(0, (2, len(distributions))) for one in found]
        noise: Noise | None = None
        for k, distribution in enumerate(distributions):
            rounded = [(one[k].double() - other[0, k]).abs() + other[1, k] for one, other in zip(logp, beside, strict=True)]
            if of_one := Noise.of(torch.cat(where(rounded, self.sure(samples, distribution)))):
                noise = of_one.or_more(noise)
        return noise

    def noise_of_roundings(self, samples: Sequence[Sample], distribution: Distribution) -> Noise | None:
        """Returns how far log-probs on these samples are from those of `ROUNDINGS` other roundings, each as valid.

        For each token this is the root of the mean square over the roundings. None: no token is `sure`.
        """
        sure = self.sure(samples, distribution)
        logp, squares = torch.cat(where(self.logp(samples, distribution), sure)).double(), []
        for first in range(ROUNDINGS):
            with nudged(self.policy.model, first, ROUNDINGS):
                nudged_logp = torch.cat(where(self.logp(samples, distribution), sure)).double()
                squares.append((nudged_logp - logp).square())
        return Noise.of(torch.stack(squares).mean(0).sqrt())

    @torch.no_grad()
    def logp_of_all(self, sample: Sample, distribution: Distribution) -> Tensor:
        """Returns the log-probs of all V ids at each of the L sampled positions, [L, V] float64 on the CPU."""
        logits_LV = self.policy.logits(collate(Samples.of([sample], ()), [0], self.processes.device))
        return log_softmax(logits_LV.double(), distribution).cpu()


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Engine and trainer of the comparison, and how the run samples."""

    trainer: TrainerSide
    engine: Engine  # of this process
    engine_share: EngineShare
    expected: Settings  # the engine's settings according to the recipe
    tokenizer: PreTrainedTokenizerBase
    template: str | None = None  # chat template of the recipe, in place of the tokenizer's own; None: the recipe sets none
    prompts: Sequence[Prompt]  # `PROMPTS` prompts
    sampling: Sampling  # of the run
    given: Bounds | None  # bounds of the recipe, which replace measured ones
    most: Bounds  # that hold whatever the noise
    noise: Noise | None  # what rounding explains, on the tokens of check 1; None: not measured
    seed: int
    version: int  # version of the weights that engine and trainer hold

    @property
    def bounds(self) -> Bounds:
        """Returns the bounds of the recipe, or else those that follow from the noise, or else the widest."""
        return self.given or (self.most if self.noise is None else Bounds.by_noise(self.noise, self.most))

    def measured(self, samples: Sequence[Sample], *distributions: Distribution) -> "Probe":
        """Returns a copy whose noise is at least that of `samples` under the current weights."""
        found = None if self.given else self.trainer.noise(samples, distributions)
        return self if found is None else replace(self, noise=found.or_more(self.noise))

    def looked_closer(self, gap: Gap, samples: Sequence[Sample], distribution: Distribution) -> "Probe":
        """Returns a copy whose noise is at least that of `samples`, closely measured, if their `gap` exceeds the bounds."""
        if self.given or (self.noise and self.bounds.hold(gap)):
            return self
        probe = self.measured(samples, distribution)
        if probe.noise is None:
            return probe
        closer = self.trainer.noise_of_roundings(samples, distribution)
        return probe if closer is None else replace(probe, noise=closer.or_more(probe.noise))

    @property
    def policy(self) -> Policy:
        return self.trainer.policy

    @property
    def processes(self) -> Processes:
        return self.trainer.processes

    @property
    def whole(self) -> Distribution:
        """Returns the distribution of the run's temperature over all ids, in which every fault shows."""
        return self.sampling.distribution.whole

    def fits(self, samples: Sequence[Sample]) -> bool:
        """Returns whether the gap on samples of the distribution `whole` is within the bounds."""
        return self.bounds.hold(self.trainer.gap(samples, self.whole))

    def plain(self, distribution: Distribution | None, tokens: int) -> Sampling:
        """Returns the settings of the run, without a regular expression.

        Args:
            distribution: to sample from; None: that of the run.
            tokens: maximum length of a completion; that of the run also applies.
        """
        chosen = {} if distribution is None else asdict(distribution)
        return replace(self.sampling, max_tokens=min(tokens, self.sampling.max_tokens), regex=None, **chosen)

    def sample(self, distribution: Distribution | None, tokens: int, prompts: Sequence[Prompt] | None = None) -> list[Sample]:
        """Returns one completion of each prompt from each engine, in every process.

        The samples of the first engine come first. With tensor parallelism, the first process of each engine contributes them.
        See `plain` for the arguments. Without `prompts` it samples those of the probe.
        """
        settings = self.plain(distribution, tokens)

        def of_engine() -> list[Sample]:
            groups = rollout(self.engine, prompts or self.prompts, settings, 1, self.seed, self.version, self.tokenizer)
            return [sample for group in groups for sample in group.samples] if self.engine_share.first else []

        of_all = self.processes.gather_all(of_engine, has_collectives=self.engine_share.shared, keepalive=True)
        return [sample for samples in of_all for sample in samples]

    def sync(self, hashed: bool = False, whole: bool = False) -> None:
        """Sends the present weights of the policy to the engine, see `send_weights`. It sleeps first, as it does in a run."""
        self.engine.sleep()
        send_weights(self.engine, self.policy.model, self.version, self.processes, hashed, whole)
