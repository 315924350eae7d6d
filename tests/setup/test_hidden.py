"""What libraries print goes to a file of the run, without secrets; what rlgen prints stays on the screen."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, subprocess, sys
from pathlib import Path
from rlgen.setup.attempt import Hidden
from rlgen.run.console import Console, apart

print("held back", end="")
with Console(2, file=apart(sys.stdout)) as console, Hidden() as hidden:
    hidden.to(Path(sys.argv[1]) / "first.log")
    print("python")
    console.say(" said")
    os.write(2, b"from C, key sk-abcdefghijklmnopqrstuvwx\\n")
    hidden.to(Path(sys.argv[1]) / "second.log")
    subprocess.run(["echo", "a child"])
    console.say("said too")
print("afterwards")
"""


def test_only_rlgen_reaches_the_screen(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, env={**os.environ})
    assert (done.returncode, done.stdout, done.stderr) == (0, "held back said\nsaid too\nafterwards\n", "")
    assert sorted((tmp_path / "first.log").read_text().splitlines()) == ["from C, key [redacted]", "python"]
    assert (tmp_path / "second.log").read_text() == "a child\n"


def test_an_error_is_seen(tmp_path: Path) -> None:
    script = SCRIPT.replace('console.say("said too")', "raise ValueError('why')")
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.rstrip().endswith("ValueError: why")
