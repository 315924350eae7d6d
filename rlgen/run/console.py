"""Prints the progress of a run: plain lines, or one JSON object a step. Opens the log.

The live view, and the choice of a console, are in `rlgen.run.live`. The loop knows `Console` alone: `step`, `evaluation`, `say`,
`answer`, `close`.
"""

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Literal, TextIO, TypeAlias

from rich.console import Console as RichConsole
from rich.console import ConsoleDimensions

from rlgen.errors import UsageError
from rlgen.files import LogFile
from rlgen.metrics import Family, Metric
from rlgen.redact import printable, redacted
from rlgen.run.clock import as_clock, remaining
from rlgen.run.directory import json_line

WIDTH = 80  # most characters of a step's line
OUTPUTS = (1, 2)  # descriptors of standard output and standard error

Progress: TypeAlias = Literal["auto", "live", "plain", "json"]
Record: TypeAlias = Mapping[str, Any]  # one object of metrics.jsonl


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A completion to be shown. Example(prompt="What is 1 + 1?", completion="2", reward=1.0)"""

    prompt: str
    completion: str
    reward: float | None


Examples: TypeAlias = Callable[[], Sequence[Example]]  # called only by a console that shows them


class Terminal(RichConsole):
    """Prints texts literally, without markup or control sequences. Failed writes to the stream do not end the run.

    With `notebook` it draws into a cell of the notebook that runs this program.
    """

    def __init__(self, quiet: bool, file: TextIO | None = None, notebook: bool = False) -> None:
        stream = file or sys.stdout
        wraps = bool(stream and stream.isatty())  # other programs get lines of any length
        super().__init__(
            soft_wrap=not wraps, highlight=False, markup=False, emoji=False, quiet=quiet, file=file, force_jupyter=notebook
        )

    @property  # type: ignore[misc]  # rich's can be set, too
    def size(self) -> ConsoleDimensions:
        """Returns columns and lines of the terminal that this console prints to, wherever descriptors 0 to 2 lead."""
        with suppress(OSError, ValueError, AttributeError):
            columns, lines = os.get_terminal_size(self.file.fileno())
            if self._width is None and columns and lines:
                return ConsoleDimensions(columns, lines)
        return super().size

    def say(self, text: str) -> None:
        try:
            self.print(printable(text))
        except OSError:  # the disk of `rlgen train … > file` is full
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        """Stops printing when the reader of the stream is gone (`rlgen train … | head -1`), so that the run goes on."""
        self.quiet = True
        hush(self.file)


def hush(stream: IO[str]) -> None:
    """Redirects a stream to the null device."""
    descriptor = os.open(os.devnull, os.O_WRONLY)
    os.dup2(descriptor, stream.fileno())
    os.close(descriptor)


def own_stream(stream: TextIO) -> TextIO:
    """Returns a stream that leads to where `stream` leads now, even if descriptors 1 and 2 lead elsewhere later."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError, AttributeError):  # no file: a notebook, a test
        return stream
    if descriptor not in OUTPUTS:
        return stream
    return open(os.dup(descriptor), "w", encoding=stream.encoding, errors="backslashreplace", buffering=1)


def release(stream: TextIO) -> None:
    """Closes a stream that `own_stream` opened; standard streams stay open."""
    if stream not in (sys.stdout, sys.stderr):
        with suppress(OSError):  # what it still holds cannot be written
            stream.close()


class Console(AbstractContextManager["Console"]):
    """Prints a run as plain lines. The record of a run is `metrics.jsonl`; a console is only a view of it.

    `quiet` prints nothing, as all processes but the main one. A `file` that `own_stream` opened is closed with the console.
    """

    def __init__(self, steps: int, quiet: bool = False, file: TextIO | None = None, notebook: bool = False) -> None:
        self.steps = steps
        self.file = file or sys.stdout
        self.terminal = Terminal(quiet, file, notebook)
        self.seconds: list[float] = []  # of the steps of this attempt

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends what is shown beside the lines. Nothing is printed any more."""
        release(self.file)

    def history(self, records: Iterable[Record]) -> None:
        """Takes note of the steps of earlier attempts."""

    def say(self, text: str) -> None:
        self.terminal.say(text)

    def evaluation(self, record: Record) -> None:
        """Prints the evaluation before step 1, from its object in metrics.jsonl."""
        self.say(evaluation_line(record, self.steps))

    def step(self, record: Record, examples: Examples) -> None:
        """Prints a step and its evaluation, from its object in metrics.jsonl. `examples` returns completions of the step."""
        self.seconds.append(record[Metric.TIME_STEP])
        self.say(step_line(record, self.steps, remaining(self.seconds, self.steps - record[Metric.STEP])))
        if Metric.EVAL_REWARD_MEAN in record:
            self.evaluation(record)

    def answer(self, text: str) -> None:
        """Prints a message from a signal handler. Bypasses all buffers, because the handler may interrupt any other print."""
        if self.terminal.quiet:
            return
        line = f"{printable(text)}\n"
        with suppress(OSError, ValueError, RuntimeError):  # RuntimeError: the stream is just being written to
            if self.file.isatty():
                line = f"\n{line}"  # after the terminal's ^C
            try:
                os.write(self.file.fileno(), line.encode(self.file.encoding, "backslashreplace"))
            except (AttributeError, ValueError):  # a stream without a descriptor
                self.file.write(line)


class JsonConsole(Console):
    """Prints the metrics of each step as one JSON object a line, as in metrics.jsonl, and messages to another stream."""

    def __init__(self, steps: int, quiet: bool, file: TextIO | None, messages: TextIO) -> None:
        super().__init__(steps, quiet, messages)
        self.output = file or sys.stdout
        self.objects = Terminal(quiet, file)

    def close(self) -> None:
        super().close()
        release(self.output)

    def evaluation(self, record: Record) -> None:
        self.objects.say(json_line(dict(record)).rstrip())

    def step(self, record: Record, examples: Examples) -> None:
        self.evaluation(record)


def check_progress(progress: Progress) -> None:
    """Raises UsageError if standard output cannot show what `--progress` asks for."""
    if progress == "live" and not takes_live_view(sys.stdout):
        raise UsageError(
            "--progress live needs a terminal with cursor control and UTF-8, or a notebook with ipywidgets; leave the option out,"
            " or set it to plain"
        )


def takes_live_view(stream: TextIO) -> bool:
    """Returns whether a stream is a notebook's, or a terminal that can move its cursor and show block characters."""
    if in_notebook():
        return True
    able = os.environ.get("TERM", "dumb").lower() not in ("dumb", "unknown")
    return able and stream.isatty() and (stream.encoding or "").lower().replace("-", "") == "utf8"


def in_notebook() -> bool:
    """Returns whether a notebook runs this program, and has ipywidgets to draw with."""
    return RichConsole().is_jupyter and find_spec("ipywidgets") is not None


def evaluation_line(record: Record, steps: int) -> str:
    """Returns `eval  12/100  reward 0.531 (0.480 to 0.582)  pass@1 0.500  length 12.3`; the interval is of 95 %."""
    low, high = (record.get(metric) for metric in (Metric.EVAL_REWARD_LOW, Metric.EVAL_REWARD_HIGH))
    interval = "" if low is None or high is None else f" ({low:.3f} to {high:.3f})"
    return (
        f"eval {record[Metric.STEP]:>{len(str(steps))}}/{steps}"
        f"  reward {number_text(record[Metric.EVAL_REWARD_MEAN])}{interval}"
        f"  pass@1 {number_text(record.get(Family.EVAL_PASS.of('1')))}"
        f"  length {number_text(record.get(Metric.EVAL_MEAN_TOKENS), '.1f')}"
    )


def step_line(record: Record, steps: int, left: float | None = None) -> str:
    """Returns `step  12/100  reward 0.531 ±0.50  loss -0.0123  Δ 1e-6  803 tok/s  left 3h20m`, of at most `WIDTH` characters.

    If the line would be longer, its last parts are left out, but not the time.
    """
    time = "" if left is None else f"  left {as_clock(left)}"
    line = f"step {record[Metric.STEP]:>{len(str(steps))}}/{steps}"
    for part in (
        f"reward {number_text(record.get(Metric.REWARD_MEAN))} ±{number_text(record.get(Metric.REWARD_STD), '.2f')}",
        f"loss {number_text(record.get(Metric.LOSS), '+.4f')}",
        f"Δ {number_text(record.get(Metric.SAMPLER_DELTA_MAX), '.0e').replace('e-0', 'e-')}",
        f"{in_thousands(tokens_per_second(record))} tok/s",
    ):
        if len(line) + len(part) + 2 + len(time) <= WIDTH:
            line += f"  {part}"
    return line + time


def tokens_per_second(record: Record) -> float | None:
    """Returns the tokens sampled in each second of a step."""
    tokens, seconds = record.get(Metric.TOKENS_GENERATED), record.get(Metric.TIME_STEP)
    return tokens / seconds if tokens is not None and seconds else None


def in_thousands(value: float | None) -> str:
    """Returns a number of at most four characters: "803", "1.2k", "12k", "3.4M"."""
    if value is None or value < 999.5:
        return number_text(value, ".0f")
    scaled, unit = (value / 1e6, "M") if value >= 999_500 else (value / 1e3, "k")
    return f"{scaled:.1f}{unit}" if scaled < 9.95 else f"{scaled:.0f}{unit}"


def number_text(value: float | None, form: str = ".3f") -> str:
    return "–" if value is None else format(value, form)


class Redacting(logging.Formatter):
    """Formats log lines with secrets removed.

    A filter on the root logger would not see tracebacks, nor records that other loggers pass to its handlers.
    """

    def format(self, record: logging.LogRecord) -> str:
        return redacted(super().format(record))


def log_to(path: Path) -> None:
    """Redirects logs and warnings of libraries from the screen to the file at `path`."""
    handler = LogFile(path, encoding="utf-8")
    handler.setFormatter(Redacting("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old, logging.FileHandler)]:
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    warnings.simplefilter("default")
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()
