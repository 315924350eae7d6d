"""A model's tensors under the names a checkpoint gives them, and back: what a weight sync sends is a checkpoint.

transformers holds some weights in another layout than the checkpoint they came from: all experts of a layer in one tensor, a
head under another name. vLLM reads checkpoints, so it is sent what `save_pretrained` would write.
"""

import copy
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)


def own_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters, tied ones once, and buffers that a checkpoint keeps (a router's correction bias), without gradients."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return parameters | {name: buffer for name, buffer in model.state_dict().items() if name not in known}


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
    """Names and tensors as in the checkpoint that `from_pretrained` made `model` from.

    Most models keep their checkpoint's layout: the tensors are then the model's own. Others are converted layer by layer, so
    that one layer's experts are held twice at a time, not all of them. Sharded ones are put together one by one: all processes
    must go through all of them.
    """
    tensors = own_tensors(model)
    if not model._weight_conversions:
        yield from ((name, whole(tensor)) for name, tensor in tensors.items())
        return
    for _, layer in groupby(tensors.items(), key=lambda item: layer_of(item[0])):
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
