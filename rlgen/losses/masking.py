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
    """Returns means under `mask` [B, T], float64 on its device: of values [B, T] over tokens, of values [B, 1] over rows."""
    rows_B1 = mask.any(dim=1, keepdim=True)
    means: Stats = {}
    for name, value in values.items():
        counted = mask if value.shape == mask.shape else rows_B1
        means[name] = Mean(select(counted, value.detach()).sum(dtype=torch.float64), counted.sum(dtype=torch.float64))
    return means


def entropy_kept(entropy: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """Returns [B, T] bool, true for masked tokens whose entropy is at least `threshold` (arXiv 2506.01939)."""
    return mask & (select(mask, entropy).double() >= threshold)
