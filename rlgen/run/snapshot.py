"""Copies everything that a checkpoint consists of to the CPU, so that the loop can go on while the copy is written."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rlgen.models.lora import adapter_tensors, is_adapted
from rlgen.models.parts import first_copy, part, whole
from rlgen.models.weights import gone_through, own_tensors
from rlgen.run.state import is_sharded
from rlgen.types import Position


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The part of a checkpoint that one process writes: Snapshot(at=Position(step=20, ...), schedule={...}, ...)."""

    at: Position
    schedule: Mapping[str, Any]
    facts: Mapping[str, Any]  # facts for the manifest
    draws: list[dict[str, Tensor]]  # random states by rank
    adapted: bool  # the weights are those of an adapter
    sharded: bool  # each process writes shards of the optimizer's state
    weights: dict[str, Tensor]  # unsharded, in the main process; {} in others
    moments: dict[str, Tensor]  # unsharded, in the main process; or its shards, in each


class Room:
    """CPU buffers for the copies, reused by all saves, because allocating the memory takes longer than copying."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def copies(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies tensors into contiguous CPU buffers; of sharded tensors, the local shard. The next save overwrites them."""
        return {name: self._copy(name, tensor) for name, tensor in tensors.items()}

    @torch.no_grad()
    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        held = self._held.get(name)
        if held is None or (held.shape, held.dtype) != (tensor.shape, tensor.dtype):
            if isinstance(tensor, DTensor):
                held = self._held[name] = tensor.detach().to("cpu", copy=True)
                return held
            held = self._held[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        part(held).copy_(part(tensor.detach()))
        return held

    def weights(self, model: PreTrainedModel, is_main: bool) -> dict[str, Tensor]:
        """Returns copies of the weights that a checkpoint contains, in the main process; {} in others.

        Sharded weights are gathered one tensor at a time, a collective in which all processes take part.
        """
        if is_adapted(model) or not is_sharded(model):  # an adapter is whole in each process
            return self.copies(adapter_tensors(model) if is_adapted(model) else own_tensors(model)) if is_main else {}
        tensors = ((name, whole(tensor)) for name, tensor in own_tensors(model).items())
        with gone_through(tensors):
            return {name: self._copy(name, tensor) for name, tensor in tensors} if is_main else {}

    def moments(self, moments: Mapping[str, Tensor], is_main: bool) -> dict[str, Tensor]:
        """Returns copies of the optimizer state that this process writes: its shards, if no earlier process holds equal ones.

        The main process writes whole tensors, too.
        """
        sharded = {name for name, tensor in moments.items() if isinstance(tensor, DTensor)}
        writes = {name: first_copy(tensor) if name in sharded else is_main for name, tensor in moments.items()}
        return self.copies({name: tensor for name, tensor in moments.items() if writes[name]})
