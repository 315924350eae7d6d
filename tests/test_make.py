"""The programs that `make` starts find what they import: each is loaded as make does it, and runs nothing."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

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
