"""Which tokens to learn from, by the entropy of the distribution that they were sampled from (nats)."""

import numpy
import torch
from torch import Tensor


def entropy_threshold(entropy: Tensor, mask: Tensor, share: float) -> float:
    """The entropy that a `share` of the masked tokens reaches: their (1 - share) quantile, linear between ranks.

    Beyond the 80/20 Rule (arXiv 2506.01939). It needs the tokens of a whole window: micro-batches have other quantiles.

    Args:
        entropy, mask: [B, T].

    Returns:
        Infinity for an empty mask.
    """
    values = entropy[mask]
    return float(numpy.quantile(values.double().cpu().numpy(), 1.0 - share)) if len(values) else float("inf")


def entropy_kept(entropy: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """[B, T] bool: masked tokens of at least `threshold`."""
    return mask & (torch.where(mask, entropy, 0.0).double() >= threshold)
