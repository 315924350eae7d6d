"""A model's tensors under the names a checkpoint gives them, and back: what a weight sync sends is a checkpoint.

transformers holds some weights in another layout than the checkpoint they came from: all experts of a layer in one tensor, a
head under another name. vLLM reads checkpoints, so it is sent what `save_pretrained` would write.
"""

import copy
import hashlib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby

import torch
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.linalg import vector_norm
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from rlgen.models.lora import adapted_layers, base_name, in_adapter, is_packed, merged_weight
from rlgen.processes import Processes


def own_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters, tied ones once, and buffers that a checkpoint keeps (a router's correction bias), without gradients.

    Of an adapted model these are the frozen tensors of its base, under the names that they have there.
    """
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tensors = parameters | {name: buffer for name, buffer in model.state_dict().items() if name not in known}
    return {base_name(name): tensor for name, tensor in tensors.items() if not in_adapter(name)}


def merged_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """`own_tensors`, those with an adapter merged with it, one at a time: the weights that `model` computes with.

    A merged tensor is a new one in float32; all others are the model's own. Weights that are held in few bits come as numbers.
    """
    adapted = adapted_layers(model)
    packed = {f"{base_name(f'{name}.')}weight": m for name, m in model.named_modules() if is_packed(getattr(m, "weight", None))}
    for name, tensor in own_tensors(model).items():
        if name in adapted:
            yield name, merged_weight(adapted[name])
        elif name in packed:
            yield name, dequantize_module_weight(packed[name]).detach()
        elif not re.search(r"\.weight\.|\.SCB$|\.weight_format$", name):  # what bitsandbytes keeps beside packed weights
            yield name, tensor


def base_digest(model: PreTrainedModel) -> str:
    """SHA-256 over the bytes and names of `own_tensors`: of an adapted model, its frozen base."""
    digest = hashlib.sha256()
    for name, tensor in own_tensors(model).items():
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether every value of them is, as far as this process holds them. Nothing of their size is allocated."""
    held = [part(tensor.detach()) for tensor in tensors]
    largest = [vector_norm(tensor, torch.inf).double().cpu() for tensor in held if tensor.numel()]
    return not largest or bool(torch.stack(largest).isfinite().all())


def non_finite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """The name of the first tensor with a value that is not finite; of a sharded one, this process looks at its part."""
    for name, tensor in tensors:
        # torch has no norm of floats of eight bits
        if tensor.is_floating_point() and tensor.itemsize > 1 and not all_finite([tensor]):
            return name
    return None


def bits(model: PreTrainedModel, processes: Processes) -> str:
    """A digest of the trained parameters, the same however they are sharded: the sum of each one's bits, read as integers.

    Made to notice that weights are not the same to the last bit, after every step; not against somebody who wants to deceive.
    """
    trained = {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}
    own = [bit_sum(part(tensor)) for tensor in trained.values()]
    sums = [torch.stack(own).cpu()] if own else []
    if any(isinstance(tensor, DTensor) for tensor in trained.values()):
        sums = processes.gather(sums)
    total = torch.stack(sums).sum(0).tolist() if sums else []
    return hashlib.sha256(repr(list(zip(trained, total, strict=True))).encode()).hexdigest()[:16]


def bit_sum(tensor: Tensor) -> Tensor:
    """A scalar, modulo 2^64. Two numbers of four bytes are read as one where rows are even: ten times as fast on the CPU."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    flat = tensor.reshape(-1).view(integers[tensor.itemsize])
    even = tensor.itemsize == 4 and tensor.dim() > 1 and tensor.shape[-1] % 2 == 0 and flat.storage_offset() % 2 == 0
    return (flat.view(torch.int64) if even else flat).sum(dtype=torch.int64)


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor from its parts, which all processes must ask for; another one as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, sharing its memory: all of it, or its shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_like(full: Tensor, tensor: Tensor) -> Tensor:
    """What this process would hold of `full` if it were sharded as `tensor` is."""
    if not isinstance(tensor, DTensor):
        return full
    mesh, placements = tensor.device_mesh, tensor.placements
    # Every process has `full`: nothing is sent.
    return distribute_tensor(full.to(mesh.device_type), mesh, placements, src_data_rank=None).to_local()


def layer_of(name: str) -> str:
    """("model.layers.3.mlp.experts.down_proj") -> "model.layers.3."; "" outside of layers."""
    found = re.match(r".*?\.\d+\.", name)
    return found[0] if found else ""


def checkpoint_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors as in the checkpoint that `from_pretrained` made `model` from; adapters are merged on the way.

    Most models keep their checkpoint's layout: the tensors are then the model's own. Others are converted layer by layer, so
    that one layer's experts are held twice at a time, not all of them. Sharded ones are put together one by one: all processes
    must go through all of them.
    """
    tensors = merged_tensors(model)
    if not model._weight_conversions:
        yield from ((name, whole(tensor)) for name, tensor in tensors)
        return
    for _, layer in groupby(tensors, key=lambda item: layer_of(item[0])):
        yield from revert_weight_conversion(model, {name: whole(tensor) for name, tensor in layer}).items()


@contextmanager
def gone_through(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[None]:
    """After the block nothing is left of `tensors`, even if it failed: other processes put the same tensors together."""
    try:
        yield
    finally:
        for _ in tensors:
            pass


def model_tensors(model: PreTrainedModel, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The inverse: names and tensors of a checkpoint to those of `model`. A name it does not know passes as it is."""
    conversions = model._weight_conversions or []
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    packed: dict[str, WeightConverter] = {}
    # Files list expert 10 before expert 2; they are stacked in the order of this loop.
    for name, tensor in sorted(weights, key=lambda item: dot_natural_key(item[0])):
        own_name, pattern = rename_source_key(name, renamings, converters)
        if pattern is None:
            yield own_name, tensor
        else:
            converter = packed.setdefault(own_name, copy.deepcopy(by_pattern[pattern]))
            converter.add_tensor(own_name, name, pattern, tensor)
    for own_name, converter in packed.items():
        yield from converter.convert(own_name, model=model, config=model.config).items()
