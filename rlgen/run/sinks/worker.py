"""Runs one tracker in a process of its own: takes orders from standard input, one JSON object a line, and answers each.

The library is imported only here. So it shares neither memory, locks, signals, environment nor screen with the run, and can be
killed when it hangs. torch is not imported.
"""

import importlib
import json
import os
import traceback
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import TypeAdapter

from rlgen.errors import CheckpointError
from rlgen.recipe.sinks import SinkRecipe
from rlgen.rollout.read import read_rollouts
from rlgen.run.sinks.tracker import Opening, Table, Tracker

INTERRUPTED = 70  # exit code that a tracker gets if the run was killed
LONGEST_TEXT = 10_000  # characters of a prompt or a completion that are sent
COLUMNS = ("prompt", "completion", "finish_reason", "rewards", "reward", "advantage")


def read_table(path: Path, most: int) -> Table | None:
    """Returns at most `most` samples of a step, evenly from all of them; None if rollouts.keep has deleted them meanwhile."""
    try:
        found = read_rollouts(path, columns=COLUMNS)
    except CheckpointError:
        return None
    count = len(found)
    rows = found.take(pa.array([place * count // most for place in range(most)] if count > most else range(count), pa.int64()))
    columns: dict[str, list[Any]] = {}
    for name in rows.column_names:
        values = rows[name].to_pylist()
        if name == "rewards":
            columns |= {f"reward/{label}": [row[label] for row in values] for label in (values[0] if values else ())}
        else:
            columns[name] = [cut_off(value) if isinstance(value, str) else value for value in values]
    return Table(columns=list(columns), rows=[list(row) for row in zip(*columns.values(), strict=True)])


def cut_off(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 1]}…"


def open_tracker(settings: dict[str, Any], opening: Opening) -> Tracker:
    sink: SinkRecipe = TypeAdapter[SinkRecipe](SinkRecipe).validate_python(settings)
    module = importlib.import_module(f"rlgen.run.sinks.{sink.kind}")
    return getattr(module, f"{sink.kind.capitalize()}Tracker")(sink, opening)


def carry_out(tracker: Tracker, order: dict[str, Any]) -> None:
    match order["what"]:
        case "metrics":
            tracker.metrics(order["step"], order["numbers"])
        case "samples":
            table = read_table(Path(order["path"]), order["most"])
            if table is not None and table.rows:
                tracker.samples(order["step"], table)
        case "end":
            tracker.end(order["state"], order["exit_code"])


def run_tracker() -> None:
    """Opens a tracker by the first line of standard input, and carries out the other lines, up to the order to end.

    If the input ends without that order, the run was killed.
    """
    orders = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    with open(os.devnull, "r+") as nothing:  # what libraries ask and print
        for descriptor in (0, 1):
            os.dup2(nothing.fileno(), descriptor)
    tracker, order = None, {"what": ""}
    try:
        for line in orders:
            order = json.loads(line)
            if tracker is None:
                tracker = open_tracker(order["settings"], Opening(**order["opening"]))
            else:
                carry_out(tracker, order)
            print(json.dumps({"id": tracker.id}), file=answers)
            if order["what"] == "end":
                break
        if tracker is not None and order["what"] != "end":
            tracker.end("failed", INTERRUPTED)
    except Exception as error:
        words = " ".join(f"{type(error).__name__}: {error}".split())
        print(json.dumps({"error": words, "traceback": traceback.format_exc()}), file=answers)
    os._exit(0)  # without the exit hooks of the library, which may wait for ever
