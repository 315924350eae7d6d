"""Records the kernels that a decode step calls, and calls them again in later steps, without the Python of the model.

A step of the same requests calls the same kernels on the same memory as the step before; only the contents of the memory differ.
So the calls of one step are recorded with their arguments and results, as a CUDA graph does on a GPU, and later steps repeat
them. Views and empty tensors keep their memory, and need no call. Only kernels that depend on nothing but their arguments are
repeated: if a step calls any other, it is not recorded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

# Kernels that change their arguments, by their names in torch.
CHANGING = {
    *("_C::onednn_mm", "_C::rms_norm", "_C::fused_add_rms_norm", "_C::rotary_embedding", "_C::silu_and_mul", "_C::gelu_and_mul"),
    *("_C::gelu_tanh_and_mul", "_C::cpu_attn_reshape_and_cache", "_C::cpu_attention_with_kv_cache", "_C::cpu_fused_moe"),
    *("aten::add_.Tensor", "aten::mul_.Tensor", "aten::copy_"),
}
# Kernels that return new tensors, each with its variant that writes into given memory; None: there is none.
RETURNING = {
    **dict.fromkeys(("aten::embedding", "aten::linear", "aten::mm", "aten::addmm", "aten::cat", "aten::mean.dim"), "out"),
    **dict.fromkeys(("aten::mul.Tensor", "aten::add.Tensor", "aten::sub.Tensor", "aten::div.Tensor", "aten::neg"), "out"),
    **dict.fromkeys(("aten::silu", "aten::gelu", "aten::tanh", "aten::rsqrt", "aten::cos", "aten::sin"), "out"),
    **{"aten::pow.Tensor_Scalar": "Tensor_Scalar_out", "aten::layer_norm": None, "aten::softmax.int": None, "aten::topk": None},
}
COPIES = {"aten::contiguous", "aten::clone", "aten::to.dtype", "aten::_to_copy"}
# Kernels that compute nothing.
NOTHING = {"aten::empty.memory_format", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::promote_types"}


class Call(NamedTuple):
    """A kernel and its arguments."""

    kernel: Callable[..., Any]
    arguments: list[Any]
    options: dict[str, Any]


class KernelRecorder(TorchDispatchMode):
    """Collects the calls that are needed to repeat what runs inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.unknown: str | None = None  # the first kernel that cannot be repeated

    def __torch_dispatch__(
        self, kernel: OpOverload, types: Sequence[type], arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        """Runs a kernel, and notes how it can be repeated."""
        result, name = kernel(*arguments, **(options or {})), kernel.name()
        held = {tensor.untyped_storage().data_ptr() for tensor in arguments if isinstance(tensor, Tensor)}
        made = [tensor for tensor in (result if isinstance(result, list | tuple) else [result]) if isinstance(tensor, Tensor)]
        changes = kernel._schema.is_mutable
        if name in NOTHING or (not changes and made and all(tensor.untyped_storage().data_ptr() in held for tensor in made)):
            return result  # new memory or a view, which needs no call
        if name in COPIES:
            self.calls.append(Call(torch.ops.aten.copy_.default, [result, arguments[0]], {}))
        elif changes and name in CHANGING:
            self.calls.append(Call(kernel, list(arguments), dict(options or {})))
        elif not changes and name in RETURNING:
            variant = RETURNING[name]
            into = partial(compute_into, kernel, made) if variant is None else getattr(kernel.overloadpacket, variant)
            out = {} if variant is None else {"out": result}
            self.calls.append(Call(into, list(arguments), {**(options or {}), **out}))
        else:
            self.unknown = self.unknown or name
        return result


def compute_into(kernel: OpOverload, results: Sequence[Tensor], *arguments: Any, **options: Any) -> None:
    computed = kernel(*arguments, **options)
    for result, own in zip(results, [computed] if isinstance(computed, Tensor) else computed, strict=True):
        result.copy_(own)


@dataclass(frozen=True, slots=True)
class Recording:
    """The kernels of a step, and the tensors that it returned. Repeated kernels write into these again."""

    calls: list[Call]
    result: tuple[Tensor, ...]
    changing: list[tuple[list[Any], int, int]]  # arguments of a call, place of one among them, and which changing tensor it is

    def repeat(self, changing: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Calls the kernels again, with tensors in place of those given to `record`. Returns the recorded step's tensors."""
        for arguments, place, which in self.changing:
            arguments[place] = changing[which]
        for kernel, arguments, options in self.calls:
            kernel(*arguments, **options)
        return self.result


def record(step: Callable[[], tuple[Tensor, ...]], changing: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Recording | None]:
    """Runs a step and returns what it returns, and its recording; None: it calls a kernel that is not known.

    The memory of the tensors `changing` differs from step to step.
    """
    with KernelRecorder() as recorder:
        result = step()
    if recorder.unknown is not None:
        return result, None
    places = [
        (call.arguments, place, which)
        for call in recorder.calls
        for place, argument in enumerate(call.arguments)
        for which, tensor in enumerate(changing)
        if argument is tensor
    ]
    return result, Recording(recorder.calls, result, places)
