"""Turns comparisons into rewards."""

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def win_rates(items: Sequence[T], wins: Callable[[T, T], float]) -> list[float | None]:
    """Returns the mean share that each item wins against the others of its group; their mean is 0.5.

    Args:
        items: [G] what is compared.
        wins: the share of the first of two items, from 0 (it loses) to 1; for the swapped items it gives 1 minus that.

    Returns:
        [G] from 0 to 1; None for a single item, which has nothing to be compared with.
    """
    rates: list[float | None] = []
    for place, item in enumerate(items):
        others = [wins(item, other) for index, other in enumerate(items) if index != place]
        rates.append(sum(others) / len(others) if others else None)
    return rates
