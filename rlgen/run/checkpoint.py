"""Checkpoints: `step_000020/` is a folder that `from_pretrained` opens, with the trainer's state under `state/`.

    config.json, model.safetensors, tokenizer files     the policy, in float32: the weights that are trained
    adapter_config.json, adapter_model.safetensors      instead of the first two, where an adapter is what is trained
    state/optimizer.safetensors                         moments and step counts by parameter name; or, of sharded weights,
    state/optimizer/                                    the same by torch.distributed.checkpoint, each process its shard
    state/random.safetensors                            random states of the main process
    state/random_1.safetensors                          and of the others
    state/state.json                                    step, data position, schedule; written last

The weights are whole in every checkpoint: they pass whole through each weight sync too, and a folder that opens everywhere is
what a checkpoint is for. The optimizer's state, twice as large, stays in shards. Either form is read by any number of
processes, with sharded weights or whole ones.

Nothing here is a pickle. A folder is written under another name and renamed when it is complete.
"""

import hashlib
import json
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed.checkpoint as sharded
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlgen.errors import CheckpointError, Fault, SentinelError
from rlgen.models.lora import is_adapted, load_adapter, save_adapter
from rlgen.models.weights import base_digest, gone_through, model_tensors, own_tensors, part, part_like, whole
from rlgen.processes import Processes
from rlgen.run.files import flush, flush_tree, read_json, write_json

FORMAT = 1


@dataclass(frozen=True, slots=True)
class TrainerState:
    """Where a run stands. TrainerState(step=20, position=160, weight_version=20, schedule={...}, format=1)"""

    step: int  # steps done
    position: int  # prompts taken from the data's order, over all epochs
    weight_version: int
    schedule: dict[str, Any]
    format: int = FORMAT


class Checkpoints:
    """The checkpoints of one run; the newest `keep` stay. All processes save and load together; the main one writes.

    Args:
        base: digest of the frozen weights under an adapter, which no checkpoint holds: they must stay what they are.
    """

    def __init__(self, folder: Path, keep: int, processes: Processes, base: str | None = None) -> None:
        self.folder = folder
        self.keep = keep
        self.processes = processes
        self.base = base

    def newest(self) -> Path | None:
        """The last complete checkpoint, or None."""
        complete = [path for path in self.folder.glob("step_*") if (path / "state" / "state.json").is_file()]
        return max(complete, default=None)

    def oldest(self) -> int:
        """The step of the first checkpoint that is kept; 0: there is none."""
        numbers = [path.name.removeprefix("step_") for path in self.folder.glob("step_*")]
        return min((int(number) for number in numbers if number.isdecimal()), default=0)

    def has(self, step: int) -> bool:
        """Whether a checkpoint of `step` is there."""
        return (self.folder / f"step_{step:06d}").exists()

    def save(
        self,
        step: int,
        position: int,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        optimizer: Optimizer,
        schedule: LRScheduler,
    ) -> Path:
        """Writes the checkpoint of `step`, then drops the oldest.

        Raises:
            CheckpointError: it could not be written; the older ones are untouched.
            SentinelError: the base of an adapter has changed; nothing is written.
        """
        base = same_base(model, self.base) if is_adapted(model) else ""
        final = self.folder / f"step_{step:06d}"
        aside = self.folder / f".writing_{step:06d}"
        draws = self.processes.gather([random_tensors()])
        moments = optimizer_tensors(model, optimizer)

        @written(final)
        def begin() -> None:
            shutil.rmtree(aside, ignore_errors=True)
            (aside / "state").mkdir(parents=True)

        @written(final)
        def weights() -> None:
            if is_adapted(model):
                if self.processes.is_main:
                    save_adapter(model, aside, base)
            else:
                save_weights(model, aside, self.processes.is_main)

        @written(final)
        def finish() -> None:
            tokenizer.save_pretrained(aside)
            if not is_sharded(model):
                save_file(moments, aside / "state" / "optimizer.safetensors")
            for rank, draw in enumerate(draws):
                save_file(draw, aside / "state" / random_name(rank))
            state = TrainerState(step, position, step, schedule.state_dict())
            write_json(aside / "state" / "state.json", asdict(state))
            flush_tree(aside)
            aside.rename(final)
            flush(self.folder)

        self.processes.on_main(begin)
        self.processes.agreed(weights)
        if is_sharded(model):
            with written(final):  # fails in all processes if it does in one
                save_shards(moments, aside / "state" / "optimizer")
        self.processes.on_main(finish)
        if self.processes.is_main:
            for old in sorted(self.folder.glob("step_*"))[: -self.keep]:
                shutil.rmtree(old)
        return final

    @staticmethod
    def load(
        path: Path, model: PreTrainedModel, optimizer: Optimizer, schedule: LRScheduler, processes: Processes
    ) -> TrainerState:
        """Puts weights, optimizer, schedule and random states of `path` in place.

        Raises:
            CheckpointError: it is damaged, or of another model or version of rlgen.
        """
        return processes.agreed(lambda: load_parts(path, model, optimizer, schedule, processes.rank))


def load_parts(path: Path, model: PreTrainedModel, optimizer: Optimizer, schedule: LRScheduler, rank: int) -> TrainerState:
    """Raises CheckpointError."""
    try:
        state = TrainerState(**read_json(path / "state" / "state.json"))
        if state.format != FORMAT:
            raise CheckpointError(f"{path} is of checkpoint format {state.format}; this rlgen reads {FORMAT}")
        if is_adapted(model):
            load_adapter(path, model, base_digest(model))
        else:
            load_weights(path, model)
        if (path / "state" / "optimizer").is_dir():
            load_shards(path / "state" / "optimizer", model, optimizer)
        else:
            load_optimizer(load_file(path / "state" / "optimizer.safetensors"), model, optimizer)
        schedule.load_state_dict(state.schedule)
        # A schedule changes the rate when it steps, and does not step here.
        for group, rate in zip(optimizer.param_groups, schedule.get_last_lr(), strict=True):
            group["lr"] = rate
        if (path / "state" / random_name(rank)).exists():
            set_random(load_file(path / "state" / random_name(rank)))
        else:  # this process is one more than there were
            seed_random(f"{state.step}/{rank}")
    except (OSError, ValueError, KeyError, TypeError, SafetensorError, CheckpointException) as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}; delete it to go on from the one before") from error
    return state


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Raises CheckpointError for what goes wrong while `path` is written."""
    try:
        yield
    except (OSError, SafetensorError, CheckpointException) as error:
        raise CheckpointError(f"{path} cannot be written: {error}; free space or change run.dir") from error


def random_name(rank: int) -> str:
    return f"random_{rank}.safetensors" if rank else "random.safetensors"


def saved_processes(path: Path) -> int:
    """How many processes wrote the checkpoint at `path`."""
    return len(list((path / "state").glob("random*.safetensors")))


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


def same_base(model: PreTrainedModel, before: str | None) -> str:
    """The digest of the frozen weights under an adapter.

    Raises:
        SentinelError: it is not what it was `before`.
    """
    now = base_digest(model)
    if before is not None and now != before:
        raise SentinelError(
            Fault.BASE_CHANGED,
            f"the frozen weights under the adapter are not those that the run began with (SHA-256 {before[:12]}, now {now[:12]}):"
            " something writes into them, and the adapter would be worth nothing on the model as it was; nothing was saved",
        )
    return now


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
    """Random states from where the run stands, for one that starts, or a process without saved ones."""
    seed = int.from_bytes(hashlib.sha256(place.encode()).digest()[:4])
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
