"""The model that is trained, as it is opened."""

import pytest
import torch
from conftest import tiny_model

from rlgen.setup.policy import checkpoint_activations


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
