"""Models of every architecture are served right, or refused with one sentence: decoders, heads, caches, the families of today.

`make sweep` does this for every model type that transformers has; its results stand in `scripts/sweep.json`.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import make_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import sweep
import torch
from conftest import CPU, read_jsonl, tiny_model
from helpers.slow import slow_but
from helpers.waiting import HANGS
from torch import nn

from rlgen.engines.transformers import TransformersEngine
from rlgen.engines.vllm_compat import ELSEWHERE, open_llm
from rlgen.engines.vllm_weights import forget_expert_kernels, listen, stop_listening
from rlgen.errors import EngineError, SetupError
from rlgen.metrics import Metric
from rlgen.models.decoder import decoder_of
from rlgen.models.load import load_model
from rlgen.models.policy import Policy
from rlgen.setup import TrainOptions, train

pytestmark = pytest.mark.usefixtures("one_thread")

# Each ended with a traceback once.
ONCE_BUGS = ["falcon", "falcon:alibi", "falcon:many-heads", "falcon:new", "gpt2:scaled-by-layer"]
ONCE_BUGS += ["llama4_text", "opt", "opt:projected", "persimmon"]
# People train these, and vLLM's CPU build does not serve them all.
FAMILIES = ["deepseek_v3", "gpt_oss", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"]


@pytest.fixture
def results() -> dict[str, dict[str, Any]]:
    """What `make sweep` found."""
    found: dict[str, dict[str, Any]] = json.loads(sweep.TABLE.read_text())
    return found


def loaded(name: str, folder: Path) -> Any:
    """A small model of a type."""
    sweep.build(name, folder)
    return load_model(str(folder), None, torch.float32, "sdpa", CPU)


@pytest.mark.parametrize("name", slow_but(ONCE_BUGS, "llama4_text"))
def test_what_ended_with_a_traceback_is_served(name: str, tmp_path: Path) -> None:
    sweep.build(name, tmp_path)
    found = sweep.examine(tmp_path, "transformers", sweep.PLAIN.get(name, "eager"))
    assert found["outcome"] == "healthy", found
    assert found["gap"] <= sweep.BOUND and found["plain"] <= sweep.BOUND


@pytest.mark.slow
@pytest.mark.parametrize("name", ONCE_BUGS)
def test_what_ended_with_a_traceback_in_vllm(name: str, tmp_path: Path, results: dict[str, dict[str, Any]]) -> None:
    """In a process of its own, as the sweep: vLLM starts once in a process."""
    found = sweep.apart_from_here(name, "colocated", tmp_path / "log")
    assert found["outcome"] == results[name]["colocated"]["outcome"] != "defect", found


def test_the_decoder_is_found_where_transformers_finds_none(tmp_path: Path) -> None:
    model = loaded("llama4_text", tmp_path)
    assert model.get_decoder() is model, "transformers finds it now: `decoder_of` is not needed any more"
    assert decoder_of(model) is model.model
    own = tiny_model("llama")
    assert decoder_of(own) is own.model


def test_a_model_that_sees_later_ids_is_refused(tmp_path: Path) -> None:
    said = "BertGenerationDecoder does not generate from left to right: hidden states change by .* `is_decoder: true`"
    with pytest.raises(SetupError, match=said):
        Policy(loaded("bert-generation", tmp_path), torch.float32, True)
    Policy(loaded("bert-generation:decoder", tmp_path / "decoder"), torch.float32, True)


def test_a_model_that_needs_more_than_ids_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")

    def forward(**_: object) -> None:
        raise TypeError("forward() missing 1 required\npositional argument: 'pixel_values'")

    monkeypatch.setattr(model.model, "forward", forward)
    with pytest.raises(
        SetupError, match=r"LlamaForCausalLM cannot be run on ids of text alone \(TypeError: forward\(\) missing 1"
    ):
        Policy(model, torch.float32, True)


def test_a_model_whose_code_cannot_decode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    forward = model.model.forward

    def without_cache(**inputs: Any) -> Any:
        if inputs["use_cache"]:
            raise TypeError("forward() got an unexpected keyword argument 'past_key_values'")
        return forward(**inputs)

    monkeypatch.setattr(model.model, "forward", without_cache)
    said = "engine.kind: transformers cannot decode LlamaForCausalLM in batches with its cache .* set engine.kind to colocated"
    with pytest.raises(SetupError, match=said):
        TransformersEngine(model=model, fp32_head=True, max_num_seqs=2)


def test_what_vllm_does_not_serve_on_the_cpu_says_what_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def starting(**_: object) -> None:
        raise NotImplementedError("MLA is not implemented\n  for CPU")

    vllm = SimpleNamespace(__version__="0.32.0", LLM=starting, EngineArgs=None)
    arguments = {"model": "model", "max_num_seqs": 2, "kv_cache_memory_bytes": 1 << 30}
    vllm.EngineArgs = make_dataclass("EngineArgs", arguments)
    said = "vLLM 0.32.0 did not start on model: MLA is not implemented for CPU"
    with pytest.raises(EngineError) as caught:
        open_llm(vllm, arguments)
    assert str(caught.value) == f"{said}; {ELSEWHERE}" and "set engine.kind to transformers here" in ELSEWHERE
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(EngineError) as caught:
        open_llm(vllm, arguments)
    assert str(caught.value) == said, "on a GPU nothing is known that would serve it"


@pytest.mark.parametrize("name", slow_but(FAMILIES, "qwen3_next"))
def test_families_of_today_train_with_the_transformers_engine(name: str, recipe_file: Path, tmp_path: Path) -> None:
    """The sentinel climbs before step 1 and looks at every batch. A row that ends early leaves the batch, with its cache."""
    sweep.build(name, tmp_path / "model")
    settings = [f"model.path={tmp_path / 'model'}", "engine={kind: transformers}", "rollout.prompts_per_step=2"]
    settings += ["data.options={}", "rewards=[{use: length, args: {target: 6}}]"]
    steps = read_jsonl(train(recipe_file, TrainOptions(overrides=settings, run_dir=tmp_path / "run")) / "metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert step[Metric.SAMPLER_DELTA_MAX] <= sweep.BOUND
        assert step[Metric.GRAD_NORM] > 0 and step[Metric.WEIGHTS_VERSION] == step["step"]


def test_a_layer_in_two_places_arrives_by_either_name() -> None:
    """Where vLLM runs the code of transformers, shared experts and the router of a layer have two names each."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.other = nn.Linear(2, 2), nn.Linear(2, 2)
            self.experts = nn.ModuleDict({"gate": self.gate})

        def load_weights(self, weights: object) -> set[str]:
            return {"experts.gate.weight", "gate.bias", "other.weight"}

    model = Model()
    listen(model)
    model.load_weights([])
    assert stop_listening(model) == {"other.bias"}


def test_kernels_of_every_kind_of_experts_are_built_anew() -> None:
    """Those of gpt-oss, and of models that vLLM runs by the code of transformers, are subclasses of vLLM's experts."""

    class RoutedExperts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant_method = SimpleNamespace(moe_kernel="packed")

    class OtherRoutedExperts(RoutedExperts):
        pass

    model = nn.Sequential(RoutedExperts(), OtherRoutedExperts(), nn.Linear(2, 2))
    assert list(forget_expert_kernels(model)) == ["0", "1"]
    assert [experts.quant_method.moe_kernel for experts in list(model)[:2]] == [None, None]


def test_outcomes_of_the_sweep() -> None:
    def raising(error: Exception) -> Callable[[], sweep.Result]:
        return Mock(side_effect=error)

    assert sweep.outcome(lambda: {"outcome": "healthy"}) == {"outcome": "healthy"}
    refused = {"outcome": "refused", "exit": 3, "said": "model.path: no"}
    assert sweep.outcome(raising(SetupError("model.path: no"))) == refused
    assert sweep.outcome(raising(SetupError("model.path: no\nand more")))["outcome"] == "defect"
    found = sweep.outcome(raising(KeyError("num_heads")))
    assert (found["outcome"], found["exit"]) == ("defect", 70) and found["said"].startswith("KeyError: 'num_heads'")


@pytest.mark.parametrize(
    ("ends", "limit", "said"),
    [(lambda: os._exit(9), HANGS, "the process died (exit code 9)"), (lambda: time.sleep(HANGS), 1, "no result after 1 s")],
    ids=["dies", "hangs"],
)
def test_a_process_that_dies_or_hangs_is_a_defect(
    ends: Callable[[], None], limit: float, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "SECONDS", limit)
    monkeypatch.setattr(sweep, "of_model", lambda *_: ends())
    assert sweep.apart_from_here("llama", "transformers", tmp_path / "log") == {"outcome": "defect", "said": said}


def test_the_sweep_found_no_defect(results: dict[str, dict[str, Any]]) -> None:
    kinds = {name.partition(":")[0] for name, found in results.items() for one in found.values() if one["outcome"] == "healthy"}
    assert len(kinds) >= 60
    assert [(name, one) for name, found in results.items() for one in found.values() if one["outcome"] == "defect"] == []
    assert all(one["exit"] in (3, 6) for found in results.values() for one in found.values() if one["outcome"] == "refused")
    assert all(one["plain"] <= sweep.BOUND for found in results.values() for one in found.values() if one["outcome"] == "healthy")
