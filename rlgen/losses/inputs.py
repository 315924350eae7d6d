"""Inputs and outputs of the losses."""

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Denominators: counts of the whole train batch (all rows of one optimizer step), over micro-batches and processes.

    Because they do not depend on the split, the sum of the micro-batches' losses is the loss of the train batch.
    A loss clamps the ones it divides by to at least 1. Totals(sequences=64, tokens=9132, kept=9132, prompts=8, pairs=0)
    """

    sequences: int  # rows, those with an empty mask included
    tokens: int  # true positions of the masks
    kept: int  # of these, tokens that the entropy selection keeps; all of them without one
    prompts: int  # groups
    pairs: int  # preference pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The rows of one micro-batch. Gradient flows into `policy_logp`, and into `entropy` if the recipe has an entropy bonus.

    Positions outside `mask` may hold NaN or inf. Advantages and pairs stay on the CPU: reading them there waits for no device.
    """

    policy_logp: Tensor  # [B, T] current weights, with gradient
    old_logp: Tensor  # [B, T] trainer, the weights that sampled; frozen at the first update
    sampler_logp: Tensor  # [B, T] reported by the engine; NaN: not reported
    ref_logp: Tensor | None  # [B, T] frozen reference; None: the recipe has none
    entropy: Tensor  # [B, T] of the distribution that a token is sampled from, nats
    mask: Tensor  # [B, T] bool, true on sampled tokens, the stop token included
    kept: Tensor  # [B, T] bool, tokens that the entropy selection keeps; `mask` without one
    advantages: Tensor  # [B] on the CPU; of preferences only the sign counts: > 0 chosen, < 0 rejected
    weight: Tensor  # [B, T] or, of whole rows, [B, 1]: importance weight sampler -> old; ones when there is none
    group_tokens: Tensor  # [B] tokens under the masks of the row's whole group
    pair_id: Tensor  # [B] long, on the CPU; shared by the two rows of a pair; -1: in no pair
    totals: Totals
    max_tokens: int  # `rollout.max_completion_tokens`: the M of aggregation `fixed`
    epoch: float  # passes over the data before this step


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean that can be added over micro-batches and processes: sum of totals by sum of counts. Mean(total=3.0, count=4.0)

    Both are numbers, or scalars on the device that computed them: reading those makes the program wait for the device.
    """

    total: float | Tensor
    count: float | Tensor

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> float | None:
        """None if there is nothing to average."""
        total, count = float(self.total), float(self.count)
        return total / count if count else None


Stats: TypeAlias = dict[str, Mean]
Measured: TypeAlias = dict[str, Tensor]


def onto(values: Tensor, device: torch.device) -> Tensor:
    """Returns values of the CPU on `device`. A GPU takes them from pinned memory in its turn, and the program does not wait."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)
