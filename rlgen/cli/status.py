"""Prints the state of a run, or of all runs of a folder: `rlgen status`, `rlgen runs`."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlgen.analysis.run import interval_of, tenths
from rlgen.cli.output import echo, page_for_terminal, plain_table
from rlgen.errors import EXIT_CODES, UsageError
from rlgen.metrics import Family, Metric
from rlgen.redact import printable
from rlgen.run.clock import as_clock, remaining
from rlgen.run.console import evaluation_line, number_text, step_line
from rlgen.run.directory import RunDirectory, in_use, json_line, pinned_step, read_records
from rlgen.run.find import find_run, holds_run, names_of_runs

FOLLOWS = 0.5  # seconds between two looks at a run that is followed
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
UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


def status_command(name: Path, as_json: bool, follow: bool = False) -> None:
    """Prints the state of a run; with `follow` each new step before, until the run ends. Raises UsageError if no run is there."""
    path = find_run(name)
    if follow:
        follow_steps(path, as_json)
    found = status_of(path)
    if as_json:
        echo(json.dumps(found, indent=None if follow else 2))
    elif follow:
        code = found["exit_code"]
        words = "" if code is None else f", exit code {code}: {EXIT_CODES.get(code, 'see `rlgen docs exit-codes`')}"
        echo("\n".join(filter(None, [f"{path}: {found['state']}{words}", found["message"]])))
    else:
        print_status(path, found)


def follow_steps(path: Path, as_json: bool) -> None:
    """Prints each new step of a run, which another process may be training, until that process ends."""
    known = {record[Metric.STEP] for record in read_records(path / "metrics.jsonl")}
    while True:
        alive, found = in_use(path), status_of(path)
        records = read_records(path / "metrics.jsonl")
        for place, record in enumerate(records, 1):
            step = record[Metric.STEP]
            if step in known:
                continue
            known.add(step)
            if as_json:
                echo(json_line(record).rstrip())
                continue
            if step:
                left = remaining(seconds_of(records[:place]), found["steps"] - step)
                echo(step_line(record, found["steps"], left))
            if Metric.EVAL_REWARD_MEAN in record:
                echo(evaluation_line(record, found["steps"]))
        if not alive:  # checked before the steps were read, so none is missed
            return
        time.sleep(FOLLOWS)


def print_status(path: Path, found: Mapping[str, Any]) -> None:
    said = f"exit code {found['exit_code']}" if found["exit_code"] is not None else f"process {found['pid']}"
    gone = None if found["time"] is None else time.time() - found["time"]
    ago = "at an unknown time" if gone is None else f"{abs(gone):.0f} s {'ago' if gone > -1 else 'ahead of the clock here'}"
    left = "" if found["remaining"] is None else f", {as_clock(found['remaining'])} left"
    echo(f"{path}: {found['state']} ({said}), step {found['step']} of {found['steps']}, last heard of {ago}{left}")
    if found["message"]:
        echo(found["message"])
    first, newest = found["trend"]["first"], found["trend"]["last"]
    if first is not None and newest is not None:
        echo(f"reward: {first:.6g} in the first tenth of the steps, {newest:.6g} in the last")
    if found["rewards"]:
        echo(f"rewards: {', '.join(f'{label} {number_text(value)}' for label, value in found['rewards'].items())}")
    last = found["last"] or {}
    for keys in SHOWN:
        if values := [f"{key} {last[key]:.6g}" for key in keys if last.get(key) is not None]:
            echo(", ".join(values))
    if (record := found["evaluation"]) is not None:
        reward, interval = record[Metric.EVAL_REWARD_MEAN], interval_of(record, Metric.EVAL_REWARD_MEAN)
        shown = "no reward" if reward is None else f"reward {reward:.6g}" + (f" ({interval})" if interval else "")
        pinned = found["best_checkpoint"]
        best = "" if pinned is None else f"; the best checkpoint is that of step {pinned}"
        echo(f"evaluation after step {record[Metric.STEP]}: {shown}{best}")
    for line in found["health"]:
        echo(f"health: {line}")


def status_of(path: Path) -> dict[str, Any]:
    """Returns `status.json`, and what follows from the run's other files:

    - `alive`: whether a process trains it
    - `last`: the last complete record of the metrics
    - `evaluation`: the last record with an evaluation
    - `best_checkpoint`: the step of the checkpoint that is pinned as the best
    - `remaining`: seconds that the rest may take; None if the run is not alive
    - `trend`: mean reward of the `first` and of the `last` tenth of the steps
    - `rewards`: the last mean of each reward by name

    A killed run cannot write how it ended, but the kernel releases its lock: `state` is then "killed". After a dry run it is
    "not started".
    """
    if not (path / "resolved.yaml").is_file():
        raise UsageError(f"{path} holds no run; name the folder of a run, run.dir/run.name of its recipe")
    alive = in_use(path)
    nothing = {"state": "starting", "step": 0, "steps": 0, "exit_code": None, "message": "", "pid": None, "time": None}
    found = {**nothing, "health": [], **RunDirectory.look(path)}
    if found["state"] in BEFORE_THE_END and not alive:
        killed = ("killed", "killed, or the machine went down; --resume goes on from the last checkpoint")
        never = ("not started", "`rlgen train --dry-run` has written its recipe; without --dry-run it starts")
        found["state"], found["message"] = killed if any((path / name).exists() for name in ("status.json", "logs")) else never
    records = read_records(path / "metrics.jsonl")
    evaluated = [record for record in records if Metric.EVAL_REWARD_MEAN in record]
    steps = [record for record in records if record[Metric.STEP]]
    newest = steps[-1] if steps else {}
    return {
        **found,
        "alive": alive,
        "last": records[-1] if records else None,
        "evaluation": evaluated[-1] if evaluated else None,
        "best_checkpoint": pinned_step(path),
        "remaining": remaining(seconds_of(records), found["steps"] - found["step"]) if alive else None,
        "trend": dict(zip(("first", "last"), tenths(steps), strict=True)),
        "rewards": {key.split("/", 1)[1].removesuffix("/mean"): newest[key] for key in Family.REWARD_MEAN.keys(newest)},
    }


def seconds_of(records: Sequence[Mapping[str, Any]]) -> list[float]:
    """Returns the seconds of each step, without the evaluation before step 1."""
    return [record[Metric.TIME_STEP] for record in records if record[Metric.STEP] and Metric.TIME_STEP in record]


def runs_command(folder: Path, as_json: bool) -> None:
    if holds_run(folder):
        raise UsageError(f"{folder} is a run; `rlgen status {folder}` prints its state")
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}; name the one that holds the runs, run.dir of their recipes")
    found = {name: status_of(folder / name) for name in names_of_runs(folder)}
    if as_json:
        echo(json.dumps([{"name": name, **one} for name, one in found.items()], indent=2))
        return
    if not found:
        echo(f"{folder} holds no run; next: rlgen recipes list")
        return
    table = plain_table(["run", "state"], ["step", "reward first", "last", "evaluation", "age"])
    for name, one in found.items():
        table.add_row(*map(printable, (name, one["state"], *columns(one))))
    with page_for_terminal(whole_lines=True) as page:
        page.print(table)


def columns(found: dict[str, Any]) -> tuple[str, ...]:
    """Returns the columns after the state: step of steps, mean reward of the first and last tenth, last evaluation, age."""
    values = (*found["trend"].values(), (found["evaluation"] or {}).get(Metric.EVAL_REWARD_MEAN))
    shown = ["" if value is None else f"{value:.3f}" for value in values]
    return (f"{found['step']}/{found['steps']}", *shown, "" if found["time"] is None else age(time.time() - found["time"]))


def age(seconds: float) -> str:
    """90 -> `1 min`; a clock that is ahead -> `0 s`"""
    unit, size = next((one for one in UNITS if seconds >= one[1]), UNITS[-1])
    return f"{max(0.0, seconds) // size:.0f} {unit}"
