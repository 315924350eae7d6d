"""`rlgen checkpoints`: what a run has saved, whether it is good, and what may go."""

import json
import time
from pathlib import Path
from typing import Any

from rlgen.cli.output import echo
from rlgen.errors import CheckpointError, DamagedCheckpoint, UsageError
from rlgen.run.directory import RunDirectory
from rlgen.run.manifest import check_files
from rlgen.run.shelf import Shelf


def list_command(run: Path, as_json: bool) -> None:
    """Looks at names and sizes. Raises UsageError where there is no run."""
    say(run, [look(path, hashes=False) for path in entries(run)], as_json)


def verify_command(run: Path, step: int | None, as_json: bool) -> None:
    """Reads every byte, and every number.

    Raises:
        UsageError: there is no run, or no checkpoint of `step`.
        CheckpointError: one of them is damaged, or there is none; all have been read.
    """
    found = entries(run)
    if step is not None:
        found = [path for path in found if path == Shelf(run / "checkpoints").path(step)]
        if not found:
            raise UsageError(f"--step: {run} has no checkpoint of step {step}")
    rows = [look(path, hashes=True) for path in found]
    say(run, rows, as_json)
    # What was set aside is listed and does no harm.
    if wrong := [str(row["problem"]) for row in rows if row["problem"] and not row["set_aside"]]:
        raise CheckpointError("; ".join(wrong))
    if not rows:
        raise CheckpointError(f"{run} has no checkpoint")


def prune_command(run: Path, keep: int, as_json: bool) -> None:
    """Keeps the newest good ones.

    Raises:
        UsageError: there is no run, or it is in use.
        CheckpointError: none is good; nothing is deleted.
    """
    shelf = Shelf(run / "checkpoints")
    entries(run)
    directory = RunDirectory.reopen(run)
    try:
        good = [path for path in shelf.steps().values() if not look(path, hashes=True)["problem"]]
        if not good:
            raise CheckpointError(f"{run} has no good checkpoint; nothing was deleted")
        doomed = [path for path in shelf.steps().values() if path not in good[-keep:]]
        gone = [*doomed, *shelf.aside(), *shelf.leftovers()]
        freed = sum(size_of(path) for path in gone)
        for path in [*doomed, *shelf.aside()]:
            shelf.remove(path)
        shelf.sweep()
    finally:
        directory.close()
    kept = [path.name for path in good[-keep:]]
    report = {"kept": kept, "removed": [str(path) for path in gone], "freed_bytes": freed}
    if as_json:
        echo(json.dumps(report, indent=2))
        return
    echo(f"kept {', '.join(kept)}; removed {len(gone)}, {mebibytes(freed)} freed")


def entries(run: Path) -> list[Path]:
    """Checkpoints, and what was set aside. Raises UsageError where there is no run."""
    shelf = Shelf(run / "checkpoints")
    if not shelf.folder.is_dir():
        raise UsageError(f"{run} holds no run; name a run's directory")
    return [*shelf.steps().values(), *shelf.aside()]


def look(path: Path, hashes: bool) -> dict[str, Any]:
    """One object of the list. `problem`: what is wrong; None: nothing that was looked for."""
    row: dict[str, Any] = {
        "step": int(path.name.removeprefix("step_").partition(".")[0]),
        "path": str(path),
        "bytes": size_of(path),
        "time": None,
        "complete": False,
        "verified": None,
        "set_aside": path.parent.name == "set_aside",
        "problem": None,
    }
    try:
        manifest = check_files(path, hashes=False)
        row |= {"complete": True, "time": manifest.time}
        if hashes:
            row["verified"] = False
            check_files(path, hashes=True)
            if name := not_finite(path):
                raise DamagedCheckpoint(f"{path}: {name} has values that are not finite")
            row["verified"] = True
    except CheckpointError as error:
        row["problem"] = str(error)
    return row


def not_finite(path: Path) -> str | None:
    """Heavy imports happen here."""
    from rlgen.models.weights import non_finite
    from rlgen.run.state import stored_tensors

    return non_finite(stored_tensors(path))


def say(run: Path, rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        echo(json.dumps(rows, indent=2))
        return
    if not rows:
        echo(f"{run}: no checkpoints")
    for row in rows:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["time"])) if row["time"] else "–" * 19
        state = row["problem"] or ("verified" if row["verified"] else "complete")
        aside = "set aside: " if row["set_aside"] else ""
        echo(f"step {row['step']:>6}  {when}  {mebibytes(row['bytes']):>12}  {aside}{state}")


def size_of(folder: Path) -> int:
    """Bytes of the files in it."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def mebibytes(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
