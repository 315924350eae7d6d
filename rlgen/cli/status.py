"""`rlgen status`: how a run stands, or how it ended."""

import fcntl
import json
import time
from pathlib import Path
from typing import Any

from rlgen.cli.output import echo
from rlgen.errors import UsageError
from rlgen.run.directory import RunDirectory

BEFORE_THE_END = ("starting", "running")
SHOWN = (
    ("step", "reward/mean", "loss", "grad_norm", "time/step"),
    # what the rules of `health` are about
    ("groups/zero_std", "entropy", "kl/ref_k1", "kl/ref_k3", "clip/region", "cispo/clipped", "completions/truncated"),
    ("sampler/delta_mean", "sampler/kl", "is/ess_raw"),
)


def status_command(path: Path, as_json: bool) -> None:
    """Raises UsageError if no run is there."""
    found = status_of(path)
    if as_json:
        echo(json.dumps(found, indent=2))
        return
    said = f"exit code {found['exit_code']}" if found["exit_code"] is not None else f"process {found['pid']}"
    ago = f"{time.time() - found['time']:.0f} s ago" if found["time"] is not None else "at an unknown time"
    echo(f"{path}: {found['state']} ({said}), step {found['step']} of {found['steps']}, last heard of {ago}")
    if found["message"]:
        echo(found["message"])
    last = found["last"] or {}
    for keys in SHOWN:
        if values := [f"{key} {last[key]:.6g}" for key in keys if last.get(key) is not None]:
            echo(", ".join(values))
    for line in found["health"]:
        echo(f"health: {line}")


def status_of(path: Path) -> dict[str, Any]:
    """`status.json`, with `alive`, and with the last complete line of the metrics as `last`.

    A run that was killed could not say so. The kernel frees its lock: `state` is then "killed".

    Raises:
        UsageError: no run is there.
    """
    if not (path / "resolved.yaml").is_file():
        raise UsageError(f"{path} holds no run; name its folder, run.dir/run.name of its recipe")
    alive = in_use(path)
    nothing = {"state": "starting", "step": 0, "steps": 0, "exit_code": None, "message": "", "pid": None, "time": None}
    found = {**nothing, "health": [], **RunDirectory.look(path)}
    if found["state"] in BEFORE_THE_END and not alive:
        found["message"] = "killed, or the machine went down; --resume goes on from the last checkpoint"
        found["state"] = "killed"
    return {**found, "alive": alive, "last": last_metrics(path / "metrics.jsonl")}


def in_use(path: Path) -> bool:
    """Whether a process holds the run's lock. Taken for no longer than it takes to look."""
    try:
        with (path / ".lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def last_metrics(file: Path) -> dict[str, Any] | None:
    """The last line that is whole."""
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
    for line in reversed(lines):
        try:
            record: dict[str, Any] = json.loads(line)
            return record
        except ValueError:  # cut off by the end of its process
            continue
    return None
