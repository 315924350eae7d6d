"""What a run prints: one line or one object a step, in at most 80 columns."""

import io
import json

import pytest
from helpers.recipes import recipe_for
from rich.cells import cell_len

from rlgen.errors import UsageError
from rlgen.run.clock import as_clock, remaining
from rlgen.run.console import Console, Example, JsonConsole, check_progress, in_thousands, step_line, takes_live_view
from rlgen.run.live import LiveConsole, open_console

RECORD = {
    "step": 12,
    "reward/mean": 0.5314,
    "reward/std": 0.4983,
    "loss": -0.01234,
    "sampler/delta_max": 1.23e-6,
    "tokens/generated": 1606,
    "time/step": 2.0,
}
EVALUATED = {"eval/reward/mean": 0.531, "eval/reward/mean_low": 0.48, "eval/reward/mean_high": 0.582, "eval/pass@1": 0.5}
RECIPE = recipe_for("tiny:qwen3", run={"name": "demo", "steps": 100})


class Screen(io.StringIO):
    """A terminal, or not."""

    def __init__(self, terminal: bool = True, encoding: str = "utf-8") -> None:
        super().__init__()
        self.terminal, self.code = terminal, encoding

    def isatty(self) -> bool:
        return self.terminal

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.code


def no_examples() -> list[Example]:
    raise AssertionError("plain lines show no completions: none is decoded")


def test_the_line_of_a_step() -> None:
    line = "step  12/100  reward 0.531 ±0.50  loss -0.0123  Δ 1e-6  803 tok/s"
    assert step_line(RECORD, 100) == line
    assert step_line(RECORD, 100, 12_000.0) == f"{line}  left 3h20m"
    nothing = {**dict.fromkeys(RECORD), "step": 1}
    assert step_line(nothing, 3) == "step 1/3  reward – ±–  loss –  Δ –  – tok/s"


def test_a_long_line_loses_what_matters_least() -> None:
    huge = {**RECORD, "step": 100_000, "reward/mean": -1234.5, "loss": 12345.678, "tokens/generated": 3_400_000}
    line = step_line(huge, 100_000, 360_000.0)
    assert line == "step 100000/100000  reward -1234.500 ±0.50  loss +12345.6780  Δ 1e-6  left 4d04h"
    assert len(line) <= 80


def test_numbers_and_times() -> None:
    shown = {None: "–", 0.4: "0", 999.4: "999", 999.6: "1.0k", 9940.0: "9.9k", 12_345.0: "12k", 999_400.0: "999k", 3.4e6: "3.4M"}
    assert {value: in_thousands(value) for value in shown} == shown
    assert [as_clock(seconds) for seconds in (0, 47.4, 725, 12_000, 183_600)] == ["0:00", "0:47", "12:05", "3h20m", "2d03h"]
    assert remaining([], 5) is None and remaining([2.0, 4.0], 5) == 15.0
    assert remaining([100.0, *[1.0] * 50], 3) == 3.0, "the last 50 steps count"


def test_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with Console(100) as console:
        console.evaluation({"step": 0, **EVALUATED})
        console.step({**RECORD, "step": 99}, no_examples)
        console.step({**RECORD, **EVALUATED, "step": 100, "time/step": 4.0}, no_examples)
        console.say("health: " + "long " * 40)
        console.answer("finishing")
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "eval   0/100  reward 0.531 (0.480 to 0.582)  pass@1 0.500  length –",
        "step  99/100  reward 0.531 ±0.50  loss -0.0123  Δ 1e-6  803 tok/s  left 0:02",
        "step 100/100  reward 0.531 ±0.50  loss -0.0123  Δ 1e-6  402 tok/s  left 0:00",
        "eval 100/100  reward 0.531 (0.480 to 0.582)  pass@1 0.500  length –",
        "health: " + "long " * 40,
        "finishing",
    ]
    assert all(len(line) <= 80 for line in lines[:4])


def test_a_terminal_gets_whole_words() -> None:
    screen = Screen()
    Console(2, file=screen).say("words " * 30)
    lines = screen.getvalue().splitlines()
    assert len(lines) > 1 and all(line.split() == ["words"] * len(line.split()) and cell_len(line) <= 80 for line in lines)


def test_one_object_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    messages = Screen(terminal=False)
    with JsonConsole(100, False, None, messages) as console:
        console.say("model: loading")
        console.evaluation({"step": 0, **EVALUATED})
        console.step({**RECORD, **EVALUATED, "loss": float("nan")}, no_examples)
        said = messages.getvalue()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [{"step": 0, **EVALUATED}, {**RECORD, **EVALUATED, "loss": None}]
    assert said == "model: loading\n"


def test_other_processes_print_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    for console in (Console(2, quiet=True), open_console("json", RECIPE, quiet=True)):
        console.say("a")
        console.step({**RECORD}, no_examples)
        console.answer("b")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("screen", "term", "live"),
    [
        (Screen(), "xterm", True),
        (Screen(terminal=False), "xterm", False),
        (Screen(), "dumb", False),
        (Screen(), None, False),
        (Screen(encoding="ascii"), "xterm", False),
    ],
)
def test_which_screens_take_the_live_view(monkeypatch: pytest.MonkeyPatch, screen: Screen, term: str | None, live: bool) -> None:
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.delenv("TERM") if term is None else monkeypatch.setenv("TERM", term)
    assert takes_live_view(screen) is live
    assert type(open_console("auto", RECIPE, quiet=False)) is (LiveConsole if live else Console)
    assert type(open_console("plain", RECIPE, quiet=False)) is Console
    assert type(open_console("auto", RECIPE, quiet=True)) is Console
    if live:
        check_progress("live")
    else:
        with pytest.raises(UsageError, match="--progress live needs a terminal"):
            check_progress("live")
    check_progress("auto")
