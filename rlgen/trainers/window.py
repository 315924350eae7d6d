"""All rows of one optimizer step, and what is frozen about them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from rlgen.losses.inputs import Totals
from rlgen.rollout.batch import pad_rows, plan
from rlgen.trainers.base import Signal
from rlgen.types import Batch, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The trained rows of a rollout. Totals are global: no loss knows how the rows are split into micro-batches."""

    samples: tuple[Sample, ...]  # [B]
    advantages: Tensor  # [B] float32
    pair_id: Tensor  # [B]
    totals: Totals
    micro_batches: tuple[tuple[int, ...], ...]  # rows of each
    old_logp: dict[int, Tensor] = field(default_factory=dict)  # [L] by row, frozen at the first update
    ref_logp: dict[int, Tensor] = field(default_factory=dict)  # [L] by row, if there is a reference

    @classmethod
    def of(cls, samples: Sequence[Sample], signal: Signal, budget: int) -> "Window":
        """The rows of `samples` that `signal` trains, planned into micro-batches of at most `budget` tokens."""
        rows = signal.trained.nonzero()[:, 0].tolist()
        trained = tuple(samples[row] for row in rows)
        pair_id = signal.pair_id[signal.trained]
        pairs: dict[int, list[int]] = {}
        for row, pair in enumerate(pair_id.tolist()):
            if pair >= 0:
                pairs.setdefault(pair, []).append(row)
        units = list(pairs.values()) or [[row] for row in range(len(trained))]
        lengths = [len(sample.prompt_ids) + len(sample.completion_ids) for sample in trained]
        return cls(
            samples=trained,
            advantages=signal.advantages[signal.trained].float(),
            pair_id=pair_id,
            totals=Totals(sequences=len(trained), tokens=sum(sum(sample.loss_mask) for sample in trained), pairs=len(pairs)),
            micro_batches=tuple(map(tuple, plan(units, lengths, budget))),
        )

    def freeze_old(self, batch: Batch, logp: Tensor) -> None:
        """Keeps the trainer's log-probs [B, T] under the weights that sampled."""
        for row, values in zip(batch.rows, logp.detach(), strict=True):
            self.old_logp[row] = values[: len(self.samples[row].completion_ids)]

    @staticmethod
    def gather(frozen: dict[int, Tensor], batch: Batch) -> Tensor:
        """[B, T] of frozen log-probs for the rows of `batch`."""
        return pad_rows([frozen[row] for row in batch.rows], 0.0).to(batch.input_ids.device)

    def padded(self, batch_tokens: int) -> int:
        """Padding positions, of `batch_tokens` positions that all micro-batches have together."""
        return batch_tokens - sum(len(s.prompt_ids) + len(s.completion_ids) for s in self.samples)
