"""Converts a model's tensors to the names and layout of its checkpoint and back: a weight sync sends checkpoint tensors.

transformers holds some weights in another layout than the checkpoint they came from: all experts of a layer in one tensor, or a
head under another name. vLLM reads checkpoints, so it receives what `save_pretrained` would write.
"""

import copy
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from operator import getitem
from typing import TypeAlias

import torch
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.linalg import vector_norm
from transformers import PreTrainedModel
from transformers import core_model_loading as loading

from rlgen.models.factors import FIRST, SCALE, SECOND
from rlgen.models.lora import adapted_layers, base_name, factors, in_adapter, is_packed, merged_weight, scale
from rlgen.models.parts import Stored, first_copy, part, whole
from rlgen.processes import Processes


def own_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Returns parameters, tied ones once, and buffers that a checkpoint contains (a router's correction bias), detached.

    For an adapted model these are the frozen tensors of its base model, under their names in the base model.
    """
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tensors = parameters | {name: buffer for name, buffer in model.state_dict().items() if name not in known}
    return {base_name(name): tensor for name, tensor in tensors.items() if not in_adapter(name)}


def merged_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yields `own_tensors` with adapters merged into them, one at a time: the weights that `model` computes with.

    A merged tensor is new and in float32, a quantised one is dequantised; all others are the model's own.
    """
    adapted = adapted_layers(model)
    packed = {f"{base_name(f'{name}.')}weight": m for name, m in model.named_modules() if is_packed(getattr(m, "weight", None))}
    for name, tensor in own_tensors(model).items():
        if name in adapted:
            yield name, merged_weight(adapted[name])
        elif name in packed:
            yield name, dequantize_module_weight(packed[name]).detach()
        elif not re.search(r"\.weight\.|\.SCB$|\.weight_format$", name):  # extra tensors of bitsandbytes
            yield name, tensor


def base_digest(model: PreTrainedModel, gather: bool = True, reads: bool = True) -> str:
    """Returns the SHA-256 over names and bytes of `own_tensors`: for an adapted model, of its frozen base.

    With `gather`, that of whole tensors: sharded ones are gathered one by one, and all processes must call this together. One
    that does not read them only takes part, and returns no digest of them. Without `gather`, that of this process's shards.
    """
    return tensors_digest(own_tensors(model), gather, reads)


def tensors_digest(tensors: Mapping[str, Tensor], gather: bool, reads: bool = True) -> str:
    """Returns the digest that `base_digest` returns, given `own_tensors`."""
    digest = hashlib.sha256()
    for name, held in tensors.items():
        tensor = whole(held) if gather else part(held)
        if not reads:
            continue
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Returns whether every value of the tensors, or of this process's shards of them, is finite. Allocates no large tensors."""
    held = [tensor for tensor in (part(tensor.detach()) for tensor in tensors) if tensor.numel()]
    # A sum is finite only if all its terms are, and takes a tenth of the time; finite terms may still overflow it.
    if not held or bool(torch.stack([tensor.sum().double() for tensor in held]).isfinite().all()):
        return True
    largest = [vector_norm(tensor, torch.inf).double() for tensor in held]
    return bool(torch.stack(largest).isfinite().all())


def non_finite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """Returns the name of the first tensor with a non-finite value, or None. Of a sharded tensor, checks this process's shard."""
    # torch has no norm for 8-bit floats
    checked = ((name, tensor) for name, tensor in tensors if tensor.is_floating_point() and tensor.itemsize > 1)
    return next((name for name, tensor in checked if not all_finite([tensor])), None)


def bits(model: PreTrainedModel, processes: Processes) -> str:
    """Returns a digest of the trained parameters, equal for every sharding: of the sum of each one's bits, read as integers.

    It is to notice after every step that weights differ in any bit; it is not secure against deliberate changes.
    """
    trained = {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}
    # Of equal shards in several processes only one counts.
    own = [bit_sum(part(tensor)) * first_copy(tensor) for tensor in trained.values()]
    sums = [torch.stack(own).cpu()] if own else []
    if any(isinstance(tensor, DTensor) for tensor in trained.values()):
        sums = processes.gather(sums)
    total = torch.stack(sums).sum(0).tolist() if sums else []
    return hashlib.sha256(repr(list(zip(trained, total, strict=True))).encode()).hexdigest()[:16]


def bit_sum(tensor: Tensor) -> Tensor:
    """Returns the sum of a tensor's bits read as integers, a scalar modulo 2^64.

    Two 4-byte numbers are read as one integer where rows have even length: ten times as fast on the CPU.
    """
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    flat = tensor.reshape(-1).view(integers[tensor.itemsize])
    even = tensor.itemsize == 4 and tensor.dim() > 1 and tensor.shape[-1] % 2 == 0 and flat.storage_offset() % 2 == 0
    return (flat.view(torch.int64) if even else flat).sum(dtype=torch.int64)


def layer_of(name: str) -> str:
    """Returns the layer of a name, or "". "model.layers.3.mlp.experts.down_proj" -> "model.layers.3." """
    found = re.match(r".*?\.\d+\.", name)
    return found[0] if found else ""


Tensors: TypeAlias = Iterable[tuple[str, Tensor]]


def checkpoint_tensors(model: PreTrainedModel, cast: Callable[[Tensors], Tensors] = iter) -> Iterator[tuple[str, Tensor]]:
    """Yields names and tensors as in the checkpoint that `from_pretrained` loaded `model` from, with adapters merged.

    Models that are held in another layout are converted layer by layer, so that only one layer's experts are held twice at a
    time. Sharded tensors are gathered one by one: all processes must iterate over all of them.

    `cast` rounds tensors, each value by itself. It is applied to shards, before they are gathered, where the model is held as in
    its checkpoint: rounded ones have fewer bytes.
    """
    tensors = merged_tensors(model)
    if not model._weight_conversions:
        yield from ((name, whole(tensor)) for name, tensor in cast(tensors))
        return
    for _, layer in groupby(tensors, key=lambda item: layer_of(item[0])):
        converted = loading.revert_weight_conversion(model, {name: whole(tensor) for name, tensor in layer})
        yield from cast(converted.items())


def adapter_factors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yields the factors of the adapter of `model`, for an engine that merges them itself, see `rlgen.models.factors`.

    The scale of a layer whose adapter is switched off is 0. Sharded tensors are gathered one by one: all processes must iterate
    over all of them.
    """
    for name, layer in adapted_layers(model).items():
        if model._weight_conversions:  # W itself is held as in the checkpoint, but may have another name there
            (name,) = loading.revert_weight_conversion(model, {name: torch.empty(1, 1, device="meta")})
        first, second = (whole(factor.detach()) for factor in factors(layer))
        if layer.fan_in_fan_out:  # type: ignore[attr-defined]  # W is stored as [in, out]
            first, second = second.T, first.T
        yield name + FIRST, first.contiguous()
        yield name + SECOND, second.contiguous()
        yield name + SCALE, torch.tensor(0.0 if layer.disable_adapters else scale(layer), dtype=torch.float64)


@contextmanager
def gone_through(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[None]:
    """Consumes the rest of `tensors` after the block, even if it failed: other processes gather the same, and would wait."""
    try:
        yield
    finally:
        for _ in tensors:
            pass


def model_tensors(model: PreTrainedModel, weights: Iterable[tuple[str, Stored]]) -> Iterator[tuple[str, Stored]]:
    """Converts names and tensors of a checkpoint to those of `model`: the inverse of `checkpoint_tensors`.

    A tensor with an unknown name is yielded unchanged. A slice of a file (safetensors' `get_slice`) is yielded unread, unless it
    is converted: then the tensors that make one tensor of the model are read together.
    """
    conversions = model._weight_conversions or []
    renamings = [conversion for conversion in conversions if isinstance(conversion, loading.WeightRenaming)]
    converters = [conversion for conversion in conversions if isinstance(conversion, loading.WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    packed: dict[str, loading.WeightConverter] = {}
    # Files list expert 10 before expert 2; they are stacked in the order of this loop.
    for name, tensor in sorted(weights, key=lambda item: loading.dot_natural_key(item[0])):
        own_name, pattern = loading.rename_source_key(name, renamings, converters)
        if pattern is None:
            yield own_name, tensor
        else:
            converter = packed.setdefault(own_name, copy.deepcopy(by_pattern[pattern]))
            converter.add_tensor(own_name, name, pattern, tensor if isinstance(tensor, Tensor) else partial(getitem, tensor, ...))
    for own_name, converter in packed.items():
        yield from converter.convert(own_name, model=model, config=model.config).items()
