"""Parts of sharded tensors (DTensor): what this process holds of them, and how it is cut out of a whole tensor or a file."""

from collections.abc import Iterable
from functools import cache
from typing import Any, TypeAlias, TypeVar

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

T = TypeVar("T", bound=Tensor)
Stored: TypeAlias = Any  # a Tensor, or a tensor in a safetensors file that has not been read (`get_slice`, which has no type)


def whole(tensor: Tensor) -> Tensor:
    """Returns a sharded tensor gathered from all processes, all of which must call this; returns any other tensor unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part(tensor: Tensor) -> Tensor:
    """Returns this process's part of a tensor, sharing its memory: its shard, or the whole tensor if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def extent_of(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shape of this process's part of a tensor, and the index in the whole tensor at which the part begins."""
    if isinstance(tensor, DTensor):
        return compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(tensor.shape), (0,) * tensor.ndim


def by_mesh(tensors: Iterable[T]) -> list[list[T]]:
    """Returns tensors grouped by the processes that share them: torch's operations on lists take one mesh at a time."""
    groups = dict[Any, list[T]]()
    for tensor in tensors:
        groups.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(groups.values())


def part_of_stored(stored: Stored, tensor: Tensor) -> Tensor:
    """Returns the part of a stored tensor that this process would hold if it were sharded as `tensor` is. Reads only that."""
    if not isinstance(tensor, DTensor):
        return stored[...]
    shape, offsets = extent_of(tensor)
    if not all(shape):
        return tensor.to_local().new_empty(shape)
    return stored[tuple(slice(first, first + size) for first, size in zip(offsets, shape, strict=True))]


def shape_of(stored: Stored) -> tuple[int, ...]:
    """Returns the shape of a stored tensor, without reading it."""
    return tuple(stored.shape if isinstance(stored, Tensor) else stored.get_shape())


def first_copy(tensor: Tensor) -> bool:
    """Returns whether no process of lower rank holds the same part of a sharded tensor. True for a tensor that is not sharded.

    A tensor that several groups of processes hold alike is on the mesh of each group: the first process is in the first group.
    """
    if not isinstance(tensor, DTensor):
        return True
    places = zip(tensor.placements, tensor.device_mesh.get_coordinate() or (), strict=True)
    return has_first(tensor.device_mesh) and all(coordinate == 0 for placement, coordinate in places if placement.is_replicate())


@cache
def has_first(mesh: DeviceMesh) -> bool:
    """Returns whether the process of rank 0 is in a mesh. Kept, because a save asks it for each tensor while the loop waits."""
    return 0 in mesh.mesh
