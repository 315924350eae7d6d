"""Every default way through training is gone, two steps of it, by a test of `make test`: no two values meet first on a GPU."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import conftest
import pytest
from conftest import ROOT
from helpers import paths
from helpers.paths import AXES
from helpers.runs import bare_run
from helpers.spread import learned, recipe_of_way

from rlgen.cli.train import train_command

DECLARED = list(paths.declared(ROOT / "tests"))


def alone(request: pytest.FixtureRequest, folder: Path) -> None:
    way = request.node.get_closest_marker("path").args
    recipe = recipe_of_way(way, folder)
    train_command(recipe, [], False, False, None, recipe.with_suffix(""))
    learned(recipe.with_suffix(""))


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
