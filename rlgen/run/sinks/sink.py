"""Passes records to one tracker: a bounded queue, a thread that empties it, and the process that holds the tracker's library."""

import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Condition, Thread
from typing import Any

from rlgen.errors import redacted
from rlgen.files import read_json, write_json

ROOM = 1000  # records that may wait
ANSWER = 120.0  # seconds that the library may take for one record, or for its start
# The process has the trainer's sys.path; -P keeps the working directory out of it, where a folder `wandb` may be.
START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from rlgen.run.sinks.worker import main; main()"
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
class Sink:
    """One tracker, as the run sees it. `put` never blocks and never raises."""

    kind: str
    opening: Mapping[str, Any]  # the first order, see worker.py; the id of the run is filled in
    memory: Path  # file with the id that the tracker gave to the run
    say: Callable[[str], None]  # receives warnings
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
                kill(process)
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
                kill(self._process)

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
        assert self._process is not None and self._process.stdin is not None
        with suppress(OSError):  # it has ended, which shows below
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        found = read_line(self._process, self.answer)
        if "error" in found:
            logging.getLogger("rlgen").warning("sink %s: %s", self.kind, found["traceback"])
            raise SinkFailed(f"{found['error'][:300]} (see logs/rlgen.log)")
        return found


def read_line(process: "subprocess.Popen[bytes]", seconds: float) -> dict[str, Any]:
    """Returns the next answer of a process. Raises SinkFailed if it ends, or takes longer than `seconds`."""
    assert process.stdout is not None
    text, deadline = b"", time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not text.endswith(b"\n"):
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise SinkFailed(f"its library has not answered for {seconds:g} s: check the connection to the tracker")
            if not (part := os.read(process.stdout.fileno(), 1 << 16)):
                raise SinkFailed("its process has died, perhaps because memory ran out")
            text += part
    answer: dict[str, Any] = json.loads(text)
    return answer


def kill(process: "subprocess.Popen[bytes]") -> None:
    """Kills a process with everything that it started, and waits for its end. Does nothing if this was done before."""
    if process.returncode is None:  # until it is waited for, its number is no other process's
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
