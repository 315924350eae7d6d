"""The page about judges: its recipes are valid, its commands run against a server that answers as the page says."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import RECIPE, ROOT
from helpers.judge_server import serving
from typer.testing import CliRunner

from rlgen.cli.app import app
from rlgen.cli.validate import validate_command

PAGE = (ROOT / "rlgen" / "docs" / "judges.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
RECIPES = [text for kind, text in BLOCKS if kind == "yaml"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the recipes name."""
    (tmp_path / "scores").mkdir()
    config = '{"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}'
    (tmp_path / "scores" / "config.json").write_text(config)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JUDGE_API_KEY", "not-a-real-key")
    return tmp_path


def whole(part: dict[str, Any]) -> str:
    return yaml.safe_dump({**yaml.safe_load(RECIPE), **part})


@pytest.mark.parametrize("text", RECIPES, ids=["reward model", "judge", "preferences"])
def test_a_recipe_is_valid(folder: Path, text: str) -> None:
    (folder / "recipe.yaml").write_text(whole(yaml.safe_load(text)))
    validate_command(folder / "recipe.yaml", [], False, 0)


def test_the_commands_run(folder: Path) -> None:
    with serving(lambda question: f'{{"why": "It sorts.", "score": {1 + len(question) % 5}}}') as server:
        part = yaml.safe_load(RECIPES[1])
        part["rewards"][0]["args"]["url"] = server.url
        (folder / "recipe.yaml").write_text(whole(part))
        (script,) = (text for kind, text in BLOCKS if kind == "sh")
        for line in script.splitlines():
            result = CliRunner().invoke(app, line.split()[1:])
            assert result.exit_code == 0, (line, result.output, result.exception)
    assert len(server.questions) == 4 and server.keys[0] == "Bearer not-a-real-key"
    assert server.questions[0].startswith("A pupil was asked: ") and '{"why": "a sentence"' in server.questions[0]
