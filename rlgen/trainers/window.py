"""All rows of one optimizer step, and what is frozen about them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rlgen.losses.entropy import entropy_kept, entropy_threshold
from rlgen.losses.inputs import Totals
from rlgen.processes import Processes
from rlgen.rollout.batch import deal, pad_rows
from rlgen.trainers.base import Signal
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

    def freeze_old(self, batch: Batch, logp: Tensor) -> None:
        """Keeps the trainer's log-probs [B, T] from before the first update."""
        for row, values in zip(batch.rows, logp.detach(), strict=True):
            self.old_logp[row] = values[: len(self.samples[row].completion_ids)]

    @staticmethod
    def gather(frozen: dict[int, Tensor], batch: Batch) -> Tensor:
        """[B, T] of what is frozen, for the rows of `batch`; padded with 0 or False."""
        return pad_rows([frozen[row] for row in batch.rows], 0).to(batch.input_ids.device)

    def padded(self, batch_tokens: int) -> int:
        """Padding positions, of `batch_tokens` positions that all micro-batches of all processes have together."""
        return batch_tokens - sum(len(s.prompt_ids) + len(s.completion_ids) for s in self.samples)
