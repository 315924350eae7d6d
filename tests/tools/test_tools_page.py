"""The page rlgen/docs/tools.md: its tool is shown to the model and called, its recipe loads, its reward scores."""

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import RECIPE, ROOT
from helpers.waiting import HANGS

from rlgen.recipe import load_recipe
from rlgen.recipe.models import ScoringRecipe
from rlgen.tools.box import ToolCall, open_tools

PAGE = (ROOT / "rlgen" / "docs" / "tools.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
TOOL, REWARD = (text for kind, text in BLOCKS if kind == "python")


def test_the_tool_of_the_page_is_called_as_its_recipe_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tools.py").write_text(TOOL)
    (tmp_path / "questions.jsonl").write_text('{"question": "5 km in miles?", "answer": 3.11}\n')
    (part,) = (yaml.safe_load(text) for kind, text in BLOCKS if kind == "yaml")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**yaml.safe_load(RECIPE), **part}))
    recipe = load_recipe(tmp_path / "recipe.yaml").recipe
    box = open_tools(recipe.tools, ScoringRecipe())
    came, found = threading.Event(), []

    def done(answers: Any) -> None:
        found.extend(answers)
        came.set()

    try:
        given = [{"amount": 5, "unit": "km"}, {"amount": 5, "unit": "yards"}]
        box.call([ToolCall("convert", one) for one in given] + [ToolCall("convrt", {})], done)
        assert came.wait(HANGS)
    finally:
        box.close()
    assert box.schemas[0]["function"]["parameters"]["properties"]["unit"] == {
        "type": "string",
        "enum": ["km", "miles"],
        "description": "What the distance is measured in now.",
    }
    assert found[0].text == "3.11"
    for answer in found[1:]:
        assert f"`{answer.text}`" in PAGE


def test_the_reward_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {}
    exec(REWARD, names)
    assert names["asks_first"]([{"role": "assistant", "content": "", "tool_calls": []}, {"role": "tool"}]) == 1.0
    assert names["asks_first"]([{"role": "assistant", "content": "3"}]) == 0.0
