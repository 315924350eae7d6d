"""The optimizer's state goes where its kernel takes it from, on whichever device the parameters are.

Without a GPU, another device is imitated by the meta device, whose tensors hold no values.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import AdamW
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlgen.run.state import load_optimizer, load_shards, optimizer_tensors, place_optimizer, save_shards

Placed = Callable[[dict[str, Tensor], Path, nn.Module, AdamW], None]


def trained() -> tuple[nn.Linear, AdamW]:
    """A model after two updates."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = AdamW(model.parameters(), lr=0.1, fused=True)
    for _ in range(2):
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def fresh(device: str, **settings: Any) -> tuple[nn.Linear, AdamW]:
    """A model of this shape on a device, and a new optimizer of it."""
    model = nn.Linear(3, 2, device=device)
    return model, AdamW(model.parameters(), lr=0.2, **settings)


def of_a_file(tensors: dict[str, Tensor], folder: Path, model: nn.Module, optimizer: AdamW) -> None:
    save_file(tensors, folder / "optimizer.safetensors")
    load_optimizer(load_file(folder / "optimizer.safetensors"), model, optimizer)


def of_shards(tensors: dict[str, Tensor], folder: Path, model: nn.Module, optimizer: AdamW) -> None:
    save_shards(tensors, folder, 0)
    load_shards(folder, model, optimizer)


def of_a_copy(tensors: dict[str, Tensor], folder: Path, model: nn.Module, optimizer: AdamW) -> None:
    """As `opening.change.compare` goes back to the moments of before the step."""
    place_optimizer({name: tensor.clone() for name, tensor in tensors.items()}, model, optimizer)


@pytest.mark.parametrize("placed", [of_a_file, of_a_copy])
@pytest.mark.parametrize(("fused", "counts_on"), [(True, "meta"), (False, "cpu")])
def test_state_is_beside_the_parameters(placed: Placed, fused: bool, counts_on: str, tmp_path: Path) -> None:
    """A fused kernel takes the step counts from there, too; of others they are on the CPU."""
    model, optimizer = fresh("meta", fused=fused)
    placed(optimizer_tensors(*trained()), tmp_path, model, optimizer)
    for parameter in model.parameters():
        devices = {key: value.device.type for key, value in optimizer.state[parameter].items()}
        assert devices == {"step": counts_on, "exp_avg": "meta", "exp_avg_sq": "meta"}
    assert optimizer.param_groups[0]["lr"] == 0.2, "settings are those of the new optimizer"


@pytest.mark.parametrize("placed", [of_a_file, of_shards, of_a_copy])
def test_an_optimizer_goes_on_with_the_same_bits(placed: Placed, tmp_path: Path) -> None:
    model, optimizer = trained()
    again, other = fresh("cpu", fused=True)
    again.load_state_dict(model.state_dict())
    placed(optimizer_tensors(model, optimizer), tmp_path, again, other)
    for group in (*optimizer.param_groups, *other.param_groups):
        group["lr"] = 0.05
    for one, its in ((model, optimizer), (again, other)):
        one(torch.arange(3.0)).sum().backward()
        its.step()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(again.parameters(), model.parameters(), strict=True))
    assert other.state[again.weight]["step"] == 3


def test_what_is_in_place_is_not_copied() -> None:
    tensors = {name: tensor.clone() for name, tensor in optimizer_tensors(*trained()).items()}
    model, optimizer = fresh("cpu", fused=True)
    load_optimizer(tensors, model, optimizer)
    assert optimizer.state[model.weight]["exp_avg"] is tensors["weight/exp_avg"]


@pytest.fixture
def as_one_of_two() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def test_sharded_state_is_beside_the_shards(as_one_of_two: None) -> None:
    mesh, (model, _) = init_device_mesh("cpu", (2,)), fresh("meta")
    for name, parameter in list(model.named_parameters()):
        local = torch.empty(1, *parameter.shape[1:], device="meta")
        setattr(model, name, nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False)))
    optimizer = AdamW(model.parameters(), fused=True)
    load_optimizer(optimizer_tensors(*trained()), model, optimizer)
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        assert {value.device.type for value in state.values()} == {"meta"}
        assert isinstance(state["exp_avg"], DTensor) and state["exp_avg"].shape == parameter.shape
        assert state["exp_avg"].to_local().shape == parameter.to_local().shape
