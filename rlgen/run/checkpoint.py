"""Checkpoints: `step_000020/` is a folder that `from_pretrained` opens, with the trainer's state under `state/`.

    config.json, model.safetensors, tokenizer files     the policy, in float32: the weights that are trained
    adapter_config.json, adapter_model.safetensors      instead of the first two, where an adapter is what is trained
    state/optimizer.safetensors                         moments and step counts by parameter name
    state/random.safetensors                            random states
    state/state.json                                    step, data position, schedule; written last

Nothing here is a pickle. A folder is written under another name and renamed when it is complete.
"""

import json
import os
import random
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlgen.errors import CheckpointError, Fault, SentinelError
from rlgen.models.lora import is_adapted, load_adapter, save_adapter
from rlgen.models.weights import base_digest, model_tensors, own_tensors
from rlgen.run.files import read_json, write_json

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
    """The checkpoints of one run; the newest `keep` stay.

    Args:
        base: digest of the frozen weights under an adapter, which no checkpoint holds: they must stay what they are.
    """

    def __init__(self, folder: Path, keep: int, base: str | None = None) -> None:
        self.folder = folder
        self.keep = keep
        self.base = base

    def newest(self) -> Path | None:
        """The last complete checkpoint, or None."""
        complete = [path for path in self.folder.glob("step_*") if (path / "state" / "state.json").is_file()]
        return max(complete, default=None)

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
        shutil.rmtree(aside, ignore_errors=True)
        try:
            (aside / "state").mkdir(parents=True)
            if is_adapted(model):
                save_adapter(model, aside, base)
            else:
                model.save_pretrained(aside)
            tokenizer.save_pretrained(aside)
            save_file(optimizer_tensors(model, optimizer), aside / "state" / "optimizer.safetensors")
            save_file(random_tensors(), aside / "state" / "random.safetensors")
            state = TrainerState(step, position, step, schedule.state_dict())
            write_json(aside / "state" / "state.json", asdict(state))
            for path in aside.rglob("*"):
                _flush(path)
            aside.rename(final)
            _flush(self.folder)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{final} cannot be written: {error}; free space or change run.dir") from error
        for old in sorted(self.folder.glob("step_*"))[: -self.keep]:
            shutil.rmtree(old)
        return final

    @staticmethod
    def load(path: Path, model: PreTrainedModel, optimizer: Optimizer, schedule: LRScheduler) -> TrainerState:
        """Puts weights, optimizer, schedule and random states of `path` in place.

        Raises:
            CheckpointError: it is damaged, or of another model or version of rlgen.
        """
        try:
            state = TrainerState(**read_json(path / "state" / "state.json"))
            if state.format != FORMAT:
                raise CheckpointError(f"{path} is of checkpoint format {state.format}; this rlgen reads {FORMAT}")
            if is_adapted(model):
                load_adapter(path, model, base_digest(model))
            else:
                load_weights(path, model)
            load_optimizer(load_file(path / "state" / "optimizer.safetensors"), model, optimizer)
            schedule.load_state_dict(state.schedule)
            # A schedule changes the rate when it steps, and does not step here.
            for group, rate in zip(optimizer.param_groups, schedule.get_last_lr(), strict=True):
                group["lr"] = rate
            set_random(load_file(path / "state" / "random.safetensors"))
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read: {error!r}; delete it to go on from the one before") from error
        return state


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
        tensor.copy_(saved[name])


def optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """{"layer.weight/exp_avg": ...}: the optimizer's state by parameter name, for safetensors."""
    return {
        f"{name}/{key}": torch.as_tensor(value).detach().cpu().contiguous()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer(tensors: dict[str, Tensor], model: nn.Module, optimizer: Optimizer) -> None:
    """The inverse of `optimizer_tensors`."""
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


def _flush(path: Path) -> None:
    """Waits until the file or folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
