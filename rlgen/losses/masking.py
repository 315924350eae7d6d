"""Masking by selection instead of multiplication: padding may hold NaN, and NaN * 0 is NaN, also in the gradient."""

import torch
from torch import Tensor

from rlgen.losses.inputs import Mean, Measured, Stats


def select(mask: Tensor, values: Tensor) -> Tensor:
    """Returns `values` where `mask`, else 0.

    Apply it to the inputs of exp, product and division: applied to their output it corrects the value but not the gradient.
    """
    return torch.where(mask, values, 0.0)


def capped_exp(z: Tensor) -> Tensor:
    """Returns exp(min(z, 20)), so that an extreme ratio stays finite in float32; the gradient is 0 beyond the cap."""
    return z.clamp(max=20.0).exp()


def masked_means(mask: Tensor, values: Measured) -> Stats:
    """Returns means under `mask` [B, T], with one device-to-host transfer: values [B, T] over tokens, values [B, 1] over rows."""
    rows_B1 = mask.any(dim=1, keepdim=True)
    parts: list[Tensor] = []
    for value in values.values():
        counted = mask if value.shape == mask.shape else rows_B1
        parts += [select(counted, value.detach()).sum(dtype=torch.float64), counted.sum(dtype=torch.float64)]
    if not parts:
        return {}
    sums = torch.stack(parts).tolist()
    return {name: Mean(*sums[2 * i : 2 * i + 2]) for i, name in enumerate(values)}
