"""Merges a low-rank adapter into the weights of a checkpoint: a server receives only the factors of the adapter.

Each adapted weight W of a checkpoint, W + s B A after the merge, is sent as three tensors, whose product has the shape of W:

    NAME.lora_A [rank, in]     NAME.lora_B [out, rank]     NAME.lora_scale, s as float64

A server's worker imports this file, which needs neither peft nor a recipe.
"""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from rlgen.errors import EngineError

FIRST, SECOND, SCALE = ".lora_A", ".lora_B", ".lora_scale"


def is_factors(names: Iterable[str]) -> bool:
    """Returns whether tensors of these names are the factors of an adapter, not the weights of a model."""
    return any(name.endswith(SCALE) for name in names)


@torch.no_grad()
def merged(
    base: Iterable[tuple[str, Tensor]], factors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a checkpoint with an adapter merged into those that it adapts, in float32, as the trainer merges it.

    Args:
        factors: those of the adapter, by the names under which they are sent.
        dtype: of the trainer's base weights, to which the checkpoint's are rounded before the merge.
        device: computes the products.

    Raises:
        EngineError: after the last tensor, if the checkpoint lacks a weight that is adapted.
    """
    missing = {name.removesuffix(SCALE) for name in factors if name.endswith(SCALE)}
    for name, tensor in base:
        if name not in missing:
            yield name, tensor
            continue
        missing.discard(name)
        first, second = factors[name + FIRST].to(device), factors[name + SECOND].to(device)
        yield name, tensor.to(device, dtype).float() + (second @ first) * factors[name + SCALE].item()
    if missing:
        raise EngineError(
            f"the adapter changes {min(missing)}, which is not in the files of the engine's model; set engine.lora to merged"
        )
