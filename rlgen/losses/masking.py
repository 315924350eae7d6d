"""Select, never multiply: padding may hold NaN, and NaN * 0 is NaN, in the gradient too."""

import torch
from torch import Tensor

from rlgen.losses.inputs import Mean, Measured, Stats


def select(mask: Tensor, values: Tensor) -> Tensor:
    """`values` where `mask`, else 0.

    Apply it to what goes *into* exp, product and division: behind them it cleans the value but not the gradient.
    """
    return torch.where(mask, values, 0.0)


def capped_exp(z: Tensor) -> Tensor:
    """exp(min(z, 20)): one absurd ratio stays finite in float32; the gradient is 0 beyond the cap."""
    return z.clamp(max=20.0).exp()


def masked_means(mask: Tensor, values: Measured) -> Stats:
    """Means under `mask` [B, T], from one transfer off the device: of values [B, T] over tokens, of [B, 1] over rows."""
    rows_B1 = mask.any(dim=1, keepdim=True)
    parts: list[Tensor] = []
    for value in values.values():
        counted = mask if value.shape == mask.shape else rows_B1
        parts += [select(counted, value.detach()).sum(dtype=torch.float64), counted.sum(dtype=torch.float64)]
    if not parts:
        return {}
    sums = torch.stack(parts).tolist()
    return {name: Mean(*sums[2 * i : 2 * i + 2]) for i, name in enumerate(values)}
