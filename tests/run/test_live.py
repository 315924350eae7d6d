"""The live view: its lines at any width, what is bad in it, and texts of a model that a terminal would obey."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.packages import installed
from helpers.runs import RECIPE, make_run, merge
from live_picture import draw
from rich.text import Text

from rlgen.recipe import Recipe
from rlgen.run import live
from rlgen.run.console import Example
from rlgen.run.health import value_in
from rlgen.run.live import BAD, DOUBTFUL, GROUPS, SAMPLES, WELL, LiveConsole, View, curve

STEP: dict[str, Any] = {
    "reward/mean": 0.5,
    "reward/std": 0.4,
    "groups/zero_std": 0.25,
    "completions/mean_tokens": 15.2,
    "completions/truncated": 0.02,
    "reward/exact_match/failed": 0,
    "grad_norm": 0.412,
    "entropy": 1.21,
    "clip/region": 0.001,
    "updates/done": 1,
    "loss": -0.0123,
    "sampler/delta_mean": 1.2e-6,
    "sampler/delta_max": 1.2e-5,
    "sampler/kl": 3e-9,
    "is/ess_raw": 0.999,
    "tokens/generated": 1606,
    "time/step": 2.0,
    "time/generate": 1.1,
    "time/train": 0.64,
}
DEMO = Recipe.model_validate(merge(RECIPE, {"run": {"name": "demo", "steps": 10}}))
HOSTILE = "a\x1b[31mred\x1b]0;title\x07 [red]markup[/red] \u202e\n\n日本語 " + "x" * 500


def view_of(steps: int = 8, **changes: Any) -> View:
    view = View(DEMO)
    for step in range(1, steps + 1):
        view.add({**STEP, "step": step, "reward/mean": step / 8, **changes})
    return view


def plain(lines: list[Text]) -> list[str]:
    return [line.plain.rstrip() for line in lines]


@pytest.mark.parametrize("width", [40, 80, 160])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    view = view_of(**{"eval/reward/mean": 0.5, "eval/reward/mean_low": 0.4, "eval/reward/mean_high": 0.6})
    view.examples = [
        Example(prompt=HOSTILE, completion=HOSTILE, reward=1.0),
        Example(prompt="", completion="日" * 60, reward=None),
    ]
    view.notice = "finishing step 9, then saving; interrupt again to stop now " * 3
    lines = view.lines(width, 24, 35.0, 312.0)
    assert len(lines) == 1 + 4 + 4 + 1 + 4 + 1
    assert all(line.cell_len <= width and "\n" not in line.plain for line in lines)
    assert not re.search("[\x00-\x1f\x7f-\x9f\u202a-\u202e]", "".join(line.plain for line in lines))
    assert width == 40 or r"a\x1b[31mred\x1b]0;title\x07 [red]markup[/red]" in lines[10].plain
    assert len(view.lines(width, SAMPLES - 1, 35.0, 312.0)) == len(lines) - 4


def test_what_the_lines_say() -> None:
    view = view_of()
    view.examples = [Example(prompt="What is\n1 + 1?", completion="2", reward=1.0)]
    assert plain(view.lines(80, 24, 35.0, 312.0)) == [
        f"demo  step 8/10  {'━' * 36}{'─' * 10}  0:35, left 5:12",
        *plain(curve([step / 8 for step in range(1, 9)], 10, 80)),
        "learning      reward 1.000  ± 0.400  equal groups 25%  tokens 15  cut off 2%",
        "stability     gradient 0.412  entropy 1.210  clipped 0.1%  updates 1",
        "agreement     Δ mean 1.2e-06  max 1.2e-05  KL 3.0e-09  effective samples 99.9%",
        "throughput    tokens/s 803  s/step 2.00  sample 55%  train 32%",
        "sample +1.00  What is 1 + 1?",
        "              → 2",
    ]


def test_before_the_first_step() -> None:
    view = View(DEMO)
    assert plain(view.lines(40, 24, 5.0, None)) == [f"demo  step 0/10  {'─' * 17}  0:05"]
    view.add({"step": 0, "eval/reward/mean": 0.25})
    assert plain(view.lines(80, 24, 5.0, None))[1] == "evaluation    eval  0/10  reward 0.250  pass@1 –  length –"


def test_the_curve_of_a_run() -> None:
    """Four steps of eight, on eight columns: from the lowest bar, an eighth of the fourth line, to the highest."""
    lines = [line.plain[14:] for line in curve([0.0, 1.0, None, 0.5], 8, 14 + 8)]
    assert lines == [" █  ", " █ ▁", " █ █", "▁█ █"]
    assert [line.plain[:14] for line in curve([0.0, 1.0], 8, 22)] == ["reward  1.000 ", " " * 14, " " * 14, "        0.000 "]
    assert [line.plain[14:] for line in curve([0.5, 0.5], 2, 16)] == ["  ", "  ", "██", "██"], "a constant is in the middle"
    assert curve([None, None], 2, 80) == []
    many = curve([step / 1000 for step in range(1000)], 1000, 14 + 4)
    assert [line.plain[14:] for line in many] == ["   ▄", "  ▄█", " ▅██", "▅███"], "means of 250 steps each"


@pytest.mark.parametrize(
    "reward, label", [(-99.5, "-99.500"), (-999.9996, "-1000.0"), (123456.7, "123457"), (-1e9, "-1e+09"), (-1.5e300, "-2e+300")]
)
def test_a_reward_of_any_size_has_its_place(reward: float, label: str) -> None:
    lines = plain(curve([0.0, reward], 2, 40))
    assert label in (lines[0] + lines[-1]).split() and "0.000" in (lines[0] + lines[-1]) and max(map(len, lines)) <= 40
    assert lines[0].startswith("reward ")


def test_colours_say_what_is_bad() -> None:
    """A broken rule is red and has a mark, which is seen without colours; a step beyond a threshold is yellow."""
    view = view_of(**{"grad_norm": 50.0, "entropy": 0.004, "health/entropy": True, "health/grad_norm": False})
    found = dict(view.judged(cell) for cell in GROUPS["stability"] if value_in(cell.of, view.last) is not None)
    assert found["gradient 50.000"] == DOUBTFUL and found["! entropy 0.004"] == BAD and found["updates 1"] == WELL
    assert found["loss -0.0123"] == "", "no rule is about it"
    text = view.group("stability", 80)
    assert [span.style for span in text.spans if text.plain[span.start : span.end] == "! entropy 0.004"] == [BAD]


def test_what_is_bad_is_never_left_out() -> None:
    view = view_of(**{"updates/done": 0, "health/no_update": True})
    assert view.group("stability", 14 + 14).plain == "stability     ! updates 0"
    assert "failed" not in view_of().group("learning", 80).plain
    failing = view_of(**{"reward/exact_match/failed": 3, "health/reward_failed": True})
    assert failing.group("learning", 80).plain.endswith("! failed 3")


def test_missing_steps_and_values() -> None:
    view = view_of(0)
    view.add({"step": 3, "reward/mean": None, "time/step": 1.0})
    assert view.rewards == [None, None, None]
    lines = plain(view.lines(80, 24, 1.0, None))
    assert lines[1:] == ["learning      failed 0", "stability", "agreement", "throughput    s/step 1.00"]


def test_a_picture_of_a_recorded_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "mine", steps=6)
    draw(run, tmp_path / "live.svg")
    picture = (tmp_path / "live.svg").read_text()
    said = re.sub("<[^>]*>", "", picture).replace("&#160;", " ")
    assert picture.startswith("<svg") and "step 6/6" in said and "agreement" in said
    assert "What is " in said and "entropy" in said and "http" not in re.sub(r'xmlns="[^"]*"', "", picture)


class Cell:
    """The output of a notebook's cell: what was displayed last in it, as text."""

    shown = ""

    def __enter__(self) -> None: ...

    def __exit__(self, *exc: object) -> None: ...

    def clear_output(self, wait: bool) -> None:
        Cell.shown = ""


def display(*shown: Any) -> None:
    if not isinstance(shown[0], Cell):
        Cell.shown += shown[0]._repr_mimebundle_([], [])["text/plain"]


def test_a_notebook_has_the_view_in_a_cell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(live, "in_notebook", lambda: True)
    monkeypatch.setitem(sys.modules, "ipywidgets", SimpleNamespace(Output=Cell))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    with LiveConsole(View(DEMO), None) as console:
        console.step({**STEP, "step": 1}, lambda: [Example(prompt="1 + 1?", completion="two", reward=0.0)])
        console.close()
        assert re.search(r"demo  step 1/10 .*reward .*two", Cell.shown, re.S)
    assert capsys.readouterr().out == ""


NOTEBOOK = """
import sys
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

cell = f"import rlgen; print(rlgen.train({sys.argv[1]!r}, progress='live').status['state'])"
notebook = new_notebook(cells=[new_code_cell(cell)])
NotebookClient(notebook, kernel_name="here", timeout=300).execute()
print(notebook)
"""


@pytest.mark.slow
def test_a_real_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = installed("notebook", "ipykernel==7.4.0", "ipywidgets==8.1.9", "nbclient==0.11.0", "nbformat==5.11.1")
    kernel = tmp_path / "share" / "kernels" / "here" / "kernel.json"
    kernel.parent.mkdir(parents=True)
    start = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    kernel.write_text(json.dumps({"argv": start, "display_name": "here", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share"))
    monkeypatch.setenv("PYTHONPATH", str(packages))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(merge(RECIPE, {"run": {"name": "demo", "steps": 2, "dir": str(tmp_path / "runs")}})))
    done = subprocess.run([sys.executable, "-c", NOTEBOOK, str(recipe)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "'text': 'done\\n'" in done.stdout and "demo  step 2/2" in done.stdout
