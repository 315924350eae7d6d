"""All rows of one optimizer step, and what is frozen about them."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rlgen.losses.entropy import entropy_kept, entropy_threshold
from rlgen.losses.inputs import Totals
from rlgen.rollout.batch import pad_rows, plan
from rlgen.trainers.base import Signal
from rlgen.types import Batch, Sample

# From a list of this process to that of all processes, in order of rank: accelerate's `gather_object`; of one process, `list`.
Gather: TypeAlias = Callable[[list[Any]], list[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The trained rows of a rollout that this process has.

    Totals are global: no loss knows how the rows are split into micro-batches and processes.
    """

    samples: tuple[Sample, ...]  # [B]
    advantages: Tensor  # [B] float32
    pair_id: Tensor  # [B]
    group_tokens: Tensor  # [B] tokens of the row's whole group, wherever its other rows are
    totals: Totals  # of all processes
    epoch: float  # passes over the data before this step
    micro_batches: tuple[tuple[int, ...], ...]  # rows of each
    gather_all: Gather
    old_logp: dict[int, Tensor] = field(default_factory=dict)  # [L] by row, frozen at the first update
    ref_logp: dict[int, Tensor] = field(default_factory=dict)  # [L] by row, if there is a reference
    kept: dict[int, Tensor] = field(default_factory=dict)  # [L] by row, if tokens are selected by entropy

    @classmethod
    def of(cls, samples: Sequence[Sample], signal: Signal, epoch: float, budget: int, gather_all: Gather = list) -> "Window":
        """The rows of `samples` that `signal` trains, planned into micro-batches of at most `budget` tokens.

        Args:
            samples: of this process, and `signal` for each of them. Groups may be spread over processes, pairs may not; ids of
                both are those of all processes.
            gather_all: every process must come here, with rows or without.
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
        group_ids, pair_ids = gather_all(counted), gather_all(list(pairs))
        of_group: Counter[int] = Counter()
        for group_id, count in gather_all([(sample.group_id, sum(sample.loss_mask)) for sample in trained]):
            of_group[group_id] += count
        tokens = of_group.total()
        return cls(
            samples=trained,
            advantages=signal.advantages[signal.trained].float(),
            pair_id=pair_id,
            group_tokens=torch.tensor([of_group[sample.group_id] for sample in trained]),
            totals=Totals(
                sequences=len(group_ids),
                tokens=tokens,
                kept=tokens,
                prompts=len(set(group_ids)),
                pairs=len(pair_ids),
            ),
            epoch=epoch,
            micro_batches=tuple(map(tuple, plan(units, lengths, budget))),
            gather_all=gather_all,
        )

    def select_tokens(self, entropy: Sequence[Tensor], share: float) -> "Window":
        """Keeps the `share` of all processes' tokens with the highest entropy; one [L] tensor a row comes in."""
        mask = [torch.tensor(sample.loss_mask) for sample in self.samples]
        values = torch.cat(self.gather_all([of_row[mask_L] for of_row, mask_L in zip(entropy, mask, strict=True)]))
        threshold = entropy_threshold(values, torch.ones_like(values, dtype=torch.bool), share)
        kept = {row: entropy_kept(*of_row, threshold) for row, of_row in enumerate(zip(entropy, mask, strict=True))}
        count = sum(self.gather_all([int(kept_L.sum()) for kept_L in kept.values()]))
        return replace(self, kept=kept, totals=replace(self.totals, kept=count))

    def freeze_old(self, batch: Batch, logp: Tensor) -> None:
        """Keeps the trainer's log-probs [B, T] under the weights that sampled."""
        for row, values in zip(batch.rows, logp.detach(), strict=True):
            self.old_logp[row] = values[: len(self.samples[row].completion_ids)]

    @staticmethod
    def gather(frozen: dict[int, Tensor], batch: Batch) -> Tensor:
        """[B, T] of what is frozen, for the rows of `batch`; padded with 0 or False."""
        return pad_rows([frozen[row] for row in batch.rows], 0).to(batch.input_ids.device)

    def padded(self, batch_tokens: int) -> int:
        """Padding positions, of `batch_tokens` positions that all micro-batches have together."""
        return batch_tokens - sum(len(s.prompt_ids) + len(s.completion_ids) for s in self.samples)
