"""What a person sees: a progress display on a terminal, one plain line a step elsewhere."""

import os
import sys
from typing import IO, Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rlgen.redact import printable


class Terminal(RichConsole):
    """Prints texts as they are: no markup, nothing that a terminal would obey. Where nobody can read them nothing ends."""

    def __init__(self, quiet: bool) -> None:
        super().__init__(soft_wrap=True, highlight=False, markup=False, emoji=False, quiet=quiet)

    def say(self, text: str) -> None:
        """One line, or several."""
        try:
            self.print(printable(text))
        except OSError:  # the disk of `rlgen train … > file` is full
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        """`rlgen train … | head -1`: the run goes on."""
        self.quiet = True
        hush(sys.stdout)


def hush(stream: IO[str]) -> None:
    """From here on what is written goes nowhere."""
    descriptor = os.open(os.devnull, os.O_WRONLY)
    os.dup2(descriptor, stream.fileno())
    os.close(descriptor)


class Console:
    """Prints to standard output, unless it is `quiet`. `metrics.jsonl` is the record; this is a view of it."""

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
        """One line."""
        self._console.say(text)

    def step(self, record: dict[str, Any]) -> None:
        """The line of one step, from its object in metrics.jsonl."""
        self.say(step_line(record, self._steps))
        if self._progress:
            self._progress.update(self._task, completed=record["step"], description=f"reward {_number(record['reward/mean'])}")


def step_line(record: dict[str, Any], steps: int) -> str:
    """`step  12/100  reward 0.531 ±0.50  loss -0.0123  Δ 1.2e-06  12.3 tokens  ...`"""
    width = len(str(steps))
    speed = record["tokens/generated"] / record["time/step"]
    return (
        f"step {record['step']:>{width}}/{steps}  reward {_number(record['reward/mean'])} ±{_number(record['reward/std'])}"
        f"  loss {_number(record['loss'], '+.4f')}  grad {_number(record['grad_norm'])}"
        f"  Δ {_number(record.get('sampler/delta_max'), '.1e')}  length {_number(record['completions/mean_tokens'], '.1f')}"
        f"  {speed:.0f} tok/s  {record['time/step']:.2f} s"
    )


def _number(value: float | None, form: str = ".3f") -> str:
    return "–" if value is None else format(value, form)
