"""The JSON Schema of recipes: it takes what the loader takes, and every key has its sentence."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import RECIPE, ROOT
from helpers.recipes import problems, written
from jsonschema import Draft7Validator

from rlgen.recipe import dump_recipe, load_recipe, yaml
from rlgen.recipe.keys import recipe_schema
from rlgen.recipe.models import Recipe

SCHEMA = recipe_schema()
STARTER = ROOT / "rlgen" / "cli" / "starter" / "recipe.yaml"


def wrong(text: str) -> list[str]:
    """The keys with a mistake."""
    found = Draft7Validator(SCHEMA).iter_errors(yaml.parse(text, "").data)
    return sorted(".".join(map(str, error.absolute_path)) or error.message for error in found)


def test_it_is_a_schema_that_editors_know() -> None:
    Draft7Validator.check_schema(SCHEMA)
    assert SCHEMA["$schema"] == "http://json-schema.org/draft-07/schema#"


@pytest.mark.parametrize(
    "path", [*sorted((ROOT / "recipes").glob("*.yaml")), STARTER], ids=lambda path: path.parent.name + path.stem
)
def test_every_recipe_fits_and_so_does_what_it_resolves_to(path: Path) -> None:
    assert wrong(path.read_text()) == []
    assert wrong(dump_recipe(load_recipe(path).recipe)) == []


TAKEN = [
    "run: {seed: 1}",
    "health: {entropy: {steps: 3}}",
    "engine: {max_num_seqs: 3}",
    "engine: {kind: server, launch: true, servers: 2, devices: [4, 5]}",
    'engine: {kind: server, url: ["http://127.0.0.1:1", "http://127.0.0.1:2"]}',
    "trainer: {beta: 0.1, correction: {mode: icepop}}",
    "trainer: {kind: rloo, reward_clip: [-1, 1.5]}",
    "trainer: {kind: online_dpo, beta: [0.1, 0.2]}",
    "checkpoint: {every: 3}\nrollouts: {keep: null}",
]
REFUSED = {
    "run: {stesp: 1}": "run",
    "run: {steps: many}": "run.steps",
    "health: {entropy: {threshold: -1}}": "health.entropy.threshold",
    "engine: {kind: vllm}": "engine",
    "trainer: {clip_hgih: 0.3}": "trainer",
    "optim: {learning_rate: 0}": "optim.learning_rate",
    "rewards: []": "rewards",
    "rewards: [{weight: 1.0}]": "rewards.0",
    "model: {dtype: float32}": "model",
    "evaluation: {every: 3}": "evaluation",
}


def changed(change: str) -> str:
    """The recipe with the sections of `change` instead of its own."""
    data = yaml.parse(RECIPE, "").data | yaml.parse(change, "").data
    return yaml.dump(data)


@pytest.mark.parametrize("change", TAKEN)
def test_what_the_loader_takes(change: str, tmp_path: Path) -> None:
    path = written(tmp_path, changed(change))
    load_recipe(path)
    assert wrong(path.read_text()) == []


@pytest.mark.parametrize("change", REFUSED)
def test_what_the_loader_refuses(change: str, tmp_path: Path) -> None:
    path = written(tmp_path, changed(change))
    assert problems(path) != []
    (mistake,) = wrong(path.read_text())
    assert mistake == REFUSED[change] or f"'{REFUSED[change]}' was unexpected" in mistake


def test_a_recipe_that_extends_another_need_not_be_whole() -> None:
    assert wrong("extends: base.yaml\nmodel: {dtype: float32}\n") == []
    assert wrong("model: {dtype: float32}\n") == ["'data' is a required property", "'rewards' is a required property", "model"]
    assert wrong("extends: 3\n") == ["extends"]


def keys(schema: Mapping[str, Any], name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for key, value in schema.get("properties", {}).items():
        yield f"{name}.{key}", value


def test_every_key_has_its_sentence() -> None:
    parts = {"Recipe": SCHEMA, **SCHEMA["$defs"]}
    found = dict(pair for name, part in parts.items() for pair in keys(part, name))
    assert len(found) > 150 and [name for name, value in found.items() if not value.get("description", "").endswith(".")] == []
    assert {name.removeprefix("Recipe.") for name in found if name.startswith("Recipe.")} == {"extends", *Recipe.model_fields}
