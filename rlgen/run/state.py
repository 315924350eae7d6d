"""Converts the state of a trainer to tensors and back: weights, the optimizer's state, random states.

Nothing here is a pickle: every file is safetensors or JSON. torch's sharded checkpoints pickle their metadata unless they are
stored as safetensors, as here: the header of each file then says which part of a tensor it holds.
"""

import hashlib
import json
import random
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed.checkpoint as sharded
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from rlgen.engines.base import model_shape
from rlgen.errors import CheckpointError
from rlgen.models.lora import adapter_tensors, config_of, is_adapted
from rlgen.models.parts import first_copy, part, part_of_stored, shape_of
from rlgen.models.weights import model_tensors, own_tensors

SHARD_FILE = 40 << 20  # bytes; above 32 MiB glibc gives what assembled a file back at once
OPTIMIZER_SHARDS = "state/optimizer"  # the folder in a checkpoint


def model_facts(model: PreTrainedModel) -> dict[str, Any]:
    """Returns the facts in which two models, or adapters, must agree so that one can load the other's checkpoint."""
    trained, lora = own_tensors(model), None
    if is_adapted(model):
        trained, config = adapter_tensors(model), config_of(model)
        assert isinstance(config.target_modules, list | set)  # as `inject` leaves them
        targets = sorted(config.target_modules)
        lora = {"rank": config.r, "alpha": config.lora_alpha, "use_rslora": config.use_rslora, "targets": targets}
    return {
        "architecture": (model.config.architectures or [type(model).__name__])[0],
        **model_shape(model.config),
        "trained_parameters": sum(tensor.numel() for tensor in trained.values()),
        "trained_dtype": str(next(iter(trained.values())).dtype).removeprefix("torch."),
        "lora": lora,
    }


def stored_tensors(folder: Path, rank: int = 0, world: int = 1) -> Iterator[tuple[str, Tensor]]:
    """Yields the place ("FILE, NAME,") and the tensor of everything in the safetensors files under `folder`, one at a time; of
    `world` processes, each gets its share of the files.
    """
    for path in sorted(folder.rglob("*.safetensors"))[rank::world]:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # no dict
                yield f"{path.relative_to(folder)}, {name},", file.get_tensor(name)


@torch.no_grad()
def load_model_weights(path: Path, model: PreTrainedModel) -> None:
    """Copies the weights in `path` into `model`, in place, so that the optimizer keeps its parameters.

    Reads one tensor at a time; of a sharded one only this process's shard, unless it is converted from others.
    """
    missing = own_tensors(model)
    with ExitStack() as opened:
        files = [opened.enter_context(safe_open(file, framework="pt")) for file in sorted(path.glob("*.safetensors"))]
        slices = [(name, file.get_slice(name)) for file in files for name in file.keys()]  # noqa: SIM118  # no dict
        for name, stored in model_tensors(model, slices):
            tensor = missing.pop(name, None)
            if tensor is None:
                continue
            if tensor.shape != shape_of(stored):
                raise CheckpointError(f"{path}: {name} has another shape than in model.path: it is a checkpoint of another model")
            part(tensor).copy_(part_of_stored(stored, tensor))
    if missing:
        raise CheckpointError(f"{path} has no weights for {min(missing)}: it is a checkpoint of another model")


def optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Returns references to the optimizer's state by parameter name, {"layer.weight/exp_avg": ...}; nothing is copied."""
    return {
        f"{name}/{key}": torch.as_tensor(value).detach()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def save_shards(tensors: Mapping[str, Tensor], folder: Path, rank: int) -> list[str]:
    """Writes the shards of `tensors` that this process holds as safetensors, and returns the names of the files.

    Each process derives what it writes from its own shards, without a collective. A tensor that is not sharded is written as it
    is, so pass it in one process only.
    """
    writer = sharded.HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=file_numbers(tensors), save_distributed=True)
    planner = sharded.DefaultSavePlanner()
    planner.set_up_planner(dict(tensors), is_coordinator=rank == 0)
    writer.set_up_storage_writer(rank == 0)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    # The global plan only adds the rank, which is part of the file names; so empty plans stand for the other ranks.
    plan = writer.prepare_global_plan([sharded.SavePlan([])] * rank + [plan])[rank]
    writer.write_data(planner.finish_plan(plan), planner).wait()
    return sorted(path.name for path in folder.glob(f"shard-{rank + 1:05d}-*"))


def file_numbers(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Assigns each tensor a file number from 1: a file that holds `SHARD_FILE` bytes is full.

    torch assembles each file in memory, twice, while it holds the GIL: large files would stop the loop.
    """
    numbers, number, held = {}, 1, 0
    for name, tensor in tensors.items():
        if held >= SHARD_FILE:
            number, held = number + 1, 0
        numbers[name], held = number, held + part(tensor).nbytes
    return numbers


def read_shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Reads what `save_shards` has written into `tensors`: of sharded ones what this process holds now, whoever wrote it."""
    with warnings.catch_warnings():
        # Without collectives (no_dist), a damaged file is an error in this process and no hang in the others. torch warns of it.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        sharded.load(tensors, storage_reader=sharded.HuggingFaceStorageReader(str(folder)), no_dist=True)


def whole_shards(folder: Path) -> dict[str, Tensor]:
    """Returns what the processes that called `save_shards` held together, unsharded."""
    stored: dict[str, Any] = sharded.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(one.size, dtype=one.properties.dtype) for name, one in stored.items()}
    read_shards(folder, tensors)
    return tensors


def load_shards(folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Loads the optimizer's state from shards of any number of processes."""
    stored = sharded.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    parameters, tensors = dict(model.named_parameters()), dict[str, Tensor]()
    for place, one in stored.items():
        if (parameter := parameters.get(place.rpartition("/")[0])) is not None:
            scalar = not getattr(one, "size", ())
            tensors[place] = torch.zeros(()) if scalar else torch.zeros_like(parameter, requires_grad=False)
    read_shards(folder, tensors)
    place_optimizer(tensors, model, optimizer)


def load_optimizer(tensors: dict[str, Tensor], model: nn.Module, optimizer: Optimizer) -> None:
    """Loads the optimizer's state from unsharded tensors, named as by `optimizer_tensors`; each process keeps its own shards."""
    parameters, placed = dict(model.named_parameters()), dict(tensors)
    for place, value in tensors.items():
        parameter = parameters.get(place.rpartition("/")[0])
        if isinstance(parameter, DTensor) and value.shape == parameter.shape:
            on_device, mesh = value.to(parameter.device), parameter.device_mesh
            placed[place] = distribute_tensor(on_device, mesh, parameter.placements, src_data_rank=None)
    place_optimizer(placed, model, optimizer)


def place_optimizer(tensors: Mapping[str, Tensor], model: nn.Module, optimizer: Optimizer) -> None:
    """Replaces the optimizer's state by `tensors`, named as by `optimizer_tensors`.

    torch puts each value where its kernel wants it: moments beside their parameter, and step counts too if the kernel is fused. A
    tensor that is there already is taken as it is, without a copy.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    by_name: dict[str, dict[str, Tensor | int]] = {}
    for place, value in tensors.items():
        name, _, key = place.rpartition("/")
        # torch's AdamW counts its steps in a float tensor, that of bitsandbytes in a Python number.
        by_name.setdefault(name, {})[key] = int(value) if value.dtype == torch.int64 else value
    trained = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    state = {index: by_name[name] for index, name in enumerate(trained) if name in by_name}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def random_tensors() -> dict[str, Tensor]:
    """Returns the random states of Python, NumPy and torch (CPU and all GPUs) as tensors."""
    version, numbers, gauss = random.getstate()
    numpy_state = numpy.random.get_state(legacy=False)
    words = numpy_state["state"].pop("key")  # the rest is plain numbers
    text = json.dumps({"python": [version, gauss], "numpy": numpy_state})
    states = {
        "python": torch.tensor(numbers, dtype=torch.int64),
        "numpy": torch.from_numpy(words.astype(numpy.int64)),
        "torch": torch.get_rng_state(),
        "rest": torch.tensor(list(text.encode()), dtype=torch.uint8),
    }
    for index, state in enumerate(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []):
        states[f"cuda{index}"] = state
    return states


def set_random(states: dict[str, Tensor]) -> None:
    rest = json.loads(bytes(states["rest"].tolist()))
    version, gauss = rest["python"]
    random.setstate((version, tuple(states["python"].tolist()), gauss))
    numpy_state = rest["numpy"]
    numpy_state["state"]["key"] = states["numpy"].numpy().astype(numpy.uint32)
    numpy.random.set_state(numpy_state)
    torch.set_rng_state(states["torch"])
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if f"cuda{index}" in states:
            torch.cuda.set_rng_state(states[f"cuda{index}"], index)


def seed_random(place: str) -> None:
    """Seeds Python, NumPy and torch from `place`, such as "STEP/RANK", in a process that has no saved random states."""
    seed = int.from_bytes(hashlib.sha256(place.encode()).digest()[:4])
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


@torch.no_grad()
def copied(tensors: Mapping[str, Tensor], room: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies tensors into contiguous CPU buffers; of sharded ones, the local shards. The next save overwrites them.

    All saves reuse the buffers, `room`, because allocating the memory takes longer than copying.
    """
    for name, tensor in tensors.items():
        held = room.get(name)
        if held is None or (held.shape, held.dtype) != (tensor.shape, tensor.dtype):
            if isinstance(tensor, DTensor):
                room[name] = tensor.detach().to("cpu", copy=True)
                continue
            held = room[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        part(held).copy_(part(tensor.detach()))
    return {name: room[name] for name in tensors}


def trained_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns the weights that a checkpoint has: those of the adapter, if there is one."""
    return adapter_tensors(model) if is_adapted(model) else own_tensors(model)


def written_here(tensors: Mapping[str, Tensor], is_main: bool) -> dict[str, Tensor]:
    """Returns what this process writes: shards that no earlier process holds; whole tensors in the main one."""
    return {name: tensor for name, tensor in tensors.items() if (first_copy(tensor) if isinstance(tensor, DTensor) else is_main)}
