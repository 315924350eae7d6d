"""Whole runs that train an adapter, on both engines: the reference is the base, and a resumed run is the run."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CPU, read_jsonl
from helpers.rollouts import records_but_times
from helpers.slow import slow_but
from safetensors.torch import load_file
from torch import Tensor

from rlgen.cli.train import train_command
from rlgen.errors import Fault, SentinelError, UsageError
from rlgen.files import read_json
from rlgen.models import weights
from rlgen.models.load import load_model
from rlgen.models.lora import adapter_metadata, base_weight, without_adapter
from rlgen.models.tiny import build_tiny
from rlgen.models.weights import base_digest, checkpoint_tensors
from rlgen.sentinel import sync
from rlgen.trainers import loop

LORA = ["model.lora={rank: 8, alpha: 16}", "optim.learning_rate=0.01", "checkpoint.every=2"]
ENGINES = ["colocated", "transformers"]


def run(directory: Path, recipe: Path, *overrides: str, resume: bool = False) -> Path:
    train_command(recipe, [*LORA, *overrides], resume, False, None, directory)
    return directory


def adapter(directory: Path, step: int) -> dict[str, Tensor]:
    return load_file(directory / f"checkpoints/step_{step:06d}/adapter_model.safetensors")


@pytest.mark.parametrize("engine", slow_but(ENGINES, "transformers"))
def test_grpo_starts_at_its_reference_and_resumes_as_if_never_stopped(recipe_file: Path, engine: str) -> None:
    settings = [f"engine={{kind: {engine}}}", "trainer={kind: grpo, beta: 0.1}"]
    whole = run(recipe_file.parent / "whole", recipe_file, *settings, "run.steps=4")
    records = read_jsonl(whole / "metrics.jsonl")
    assert records[0]["kl/ref_k3"] == 0.0 and all(record["kl/ref_k3"] > 1e-4 for record in records[1:])
    assert max(record["sampler/delta_max"] for record in records) <= 1e-4
    base = load_model(str(build_tiny("qwen3")), None, torch.float32, "sdpa", CPU)
    assert adapter_metadata(whole / "checkpoints/step_000004")["base_sha256"] == base_digest(base)
    assert [rung["name"] for rung in read_json(whole / "provenance.json")[0]["sentinel"]][4] == "adapter"
    # all factors have moved, and nothing else is in the checkpoint
    moved, final = adapter(whole, 2), adapter(whole, 4)
    assert len(final) == 56 and not any(torch.equal(moved[name], final[name]) for name in final)
    assert not (whole / "checkpoints/step_000004/model.safetensors").exists()

    parts = run(recipe_file.parent / "parts", recipe_file, *settings, "run.steps=2")
    run(parts, recipe_file, *settings, "run.steps=4", resume=True)
    assert records_but_times(parts) == records_but_times(whole)
    assert all(torch.equal(final[name], tensor) for name, tensor in adapter(parts, 4).items())


@pytest.mark.parametrize("engine", slow_but(ENGINES, "transformers"))
def test_online_dpo_prefers_against_the_base(recipe_file: Path, engine: str) -> None:
    (recipe_file.parent / "r.py").write_text("def f(completion_ids): return len(completion_ids) + sum(completion_ids) % 3\n")
    settings = [f"engine={{kind: {engine}}}", "trainer={kind: online_dpo}", "rewards=[{use: 'r.py:f'}]", "run.steps=3"]
    records = read_jsonl(run(recipe_file.parent / "run", recipe_file, *settings) / "metrics.jsonl")
    # policy and reference are one at first, so that every margin is 0
    assert records[0]["loss"] == pytest.approx(math.log(2), abs=1e-7)
    assert all(abs(record["loss"] - math.log(2)) > 1e-3 for record in records[1:])
    assert max(record["sampler/delta_max"] for record in records) <= 1e-4


def test_another_adapter_is_another_run(recipe_file: Path) -> None:
    settings = ["engine={kind: transformers}", "run.steps=2"]
    directory = run(recipe_file.parent / "run", recipe_file, *settings)
    for change, words in [
        ("model.lora.rank=4", "model.lora.rank: 8 -> 4"),
        ("model.lora.alpha=8", "model.lora.alpha: 16.0 -> 8.0"),
        ("model.lora.targets=[q_proj]", "model.lora.targets: all-linear -> ['q_proj']"),
        ("model.lora=null", "model.lora.rank: 8 -> unset"),
    ]:
        with pytest.raises(UsageError) as caught:
            run(directory, recipe_file, *settings, change, resume=True)
        assert words in str(caught.value) and caught.value.exit_code == 2


@pytest.mark.slow
def test_an_engine_that_ignores_the_adapter_is_named_on_resuming(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = run(recipe_file.parent / "run", recipe_file, "engine={kind: transformers}", "run.steps=2")
    fired = []

    def unmerged(model: Any, cast: Any) -> list[tuple[str, Tensor]]:
        fired.append("sync")
        with without_adapter(model):
            return list(checkpoint_tensors(model, cast))

    monkeypatch.setattr(sync, "checkpoint_tensors", unmerged)
    with pytest.raises(SentinelError, match="rung 1") as caught:
        run(directory, recipe_file, "engine={kind: transformers}", "run.steps=4", resume=True)
    assert fired and caught.value.fault is Fault.ADAPTER_IGNORED and caught.value.exit_code == 6


@pytest.mark.slow
def test_an_engine_that_begins_to_ignore_it_is_named_in_the_next_batch(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, fired = loop.send_weights, []

    def sends(engine: Any, model: Any, version: int, processes: Any) -> None:
        if version == 2:
            fired.append(version)
            with without_adapter(model):
                return send(engine, model, version, processes)
        return send(engine, model, version, processes)

    monkeypatch.setattr(loop, "send_weights", sends)
    with pytest.raises(SentinelError, match="batch of step 3") as caught:
        run(recipe_file.parent / "run", recipe_file, "engine={kind: transformers}", "run.steps=4")
    assert fired and caught.value.fault is Fault.ADAPTER_IGNORED


@pytest.mark.slow
def test_merging_into_the_base_and_back_is_named(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is added and taken away again leaves a rounding behind, sync by sync."""
    fired: list[str] = []

    @torch.no_grad()
    def merged(layer: Any) -> Tensor:
        fired.append("merge")
        weight, delta = base_weight(layer), layer.get_delta_weight("default")
        weight += delta
        sent = weight.clone()
        weight -= delta
        return sent

    monkeypatch.setattr(weights, "merged_weight", merged)
    with pytest.raises(SentinelError) as caught:
        run(recipe_file.parent / "run", recipe_file, "engine={kind: transformers}", "run.steps=4")
    assert fired and caught.value.fault is Fault.BASE_CHANGED and caught.value.exit_code == 6
    assert not list((recipe_file.parent / "run" / "checkpoints").iterdir())
