"""trackio. Its functions never raise: they report failures as Python warnings, which become errors here."""

import html
import warnings
from typing import Any

import trackio

from rlgen.recipe.sinks import TrackioSink
from rlgen.run.sinks.tracker import Numbers, Opening, Table

LEVELS = {"done": trackio.AlertLevel.INFO, "stopped": trackio.AlertLevel.WARN, "failed": trackio.AlertLevel.ERROR}


class TrackioTracker:
    def __init__(self, sink: TrackioSink, opening: Opening) -> None:
        self.failures: list[str] = []
        warnings.showwarning = self._heard  # type: ignore[assignment]  # its other arguments are not needed
        self.run = trackio.init(
            project=sink.project,
            name=opening.name,
            space_id=sink.space_id,
            config=opening.config,
            resume="must" if opening.id else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self.id = str(self.run.id)
        if opening.id not in (None, self.id):
            raise RuntimeError(
                f"project {sink.project} has a newer run called {opening.name}, which is not this one; set another `name` for"
                " this sink"
            )

    def _heard(self, message: Warning | str, category: type[Warning], *_: Any) -> None:
        if issubclass(category, UserWarning):  # deprecations are no failures
            self.failures.append(str(message))

    def _raise(self) -> None:
        if self.failures:
            raise RuntimeError(self.failures[0])

    def metrics(self, step: int, numbers: Numbers) -> None:
        self.run.log(dict(numbers), step=step)
        self._raise()

    def samples(self, step: int, table: Table) -> None:
        """Logs a table under the key `samples`. What the model wrote is escaped: trackio shows cells as HTML."""
        rows = [[html.escape(cell, quote=False) if isinstance(cell, str) else cell for cell in row] for row in table.rows]
        self.run.log({"samples": trackio.Table(columns=table.columns, data=rows)}, step=step)
        self._raise()

    def end(self, state: str, exit_code: int) -> None:
        """Reports the state as an alert, because a run of trackio has no state, and sends what is queued."""
        self.run.alert(title=state, text=f"exit code {exit_code}", level=LEVELS[state])
        self.run.finish()
        self._raise()
