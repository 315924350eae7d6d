"""The programs that `make` starts: each finds what it imports; `make scale` measures files; and the golden run.

That changes only when numbers are meant to: `make golden-update`, and the commit says why.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import golden
import pytest
import scale
from conftest import ROOT
from measure_rollouts import measure

BYTES = 9.5  # a token of a small file, whose rows pay more for what is one value a row; `make scale` shows that of a large one
PROGRAMS = re.findall(r"^\t(?:PYTHONPATH=(\S+) )?\$\(VENV\)/python (\S+\.py)", (ROOT / "Makefile").read_text(), re.MULTILINE)
LOAD = "import runpy, sys; sys.path[0] = sys.argv[2]; runpy.run_path(sys.argv[1], run_name='loaded')"


def test_make_starts_programs() -> None:
    assert {"tests/oracle/matrix.py", "scripts/scale.py", "scripts/golden.py"} <= {program for _, program in PROGRAMS}


@pytest.mark.slow
@pytest.mark.parametrize(("path", "program"), sorted(set(PROGRAMS)))
def test_a_program_finds_what_it_imports(path: str, program: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / path) if path else ""}
    command = [sys.executable, "-c", LOAD, program, str(Path(program).parent)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_folder_that_is_not_there_is_made_and_measured(tmp_path: Path) -> None:
    found = measure(64_000, tmp_path / "new")
    assert 8.0 < found["rollouts, bytes a token"] < BYTES  # ids and two log-probs that differ by rounding
    assert min(found.values()) > 0 and (tmp_path / "new" / "rollouts").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("trainer", golden.TRAINERS)
def test_ten_steps_are_as_they_were(trainer: str) -> None:
    stored = json.loads(golden.GOLDEN.read_text())
    assert stored["recipe"] == golden.RECIPE and stored["trainers"] == golden.TRAINERS
    good, lines = golden.compare(stored, {trainer: golden.run(golden.TRAINERS[trainer])})
    assert good, lines


def test_the_comparison_can_fail() -> None:
    stored = json.loads(golden.GOLDEN.read_text())
    for trainer, records in stored["runs"].items():
        assert len(records) == golden.STEPS and all(record["grad_norm"] > 0 for record in records)
        assert golden.compare(stored, {trainer: records})[0]
        moved = [{**record, "loss": record["loss"] + (1e-4 if record["step"] == 7 else 0)} for record in records]
        assert not golden.compare(stored, {trainer: moved})[0]
        elsewhere = {**stored, "made_on": {**stored["made_on"], "processor": "another"}}
        near = [{**record, "loss": record["loss"] + 1e-7} for record in records]
        assert golden.compare(elsewhere, {trainer: near})[0] and not golden.compare(elsewhere, {trainer: moved})[0]


def test_scale_measures_every_stage_of_a_step(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"SHARE": 2, "GROUP": 4, "TOKENS": 8, "PROMPT_TOKENS": 4}.items():
        monkeypatch.setattr(scale, name, value)
    scale.step(scale.Table(), servers=False)
    assert "the sentinel's look" in capsys.readouterr().out
