"""Prints the state of a run: `rlgen status`."""

import fcntl
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlgen.cli.output import echo
from rlgen.errors import UsageError
from rlgen.metrics import Metric
from rlgen.run.best import pinned_step
from rlgen.run.directory import RunDirectory, read_records
from rlgen.run.find import find_run

BEFORE_THE_END = ("starting", "running")
SHOWN = (
    (Metric.STEP, Metric.REWARD_MEAN, Metric.LOSS, Metric.GRAD_NORM, Metric.TIME_STEP),
    # values that the rules of `health` check
    (
        Metric.GROUPS_ZERO_STD,
        Metric.ENTROPY,
        Metric.KL_REF_K1,
        Metric.KL_REF_K3,
        Metric.CLIP_REGION,
        Metric.CISPO_CLIPPED,
        Metric.COMPLETIONS_TRUNCATED,
    ),
    (Metric.SAMPLER_DELTA_MEAN, Metric.SAMPLER_KL, Metric.IS_ESS_RAW),
)


def status_command(name: Path, as_json: bool) -> None:
    """Prints the state of a run. Raises UsageError if no run is there."""
    path = find_run(name)
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
    if found["evaluation"] is not None:
        echo(evaluation_words(found["evaluation"], found["best_checkpoint"]))
    for line in found["health"]:
        echo(f"health: {line}")


def status_of(path: Path) -> dict[str, Any]:
    """Returns `status.json`, with `alive`, with the last complete record of the metrics as `last`, with the last one that was
    evaluated as `evaluation`, and with the step of the pinned checkpoint as `best_checkpoint`.

    A run that was killed could not write so. The kernel releases its lock, and `state` is then "killed".

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
    evaluated = [record for record in read_records(path / "metrics.jsonl") if Metric.EVAL_REWARD_MEAN in record]
    return {
        **found,
        "alive": alive,
        "last": last_metrics(path / "metrics.jsonl"),
        "evaluation": evaluated[-1] if evaluated else None,
        "best_checkpoint": pinned_step(path),
    }


def evaluation_words(record: Mapping[str, Any], best: int | None) -> str:
    """Returns `evaluation after step 40: reward 0.531 (0.48 to 0.58); the best checkpoint is that of step 20`."""
    reward, low, high = (record.get(key) for key in (Metric.EVAL_REWARD_MEAN, Metric.EVAL_REWARD_LOW, Metric.EVAL_REWARD_HIGH))
    shown = "no reward" if reward is None else f"reward {reward:.6g}"
    interval = "" if low is None or high is None else f" ({low:.3g} to {high:.3g})"
    pinned = "" if best is None else f"; the best checkpoint is that of step {best}"
    return f"evaluation after step {record[Metric.STEP]}: {shown}{interval}{pinned}"


def in_use(path: Path) -> bool:
    """Returns whether a process holds the run's lock. Takes the lock only to test it."""
    try:
        with (path / ".lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def last_metrics(file: Path) -> dict[str, Any] | None:
    """Returns the last complete record of a metrics file; None if there is none."""
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
    for line in reversed(lines):
        try:
            record: dict[str, Any] = json.loads(line)
            return record
        except ValueError:  # incomplete: the process was killed while writing
            continue
    return None
