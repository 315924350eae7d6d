"""The pages tools.md and environments.md: what they show is called as its recipe says, and their tables are right."""

import inspect
import json
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import RECIPE, ROOT
from tool_files import answered

from rlgen.data.source import load_rows
from rlgen.recipe import Recipe, load_recipe
from rlgen.recipe.models import BUILT_IN_ENVIRONMENTS, ScoringRecipe
from rlgen.rollout.environment import observed
from rlgen.tools.arena import open_arena
from rlgen.tools.box import ToolCall, open_tools
from rlgen.tools.examples import ENVIRONMENTS

TOOLS, WORLDS = ((ROOT / "rlgen" / "docs" / f"{name}.md").read_text() for name in ("tools", "environments"))


def blocks(page: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def recipe_of(part: dict[str, Any]) -> Recipe:
    Path("recipe.yaml").write_text(yaml.safe_dump({**yaml.safe_load(RECIPE), **part}))
    return load_recipe(Path("recipe.yaml")).recipe


def test_the_tool_of_the_page_is_called_as_its_recipe_says() -> None:
    Path("tools.py").write_text(blocks(TOOLS, "python")[0])
    Path("questions.jsonl").write_text('{"question": "5 km in miles?", "answer": 3.11}\n')
    box = open_tools(recipe_of(yaml.safe_load(*blocks(TOOLS, "yaml"))).tools, ScoringRecipe())
    given = [{"amount": 5, "unit": "km"}, {"amount": 5, "unit": "yards"}]
    with closing(box):
        found = answered(box.call, [ToolCall("convert", one) for one in given] + [ToolCall("convrt", {})])
    assert box.schemas[0]["function"]["parameters"]["properties"]["unit"] == {
        "type": "string",
        "enum": ["km", "miles"],
        "description": "What the distance is measured in now.",
    }
    assert found[0].text == "3.11" and all(f"`{answer.text}`" in TOOLS for answer in found[1:])


def test_the_reward_of_the_page() -> None:
    names: dict[str, Any] = {}
    exec(blocks(TOOLS, "python")[1], names)
    assert names["asks_first"]([{"role": "assistant", "content": "", "tool_calls": []}, {"role": "tool"}]) == 1.0
    assert names["asks_first"]([{"role": "assistant", "content": "3"}]) == 0.0


def test_the_environment_of_the_page_is_led_as_its_recipe_says() -> None:
    (code,) = blocks(WORLDS, "python")
    part, further = map(yaml.safe_load, blocks(WORLDS, "yaml"))
    inspect.signature(ENVIRONMENTS[further["environment"]["use"]]).bind(**further["environment"]["args"])
    Path("worlds.py").write_text(code)
    Path("rows.jsonl").write_text(2 * '{"prompt": "Find the number."}\n')
    recipe = recipe_of(part)
    assert recipe.environment is not None
    arena = open_arena(recipe.environment, recipe.scoring)
    with closing(arena):
        rows = observed(load_rows(recipe.data, 0), "prompt", arena).rows
        assert [row["prompt"] for row in rows] == 2 * ["Find the number. It is between 1 and 50."]
        begin = {"prompt": "Find the number.", "seed": rows[0]["seed"]}
        talk = arena.number()
        cold = answered(arena.begin, talk, begin, rows[0]["prompt"], "hm")
        assert cold == {"text": "cold", "characters": 4, "reward": 0.0, "done": False}
        assert [answered(arena.step, talk, str(guess))["done"] for guess in range(1, 5)] == [False, False, False, True]


def test_the_built_in_ones_are_in_the_table() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", WORLDS, re.MULTILINE)
    assert (*(name for name, _ in rows), "openenv") == tuple(ENVIRONMENTS) == BUILT_IN_ENVIRONMENTS
    for name, args in rows:
        given = {key: json.loads(value) for key, value in re.findall(r"`(\w+): (\d+)`", args)}
        defaults = ENVIRONMENTS[name].__init__.__defaults__  # type: ignore[misc]
        assert tuple(given.values()) == defaults and ENVIRONMENTS[name](**given)
