"""Lists, verifies and deletes the checkpoints of a run: `rlgen checkpoints`."""

import json
import time
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from rlgen.cli.groups import AsJson, RunPath, commands
from rlgen.cli.output import echo
from rlgen.errors import CheckpointError, DamagedCheckpoint, UsageError
from rlgen.run.checkpoint_folder import CheckpointFolder
from rlgen.run.directory import RunDirectory, pinned_step
from rlgen.run.find import find_run
from rlgen.run.manifest import check_files

checkpoints = commands("What a run has saved.", "rlgen checkpoints list mine")


@checkpoints.command("list", epilog="Example: rlgen checkpoints list mine")
def list_command(run: RunPath, as_json: AsJson = False) -> None:
    """List the checkpoints of a run. Checks only the names and sizes of files; `verify` checks their content."""
    run = find_run(run)
    print_rows(run, [row_of(run, path, hashes=False) for path in entries(run)], as_json)


@checkpoints.command("verify", epilog="Example: rlgen checkpoints verify mine --step 40")
def verify_command(
    run: RunPath,
    step: Annotated[int | None, Option(help="Step of one checkpoint. Default: all checkpoints.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check every byte of a run's checkpoints. Exit code 8 if one is damaged."""
    # All numbers must be finite, too. CheckpointError is raised after all have been read.
    run = find_run(run)
    found = entries(run)
    if step is not None:
        found = [path for path in found if path == CheckpointFolder(run / "checkpoints").path(step)]
        if not found:
            raise UsageError(f"--step: {run} has no checkpoint of step {step}; `rlgen checkpoints list {run}` shows them")
    rows = [row_of(run, path, hashes=True) for path in found]
    print_rows(run, rows, as_json)
    # Checkpoints that were set aside are listed, but are no error: no run resumes from them.
    if wrong := [str(row["problem"]) for row in rows if row["problem"] and not row["set_aside"]]:
        raise CheckpointError("; ".join(wrong))
    if not rows:
        raise CheckpointError(f"{run} has no checkpoint")


@checkpoints.command("prune", epilog="Example: rlgen checkpoints prune mine --keep 2")
def prune_command(
    run: RunPath, keep: Annotated[int, Option(min=1, help="Newest good checkpoints to keep.")] = 1, as_json: AsJson = False
) -> None:
    """Delete old checkpoints and those that were set aside. Keeps the newest good ones and the best by evaluation."""
    run = find_run(run)
    folder = CheckpointFolder(run / "checkpoints")
    with closing(RunDirectory.reopen(run)):
        good = [path for path in folder.steps().values() if not row_of(run, path, hashes=True)["problem"]]
        if not good:
            raise CheckpointError(f"{run} has no good checkpoint; nothing was deleted")
        pinned = pinned_step(run)
        kept = [path for path in good if path in good[-keep:] or (pinned is not None and path == folder.path(pinned))]
        doomed = [path for path in folder.steps().values() if path not in kept]
        gone = [*doomed, *folder.aside(), *folder.leftovers()]
        freed = sum(map(bytes_in, gone))
        for path in [*doomed, *folder.aside()]:
            folder.remove(path)
        folder.sweep()
    names = [path.name for path in kept]
    if as_json:
        echo(json.dumps({"kept": names, "removed": [str(path) for path in gone], "freed_bytes": freed}, indent=2))
    else:
        echo(f"kept {', '.join(names)}; removed {len(gone)}, {mebibytes(freed)} freed")


def entries(run: Path) -> list[Path]:
    """Returns the folders of all checkpoints, then those that were set aside."""
    folder = CheckpointFolder(run / "checkpoints")
    return [*folder.steps().values(), *folder.aside()]


def row_of(run: Path, path: Path, hashes: bool) -> dict[str, Any]:
    """Returns one row of the list. `problem` says what is wrong; None: no check failed. With `hashes`, imports torch."""
    step, aside = int(path.name.removeprefix("step_").partition(".")[0]), path.parent.name == "set_aside"
    row: dict[str, Any] = {
        "step": step,
        "path": str(path),
        "bytes": bytes_in(path),
        "time": None,
        "complete": False,
        "verified": None,
        "set_aside": aside,
        "best": step == pinned_step(run) and not aside,
        "problem": None,
    }
    try:
        row |= {"time": check_files(path, hashes=False).time, "complete": True}
        if hashes:
            from rlgen.models.weights import non_finite
            from rlgen.run.state import stored_tensors

            row["verified"] = False
            check_files(path, hashes=True)
            if name := non_finite(stored_tensors(path)):
                raise DamagedCheckpoint(f"{path}: {name} has values that are not finite")
            row["verified"] = True
    except CheckpointError as error:
        row["problem"] = str(error)
    return row


def print_rows(run: Path, rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        echo(json.dumps(rows, indent=2))
        return
    if not rows:
        echo(f"{run}: no checkpoints")
    for row in rows:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["time"])) if row["time"] else "–" * 19
        state = row["problem"] or ("verified" if row["verified"] else "complete")
        aside = "set aside: " if row["set_aside"] else ""
        pinned = ", best by evaluation" if row["best"] else ""
        echo(f"step {row['step']:>6}  {when}  {mebibytes(row['bytes']):>12}  {aside}{state}{pinned}")


def bytes_in(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def mebibytes(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
