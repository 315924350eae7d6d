"""Prints the progress of a run: a progress bar on a terminal, one plain line per step elsewhere."""

import os
import sys
from typing import IO, Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rlgen.metrics import Family, Metric
from rlgen.redact import printable


class Terminal(RichConsole):
    """Prints texts literally, without markup or control sequences. Failed writes to standard output do not end the run."""

    def __init__(self, quiet: bool) -> None:
        super().__init__(soft_wrap=True, highlight=False, markup=False, emoji=False, quiet=quiet)

    def say(self, text: str) -> None:
        """Prints one line, or several."""
        try:
            self.print(printable(text))
        except OSError:  # the disk of `rlgen train … > file` is full
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        """Stops printing when the reader of standard output is gone (`rlgen train … | head -1`), so that the run goes on."""
        self.quiet = True
        hush(sys.stdout)


def hush(stream: IO[str]) -> None:
    """Redirects a stream to the null device."""
    descriptor = os.open(os.devnull, os.O_WRONLY)
    os.dup2(descriptor, stream.fileno())
    os.close(descriptor)


class Console:
    """Prints to standard output, unless `quiet`. The record of a run is `metrics.jsonl`; this is only a view of it."""

    def __init__(self, steps: int, done: int, quiet: bool) -> None:
        self._steps = steps
        self._console = Terminal(quiet)
        self._progress: Progress | None = None
        if not quiet and self._console.is_terminal and not self._console.is_dumb_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
            )
            self._task = self._progress.add_task("starting", total=steps, completed=done)

    def __enter__(self) -> "Console":
        if self._progress:
            self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._progress:
            self._progress.stop()

    def say(self, text: str) -> None:
        """Prints one line."""
        self._console.say(text)

    def evaluation(self, record: dict[str, Any]) -> None:
        """Prints the line of one evaluation, from its object in metrics.jsonl."""
        self.say(evaluation_line(record, self._steps))

    def step(self, record: dict[str, Any]) -> None:
        """Prints the line of one step, from its object in metrics.jsonl, and advances the progress bar."""
        self.say(step_line(record, self._steps))
        if self._progress:
            self._progress.update(
                self._task, completed=record[Metric.STEP], description=f"reward {_number(record[Metric.REWARD_MEAN])}"
            )


def evaluation_line(record: dict[str, Any], steps: int) -> str:
    """Returns `eval  12/100  reward 0.531 (0.480 to 0.582)  pass@1 0.500  length 12.3`; the interval is of 95 %."""
    low, high = (record.get(metric) for metric in (Metric.EVAL_REWARD_LOW, Metric.EVAL_REWARD_HIGH))
    interval = "" if low is None or high is None else f" ({low:.3f} to {high:.3f})"
    return (
        f"eval {record[Metric.STEP]:>{len(str(steps))}}/{steps}"
        f"  reward {_number(record[Metric.EVAL_REWARD_MEAN])}{interval}"
        f"  pass@1 {_number(record.get(Family.EVAL_PASS.of('1')))}"
        f"  length {_number(record[Metric.EVAL_MEAN_TOKENS], '.1f')}"
    )


def step_line(record: dict[str, Any], steps: int) -> str:
    """Returns `step  12/100  reward 0.531 ±0.50  loss -0.0123  Δ 1.2e-06  12.3 tokens  ...`."""

    def shown(metric: Metric, form: str = ".3f") -> str:
        return _number(record.get(metric), form)

    speed = record[Metric.TOKENS_GENERATED] / record[Metric.TIME_STEP]
    return (
        f"step {record[Metric.STEP]:>{len(str(steps))}}/{steps}"
        f"  reward {shown(Metric.REWARD_MEAN)} ±{shown(Metric.REWARD_STD)}"
        f"  loss {shown(Metric.LOSS, '+.4f')}  grad {shown(Metric.GRAD_NORM)}"
        f"  Δ {shown(Metric.SAMPLER_DELTA_MAX, '.1e')}  length {shown(Metric.COMPLETIONS_MEAN_TOKENS, '.1f')}"
        f"  {speed:.0f} tok/s  {record[Metric.TIME_STEP]:.2f} s"
    )


def _number(value: float | None, form: str = ".3f") -> str:
    return "–" if value is None else format(value, form)
