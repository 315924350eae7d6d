"""Computes a model in bfloat16 from float32 weights, with one layer's bfloat16 weights at a time.

The weights that are trained stay float32. Each layer rounds its own when it runs, and again in the backward pass. An engine holds
the same rounded values, so both sides compute norms, routers, experts and the stream between the layers from the same numbers.
`torch.autocast` would leave norms and the stream in float32, compute experts in float32 (`grouped_mm` is not on its list), and
keep a copy of all matrices until the backward pass.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel

HALF = torch.bfloat16

Place = tuple[nn.Module, str]  # a module, and the name of a parameter of its own


def compute_in_half(model: PreTrainedModel) -> None:
    """Makes embeddings, layers and the last norm of `model` compute in bfloat16. The head is computed in `losses.logp`.

    Parameters that the architecture always keeps in float32 are left unchanged.
    """
    kept = re.compile("|".join(map(re.escape, model._keep_in_fp32_modules_strict or ())) or "$.")
    for name, unit, whole in units(model):
        modules = unit.named_modules(prefix=name) if whole else [(name, unit)]
        parameters = [(module, own, f"{path}.{own}") for path, module in modules for own in module._parameters]
        rounded = [(module, own) for module, own, path in parameters if not kept.search(path)]
        unit.forward = HalfForward(unit, rounded)


def compute_as_held(model: PreTrainedModel) -> None:
    """Undoes `compute_in_half`, for a model that FSDP2 will round itself while it gathers the weights."""
    for _, unit, _ in units(model):
        vars(unit).pop("forward", None)


def units(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yields names and modules: the layers, with True, and what has parameters of its own outside of them, with False."""
    layers, head = set(model._no_split_modules or ()), model.get_output_embeddings()
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in inside or module is head:
            continue
        if layers & {kind.__name__ for kind in type(module).__mro__}:  # FSDP2 gives a layer a class of its own
            inside.update(module.modules())
            yield name, module, True
        elif any(parameter is not None for parameter in module._parameters.values()):
            yield name, module, False


@contextmanager
def replaced(places: Iterable[Place], by: Callable[[Place, Tensor], Tensor]) -> Iterator[None]:
    """Puts `by(place, parameter)` in the place of each parameter inside the block. Modules may have None for one, which stays."""
    parameters = [(place, place[0]._parameters[place[1]]) for place in places]
    try:
        for place, parameter in parameters:
            if parameter is not None:
                put(place, by(place, parameter))
        yield
    finally:
        for place, parameter in parameters:
            put(place, parameter)


def put(place: Place, value: Tensor | None) -> None:
    """Sets a parameter without the checks of a module, which takes none but an `nn.Parameter`."""
    module, name = place
    module._parameters[name] = value  # type: ignore[assignment]


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
        """Runs the module's own `forward` with its arguments."""
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
