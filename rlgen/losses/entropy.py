"""Selects the tokens to train on by the entropy of the distribution that they were sampled from (nats)."""

import numpy
import torch
from torch import Tensor


def entropy_threshold(entropy: Tensor, mask: Tensor, share: float) -> float:
    """Returns the entropy that a `share` of the masked tokens reaches: their (1 - share) quantile, linear between ranks.

    From "Beyond the 80/20 Rule" (arXiv 2506.01939). Takes the tokens of a whole window, since micro-batches have other quantiles.

    Args:
        entropy, mask: [B, T].

    Returns:
        The threshold; infinity for an empty mask.
    """
    values = entropy[mask]
    return float(numpy.quantile(values.double().cpu().numpy(), 1.0 - share)) if len(values) else float("inf")


def entropy_kept(entropy: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """Returns [B, T] bool, true for masked tokens whose entropy is at least `threshold`."""
    return mask & (torch.where(mask, entropy, 0.0).double() >= threshold)
