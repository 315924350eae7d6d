"""Calls the callbacks of a program from the loop, so that they cannot change what is trained."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from rlgen.callbacks import Callback, StopTraining
from rlgen.errors import CodeError, RlgenError
from rlgen.processes import Processes
from rlgen.recipe import Recipe
from rlgen.rollout.parquet import arrow_table
from rlgen.run.rollouts import RolloutWriter
from rlgen.run.signals import StopRequest
from rlgen.run.state import random_tensors, set_random
from rlgen.trainers.collect import Collected, untrained
from rlgen.worker_pool.failures import described, user_line

LATER = ["policy_logp", "advantage", "trained"]  # columns that are not known before the update


@dataclass(frozen=True, slots=True, kw_only=True)
class Callbacks:
    """The callbacks of a run. All processes call each method; the main process alone runs the callbacks.

    Raises CodeError in all processes if a callback failed.
    """

    callbacks: Sequence[Callback]  # of the main process
    processes: Processes
    there: bool  # whether the main process has callbacks, the same in all processes

    @classmethod
    def of(cls, callbacks: Sequence[Callback], processes: Processes) -> "Callbacks":
        """This is a collective."""
        return cls(callbacks=callbacks, processes=processes, there=processes.on_main(lambda: bool(callbacks)))

    def start(self, run: Path, recipe: Recipe, stop: StopRequest) -> None:
        self._call("on_start", "before the first step", stop, lambda: (run, recipe))

    def rollouts(self, step: int, got: Collected, writer: RolloutWriter, stop: StopRequest) -> None:
        """Calls `on_rollouts`, with a table as in `rollouts/`, but without the columns that follow from the update."""

        def copied() -> tuple[int, pa.Table]:
            rollout = untrained(step, got.samples).in_order()
            table = arrow_table(rollout, slice(0, len(rollout.samples)), writer.texts(rollout.samples)[0])
            return step, table.drop_columns(LATER)

        self._call("on_rollouts", f"step {step}", stop, copied)

    def measured(self, point: Literal["on_update", "on_step"], step: int, metrics: Mapping[str, Any], stop: StopRequest) -> None:
        """Calls `on_update` or `on_step`, with a copy of the metrics."""
        self._call(point, f"step {step}", stop, lambda: (step, deepcopy(dict(metrics))))

    def end(self, error: BaseException | None) -> None:
        """Calls `on_end` in the main process, whatever the others do. An error of it is raised only if there is no other."""
        for callback in self.callbacks if self.processes.is_main else ():
            with suppress(CodeError) if error else nullcontext():
                called(callback, "on_end", "at the end", (error,))

    def _call(self, point: str, when: str, stop: StopRequest, arguments: Callable[[], tuple[Any, ...]]) -> None:
        def call_all() -> str:
            why = ""
            for callback in self.callbacks:
                if getattr(type(callback), point) is not getattr(Callback, point):
                    why = called(callback, point, when, arguments()) or why
            return why

        if self.there and (why := self.processes.on_main(call_all, keepalive=True)):
            stop.why = stop.why or why


def called(callback: Callback, point: str, when: str, arguments: tuple[Any, ...]) -> str:
    """Calls one method of a callback. Returns why it asks to stop; empty: it does not. Raises CodeError if it fails."""
    name, draws = f"{type(callback).__name__}.{point}", random_tensors()
    try:
        getattr(callback, point)(*arguments)
    except StopTraining as stops:
        return f"by {name}" + (f" ({described(stops).removeprefix('StopTraining: ')})" if str(stops) else "")
    except RlgenError:
        raise
    except Exception as error:  # user code may raise anything
        file = inspect.getsourcefile(type(callback))
        raise CodeError(
            f"{when}: callback {name} raised {described(error)} {user_line(error, file)}; mend it, and go on with resume"
        ) from error
    finally:
        set_random(draws)  # a callback that draws numbers changes none of the run's
    return ""
