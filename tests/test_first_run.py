"""The page "First run", executed as it is written: what is to be typed in order, and its edits of the recipe."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, read_jsonl

from rlgen.analysis.run import tenths
from rlgen.cli.inspect import STARTER
from rlgen.files import read_json

PAGE = (ROOT / "rlgen" / "docs" / "first-run.md").read_text()
BLOCKS = re.findall(r"^```(sh|diff)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
RUN = """#!/bin/sh
exec "{python}" -m rlgen "$@"
"""


def edited(text: str, diff: str) -> str:
    """The text with the changes of a diff; each line that goes stands in it once, and what comes stands in its place."""
    lines, place = text.splitlines(), 0
    for sign, line in ((changed[0], changed[1:]) for changed in diff.splitlines()):
        if sign == "-":
            assert lines.count(line) == 1, line
            place = lines.index(line)
            del lines[place]
        else:
            lines.insert(place, line)
    return "\n".join(lines) + "\n"


def test_the_edits_are_of_lines_that_are_marked() -> None:
    (diff,) = (text for kind, text in BLOCKS if kind == "diff")
    recipe = (STARTER / "recipe.yaml").read_text()
    changed = edited(recipe, diff)
    gone = [line for line in recipe.splitlines() if line not in changed.splitlines()]
    assert len(gone) == sum("# <--" in line for line in gone) == 4 and len(changed.splitlines()) == len(recipe.splitlines())


@pytest.mark.slow
def test_the_page_works_as_written(tmp_path: Path) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "rlgen").write_text(RUN.format(python=sys.executable))
    (commands / "rlgen").chmod(0o755)
    environment = {**os.environ, "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    place = tmp_path
    for kind, text in BLOCKS:
        if kind == "diff":
            recipe = place / "recipe.yaml"
            recipe.write_text(edited(recipe.read_text(), text))
            continue
        script = f"set -e\n{text}\npwd > {tmp_path}/place\n"
        done = subprocess.run(["bash", "-c", script], cwd=place, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        place = Path((tmp_path / "place").read_text().strip())
    assert place == tmp_path / "mine"
    for name in ("first", "tens"):
        run = place / "runs" / name
        records = read_jsonl(run / "metrics.jsonl")  # that of step 0 is the evaluation before training
        first, last = tenths([record for record in records if record["step"] > 0])
        assert first is not None and last is not None and last > first + 0.3
        evaluations = [record["eval/reward/mean"] for record in records if "eval/reward/mean" in record]
        assert evaluations[-1] > evaluations[0] + 0.3
        assert all(record["completions/truncated"] < 0.1 for record in records[1:])
        assert not {key for record in records for key, broken in record.items() if key.startswith("health/") and broken}
        assert read_json(run / "status.json")["state"] == "done" and "<html" in (run / "report.html").read_text()
    assert "trained by rlgen with grpo on `tens.jsonl`" in (place / "tens-model" / "README.md").read_text()
