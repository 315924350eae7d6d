"""Passes the records of a run to its trackers: for each a queue, a thread that empties it, and a process with the library."""

import json
import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from threading import Condition, Thread, Timer
from types import TracebackType
from typing import Any

from rlgen.errors import SetupError, Stopped, redacted
from rlgen.files import read_json, write_json, written
from rlgen.metrics import Metric
from rlgen.recipe import Recipe
from rlgen.recipe.load import effective
from rlgen.run.directory import RunDirectory, ended_as

PATIENCE = 30.0  # seconds that the end of a run waits for its sinks
HURRY = 10.0  # the same, for a run that was asked to stop and may be killed soon
ROOM = 1000  # records that may wait
ANSWER = 120.0  # seconds that the library may take for one record, or for its start
# The process has the trainer's sys.path; -P keeps the working directory out of it, where a folder `wandb` may be.
START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from rlgen.run.sinks.worker import run_tracker; run_tracker()"
# Turns off the telemetry of the libraries. No sink needs a GPU.
ENVIRONMENT = {
    "DO_NOT_TRACK": "true",
    "WANDB_ERROR_REPORTING": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ALLOW_FILE_STORE": "true",  # a folder as store, which MLflow accepts only if this is set
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "GRADIO_ANALYTICS_ENABLED": "False",
    "CUDA_VISIBLE_DEVICES": "",
}


class SinkFailed(Exception):
    """Raised in the thread of a sink when its tracker cannot go on."""


@dataclass(slots=True, kw_only=True)
class Outlet:
    """One tracker, as the run sees it. `put` never blocks and never raises."""

    kind: str
    opening: Mapping[str, Any]  # the first order, see worker.py; the id of the run is filled in
    memory: Path  # file with the id that the tracker gave to the run
    say: Callable[[str], None]  # receives warnings
    every: int = 1  # steps between two that are sent
    samples: int = 0  # samples of a step that are sent
    answer: float = field(default_factory=lambda: ANSWER)  # seconds
    off: bool = False  # true: it has failed or ended, and takes nothing more
    dropped: int = 0  # records for which there was no room
    _records: deque[dict[str, Any]] = field(default_factory=deque)
    _changed: Condition = field(default_factory=Condition)
    _thread: Thread | None = None
    _process: "subprocess.Popen[bytes] | None" = None

    def start(self) -> None:
        self._thread = Thread(target=self._run, name=f"sink-{self.kind}", daemon=True)
        self._thread.start()

    def put(self, record: dict[str, Any]) -> None:
        """Queues a record. Where there is no room, the oldest table of samples is dropped, or the oldest record."""
        with self._changed:
            if self.off:
                return
            if full := len(self._records) >= ROOM:
                tables = (place for place, waiting in enumerate(self._records) if waiting["what"] == "samples")
                del self._records[next(tables, 0)]
                self.dropped += 1
            self._records.append(record)
            self._changed.notify()
        if full and self.dropped == 1:
            self.warn("is slower than the run: the oldest tables of samples are dropped, then the oldest metrics")

    def wait(self, seconds: float) -> None:
        """Waits for the tracker to have what was queued, at most `seconds`, and ends its process."""
        if self._thread is None:
            return
        self._thread.join(max(0.0, seconds))
        if self._thread.is_alive():
            with self._changed:
                self.off, process = True, self._process
                self._changed.notify()
            self.warn("has not sent everything in time, and the run no longer waits: check the connection to the tracker")
            if process is not None:
                kill_family(process)
        if self.dropped:
            logging.getLogger("rlgen").warning("sink %s: %d records were not sent", self.kind, self.dropped)

    def warn(self, what: str) -> None:
        said = redacted(f"warning: sink {self.kind} {what}; metrics.jsonl and rollouts/ have everything")
        logging.getLogger("rlgen").warning(said)
        self.say(said)

    def _run(self) -> None:
        """Opens the tracker and passes it every record up to the end. Runs in the thread."""
        try:
            self._open()
            what = "open"
            while what != "end":
                with self._changed:
                    self._changed.wait_for(lambda: self._records or self.off)
                    if self.off:
                        break
                    record = self._records.popleft()
                self._tell(record)
                what = record["what"]
        except Exception as error:  # nothing that happens here may reach the run
            with self._changed:
                waited_for, self.off = not self.off, True
                self._records.clear()
            if waited_for:
                self.warn(f"is off until the run is resumed: {' '.join(str(error).split())}")
        finally:
            self.off = True
            if self._process is not None:
                kill_family(self._process)

    def _open(self) -> None:
        """Starts the process, opens the run in the tracker, and remembers its id."""
        known = read_json(self.memory)["id"] if self.memory.exists() else None
        opening = {**self.opening["opening"], "id": known}
        process = subprocess.Popen(
            [sys.executable, "-uP", "-c", START, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **ENVIRONMENT},
            start_new_session=True,  # Ctrl-C reaches only the run, and killpg everything that the library starts
        )
        with self._changed:
            self._process, gone = process, self.off
        if gone:
            raise SinkFailed("the run has ended")
        given = self._tell({**self.opening, "opening": opening})["id"]
        if given != known:
            write_json(self.memory, {"id": given})

    def _tell(self, order: dict[str, Any]) -> dict[str, Any]:
        """Sends one order and returns the answer. Raises SinkFailed if there is none, or an error."""
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        began, late = time.monotonic(), Timer(self.answer, kill_family, [self._process])
        late.daemon = True
        late.start()
        try:
            with suppress(OSError):  # it has ended, which shows below
                self._process.stdin.write(json.dumps(order).encode() + b"\n")
                self._process.stdin.flush()
            text = self._process.stdout.readline()
        finally:
            late.cancel()
        if not text and time.monotonic() - began >= self.answer:
            raise SinkFailed(f"its library has not answered for {self.answer:g} s: check the connection to the tracker")
        if not text.endswith(b"\n"):
            raise SinkFailed("its process has died, perhaps because memory ran out")
        found: dict[str, Any] = json.loads(text)
        if "error" in found:
            logging.getLogger("rlgen").warning("sink %s: %s", self.kind, found["traceback"])
            raise SinkFailed(f"{found['error'][:300]} (see logs/rlgen.log)")
        return found


def kill_family(process: "subprocess.Popen[bytes]") -> None:
    """Kills a process with everything that it started, and waits for its end. Does nothing if this was done before."""
    if process.returncode is None:  # until it is waited for, its number is no other process's
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@dataclass(frozen=True, slots=True)
class Sinks:
    """The sinks of a run. They are open inside a `with` block, whose end tells them how the run has ended."""

    steps: int  # of the run
    sinks: Sequence[Outlet] = ()  # none in other processes than the main one

    def metrics(self, record: Mapping[str, Any]) -> None:
        """Sends an object of metrics.jsonl, as far as it is due."""
        step = record[Metric.STEP]
        for sink in self.sinks:
            if self._due(step, sink) or Metric.EVAL_REWARD_MEAN in record:
                sink.put({"what": "metrics", "step": step, "numbers": numbers_of(record)})

    def samples(self, step: int, path: Path) -> None:
        """Sends some of the rows of a step's rollouts, which are on disk, as far as they are due."""
        for sink in self.sinks:
            if sink.samples and self._due(step, sink):
                sink.put({"what": "samples", "step": step, "path": str(path), "most": sink.samples})

    def _due(self, step: int, sink: Outlet) -> bool:
        return step % sink.every == 0 or step == self.steps

    def __enter__(self) -> "Sinks":
        for sink in self.sinks:
            sink.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        state, code = ended_as(error)
        for sink in self.sinks:
            sink.put({"what": "end", "state": state, "exit_code": code})
        patience = HURRY if isinstance(error, Stopped) else 0.0 if isinstance(error, KeyboardInterrupt) else PATIENCE
        deadline = time.monotonic() + patience
        for sink in self.sinks:
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
        memory = folder / f"{sink.kind}.json"
        found.append(Outlet(kind=sink.kind, opening=order, memory=memory, say=say, every=sink.every, samples=sink.samples))
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
