"""Computes a model temporarily in another dtype, or with other rounding, to measure the effect of rounding.

A model in bfloat16 is computed in float32, one in float32 in float64. The weights are rounded as an engine holds them, so that
only the rounding of what is computed differs. One layer's weights are converted at a time.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from rlgen.models.half import HalfForward, Place, replaced, units

WIDER = {torch.bfloat16: torch.float32, torch.float32: torch.float64}
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True, eq=False)
class OtherForward:
    """Stands in for the `forward` of a module: computes it in `dtype`, with its weights rounded to `held` before."""

    module: nn.Module
    weights: list[Place]
    as_they_are: frozenset[Place]  # of these, those that the architecture never rounds
    held: torch.dtype
    dtype: torch.dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's own `forward` with its arguments; floating point ones are converted to `dtype`."""
        if type(self.module) is nn.Embedding:  # converts the rows that were looked up: the whole table may be gigabytes
            return round_to(nn.Embedding.forward(self.module, *args, **kwargs), self.held).to(self.dtype)
        args, kwargs = tree_map_only(Tensor, self.converted, (args, kwargs))
        with replaced(self.weights, self.rounded):
            return type(self.module).forward(self.module, *args, **kwargs)

    def rounded(self, place: Place, weight: Tensor) -> Tensor:
        exact = place in self.as_they_are or not weight.is_floating_point()
        return self.converted(weight if exact else round_to(weight, self.held))

    def converted(self, given: Tensor) -> Tensor:
        return given.to(self.dtype) if given.is_floating_point() else given


def round_to(weight: Tensor, held: torch.dtype) -> Tensor:
    """Returns `weight` as an engine holds it. In 8 bits, vLLM's `fp8`, matrices have one scale each, and all else is bfloat16."""
    if held != FP8:
        return weight.to(held)
    if weight.ndim < 2:
        return weight.to(torch.bfloat16)
    scale = weight.abs().amax().clamp(min=1e-12) / torch.finfo(FP8).max
    return (weight / scale).to(FP8).to(weight.dtype) * scale


@contextmanager
def computed_in(model: PreTrainedModel, held: torch.dtype, dtype: torch.dtype) -> Iterator[None]:
    """Makes the decoder of `model` compute in `dtype` inside the block, with weights that are rounded to `held`.

    The head, which `losses.logp` computes, is not changed. There is no gradient in the block.
    """
    with torch.no_grad(), ExitStack() as undo:
        undo.callback(setattr, model.config, "_experts_implementation", model.config._experts_implementation)
        model.config._experts_implementation = "eager"  # the grouped product of experts has no kernel for float64
        for _, unit, whole in list(units(model)):
            weights = [(part, name) for part in (unit.modules() if whole else [unit]) for name in part._parameters]
            before = vars(unit).get("forward")
            kept = frozenset(weights) - frozenset(before.rounded) if isinstance(before, HalfForward) else frozenset()
            # Tables for ids are not products: 8 bits are for the layers.
            of_unit = torch.bfloat16 if held == FP8 and not whole else held
            unit.forward = OtherForward(unit, weights, kept, of_unit, dtype)
            undo.callback(put_back, unit, before)
        yield


@contextmanager
def nudged(model: PreTrainedModel, first: int, step: int) -> Iterator[None]:
    """Changes the last bit of each `step`-th number of the input embeddings inside the block, from `first` on, so that all later
    sums round differently.
    """

    def nudge(_module: nn.Module, _given: Any, embedded: Tensor) -> Tensor:
        ones = torch.ones(embedded.shape[-1], device=embedded.device, dtype=embedded.dtype)
        ones[first::step] += torch.finfo(embedded.dtype).eps
        return embedded * ones

    hook = model.get_input_embeddings().register_forward_hook(nudge)
    try:
        yield
    finally:
        hook.remove()


def put_back(unit: nn.Module, forward: Any) -> None:
    if forward is None:
        del unit.forward
    else:
        unit.forward = forward
