"""Exact order statistics of values spread over many processes, computed by counting, without gathering the values."""

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

# All-reduce of a tensor, elementwise by sum, minimum or maximum. In a single process it returns the tensor itself.
Total: TypeAlias = Callable[[Tensor, Literal["sum", "min", "max"]], Tensor]


def alone(values: Tensor, op: Literal["sum", "min", "max"]) -> Tensor:
    return values


def kth_smallest(values: Tensor, ranks: Sequence[int], total: Total = alone) -> list[float]:
    """Returns the exact values at `ranks`, counted from 0, in the sorted values of all processes.

    Takes four rounds for each rank. Each round sums a histogram of the next bits, over the values that share the earlier bits
    with the wanted value; it transfers 1 kB (256 counts of int32), whatever the number of values.

    Args:
        values: [N] float32 of this process, finite or infinite; may be empty, but not in all processes.
    """
    bits = values.float().contiguous().view(torch.int32).long()
    # The bits of floats sort like the floats, once those of negative ones are inverted and the sign bit of others is set.
    key = torch.where(bits < 0, ~bits & 0xFFFFFFFF, bits | 0x80000000)
    return [_kth(key, rank, total) for rank in ranks]


def _kth(key: Tensor, rank: int, total: Total) -> float:
    found = 0
    for shift in (24, 16, 8, 0):  # a byte in each round, the highest first
        counts = total(torch.bincount((key >> shift) & 0xFF, minlength=256).int(), "sum").long()
        ends = counts.cumsum(0)
        place = int((ends <= rank).sum())
        rank -= int(ends[place] - counts[place])
        found = (found << 8) | place
        key = key[(key >> shift) == found]
    bits = found & 0x7FFFFFFF if found & 0x80000000 else ~found & 0xFFFFFFFF
    return float(torch.tensor(bits, dtype=torch.uint32).view(torch.float32))


def quantile(values: Tensor, share: float, total: Total = alone) -> float:
    """Returns the `share` quantile of the values of all processes, linear between ranks like `numpy.quantile`; NaN if none."""
    count = int(total(torch.tensor(len(values)), "sum"))
    if not count:
        return float("nan")
    place = (count - 1) * share
    below = int(place)
    low, high = kth_smallest(values, (below, min(below + 1, count - 1)), total)
    part = place - below
    return low + (high - low) * part if part < 0.5 else high - (high - low) * (1 - part)
