"""Lists the runs of a folder: `rlgen runs`."""

import json
import time
from pathlib import Path
from typing import Any

from rlgen.cli.output import echo, echo_styled, page_for_terminal
from rlgen.cli.status import status_of
from rlgen.errors import UsageError
from rlgen.metrics import Metric
from rlgen.redact import printable
from rlgen.run.find import holds_run, names_of_runs

UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


def runs_command(folder: Path, as_json: bool) -> None:
    """Prints a line for each run in a folder, newest first: state, step, reward, evaluation, age."""
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
    from rich.table import Table

    table = Table("run", "state", box=None, pad_edge=False)
    for head in ("step", "reward first", "last", "evaluation", "age"):
        table.add_column(head, justify="right")
    for name, one in found.items():
        table.add_row(*map(printable, (name, one["state"], *columns(one))))
    page = page_for_terminal(whole_lines=True)
    page.print(table)
    echo_styled(page)


def columns(found: dict[str, Any]) -> tuple[str, ...]:
    """Returns the columns after the state: step of steps, mean reward of the first and last tenth, last evaluation, age."""
    trend, evaluation = found["trend"], found["evaluation"] or {}
    values = (trend["first"], trend["last"], evaluation.get(Metric.EVAL_REWARD_MEAN))
    return (
        f"{found['step']}/{found['steps']}",
        *("" if value is None else f"{value:.3f}" for value in values),
        "" if found["time"] is None else age(time.time() - found["time"]),
    )


def age(seconds: float) -> str:
    """90 -> `1 min`"""
    unit, size = next((one for one in UNITS if seconds >= one[1]), UNITS[-1])
    return f"{seconds // size:.0f} {unit}"
