"""What a sync sends is a checkpoint, and a checkpoint comes back as the model's own tensors, to the last bit."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CPU, open_transformers, tiny_model
from helpers.train_state import equal
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rlgen.models.load import load_model
from rlgen.models.tiny import build_tiny
from rlgen.models.weights import checkpoint_tensors, model_tensors, own_tensors
from rlgen.run.state import load_model_weights

# Held as in the checkpoint; renamed parts; packed experts of four layouts, one with a buffer that a checkpoint keeps.
NAMES = ["qwen3", "phi3", "gpt2", "mixtral", "qwen3_moe", "granitemoe", "glm4_moe"]


def changed(model: Any) -> dict[str, Tensor]:
    """Copies of the model's tensors, no two of them equal."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in own_tensors(model).values():
            tensor.add_(torch.randn(tensor.shape, generator=generator))
    return {name: tensor.clone() for name, tensor in own_tensors(model).items()}


def shuffled(weights: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    return random.Random(0).sample(list(weights.items()), len(weights))


@pytest.mark.parametrize("name", NAMES)
def test_sent_is_what_save_pretrained_writes_and_comes_back(name: str, tmp_path: Path) -> None:
    model, other = tiny_model(name), tiny_model(name)
    own = changed(model)
    model.save_pretrained(tmp_path)
    sent = dict(checkpoint_tensors(model))
    assert equal(sent, load_file(tmp_path / "model.safetensors"))
    assert not any(tensor.requires_grad for tensor in sent.values())
    assert equal(dict(model_tensors(model, shuffled(sent))), own)
    places = {name: parameter.data_ptr() for name, parameter in other.named_parameters()}
    load_model_weights(tmp_path, other)
    assert equal(own, own_tensors(other))
    assert places == {name: parameter.data_ptr() for name, parameter in other.named_parameters()}, "it is loaded in place"


def test_ten_comes_after_two(tmp_path: Path) -> None:
    """Experts are stacked by number; as text, expert 10 comes before expert 2."""
    config = AutoConfig.from_pretrained(build_tiny("mixtral"), num_local_experts=12, num_hidden_layers=11)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = load_model(str(tmp_path), None, torch.float32, "sdpa", CPU)
    own = changed(model)
    sent = dict(checkpoint_tensors(model))
    assert "model.layers.10.block_sparse_moe.experts.11.w1.weight" in sent
    assert equal(dict(model_tensors(model, shuffled(sent))), own)


@pytest.mark.parametrize("name", ["qwen3", "glm4_moe"])
def test_the_transformers_engine_takes_what_is_sent(name: str) -> None:
    engine, model = open_transformers(name), tiny_model(name)
    own = changed(model)
    engine.sync(checkpoint_tensors(model), 3)
    assert equal(own, own_tensors(engine._model)) and engine.weight_version == 3
