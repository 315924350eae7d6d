"""The page about messages: its examples answer as written, and the messages that it explains are in the code."""

import re
import shlex
from pathlib import Path

import pytest
from conftest import ROOT
from recipe.mistakes import FILES, RECIPE
from typer.testing import CliRunner

from rlgen.cli.app import app

PAGE = (ROOT / "rlgen" / "docs" / "troubleshooting.md").read_text()
EXAMPLES = re.findall(r"^```\n\$ rlgen (.+)\n((?:.*\n)+?)```$", PAGE, re.MULTILINE)
MESSAGES = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)
SOURCE = " ".join(path.read_text() for path in sorted((ROOT / "rlgen").rglob("*.py")))


def test_the_page_has_examples_and_messages() -> None:
    assert len(EXAMPLES) == 8 == PAGE.count("\n$ rlgen ") and len(MESSAGES) >= 15


@pytest.mark.parametrize("command", [command for command, _ in EXAMPLES])
def test_an_example_answers_as_written(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {**FILES, "recipe.yaml": RECIPE.replace("RUNS", "runs")}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, shlex.split(command))
    said = result.output + (str(result.exception) + "\n" if result.exception else "")
    assert said.replace(f"{tmp_path}/", "") == dict(EXAMPLES)[command]


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_in_the_code(message: str) -> None:
    """Strings that the code cuts over two lines are put together."""
    assert message in re.sub(r'"\s+f?"', "", SOURCE)
