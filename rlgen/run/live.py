"""Shows a run on a terminal while it trains: step, time left, the curve of the reward, health, and completions of the last step.

Messages and evaluations scroll above the view. Control characters in what a model wrote are escaped.
"""

import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple, TextIO

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from rlgen.metrics import Family, Metric
from rlgen.recipe import Recipe
from rlgen.redact import printable
from rlgen.run.clock import as_clock, remaining
from rlgen.run.console import (
    Console,
    Example,
    Examples,
    JsonConsole,
    Progress,
    Record,
    evaluation_line,
    in_notebook,
    in_thousands,
    number_text,
    own_stream,
    takes_live_view,
    tokens_per_second,
)
from rlgen.run.health import Measured, clipped, ref_kl, rules_of, value_in

REFRESHES = 2  # a second
BLOCKS = "▁▂▃▄▅▆▇█"
CURVE = 4  # lines of the curve
LABEL = 14  # characters of the column of names
SAMPLES = 17  # lines of a terminal that has room for completions, too
WELL, DOUBTFUL, BAD, DIM = "green", "yellow", "bold red", "dim"


class Cell(NamedTuple):
    """One number of the view. Cell("entropy", Metric.ENTROPY, ".3f", "entropy")"""

    label: str
    of: Metric | Measured
    form: str
    rule: str = ""  # of `health`, which says whether the number is well


def share_of_step(metric: Metric) -> Measured:
    whole = Metric.TIME_STEP
    return lambda record: record[metric] / record[whole] if record.get(metric) and record.get(whole) else None


# The four groups. A line shows the cells that fit; bad ones come first.
GROUPS: dict[str, tuple[Cell, ...]] = {
    "learning": (
        Cell("reward", Metric.REWARD_MEAN, ".3f", "reward"),
        Cell("±", Metric.REWARD_STD, ".3f", "reward_std"),
        Cell("equal groups", Metric.GROUPS_ZERO_STD, ".0%", "zero_std"),
        Cell("tokens", Metric.COMPLETIONS_MEAN_TOKENS, ".0f", "length"),
        Cell("cut off", Metric.COMPLETIONS_TRUNCATED, ".0%", "truncated"),
        Cell("failed", lambda record: sum(record[key] for key in Family.REWARD_FAILED.keys(record)), "d", "reward_failed"),
    ),
    "stability": (
        Cell("gradient", Metric.GRAD_NORM, ".3f", "grad_norm"),
        Cell("entropy", Metric.ENTROPY, ".3f", "entropy"),
        Cell("clipped", clipped, ".1%", "clipped"),
        Cell("KL", ref_kl, ".2g", "ref_kl"),
        Cell("updates", Metric.UPDATES_DONE, "d", "no_update"),
        Cell("loss", Metric.LOSS, "+.4f"),
    ),
    "agreement": (
        Cell("Δ mean", Metric.SAMPLER_DELTA_MEAN, ".1e", "sampler_delta"),
        Cell("max", Metric.SAMPLER_DELTA_MAX, ".1e"),
        Cell("KL", Metric.SAMPLER_KL, ".1e", "sampler_kl"),
        Cell("effective samples", Metric.IS_ESS_RAW, ".1%", "ess"),
    ),
    "throughput": (
        Cell("tokens/s", tokens_per_second, "k"),
        Cell("s/step", Metric.TIME_STEP, ".2f"),
        Cell("sample", share_of_step(Metric.TIME_GENERATE), ".0%"),
        Cell("train", share_of_step(Metric.TIME_TRAIN), ".0%"),
        Cell("reward", share_of_step(Metric.TIME_REWARD), ".0%"),
        Cell("sync", share_of_step(Metric.TIME_SYNC), ".0%"),
        Cell("save", share_of_step(Metric.TIME_SAVE), ".0%"),
        Cell("evaluate", share_of_step(Metric.TIME_EVAL), ".0%"),
    ),
}


class View:
    """What is shown of a run, and how it is drawn into lines of a given width."""

    def __init__(self, recipe: Recipe) -> None:
        self.name, self.steps = recipe.run.name, recipe.run.steps
        self.rules = {rule.name: rule for rule in rules_of(recipe)}
        self.rewards: list[float | None] = []  # by step, from step 1
        self.last: Record = {}  # of the last step
        self.evaluated = ""  # the line of the last evaluation
        self.examples: Sequence[Example] = ()
        self.notice = ""  # the answer to a signal
        self.left: float | None = None  # seconds that the steps to come may take, when the last one ended

    def add(self, record: Record) -> None:
        if Metric.EVAL_REWARD_MEAN in record:
            self.evaluated = evaluation_line(record, self.steps)
        if step := record[Metric.STEP]:
            value = record.get(Metric.REWARD_MEAN)
            missing: list[float | None] = [None] * (step - 1 - len(self.rewards))
            self.rewards += [*missing, value if isinstance(value, int | float) else None]
            self.last = record

    def lines(self, width: int, height: int, elapsed: float, left: float | None) -> list[Text]:
        """Returns the lines of the view, none wider than `width`; fewer parts of it if the terminal has few lines.

        `elapsed` and `left`: seconds of this attempt so far, and seconds to come.
        """
        drawn = [self.head(width, elapsed, left)]
        if self.last:
            drawn += curve(self.rewards, self.steps, width)
            drawn += [self.group(name, width) for name in GROUPS]
        if self.evaluated:
            drawn.append(titled("evaluation", self.evaluated, width))
        if height >= SAMPLES:
            for example in self.examples:
                reward = number_text(example.reward, "+.2f")
                drawn.append(titled(f"sample {reward}", " ".join(example.prompt.split()), width, DIM))
                drawn.append(titled("", f"→ {' '.join(example.completion.split())}", width))
        if self.notice:
            drawn.append(cropped(Text(self.notice, style=BAD), width))
        return drawn

    def head(self, width: int, elapsed: float, left: float | None) -> Text:
        """Returns the first line: `demo  step 7/100  ━━━━────  0:35, left 5:12`."""
        step = len(self.rewards)
        times = as_clock(elapsed) + ("" if left is None or step == self.steps else f", left {as_clock(left)}")
        start = cropped(Text(f"{printable(self.name)}  step {step}/{self.steps}  ", style="bold"), width - len(times) - 2)
        room = max(0, width - start.cell_len - len(times) - 2)
        done = room * step // self.steps
        return Text.assemble(start, ("━" * done, WELL), ("─" * (room - done), DIM), f"  {times}")

    def group(self, name: str, width: int) -> Text:
        """Returns the line of a group: its numbers that were measured, and a colour and a `!` for those that are bad."""
        found = [(cell, self.judged(cell)) for cell in GROUPS[name] if value_in(cell.of, self.last) is not None]
        kept, room = [], width - LABEL
        for cell, (text, _) in sorted(found, key=lambda one: one[1][1] != BAD):  # what is bad first
            if room >= len(text):
                kept.append(cell)
                room -= len(text) + 2
        shown = [Text(text, style=style) for cell, (text, style) in found if cell in kept]
        return Text(f"{name:<{LABEL}}", style="bold").append_text(Text("  ").join(shown))

    def judged(self, cell: Cell) -> tuple[str, str]:
        """Returns a number with its label, and its style: bad if its rule is broken, doubtful if only this step is beyond it."""
        value, rule = value_in(cell.of, self.last), self.rules.get(cell.rule)
        assert value is not None
        text = f"{cell.label} {in_thousands(value) if cell.form == 'k' else number_text(value, cell.form)}"
        if self.last.get(Family.HEALTH.of(cell.rule)):
            return f"! {text}", BAD
        judged = None if rule is None else rule.value(self.last)
        if rule is None or judged is None:
            return text, ""
        return text, DOUBTFUL if rule.is_beyond(judged) else WELL


def curve(values: Sequence[float | None], steps: int, width: int) -> list[Text]:
    """Returns the curve of a run of `steps` steps as bars: its height says the value, its right end is the last step so far."""
    known = [value for value in values if value is not None]
    if not known:
        return []
    low, high = min(known), max(known)
    labels = [shortened(high), *[""] * (CURVE - 2), shortened(low)]
    room = width - LABEL
    columns = [mean_of_column(values, steps, place, room) for place in range(min(room, -(-len(values) * room // steps)))]
    top = CURVE * len(BLOCKS) - 1
    heights = [None if v is None else round((v - low) / (high - low) * top) if high > low else top // 2 for v in columns]
    lines = []
    for line, label in enumerate(labels):
        below = (CURVE - 1 - line) * len(BLOCKS)
        bars = "".join(" " if h is None or h < below else BLOCKS[min(h - below, len(BLOCKS) - 1)] for h in heights)
        named = "reward" if line == 0 else ""
        lines.append(Text.assemble((f"{named:<6}", "bold"), (f"{label:>{LABEL - 7}} ", DIM), (bars, "cyan")))
    return lines


def shortened(value: float) -> str:
    """Returns a number with as many digits as its place beside the curve has: "0.531", "-1000.0", "-1e+09"."""
    return next(text for form in (".3f", ".1f", ".0f", ".0e") if len(text := f"{value:{form}}") <= LABEL - 7)


def mean_of_column(values: Sequence[float | None], steps: int, place: int, columns: int) -> float | None:
    """Returns the mean of the values in one of the columns over which `steps` steps spread; at least one step is in each."""
    first = place * steps // columns
    part = [value for value in values[first : max(first + 1, (place + 1) * steps // columns)] if value is not None]
    return sum(part) / len(part) if part else None


def titled(title: str, text: str, width: int, style: str = "") -> Text:
    """Returns a line with a name in front. Control characters of the text are escaped, and what is too long is cut off."""
    return cropped(Text.assemble((f"{title:<{LABEL}}", "bold"), (printable(text[: 4 * width]), style)), width)


def cropped(text: Text, width: int) -> Text:
    text.truncate(max(width, 1), overflow="ellipsis")
    return text


class LiveConsole(Console):
    """Draws the view of a run on a terminal, and prints messages above it."""

    def __init__(self, view: View, file: TextIO | None) -> None:
        super().__init__(view.steps, False, file, in_notebook())
        self.view = view
        self._began, self._ended = time.monotonic(), 0.0  # this attempt, and its last step
        self._live = Live(
            self,
            console=self.terminal,
            refresh_per_second=REFRESHES,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )

    def __enter__(self) -> "LiveConsole":
        with suppress(OSError):  # the terminal is gone; the run goes on
            self._live.start(refresh=True)
        return self

    def close(self) -> None:
        """Draws the last state, and leaves it on the screen."""
        with suppress(OSError):
            self._live.refresh()  # a notebook's view is not drawn by `stop`
            self._live.stop()
        super().close()

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> RenderResult:
        now, left = time.monotonic(), self.view.left
        to_come = None if left is None else max(0.0, left - (now - self._ended))
        yield from self.view.lines(options.max_width, console.size.height, now - self._began, to_come)

    def history(self, records: Iterable[Record]) -> None:
        for record in records:
            self.view.add(record)

    def evaluation(self, record: Record) -> None:
        super().evaluation(record)
        self.view.add(record)

    def step(self, record: Record, examples: Examples) -> None:
        self.seconds.append(record[Metric.TIME_STEP])
        self.view.add(record)
        self.view.examples = examples()
        self.view.left, self._ended = remaining(self.seconds, self.steps - record[Metric.STEP]), time.monotonic()
        if Metric.EVAL_REWARD_MEAN in record:
            self.say(evaluation_line(record, self.steps))

    def answer(self, text: str) -> None:
        """Shows the answer to a signal at the next refresh, which another thread draws: the handler may interrupt a print."""
        self.view.notice = text


def open_console(progress: Progress, recipe: Recipe, quiet: bool) -> Console:
    """Returns the console that `rlgen train --progress` names. It stays on the screen when descriptors 1 and 2 lead elsewhere."""
    steps, screen = recipe.run.steps, own_stream(sys.stdout)
    if progress == "json":
        return JsonConsole(steps, quiet, screen, own_stream(sys.stderr))
    if quiet or progress == "plain" or not takes_live_view(screen):
        return Console(steps, quiet, screen)
    return LiveConsole(View(recipe), screen)
