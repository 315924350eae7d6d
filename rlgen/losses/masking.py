"""Select, never multiply: padding may hold NaN, and NaN * 0 is NaN, in the gradient too."""

import torch
from torch import Tensor

from rlgen.losses.inputs import Mean, Stats


def select(mask: Tensor, values: Tensor) -> Tensor:
    """`values` where `mask`, else 0.

    Apply it to what goes *into* exp, product and division: behind them it cleans the value but not the gradient.
    """
    return torch.where(mask, values, 0.0)


def capped_exp(z: Tensor) -> Tensor:
    """exp(min(z, 20)): one absurd ratio stays finite in float32; the gradient is 0 beyond the cap."""
    return z.clamp(max=20.0).exp()


def masked_means(mask: Tensor, values: dict[str, Tensor]) -> Stats:
    """The mean of each of `values` (of the mask's shape) under `mask`, from one transfer off the device."""
    sums = [select(mask, value.detach()).sum(dtype=torch.float64) for value in values.values()]
    *totals, count = torch.stack([*sums, mask.sum(dtype=torch.float64)]).tolist()
    return {name: Mean(total, count) for name, total in zip(values, totals, strict=True)}
