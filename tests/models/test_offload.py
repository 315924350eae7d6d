"""What a GPU need not hold goes to the machine's memory: moments between steps, and what layers keep for the backward pass."""

import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import tiny_model
from helpers.batches import gradients, random_batch
from helpers.recipes import recipe_for
from helpers.samples import TEXTS
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import AdamW

from rlgen.models.policy import Policy
from rlgen.processes import Processes
from rlgen.setup.largest import Largest, try_largest
from rlgen.setup.policy import checkpoint_activations
from rlgen.setup.settings import TrainSettings
from rlgen.setup.train_state import offload_moments, restore
from rlgen.types import Position

GPU = torch.device("cuda", 0)


class Noted(Tensor):
    """A moment that writes down where it is moved, and stays where it is."""

    moves: list[str]

    def to(self, *args: Any, **kwargs: Any) -> Any:
        self.moves.append(str(kwargs.get("device", *args)))
        return self


def test_moments_are_on_the_device_only_while_the_optimizer_steps() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = AdamW([weight], lr=0.1)
    offload_moments(optimizer, GPU)
    (weight * weight).sum().backward()
    optimizer.step()  # which makes the moments
    state, seen = optimizer.state[weight], list[str]()
    for name in ("exp_avg", "exp_avg_sq"):
        state[name] = state[name].as_subclass(Noted)
        state[name].moves = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(str(state["exp_avg"].moves)))
    optimizer.step()
    assert seen == ["['cuda:0']"] and state["exp_avg"].moves == state["exp_avg_sq"].moves == ["cuda:0", "cpu"]
    assert state["step"] == 2


def test_moments_that_are_loaded_do_not_stay_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every optimizer calls hooks when it loads: bitsandbytes does not."""
    moved: list[torch.device] = []
    monkeypatch.setattr("rlgen.setup.train_state.move_moments", lambda optimizer, device: moved.append(device))
    monkeypatch.setattr("rlgen.setup.train_state.load_checkpoint", lambda *_: Position(step=3))
    for offload in (False, True):
        recipe = recipe_for("tiny:qwen3", optim={"offload": offload})
        settings = TrainSettings.of(recipe, "", ())
        state: Any = SimpleNamespace(
            settings=settings,
            policy=SimpleNamespace(model=None),
            models=SimpleNamespace(base=None),
            optimizer=None,
            schedule=None,
        )
        assert restore(state, tmp_path, Processes.alone()).step == 3
    assert moved == [torch.device("cpu")]


@pytest.mark.parametrize(
    ("optim", "on_gpu", "made", "beside"),
    [
        ({}, True, [4, 4], 2),
        ({"kind": "adamw_8bit"}, True, [1, 1], 2),
        ({"offload": True}, False, [4, 4], 2),
        ({"offload": True}, True, [4, 4, 4], 0),  # two moments and a gradient
        ({"offload": True, "kind": "adamw_8bit"}, True, [1, 1, 4], 0),
    ],
)
def test_the_largest_batch_is_tried_beside_what_will_be_there(
    optim: dict[str, Any], on_gpu: bool, made: list[int], beside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`made`: bytes of a weight's tensors; `beside`: how many of them are there while a micro-batch is computed."""
    weight, kept, alive = torch.nn.Parameter(torch.ones(3)), list[Any](), list[int]()
    like = torch.empty_like

    def noted(*given: Any, **options: Any) -> Tensor:
        tensor = like(*given, **options)
        kept.append((weakref.ref(tensor), tensor.itemsize))
        return tensor

    monkeypatch.setattr(torch, "empty_like", noted)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    monkeypatch.setattr("rlgen.setup.largest.made_up", lambda *_: None)
    updater: Any = SimpleNamespace(
        policy=SimpleNamespace(parameters=lambda: [weight]),
        optimizer=SimpleNamespace(state={}),
        less_memory=lambda phase: [],
        attempt=lambda batch: alive.append(sum(one() is not None for one, _ in kept)),
        sharded=False,
    )
    most = Largest.of(recipe_for("tiny:qwen3", optim=optim), 1, packed=False, sharing=1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    try_largest(most, updater, Processes.alone())
    assert [size for _, size in kept[: len(made)]] == made and alive[0] == beside


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True])
def test_layers_with_checkpointing_keep_their_inputs_elsewhere(
    dtype: torch.dtype, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = tiny_model("qwen3"), random_batch(6, (9, 4, 7))
    checkpoint_activations(model)
    policy = Policy(model, dtype, True)
    assert not packed or policy.pack(TEXTS) is None
    logp, gradient = gradients(policy, batch)
    policy.offload_activations = True
    again, other = gradients(policy, batch)
    assert torch.equal(again, logp) and torch.equal(other, gradient)
    moved: list[Tensor] = []

    def noted(pinned: bool) -> saved_tensors_hooks:
        assert not pinned
        return saved_tensors_hooks(lambda tensor: moved.append(tensor) or tensor, lambda tensor: tensor)

    monkeypatch.setattr("rlgen.models.policy.save_on_cpu", noted)
    gradients(policy, batch)
    width, layers = model.config.hidden_size, model.config.num_hidden_layers
    large = [tensor.shape for tensor in moved if tensor.numel() > 2 * width]
    # The input of each layer, and of the last norm, which keeps three more tensors in float32. No matrix is among them.
    tokens = sum(batch.lengths) - len(batch.lengths) if packed else batch.input_ids.numel()
    assert {shape.numel() for shape in large} == {tokens * width}
    assert len(large) == (layers if dtype == torch.bfloat16 else layers + 3)
