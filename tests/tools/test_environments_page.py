"""The page rlgen/docs/environments.md: its environment is led as its recipe says, and its tables are right."""

import inspect
import json
import re
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import yaml
from conftest import RECIPE, ROOT
from helpers.waiting import HANGS

from rlgen.data.source import load_rows
from rlgen.recipe import load_recipe
from rlgen.recipe.models import BUILT_IN_ENVIRONMENTS
from rlgen.rollout.observed import observed
from rlgen.tools.arena import open_arena
from rlgen.tools.examples import ENVIRONMENTS

PAGE = (ROOT / "rlgen" / "docs" / "environments.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_environment_of_the_page_is_led_as_its_recipe_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = (text for kind, text in BLOCKS if kind == "python")
    part, further = (yaml.safe_load(text) for kind, text in BLOCKS if kind == "yaml")
    inspect.signature(ENVIRONMENTS[further["environment"]["use"]]).bind(**further["environment"]["args"])
    (tmp_path / "worlds.py").write_text(code)
    (tmp_path / "rows.jsonl").write_text(2 * '{"prompt": "Find the number."}\n')
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**yaml.safe_load(RECIPE), **part}))
    recipe = load_recipe(tmp_path / "recipe.yaml").recipe
    assert recipe.environment is not None
    arena = open_arena(recipe.environment, recipe.scoring)
    came: SimpleQueue[Any] = SimpleQueue()
    try:
        rows = observed(load_rows(recipe.data, 0), "prompt", arena).rows
        assert [row["prompt"] for row in rows] == 2 * ["Find the number. It is between 1 and 50."]
        begin = {"prompt": "Find the number.", "seed": rows[0]["seed"]}
        talk = arena.number()
        arena.begin(talk, begin, rows[0]["prompt"], "hm", came.put)
        assert came.get(timeout=HANGS) == {"text": "cold", "characters": 4, "reward": 0.0, "done": False}
        for guess in range(1, 4):
            arena.step(talk, str(guess), came.put)
            came.get(timeout=HANGS)
        arena.step(talk, "4", came.put)
        assert came.get(timeout=HANGS)["done"], "after the fifth guess"
    finally:
        arena.close()


def test_the_built_in_ones_are_in_the_table() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", PAGE, re.MULTILINE)
    assert (*(name for name, _ in rows), "openenv") == tuple(ENVIRONMENTS) == BUILT_IN_ENVIRONMENTS
    for name, args in rows:
        given = {key: json.loads(value) for key, value in re.findall(r"`(\w+): (\d+)`", args)}
        defaults = ENVIRONMENTS[name].__init__.__defaults__  # type: ignore[misc]
        assert tuple(given.values()) == defaults and ENVIRONMENTS[name](**given)
