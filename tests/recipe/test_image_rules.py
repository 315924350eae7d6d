"""What a recipe with images must not say, each with a sentence."""

from typing import Any

import pytest

from rlgen.recipe.beside import beside
from rlgen.recipe.models import Recipe

RECIPE: dict[str, Any] = {
    "run": {"name": "images"},
    "model": {"path": "tiny:idefics3", "dtype": "float32"},
    "data": {"source": "rows.jsonl", "columns": {"images": "images"}},
    "rewards": [{"use": "exact_match"}],
    "engine": {"kind": "colocated"},
}
ODD: dict[str, dict[str, Any]] = {
    "engine.kind": {"engine": {"kind": "server", "launch": True}},
    "engine.tensor_parallel_size": {"engine": {"kind": "colocated", "tensor_parallel_size": 2}},
    "engine.model_impl": {"engine": {"kind": "colocated", "model_impl": "transformers"}},
    "tools": {"tools": [{"use": "t.py:f"}]},
    "model.lora": {"model": {**RECIPE["model"], "lora": {}}},
    "model.compile": {"model": {**RECIPE["model"], "compile": True}},
    "optim.packing": {"optim": {"packing": True}},
    "processes.strategy": {"processes": {"strategy": "fsdp"}},
    "run.probe_max": {"run": {"name": "images", "probe_max": True}},
}


def found(**changes: Any) -> dict[str, str]:
    return {one.path: one.what for one in beside(Recipe.model_validate({**RECIPE, **changes}))}


def test_images_by_themselves_contradict_nothing() -> None:
    assert found() == {}


@pytest.mark.parametrize("path, changes", ODD.items(), ids=list(ODD))
def test_what_was_not_shown_to_be_right_is_refused(path: str, changes: dict[str, Any]) -> None:
    said = found(**changes)
    assert said.keys() == {path} and said[path].startswith("data.columns.images: prompts with images are not tested")
    assert found(**changes, data={"source": "rows.jsonl"}) == {}


def test_a_task_of_pictures_needs_the_column() -> None:
    task = {"source": "task:colours", "chat": True}
    assert "asks about pictures" in found(data=task)["data.source"]
    assert found(data={**task, "columns": {"images": "images"}}) == {}


def test_evaluations_have_images_only_if_training_has() -> None:
    held = {"source": "held.jsonl", "columns": {"images": "images"}}
    assert "data.columns.images none" in found(data={"source": "rows.jsonl"}, eval=held)["eval.columns.images"]
    assert found(eval=held) == {}
