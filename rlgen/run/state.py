"""What a checkpoint holds of a trainer, as tensors: weights, the optimizer's state, random states; in and out.

Nothing here is a pickle: every file is safetensors or JSON. torch's sharded checkpoints have metadata of their own that are
pickled, unless they are kept as safetensors, as here: each file then says in its header which part of a tensor it holds.
"""

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed.checkpoint as sharded
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from rlgen.errors import CheckpointError
from rlgen.models.load import model_shape
from rlgen.models.lora import adapter_tensors, config_of, is_adapted
from rlgen.models.weights import gone_through, model_tensors, own_tensors, part, part_like, whole


def model_facts(model: PreTrainedModel) -> dict[str, Any]:
    """What two models, or adapters, must have in common before one's checkpoint is the other's."""
    trained = adapter_tensors(model) if is_adapted(model) else own_tensors(model)
    return {
        "architecture": (model.config.architectures or [type(model).__name__])[0],
        **model_shape(model.config),
        "trained_parameters": sum(tensor.numel() for tensor in trained.values()),
        "trained_dtype": str(next(iter(trained.values())).dtype).removeprefix("torch."),
        "lora": lora_facts(model) if is_adapted(model) else None,
    }


def lora_facts(model: PreTrainedModel) -> dict[str, Any]:
    config = config_of(model)
    targets = config.target_modules
    assert isinstance(targets, list | set)  # as `inject` leaves them
    return {"rank": config.r, "alpha": config.lora_alpha, "use_rslora": config.use_rslora, "targets": sorted(targets)}


def stored_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of all safetensors under `folder`, one at a time."""
    for path in sorted(folder.rglob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # no dict
                yield f"{path.relative_to(folder)}, {name},", file.get_tensor(name)


def is_sharded(model: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def save_weights(model: PreTrainedModel, folder: Path, is_main: bool) -> None:
    """What `from_pretrained` opens. Sharded weights are put together in the main process's memory."""
    if not is_sharded(model):
        if is_main:
            model.save_pretrained(folder)
        return
    weights = ((name, whole(tensor)) for name, tensor in own_tensors(model).items())
    with gone_through(weights):
        if is_main:
            model.save_pretrained(folder, state_dict={name: tensor.cpu() for name, tensor in weights})


@torch.no_grad()
def load_weights(path: Path, model: PreTrainedModel) -> None:
    """Copies the weights in `path` into `model`, in place: an optimizer keeps its parameters."""
    files = sorted(path.glob("*.safetensors"))
    stored = (item for file in files for item in load_file(file).items())
    saved = dict(model_tensors(model, stored))
    own = own_tensors(model)
    if missing := sorted(set(own) - set(saved)):
        raise CheckpointError(f"{path} has no weights for {missing[0]}: it is a checkpoint of another model")
    for name, tensor in own.items():
        if tensor.shape != saved[name].shape:
            raise CheckpointError(f"{path}: {name} has another shape than in model.path: it is a checkpoint of another model")
        part(tensor).copy_(part_like(saved[name], tensor))


def optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """{"layer.weight/exp_avg": ...}: the optimizer's state by parameter name, for safetensors. Shards stay where they are."""
    return {
        f"{name}/{key}": value if isinstance(value, DTensor) else torch.as_tensor(value).detach().cpu().contiguous()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def save_shards(tensors: dict[str, Tensor], folder: Path) -> None:
    """Each process writes its shards, as safetensors. All of them come here."""
    sharded.save(tensors, storage_writer=sharded.HuggingFaceStorageWriter(str(folder), save_distributed=True))


def load_shards(folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """The inverse: each process reads what it holds, whoever wrote it. Raises CheckpointException."""
    reader = sharded.HuggingFaceStorageReader(str(folder))
    stored = reader.read_metadata().state_dict_metadata
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        for key in [key for key in stored if key.startswith(f"{name}/")]:
            scalar = not getattr(stored[key], "size", ())
            tensors[key] = torch.zeros(()) if scalar else torch.zeros_like(parameter, requires_grad=False)
    # Every process plans for itself, so that a damaged file is this one's error and not a wait for the others.
    sharded.load(tensors, storage_reader=reader, no_dist=True)
    place_optimizer(tensors, model, optimizer)


def load_optimizer(tensors: dict[str, Tensor], model: nn.Module, optimizer: Optimizer) -> None:
    """The inverse of `optimizer_tensors`, of whole tensors: each process keeps what it holds of them."""
    whole_tensors = dict(tensors)
    for name, parameter in model.named_parameters():
        for key, value in tensors.items():
            if key.startswith(f"{name}/") and value.shape == parameter.shape and isinstance(parameter, DTensor):
                whole_tensors[key] = distribute_tensor(
                    value.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
                )
    place_optimizer(whole_tensors, model, optimizer)


def place_optimizer(tensors: dict[str, Tensor], model: nn.Module, optimizer: Optimizer) -> None:
    """Gives each parameter its state."""
    for name, parameter in model.named_parameters():
        prefix = f"{name}/"
        state = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        if state:
            # Step counts stay on the CPU, where the optimizer made them; moments live beside their parameter.
            optimizer.state[parameter] = {
                key: value if key == "step" else value.to(parameter.device) for key, value in state.items()
            }


def random_tensors() -> dict[str, Tensor]:
    """The random states of Python, NumPy and torch as tensors."""
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
    """The inverse of `random_tensors`."""
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
    """Random states from where the run stands, for a process without saved ones."""
    seed = int.from_bytes(hashlib.sha256(place.encode()).digest()[:4])
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
