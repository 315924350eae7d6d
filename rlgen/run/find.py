"""Finds the folder of a run by what a user calls it: a path, or the name of a run in `runs/`."""

import difflib
import os
from pathlib import Path

from rlgen.errors import UsageError

RUNS = Path("runs")  # where runs are unless the recipe sets another `run.dir`
LISTED = 5  # names of runs that a message shows


def find_run(name: Path, runs: Path = RUNS) -> Path:
    """Returns the folder of a run that is named by its path or, second, by the name of a folder in `runs`.

    Raises UsageError if neither holds a run. The message names the runs that there are, newest first.
    """
    for place in (name, runs / name):
        if holds_run(place):
            return place
    there = names_of_runs(runs)
    if not there:
        hint = f"and {runs}/ holds none; pass the folder of a run, which is run.dir/run.name of its recipe"
    elif close := difflib.get_close_matches(name.name, there, n=1):
        hint = f"and {runs}/ has none of that name; did you mean `{close[0]}`?"
    else:
        more = f" and {len(there) - LISTED} more" if len(there) > LISTED else ""
        hint = f"and {runs}/ has none of that name; it has {', '.join(there[:LISTED])}{more}"
    raise UsageError(f"{name} holds no run, {hint}")


def holds_run(folder: Path) -> bool:
    """Returns whether a folder is that of a run. False for what cannot be a path, such as a name of 300 characters."""
    return os.path.isfile(folder / "resolved.yaml")


def names_of_runs(runs: Path) -> list[str]:
    found = [path for path in runs.iterdir() if holds_run(path)] if runs.is_dir() else []
    return [path.name for path in sorted(found, key=lambda path: (-path.stat().st_mtime, path.name))]
