"""A tiny model with its optimizer and schedule, as a checkpoint holds them."""

from pathlib import Path
from typing import Any

import torch
from conftest import save, tiny_model
from torch import Tensor
from torch.nn import Module
from torch.optim import AdamW
from torch.optim.lr_scheduler import LinearLR

from rlgen.models.lora import add_adapter
from rlgen.models.parts import part, part_of_stored
from rlgen.models.policy import Policy
from rlgen.models.sharding import Meshes, shard
from rlgen.models.tiny import byte_tokenizer
from rlgen.processes import Processes
from rlgen.recipe.models import LoraRecipe
from rlgen.run.checkpoint import Checkpoints, load_checkpoint
from rlgen.types import Position

Parts = tuple[Any, AdamW, LinearLR]


def parts(name: str = "qwen3", lora: LoraRecipe | None = None, sharded_by: Processes | None = None) -> Parts:
    model = tiny_model(name)
    if lora is not None:
        add_adapter(model, lora, 0)
    if sharded_by is not None:
        shard(Policy(model, torch.float32, True), Meshes.of(sharded_by))
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    return model, optimizer, LinearLR(optimizer, total_iters=10)


def learn(model: Any, optimizer: AdamW, schedule: LinearLR, updates: int = 1) -> None:
    for _ in range(updates):
        model(torch.randint(0, 256, (2, 8)), labels=torch.randint(0, 256, (2, 8))).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def learn_together(own: Parts) -> None:
    """An update by gradients that follow from the weights, the same in each number of processes."""
    model, optimizer, schedule = own
    for parameter in model.parameters():
        noise = torch.rand(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())) - 0.5
        gradient = parameter.detach().clone()
        part(gradient).add_(part_of_stored(noise, parameter))
        parameter.grad = gradient
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()


def state(model: Module, optimizer: AdamW, schedule: LinearLR) -> dict[str, Tensor]:
    """A copy of all that a checkpoint must bring back."""
    moments = {f"{n}/{k}": v for n, p in model.named_parameters() for k, v in optimizer.state[p].items()}
    rates = {"rate": torch.tensor(schedule.get_last_lr(), dtype=torch.float64)}
    return {name: tensor.clone() for name, tensor in {**model.state_dict(), **moments, **rates}.items()}


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    """To the last bit."""
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def position(step: int) -> Position:
    return Position(step=step, prompts=8 * step)


def save_parts(checkpoints: Checkpoints, step: int, own: Parts) -> Path:
    """Saves them, and waits until the checkpoint is complete."""
    checkpoints.tokenizer = byte_tokenizer()
    return save(checkpoints, position(step), *own)


def loaded(path: Path) -> dict[str, Tensor]:
    own = parts()
    load_checkpoint(path, *own)
    return state(*own)
