"""All rows of one optimizer step, and what is frozen about them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rlgen.errors import DivergedError
from rlgen.losses.entropy import entropy_kept, entropy_threshold
from rlgen.losses.inputs import Totals
from rlgen.losses.kl import reward_kl
from rlgen.models.policy import Policy
from rlgen.processes import Processes
from rlgen.rollout.batch import deal, pad_rows
from rlgen.rollout.score import score
from rlgen.trainers.base import Algorithm, Scores, Signal
from rlgen.types import Batch, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The trained rows of a rollout, all of them in every process; `micro_batches` are those that this process computes.

    Totals are global: no loss knows how the rows are split into micro-batches and processes.
    """

    samples: tuple[Sample, ...]  # [B]
    advantages: Tensor  # [B] float32
    pair_id: Tensor  # [B]
    group_tokens: Tensor  # [B] tokens of the row's whole group
    totals: Totals
    epoch: float  # passes over the data before this step
    micro_batches: tuple[tuple[int, ...], ...]  # rows of each; empty ones where other processes have more
    old_logp: dict[int, Tensor] = field(default_factory=dict)  # [L] by row, frozen at the first update
    old_at_sampling: dict[int, Tensor] = field(default_factory=dict)  # the same at the temperature of sampler_logp
    ref_logp: dict[int, Tensor] = field(default_factory=dict)  # [L] by row, if there is a reference
    kept: dict[int, Tensor] = field(default_factory=dict)  # [L] by row, if tokens are selected by entropy

    @classmethod
    def of(cls, samples: Sequence[Sample], signal: Signal, epoch: float, budget: int, processes: Processes) -> "Window":
        """The rows of `samples` that `signal` trains, dealt to the processes in micro-batches of at most `budget` tokens.

        Args:
            samples: of the whole step, in the same order in every process, and `signal` for each of them. The rows of a group may
                go to several processes, those of a pair do not.
        """
        trained = tuple(sample for sample, trains in zip(samples, signal.trained.tolist(), strict=True) if trains)
        counted = [sample.group_id for sample, counts in zip(samples, signal.counted.tolist(), strict=True) if counts]
        pair_id = signal.pair_id[signal.trained]
        pairs: dict[int, list[int]] = {}
        for row, pair in enumerate(pair_id.tolist()):
            if pair >= 0:
                pairs.setdefault(pair, []).append(row)
        units = list(pairs.values()) or [[row] for row in range(len(trained))]
        lengths = [len(sample.prompt_ids) + len(sample.completion_ids) for sample in trained]
        of_group: Counter[int] = Counter()
        for sample in trained:
            of_group[sample.group_id] += sum(sample.loss_mask)
        tokens = of_group.total()
        return cls(
            samples=trained,
            advantages=signal.advantages[signal.trained].float(),
            pair_id=pair_id,
            group_tokens=torch.tensor([of_group[sample.group_id] for sample in trained]),
            totals=Totals(
                sequences=len(counted),
                tokens=tokens,
                kept=tokens,
                prompts=len(set(counted)),
                pairs=len(pairs),
            ),
            epoch=epoch,
            micro_batches=tuple(map(tuple, deal(units, lengths, budget, processes.world)[processes.rank])),
        )

    def select_tokens(self, entropy: Mapping[int, Tensor], share: float) -> "Window":
        """Keeps the `share` of tokens with the highest entropy; [L] by row, of all rows."""
        mask = [torch.tensor(sample.loss_mask) for sample in self.samples]
        values = torch.cat([entropy[row][mask_L] for row, mask_L in enumerate(mask)])
        threshold = entropy_threshold(values, torch.ones_like(values, dtype=torch.bool), share)
        kept = {row: entropy_kept(entropy[row], mask_L, threshold) for row, mask_L in enumerate(mask)}
        count = sum(int(kept_L.sum()) for kept_L in kept.values())
        return replace(self, kept=kept, totals=replace(self.totals, kept=count))

    def freeze_old(self, batch: Batch, logp: Tensor, at_sampling: Tensor) -> None:
        """Keeps the trainer's log-probs [B, T] from before the first update, at the temperatures of the loss and of sampling."""
        for row, values, others in zip(batch.rows, logp.detach(), at_sampling, strict=True):
            self.old_logp[row] = values[: len(self.samples[row].completion_ids)]
            self.old_at_sampling[row] = others[: len(self.samples[row].completion_ids)]

    @staticmethod
    def gather(frozen: dict[int, Tensor], batch: Batch) -> Tensor:
        """[B, T] of what is frozen, for the rows of `batch`; padded with 0 or False."""
        return pad_rows([frozen[row] for row in batch.rows], 0).to(batch.input_ids.device)

    def padded(self, batch_tokens: int) -> int:
        """Padding positions, of `batch_tokens` positions that all micro-batches of all processes have together."""
        return batch_tokens - sum(len(s.prompt_ids) + len(s.completion_ids) for s in self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowBuilder:
    """rewards -> window: what the algorithm makes of them, and the reference's log-probs where it needs them."""

    processes: Processes
    algorithm: Algorithm
    weights: Mapping[str, float]  # of the rewards, by label
    reference: Policy | None
    temperature: float  # of the sampler's log-probs
    budget: int  # tokens of a micro-batch

    def build(self, samples: Sequence[Sample], epoch: float) -> tuple[Window, Signal, dict[str, Any]]:
        """What to learn from the samples of a step, with the reference's log-probs where the algorithm needs them.

        The third is what was measured on the way.
        """
        kl = self.kl(samples) if self.algorithm.reference == "reward" else None
        signal = self.algorithm.advantages(Scores.of(samples, self.weights, kl))
        window = Window.of(samples, signal, epoch, self.budget, self.processes)
        if self.algorithm.reference == "loss":
            window.ref_logp.update(enumerate(self.reference_logp(window.samples)))
        if kl is None:
            return window, signal, {}
        tokens = sum(sum(sample.loss_mask) for sample in samples)
        return window, signal, {"kl/ref_k1": kl.sum().item() / tokens if tokens else None}

    def reference_logp(self, samples: Sequence[Sample]) -> list[Tensor]:
        """One [L] tensor a sample, at the temperature of the loss."""
        assert self.reference is not None  # built whenever the algorithm names a use for it
        temperature = self.algorithm.loss_temperature or self.temperature
        return score(self.reference, samples, temperature, self.budget, self.processes)

    def kl(self, samples: Sequence[Sample]) -> Tensor:
        """[B] sampled KL of each completion to the reference.

        Raises:
            DivergedError: it is not finite: as part of a reward it would pass for a reward that does not apply.
        """
        if not samples:
            return torch.zeros(0)
        sampler_logp = pad_rows([torch.tensor(sample.sampler_logp) for sample in samples], 0.0)
        mask = pad_rows([torch.tensor(sample.loss_mask) for sample in samples], False)
        kl = reward_kl(sampler_logp, pad_rows(self.reference_logp(samples), 0.0), mask)
        if not kl.isfinite().all():
            raise DivergedError("the KL to the reference (trainer.kl k1_in_reward) is not finite: the reference overflows")
        return kl
