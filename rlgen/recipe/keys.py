"""Knows every key of a recipe and its description, for the schema that editors read, and where a misplaced key belongs."""

from difflib import get_close_matches
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel

from rlgen.recipe.engines import RESERVED_ENGINE_ARGUMENTS
from rlgen.recipe.health import HealthRule
from rlgen.recipe.hints import OTHER_TOOLS, REFUSED, REFUSED_BY_KIND
from rlgen.recipe.models import BUILT_IN_REWARDS, Recipe
from rlgen.recipe.trl import OPTIONS

DIALECT = "http://json-schema.org/draft-07/schema#"  # what editors' YAML servers support
HEADER = "# yaml-language-server: $schema="  # at the top of a recipe, before a path or a URL
EXTENDS = {"description": "A recipe that this one builds on: its values hold unless this file sets others.", "type": "string"}


def models_of(annotation: object) -> list[type[BaseModel]]:
    """Returns the models in an annotation, such as those of a union or of a list's items."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in models_of(part)]


@cache
def places_of_keys() -> dict[str, dict[str, tuple[str, ...]]]:
    """Returns for each key its dotted paths, with the kinds of their sections that have it; without the keys of health rules."""
    found: dict[str, dict[str, tuple[str, ...]]] = {}

    def walk(model: type[BaseModel], above: str, kind: str | None) -> None:
        for key, field in model.model_fields.items():
            path = f"{above}{key}"
            kinds = found.setdefault(key, {}).get(path, ())
            found[key][path] = kinds if kind is None or kind in kinds else (*kinds, kind)
            item = "*." if "list[" in str(field.annotation) else ""
            for inner in models_of(field.annotation):
                if inner is not HealthRule:
                    kinds = get_args(inner.model_fields["kind"].annotation) if "kind" in inner.model_fields else (kind,)
                    walk(inner, f"{path}.{item}", kinds[0])

    walk(Recipe, "", None)
    return found


def sentences(model: BaseModel, above: str = "") -> dict[str, str]:
    """Returns the description of every key of a recipe by its dotted path; that of a section comes before those of its keys.

    Args:
        above: what precedes each path, such as "engine.".
    """
    found: dict[str, str] = {}
    for key, value in model:
        path = f"{above}{key}"
        found[path] = " ".join((type(model).model_fields[key].description or "").split())
        parts = {f"{path}.{index}.": item for index, item in enumerate(value)} if isinstance(value, list) else {f"{path}.": value}
        for start, part in parts.items():
            found |= sentences(part, start) if isinstance(part, BaseModel) else {}
    return found


def key_places(key: str) -> dict[str, tuple[str, ...]]:
    """Returns the places of a key, see `places_of_keys`; those in `eval`, which repeats keys, only if there are no others."""
    places = places_of_keys().get(key, {})
    return {path: kinds for path, kinds in places.items() if not path.startswith("eval.")} or places


def advice(name: str, general: str, kind: str, allowed: list[str]) -> str | None:
    """Returns what to do about an unknown key.

    Args:
        name: the dotted path, with the indices of lists: "rewards.0.wieght".
        general: the same with `*` for each index.
        kind: of its section; "" if it has none.
        allowed: the keys of its section.
    """
    section, _, key = general.rpartition(".")
    if reason := REFUSED_BY_KIND.get(kind, {}).get(name) or REFUSED.get(general):
        return reason
    if key in OPTIONS:
        return OPTIONS[key].hint
    if key in OTHER_TOOLS:
        return OTHER_TOOLS[key]
    if elsewhere := key_places(key):
        if general in elsewhere:
            return f"it is a key of kind {' and '.join(elsewhere[general])}"
        if key != "kind" and len(elsewhere) <= 3:
            return f"here it is {' or '.join(f'`{path}`' for path in elsewhere)}"
    if key in BUILT_IN_REWARDS and section == "rewards.*":
        return f"a reward is named by `use`: write `{{use: {key}}}`"
    if section == "engine" and key in RESERVED_ENGINE_ARGUMENTS:
        return "rlgen sets it itself: remove it"
    if close := get_close_matches(key[:100], allowed, n=1):
        return f"did you mean `{close[0]}`?"
    if close := get_close_matches(key[:100], [*places_of_keys(), *OPTIONS], n=1, cutoff=0.8):
        paths = key_places(close[0])
        return f"did you mean {' or '.join(f'`{path}`' for path in paths)}?" if paths else OPTIONS[close[0]].hint
    further = "an argument of vLLM goes into engine.extra; " if section == "engine" and "extra" in allowed else ""
    further = "the key says what a column is, such as `prompt: question`; " if section == "data.columns" else further
    return f"{further}keys are {', '.join(allowed)}"


def recipe_schema() -> dict[str, Any]:
    """Returns the JSON Schema of a recipe file.

    A file may leave out what a `Recipe` requires: the run's name follows from that of the file, a health rule keeps its other
    defaults, and a file need not repeat what the recipe that it `extends` sets.
    """
    schema = Recipe.model_json_schema()
    parts = schema["$defs"]
    for filled in ("RunRecipe", "HealthRule"):
        del parts[filled]["required"]
    sections = {name: parts.get(section.get("$ref", "").rpartition("/")[2], {}) for name, section in schema["properties"].items()}
    alone = {
        "required": [name for name in schema.pop("required") if name != "run"],
        "properties": {name: {"required": part.pop("required")} for name, part in sections.items() if "required" in part},
    }
    return {
        "$schema": DIALECT,
        **schema,
        "title": "rlgen recipe",
        "description": "A run of rlgen: `rlgen train recipe.yaml`.",
        "properties": {"extends": EXTENDS, **schema["properties"]},
        "if": {"required": ["extends"]},
        "else": alone,
    }
