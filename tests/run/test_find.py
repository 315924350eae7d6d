"""RUN on the command line: a folder, or the name of one in `runs/`."""

import os
from pathlib import Path

import pytest

from rlgen.errors import UsageError
from rlgen.run.find import find_run


def make(folder: Path, age: int = 0) -> Path:
    folder.mkdir(parents=True)
    (folder / "resolved.yaml").write_text("run: {}\n")
    os.utime(folder, (1e9 - age, 1e9 - age))
    return folder


def test_a_folder_or_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "runs" / "mine")
    make(tmp_path / "elsewhere" / "other")
    assert find_run(Path("mine")) == Path("runs/mine") == find_run(Path("runs/mine"))
    assert find_run(Path("elsewhere/other")) == Path("elsewhere/other")
    make(tmp_path / "mine")
    assert find_run(Path("mine")) == Path("mine"), "a folder of the working directory comes first"


def test_what_is_no_run_is_answered_with_those_that_there_are(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with pytest.raises(UsageError, match=r"nope holds no run, and .*runs/ holds none; pass the folder of a run"):
        find_run(Path("nope"), runs)
    for age in range(7):
        make(runs / f"count-{age}", age)
    (runs / "junk").mkdir()
    with pytest.raises(UsageError, match="did you mean `count-3`"):
        find_run(Path("count3"), runs)
    with pytest.raises(UsageError, match="it has count-0, count-1, count-2, count-3, count-4 and 2 more"):
        find_run(Path("zzz"), runs)
    with pytest.raises(UsageError, match=r"x{300} holds no run"):  # longer than any file system has names
        find_run(Path("x" * 300), runs)
