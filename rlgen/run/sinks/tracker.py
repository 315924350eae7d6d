"""What every tracker is: the methods that its process calls, and what it gets."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

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

    columns: list[str]
    rows: list[list[str | float | None]]


class Tracker(Protocol):
    """One run in a tracker. Every method may raise whatever the library raises."""

    id: str  # what the tracker needs to resume this run

    def metrics(self, step: int, numbers: Numbers) -> None:
        """Sends the metrics of a step."""

    def samples(self, step: int, table: Table) -> None:
        """Sends samples of a step."""

    def end(self, state: str, exit_code: int) -> None:
        """Ends the run in the tracker, and returns when everything is sent. `state`: done, stopped or failed."""
