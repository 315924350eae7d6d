"""Every default way through training is gone, two steps of it, by a test of `make test`: no two values meet first on a GPU."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import conftest
import pytest
import yaml
from conftest import ROOT, read_jsonl
from helpers import paths
from helpers.paths import AXES, Way
from helpers.rollouts import rollout_rows
from helpers.runs import bare_run
from helpers.torchrun import launch, well
from helpers.waiting import HANGS

from rlgen.cli.train import train_command
from rlgen.engines.launch import new_token, start_servers
from rlgen.engines.open import server_plans
from rlgen.models.load import locate
from rlgen.recipe import load_recipe

DECLARED = list(paths.declared(ROOT / "tests"))


def recipe_of(way: Way, folder: Path, **server: Any) -> Path:
    """Writes the recipe of a way. `server`: instead of the one that it launches."""
    trainer, engine, processes, dtype, rows, trained = way
    settings = (server or {"launch": True, "max_model_len": 128, "max_num_seqs": 8}) if engine == "server" else {}
    recipe = {
        "run": {"name": "run", "steps": 2},
        "model": {"path": "tiny:qwen3", "dtype": dtype, "lora": {} if trained == "lora" else None},
        "data": {"source": "task:sort", "chat": True, "max_prompt_tokens": 64},
        "rewards": [{"use": "spread.py:spread"}],
        "rollout": {"prompts_per_step": 4, "group_size": 2, "max_completion_tokens": 12},
        "engine": {"kind": engine, **settings},
        "trainer": {"kind": trainer},
        "optim": {"learning_rate": 1e-3, "packing": None if rows == "packed" else False},
        "processes": {"strategy": "ddp" if processes == "one process" else processes},
    }
    path = folder / f"{'-'.join(way).replace(' ', '-')}.yaml"
    path.write_text(yaml.safe_dump(recipe))
    path.with_name("spread.py").write_text("def spread(completion_ids): return sum(completion_ids) % 97 / 97\n")
    return path


def learned(run: Path) -> None:
    """Two updates with weights that arrived at the engine: it samples what the trainer computes, in the bounds of the dtype."""
    records = read_jsonl(run / "metrics.jsonl")
    assert [record["weights/version"] for record in records] == [1, 2]
    for record in records:
        assert record["updates/done"] == 1 and record["grad_norm"] > 0 and not record["sentinel/drift"]


def alone(request: pytest.FixtureRequest, folder: Path) -> None:
    (way,) = ways_of(request)
    recipe = recipe_of(way, folder)
    train_command(recipe, [], False, False, None, recipe.with_suffix(""))
    learned(recipe.with_suffix(""))


def ways_of(request: pytest.FixtureRequest) -> list[Way]:
    return [marker.args for marker in request.node.iter_markers("path")]


@pytest.mark.path("rloo", "transformers", "one process", "float32", "padded", "lora")
def test_rloo_on_transformers(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    alone(request, tmp_path)


@pytest.mark.path("grpo", "transformers", "one process", "bfloat16", "padded", "full")
def test_grpo_on_transformers(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    alone(request, tmp_path)


@pytest.mark.path("online_dpo", "colocated", "one process", "float32", "padded", "lora")
@pytest.mark.vllm
def test_online_dpo_on_vllm(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    alone(request, tmp_path)


@pytest.mark.path("grpo", "server", "one process", "float32", "packed", "full")
@pytest.mark.vllm
def test_grpo_on_a_server(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    alone(request, tmp_path)


@pytest.mark.path("grpo", "colocated", "ddp", "float32", "packed", "full")
@pytest.mark.path("online_dpo", "server", "fsdp", "bfloat16", "padded", "full")
@pytest.mark.path("rloo", "server", "ddp", "bfloat16", "padded", "lora")
@pytest.mark.path("online_dpo", "transformers", "ddp", "bfloat16", "packed", "full")
@pytest.mark.vllm
def test_two_processes(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """All in one start of them, from the last line up, and with one server: to start either takes longer than the steps.

    Two with vLLM learn what one learns: the same samples, and the same gradient of these.
    """
    ways = ways_of(request)
    launches = load_recipe(recipe_of(next(way for way in ways if "server" in way), tmp_path)).recipe
    token = new_token()
    (server,) = start_servers(server_plans(launches, locate("tiny:qwen3")), token, [tmp_path / "server.log"], HANGS)
    try:
        recipes = [recipe_of(way, tmp_path, url=server.url) for way in ways]
        worker = ROOT / "tests" / "path_worker.py"
        well(launch(worker, *recipes, timeout=HANGS, RLGEN_SERVER_TOKEN=token))
    finally:
        server.stop()
    for recipe in recipes:
        learned(recipe.with_suffix(""))
    two, one = recipes[-1].with_suffix(""), tmp_path / "one"
    train_command(recipes[-1], [], False, False, None, one)
    for key in ("prompt_ids", "completion_ids", "reward"):
        ours, theirs = ([row[key] for row in rollout_rows(run, 1)] for run in (two, one))
        assert ours == theirs, key
    for ours, theirs in zip(read_jsonl(two / "metrics.jsonl"), read_jsonl(one / "metrics.jsonl"), strict=True):
        for key in ("loss", "grad_norm", "reward/mean", "tokens/trained"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-6), (ours["step"], key)


def test_every_two_values_meet() -> None:
    """What no test of `make test` goes is broken first on a GPU, by a user."""
    assert paths.uncovered(way for way, _ in DECLARED) == []
    for way, test in DECLARED:
        assert len(way) == len(AXES) and all(value in axis for value, axis in zip(way, AXES.values(), strict=True)), (test, way)


def test_what_was_gone_is_read_from_the_files_of_a_run(tmp_path: Path) -> None:
    run = bare_run(tmp_path / "run", [0.5, 0.5], recipe={"engine": {"kind": "transformers"}, "model": {"lora": {}}})
    (tmp_path / "ran.json").write_text(json.dumps([{"path": ["a"], "steps": 2}, {"path": ["b"], "steps": 1}]))

    def updates(*done: int, padding: int = 0) -> None:
        records = [{"updates/done": one, "tokens/padding": padding} for one in done]
        (run / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))

    updates(1, 0)
    assert paths.went(tmp_path) == {("a",)}, "one update is not two"
    updates(1, 0, 1)
    assert paths.went(tmp_path) == {("a",), ("grpo", "transformers", "one process", "float32", "packed", "lora")}
    (run / "rollouts" / "step_000002.parquet").mkdir(parents=True)
    updates(1, 1, padding=3)
    assert paths.went(tmp_path) == {("a",), ("grpo", "transformers", "ddp", "float32", "padded", "lora")}


def test_a_declared_way_that_was_not_gone_fails_the_test(tmp_path: Path) -> None:
    (tmp_path / "ran.json").write_text(json.dumps([{"path": ["grpo"], "steps": 2}]))

    def ended(*declared: str) -> None:
        marks = [pytest.mark.path(*declared).mark]
        item: Any = SimpleNamespace(
            get_closest_marker=lambda name: None, iter_markers=lambda name: marks, funcargs={"tmp_path": tmp_path}
        )
        wrapper = conftest.pytest_runtest_call(item)
        next(wrapper)
        with pytest.raises(StopIteration):
            next(wrapper)

    ended("grpo")
    with pytest.raises(AssertionError, match="declared, and not gone"):
        ended("rloo")
