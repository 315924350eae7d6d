"""Nothing that a user could write at commit 614f252 is refused today: options of commands, keys of recipes, and their choices."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from rlgen.cli.app import app
from rlgen.recipe import Recipe
from rlgen.recipe.source import RENAMED

# A line each: `rlgen train --resume`, `rollout.group_size`, `engine.kind: server`.
BEFORE = Path(__file__).with_name("surface_of_614f252.txt").read_text().splitlines()


def options(command: Any, path: str = "rlgen") -> Iterator[str]:
    yield from (f"{path} {name}" for one in command.params for name in (*one.opts, *one.secondary_opts))
    for name, inner in getattr(command, "commands", {}).items():
        yield from options(inner, f"{path} {name}")


def keys(definitions: dict[str, Any], node: Any, path: str = "", above: tuple[str, ...] = ()) -> Iterator[str]:
    if isinstance(node, list):
        for one in node:
            yield from keys(definitions, one, path, above)
        return
    name = node.get("$ref", "").rpartition("/")[2]
    if name and name not in above:
        yield from keys(definitions, definitions[name], path, (*above, name))
    yield from (f"{path}: {value}" for value in [*node.get("enum", []), *([node["const"]] if "const" in node else [])])
    for name, inner in node.get("properties", {}).items():
        place = f"{path}.{name}".removeprefix(".")
        yield place
        yield from keys(definitions, inner, place, above)
    for word, end in (("anyOf", ""), ("oneOf", ""), ("allOf", ""), ("items", "[]"), ("additionalProperties", ".*")):
        if isinstance(node.get(word), dict | list):
            yield from keys(definitions, node[word], path + end, above)


def test_nothing_that_was_written_then_is_lost() -> None:
    schema = Recipe.model_json_schema()
    now = {*options(typer.main.get_command(app)), *keys(schema["$defs"], schema)}
    renamed = {f"{section}.{old}": f"{section}.{new}" for (section, old), new in RENAMED.items()}
    assert len(BEFORE) > 500 and renamed.keys() <= set(BEFORE)
    assert sorted({renamed.get(line, line) for line in BEFORE} - now) == []
