"""Computes a model in another dtype than its weights have, with one layer's converted weights at a time.

To train in bfloat16, the weights stay float32. Each layer rounds its own when it runs, and again in the backward pass. An engine
holds the same rounded values, so both sides compute norms, routers, experts and the stream between the layers from the same
numbers. `torch.autocast` would leave norms and the stream in float32, compute experts in float32 (`grouped_mm` is not on its
list), and keep a copy of all matrices until the backward pass.

To measure what rounding does, a model in bfloat16 is computed in float32 for a time, one in float32 in float64, from weights that
are rounded as an engine holds them: only the rounding of what is computed differs.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

HALF = torch.bfloat16
FP8 = torch.float8_e4m3fn
WIDER = {torch.bfloat16: torch.float32, torch.float32: torch.float64}

Place = tuple[nn.Module, str]  # a module, and the name of a parameter of its own


def compute_in_half(model: PreTrainedModel) -> None:
    """Makes embeddings, layers and the last norm of `model` compute in bfloat16. The head is computed in `losses.logp`.

    Parameters that the architecture always keeps in float32 are left unchanged.
    """
    kept = never_rounded(model)
    for name, unit, whole in units(model):
        modules = unit.named_modules(prefix=name) if whole else [(name, unit)]
        rounded = [(module, own) for path, module in modules for own in module._parameters if not kept.search(f"{path}.{own}")]
        unit.forward = HalfForward(unit, rounded)


def never_rounded(model: PreTrainedModel) -> re.Pattern[str]:
    """Returns what the names of those parameters match that the architecture always keeps in float32."""
    return re.compile("|".join(map(re.escape, model._keep_in_fp32_modules_strict or ())) or "$.")


def compute_as_held(model: PreTrainedModel) -> None:
    """Undoes `compute_in_half`, for a model that FSDP2 will round itself while it gathers the weights."""
    for _, unit, _ in units(model):
        vars(unit).pop("forward", None)


def units(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yields names and modules: the layers, with True, and what has parameters of its own outside of them, with False."""
    layers, head = set(model._no_split_modules or ()), model.get_output_embeddings()
    layers.add("LoraLayer")  # whole: it converts what it is given to the dtype that its factors have by then
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in inside or module is head:
            continue
        if layers & {kind.__name__ for kind in type(module).__mro__}:  # FSDP2 gives a layer a class of its own
            inside.update(module.modules())
            yield name, module, True
        elif any(parameter is not None for parameter in module._parameters.values()):
            yield name, module, False


def units_in_turn(model: PreTrainedModel) -> Iterator[tuple[nn.Module, list[nn.Module], bool]]:
    """Yields what `units` does, with the modules whose weights are there while it runs.

    FSDP2 gathers the experts of a layer apart from it if processes divide them: they are a unit of their own.
    """
    for _, unit, whole in units(model):
        apart = [part for part in unit.modules() if whole and part is not unit and isinstance(part, FSDPModule)]
        own = set(unit.modules() if whole else [unit]) - {module for part in apart for module in part.modules()}
        yield from ((part, list(part.modules()), True) for part in apart)
        yield unit, [module for module in unit.modules() if module in own], whole


@contextmanager
def replaced(places: Iterable[Place], by: Callable[[Place, Tensor], Tensor]) -> Iterator[None]:
    """Puts `by(place, parameter)` in the place of each parameter inside the block. Modules may have None for one, which stays."""
    parameters = [(module, name, module._parameters[name]) for module, name in places]
    try:
        for module, name, parameter in parameters:
            if parameter is not None:  # set without the checks of a module, which takes none but an `nn.Parameter`
                module._parameters[name] = by((module, name), parameter)  # type: ignore[assignment]
        yield
    finally:
        for module, name, parameter in parameters:
            module._parameters[name] = parameter


@dataclass(frozen=True, slots=True, eq=False)
class HalfForward:
    """Stands in for the `forward` of a module whose parameters are float32, and runs it with rounded ones.

    Instead of a rounded weight autograd keeps a reference to the float32 one, which is rounded again when the backward pass needs
    it.
    """

    module: nn.Module
    rounded: list[Place]
    run: Callable[..., Any] | None = None  # instead of the `forward` of the module's class, such as a compiled one

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        held: dict[int, Tensor] = {}  # parameters by the addresses of their rounded values

        def in_half(_: Place, parameter: Tensor) -> Tensor:
            if parameter.dtype != torch.float32:
                return parameter
            half = parameter.to(HALF)
            held[half.untyped_storage().data_ptr()] = parameter
            return half

        with replaced(self.rounded, in_half), self.nothing_kept(held):
            return (self.run or type(self.module).forward)(self.module, *args, **kwargs)

    def nothing_kept(self, held: dict[int, Tensor]) -> AbstractContextManager[Any]:
        """Returns the hooks that keep a reference to a parameter instead of a view of its rounded values.

        A layer with gradient checkpointing needs none: it has hooks of its own, which these would replace, and keeps nothing.
        """
        if getattr(self.module, "gradient_checkpointing", False):
            return nullcontext()

        def pack(tensor: Tensor) -> Any:
            parameter = held.get(tensor.untyped_storage().data_ptr())
            if parameter is None or tensor.dtype != HALF:
                return tensor
            return parameter, tensor.size(), tensor.stride(), tensor.storage_offset()

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            parameter, *view = packed
            rounded: Tensor = parameter.detach().to(HALF)
            return rounded.as_strided(*view)

        return saved_tensors_hooks(pack, unpack)


@dataclass(frozen=True, slots=True, eq=False)
class OtherForward:
    """Stands in for the `forward` of a module: computes it in `dtype`, with its weights rounded to `held` before."""

    module: nn.Module
    weights: list[Place]
    as_they_are: frozenset[Place]  # of these, those that the architecture never rounds
    held: torch.dtype
    dtype: torch.dtype
    run: Callable[..., Any] | None  # instead of the `forward` of the module's class: one that sends tokens to experts

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's own `forward` with its arguments; floating point ones are converted to `dtype`."""
        if type(self.module) is nn.Embedding:  # converts the rows that were looked up: the whole table may be gigabytes
            return round_to(nn.Embedding.forward(self.module, *args, **kwargs), self.held).to(self.dtype)
        args, kwargs = tree_map_only(Tensor, self.converted, (args, kwargs))
        with replaced(self.weights, self.rounded):
            return self.run(*args, **kwargs) if self.run else type(self.module).forward(self.module, *args, **kwargs)

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
    """Makes the decoder of `model` compute in `dtype` inside the block, with weights rounded to `held` and without gradient."""
    with torch.no_grad(), ExitStack() as undo:
        undo.callback(setattr, model.config, "_experts_implementation", model.config._experts_implementation)
        model.config._experts_implementation = "eager"  # the grouped product of experts has no kernel for float64
        for unit, modules, whole in list(units_in_turn(model)):
            weights = [(part, name) for part in modules for name in part._parameters]
            before = vars(unit).get("forward")
            kept = frozenset(weights) - frozenset(before.rounded) if isinstance(before, HalfForward) else frozenset()
            # Tables for ids are not products: 8 bits are for the layers.
            of_unit = torch.bfloat16 if held == FP8 and not whole else held
            run = before if isinstance(unit, FSDPModule) and not isinstance(before, HalfForward) else None
            unit.forward = OtherForward(unit, weights, kept, of_unit, dtype, run)
            if before is None:
                undo.callback(delattr, unit, "forward")
            else:
                undo.callback(setattr, unit, "forward", before)
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
