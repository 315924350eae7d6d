"""Opens the sinks of a recipe, and passes them the records of a run."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from rlgen.errors import SetupError, Stopped
from rlgen.files import written
from rlgen.metrics import Metric
from rlgen.recipe import Recipe
from rlgen.recipe.load import effective
from rlgen.run.directory import RunDirectory, ended_as
from rlgen.run.sinks.sink import Sink

PATIENCE = 30.0  # seconds that the end of a run waits for its sinks
HURRY = 10.0  # the same, for a run that was asked to stop and may be killed soon


@dataclass(frozen=True, slots=True)
class Sinks:
    """The sinks of a run. They are open inside a `with` block, whose end tells them how the run has ended."""

    steps: int  # of the run
    sinks: Sequence[tuple[Sink, int, int]] = ()  # with `every` and `samples`; none in other processes than the main one

    def metrics(self, record: Mapping[str, Any]) -> None:
        """Sends an object of metrics.jsonl, as far as it is due."""
        step = record[Metric.STEP]
        for sink, every, _ in self.sinks:
            if self._due(step, every) or Metric.EVAL_REWARD_MEAN in record:
                sink.put({"what": "metrics", "step": step, "numbers": numbers_of(record)})

    def samples(self, step: int, path: Path) -> None:
        """Sends some of the rows of a step's rollouts, which are on disk, as far as they are due."""
        for sink, every, most in self.sinks:
            if most and self._due(step, every):
                sink.put({"what": "samples", "step": step, "path": str(path), "most": most})

    def _due(self, step: int, every: int) -> bool:
        return step % every == 0 or step == self.steps

    def __enter__(self) -> "Sinks":
        for sink, _, _ in self.sinks:
            sink.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        state, code = ended_as(error)
        for sink, _, _ in self.sinks:
            sink.put({"what": "end", "state": state, "exit_code": code})
        patience = HURRY if isinstance(error, Stopped) else 0.0 if isinstance(error, KeyboardInterrupt) else PATIENCE
        deadline = time.monotonic() + patience
        for sink, _, _ in self.sinks:
            try:
                sink.wait(deadline - time.monotonic())
            except KeyboardInterrupt:  # of somebody who does not want to wait; the run itself has ended
                deadline = 0.0
                sink.wait(0.0)


def open_sinks(recipe: Recipe, directory: RunDirectory, step: int, say: Callable[[str], None]) -> Sinks:
    """Returns the sinks of a run, to be entered. Call it in the main process, when provenance.json has this attempt."""
    if not recipe.sinks:
        return Sinks(recipe.run.steps)
    folder = directory.path.resolve() / "sinks"
    with written(folder):
        folder.mkdir(exist_ok=True)
    config = {"recipe": effective(recipe), "provenance": directory.attempts(directory.path)[-1]}
    found = []
    for sink in recipe.sinks:
        opening = {"name": sink.name or recipe.run.name, "folder": str(folder), "step": step, "config": config}
        order = {"what": "open", "settings": sink.model_dump(mode="json"), "opening": opening}
        opened = Sink(kind=sink.kind, opening=order, memory=folder / f"{sink.kind}.json", say=say)
        found.append((opened, sink.every, sink.samples))
    return Sinks(recipe.run.steps, found)


def numbers_of(record: Mapping[str, Any]) -> dict[str, float | int]:
    """Returns the numbers of an object of metrics.jsonl, without its step: all that trackers take. true becomes 1."""
    return {
        key: int(value) if isinstance(value, bool) else value
        for key, value in record.items()
        if key != "step" and isinstance(value, int | float) and math.isfinite(value)
    }


def check_libraries(recipe: Recipe) -> None:
    """Raises SetupError if the library of a sink is not installed. Imports none of them."""
    # A folder of that name, such as wandb writes into the working directory, is found, too; it has no origin.
    missing = [sink.kind for sink in recipe.sinks if (spec := find_spec(sink.kind)) is None or spec.origin is None]
    if missing:
        raise SetupError(
            f'sinks: {" and ".join(missing)} cannot be imported; `pip install "rlgen[{",".join(missing)}]"`, or remove it from'
            " the recipe"
        )
