"""The threshold of `top_entropy` by numpy, which knows all tokens; training finds it by counting, over all processes."""

import numpy
from torch import Tensor


def entropy_threshold(entropy: Tensor, mask: Tensor, share: float) -> float:
    """The entropy that a `share` of the masked tokens reaches: their (1 - share) quantile; infinity for an empty mask."""
    values = entropy[mask]
    return float(numpy.quantile(values.double().cpu().numpy(), 1.0 - share)) if len(values) else float("inf")
