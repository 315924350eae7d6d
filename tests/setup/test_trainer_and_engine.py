"""The order in which trainer and engine are opened, and the model that is trained."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import tiny_model
from helpers.before import before

from rlgen.processes import Processes
from rlgen.recipe import load_recipe
from rlgen.setup import policy, train_state, trainer_and_engine
from rlgen.setup.data import open_data
from rlgen.setup.policy import checkpoint_activations


def test_the_engine_is_opened_before_reference_and_optimizer_state(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's start-up check sees the policy alone, in a resumed run as in a fresh one."""
    order: list[str] = []
    own = SimpleNamespace(deepcopy=policy.copy.deepcopy)

    class Loaded(Exception):
        pass

    def loaded(*_: Any) -> None:
        order.append("checkpoint")
        raise Loaded

    before(trainer_and_engine, "build_engine", lambda *_: order.append("engine"), monkeypatch.setattr)
    before(own, "deepcopy", lambda *_: order.append("reference"))
    monkeypatch.setattr(policy, "copy", own)
    monkeypatch.setattr(policy, "check_fit", lambda *_: None)
    monkeypatch.setattr(train_state, "load_checkpoint", loaded)
    recipe = load_recipe(recipe_file, ["engine={kind: transformers}", "trainer={kind: grpo, beta: 0.1}"]).recipe
    with pytest.raises(Loaded):
        trainer_and_engine.open_trainer_and_engine(
            open_data(recipe), Path("checkpoint"), Processes.alone(), recipe_file.parent, print
        )
    assert order == ["engine", "reference", "checkpoint"]


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_a_checkpointed_forward_is_a_function_of_its_input(name: str) -> None:
    """Dropout of a model's config is no module of its own, but asks whether the layer above it trains."""
    model = tiny_model(name)
    ids = torch.arange(3, 19)[None]
    expected = model(ids).logits
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    checkpoint_activations(model)
    runs: list[int] = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    logits = model(ids).logits
    assert torch.equal(logits, expected)
    logits.sum().backward()
    assert len(runs) == 2, "computed again for the backward pass"
