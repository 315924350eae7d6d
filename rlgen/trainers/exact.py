"""Sums of gradients that do not depend on the order in which they are added, not even in the last bit."""

from collections.abc import Sequence

import torch
from torch import nn

# Parts are rounded to multiples of 2^-44 before they are added. Below 2^9, float64 holds every such multiple exactly.
GRID = -44
# Added to a float64 below 2^7 and subtracted again, this rounds it to a multiple of 2^GRID, the distance of neighbouring float64s
# between 2^(52 + GRID) and twice that.
SHIFT = 1.5 * 2.0 ** (52 + GRID)


class ExactSum:
    """The sum of gradients of parameters, which are added part by part in any order: the same bits whatever the order.

    The rounding is 2^-45 at most, of each part. Where a number is above 2^7, as in a gradient that diverges, the sum is as exact
    as float64 is, but its last bits depend on the order. Holds 8 bytes for each number of the parameters.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._sums = [torch.zeros_like(parameter, dtype=torch.float64, requires_grad=False) for parameter in parameters]
        self._has = [False] * len(parameters)

    @torch.no_grad()
    def take(self) -> None:
        """Adds the gradients of the parameters to the sums, and removes them from the parameters."""
        for place, parameter in enumerate(self._parameters):
            if parameter.grad is None:
                continue
            self._sums[place] += parameter.grad.double().add_(SHIFT).sub_(SHIFT)
            self._has[place] = True
            parameter.grad = None

    @torch.no_grad()
    def give(self, factor: float) -> None:
        """Makes the sums, times `factor`, the gradients of the parameters, and begins again at 0.

        A parameter without a gradient in any part gets none.
        """
        for place, parameter in enumerate(self._parameters):
            if self._has[place]:
                parameter.grad = (self._sums[place] * factor).to(parameter.dtype)
        self.drop()

    def drop(self) -> None:
        for place, total in enumerate(self._sums):
            if self._has[place]:
                total.zero_()
        self._has = [False] * len(self._has)
