"""Makes the JSON Schema of recipe files, with which editors complete keys, describe them and mark mistakes."""

from typing import Any

from rlgen.recipe.models import Recipe

DIALECT = "http://json-schema.org/draft-07/schema#"  # what editors' YAML servers support
HEADER = "# yaml-language-server: $schema="  # at the top of a recipe, before a path or a URL
EXTENDS = {"description": "A recipe that this one builds on: its values hold unless this file sets others.", "type": "string"}


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
