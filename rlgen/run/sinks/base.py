"""The records that a tracker gets, and its methods. Needs neither torch nor the library of a tracker."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from rlgen.errors import CheckpointError
from rlgen.rollout.read import read_rollouts

LONGEST_TEXT = 10_000  # characters of a prompt or a completion that are sent
COLUMNS = ("prompt", "completion", "finish_reason", "rewards", "reward", "advantage")

Numbers = Mapping[str, float | int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """The first record that a tracker gets. Opening(name="demo", folder="runs/demo/sinks", id=None, step=0, config={…})"""

    name: str  # of the run in the tracker
    folder: str  # in the run's folder, for files of trackers
    id: str | None  # given by the tracker to an earlier attempt of the run; None: there was none
    step: int  # after which this attempt starts
    config: dict[str, Any]  # {"recipe": …, "provenance": …}


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Some samples of a step, as cells of texts and numbers. Table(columns=["prompt", …], rows=[["1 + 1", …], …])"""

    columns: Sequence[str]
    rows: Sequence[Sequence[str | float | None]]


class Tracker(Protocol):
    """One run in a tracker. Every method may raise whatever the library raises."""

    id: str  # what the tracker needs to resume this run

    def metrics(self, step: int, numbers: Numbers) -> None:
        """Sends the metrics of a step."""

    def samples(self, step: int, table: Table) -> None:
        """Sends samples of a step."""

    def end(self, state: str, exit_code: int) -> None:
        """Ends the run in the tracker, and returns when everything is sent. `state`: done, stopped or failed."""


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
            columns[name] = [shortened(value) if isinstance(value, str) else value for value in values]
    return Table(columns=list(columns), rows=[list(row) for row in zip(*columns.values(), strict=True)])


def shortened(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 1]}…"
