"""`rlgen compare`: groups, differences, aligned curves and verdicts of hand-made runs, and what is said of odd ones."""

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Proof
from helpers.browser import browser, console, needs_browser, open_page, requests, texts_of
from helpers.runs import bare_run, make_run
from rich.console import Console
from selenium.webdriver import Chrome
from typer.testing import CliRunner

from rlgen.analysis.aligned import grouped, metric_chart, other_charts
from rlgen.analysis.charts import Chart, Line, chart_of
from rlgen.analysis.comparison import compare, differences_of
from rlgen.analysis.interval import of_series
from rlgen.analysis.plot import HEIGHT, plot
from rlgen.analysis.report import ASSETS, island
from rlgen.analysis.run import Run, read_run
from rlgen.cli.app import app
from rlgen.errors import SetupError, UsageError

REWARD = "reward/mean"
GRPO: dict[str, Any] = {"trainer": {"kind": "grpo"}}
RLOO: dict[str, Any] = {"trainer": {"kind": "rloo"}, "optim": {"learning_rate": 2e-6}}
EXACT, LENGTH = {"use": "exact_match"}, {"use": "length", "args": {"target": 60}, "weight": 1.0}  # ten times `helpers.runs`
HOSTILE = "</script><script>document.title='pwned'</script><img src=x onerror=alert(1)> [bold red]x[/] \x1b[31m \u202e"


def seeds(folder: Path, name: str, ends: Sequence[float], recipe: dict[str, Any]) -> list[Run]:
    """Runs of 40 steps, one for each seed: 0 for 30 steps, then that reward."""
    return [single(folder, f"{name}-{seed}", [0.0] * 30 + [end] * 10, seed=seed, recipe=recipe) for seed, end in enumerate(ends)]


def single(folder: Path, name: str, rewards: Sequence[float | str | None], **options: Any) -> Run:
    return read_run(bare_run(folder / name, rewards, **options))


def command(*arguments: object, width: int = 80) -> str:
    """What the command prints; it ends well, and no line is longer than the terminal."""
    done = CliRunner().invoke(app, ["compare", *map(str, arguments)], env={"COLUMNS": str(width), "NO_COLOR": "1"})
    assert done.exit_code == 0, (done.output, done.exception)
    lines = [line for line in done.output.splitlines() if not line.endswith(" written")]  # paths are as long as they are
    assert "--json" in arguments or max(map(len, lines)) <= width
    return done.output


def test_runs_that_differ_only_in_the_seed_are_a_group(tmp_path: Path) -> None:
    grpo, rloo = seeds(tmp_path, "grpo", [1, 1, 1], GRPO), seeds(tmp_path, "rloo", [1, 1], RLOO)
    groups = grouped([grpo[0], rloo[0], grpo[1], rloo[1], grpo[2]])
    assert [(group.letter, list(group.runs), group.again) for group in groups] == [("A", grpo, False), ("B", rloo, False)]
    assert [group.seeds for group in groups] == [[0, 1, 2], [0, 1]]


def test_a_repetition_is_a_group_of_its_own(tmp_path: Path) -> None:
    first, second = seeds(tmp_path / "first", "grpo", [1, 2], GRPO), seeds(tmp_path / "second", "grpo", [1, 2], GRPO)
    groups = grouped([*first, *second])
    assert [(group.letter, list(group.runs), group.again) for group in groups] == [("A", first, False), ("B", second, True)]
    comparison = compare([*first, *second], REWARD, "step")
    assert "B repeats the recipe and the seeds of an earlier group" in comparison.notes
    assert [comparison.names[run] for run in second] == [str(tmp_path / f"second/grpo-{seed}") for seed in (0, 1)]


def test_only_keys_that_differ_and_have_an_effect(tmp_path: Path) -> None:
    left = single(tmp_path / "here", "grpo", [1.0], recipe=GRPO)
    right = single(tmp_path / "there", "rloo", [1.0], recipe=RLOO, seed=7)
    found = differences_of([left, right])
    assert found["trainer.kind"] == {left: "grpo", right: "rloo"} and found["optim.learning_rate"] == {left: 1e-6, right: 2e-6}
    assert found["trainer.loss"] == {left: "dapo"}, "rloo has no such key"
    assert found["run.seed"] == {left: 0, right: 7}
    assert not {"run.name", "run.dir", "trainer.cispo_max", "optim.schedule"} & set(found)
    assert [key.split(".")[0] for key in found] == ["run"] + ["trainer"] * (len(found) - 2) + ["optim"], "in the recipe's order"
    shorter = single(tmp_path, "shorter", [1.0], recipe={**GRPO, "rewards": [{"use": "exact_match"}]})
    found = differences_of([left, shorter])
    assert found["rewards.1.use"] == {left: "length"} and "rewards.0.use" not in found


def lines(chart: Chart) -> dict[str, Line]:
    return {line.label: line for line in chart.lines}


def test_curves_by_tokens_and_time(tmp_path: Path) -> None:
    """10 and 20 tokens a step: at 20 tokens the first run has taken two steps and the second one."""
    left = single(tmp_path, "left", [1.0, 2.0, 4.0], tokens=10)
    right = single(tmp_path, "right", [10.0, 20.0], tokens=20, recipe=RLOO)
    by_tokens = metric_chart(grouped([left, right]), REWARD, "tokens")
    assert (list(by_tokens.x), by_tokens.axis) == ([10, 20, 30, 40], "tokens")
    assert lines(by_tokens)["A"].values == [1.0, 2.0, 4.0, None] and lines(by_tokens)["B"].values == [None, 10.0, 15.0, 20.0]
    by_time = metric_chart(grouped([left, right]), REWARD, "time")
    assert (list(by_time.x), by_time.axis) == ([2, 4, 6], "seconds") and lines(by_time)["B"].values == [10.0, 20.0, None]
    by_step = metric_chart(grouped([left, right]), REWARD, "step")
    assert (list(by_step.x), by_step.axis) == ([1, 2, 3], "step") and lines(by_step)["B"].values == [10.0, 20.0, None]


def test_bands_of_seeds(tmp_path: Path) -> None:
    """Three: Student's interval, 4.302653 / sqrt(3) deviations. Two: from one to the other. A curve ends with the shortest."""
    three = [single(tmp_path, f"a{seed}", [reward, reward], seed=seed) for seed, reward in enumerate((1.0, 2.0, 3.0))]
    uneven = enumerate(([5.0, 6.0], [7.0, 9.0, 9.0]))
    two = [single(tmp_path, f"b{seed}", rewards, seed=seed, recipe=RLOO, steps=3) for seed, rewards in uneven]
    chart = metric_chart(grouped([*three, *two]), REWARD, "step")
    found, reach = lines(chart), 4.302653 / math.sqrt(3)
    assert found["A"].values == [2.0, 2.0, None] and found["A"].low is not None and found["A"].high is not None
    assert (found["A"].low[1], found["A"].high[1]) == pytest.approx((2 - reach, 2 + reach))
    assert (found["B"].values, found["B"].low, found["B"].high) == ([6.0, 7.5, None], [5.0, 6.0, None], [7.0, 9.0, None])


def test_a_missing_value_is_a_gap(tmp_path: Path) -> None:
    run, other = single(tmp_path, "a", [1.0, "nan", 3.0, 4.0]), single(tmp_path, "b", [1.0] * 4, recipe=RLOO)
    found = lines(metric_chart(grouped([run, other]), REWARD, "step"))
    assert found["A"].values == [1.0, None, 3.0, 4.0] and found["A"].low is None
    loose = {chart.title: chart for chart in other_charts(grouped([run, other]), "step")}
    assert lines(loose["Reward"])["A"].values == [1.0, None, 3.0, 4.0]


def test_every_curve_of_a_report_is_compared(tmp_path: Path) -> None:
    left = read_run(make_run(tmp_path / "left", steps=6, tokens=4))
    right = read_run(make_run(tmp_path / "right", steps=6, tokens=4, recipe=RLOO))
    charts = {chart.title: chart for chart in other_charts(grouped([left, right]), "step")}
    assert {"Reward", "Rewards by name: exact_match", "Time of a step: train", "Speed", "Evaluation: reward"} <= set(charts)
    assert list(lines(charts["Gradient norm"])["B"].values) == [record["grad_norm"] for record in right.metrics]
    evaluation = charts["Evaluation: reward"]
    assert (evaluation.group, list(evaluation.x)) == ("Evaluation", [0, 2, 3, 4, 5, 6])
    assert lines(evaluation)["A"].values == [record["eval/reward/mean"] for record in left.evaluations]
    assert not any(chart.stacked for chart in charts.values()) and charts["KL of engine and trainer"].log
    by_tokens = {chart.title: chart for chart in other_charts(grouped([left, right]), "tokens")}["Evaluation: reward"]
    assert by_tokens.x[0] == 0 and lines(by_tokens)["A"].values[0] == left.evaluations[0]["eval/reward/mean"]


def test_the_verdict_over_seeds(tmp_path: Path) -> None:
    """Means 0.82 and 0.72, variances 4e-4: the error is sqrt(2 x 4e-4 / 3), with 4 degrees of freedom."""
    grpo, rloo = seeds(tmp_path, "grpo", [0.8, 0.82, 0.84], GRPO), seeds(tmp_path, "rloo", [0.7, 0.72, 0.74], RLOO)
    comparison = compare([*grpo, *rloo], REWARD, "tokens")
    (verdict,) = comparison.verdicts
    reach = 2.776445 * math.sqrt(2 * 4e-4 / 3)
    interval = verdict.interval
    assert interval is not None and (interval.low, interval.high) == pytest.approx((0.1 - reach, 0.1 + reach))
    assert verdict.sentence == "A is better than B by 0.1 (0.0547 to 0.145)" and verdict.higher == "A"
    assert (verdict.method, verdict.place) == ("Welch's t over seeds", "steps 31 to 40")
    assert comparison.row_of(comparison.groups[0])[1:] == ("0, 1, 2", "40", "0.82 (0.77 to 0.87)") and comparison.notes == []
    (other_way,) = compare([*rloo, *grpo], REWARD, "step").verdicts
    assert other_way.sentence == "B is better than A by 0.1 (0.0547 to 0.145)"
    assert other_way.difference == pytest.approx(-0.1)


APART = "A is better than B by 0.35 (0.35 to 0.35)"


@pytest.mark.parametrize(
    "left, right, sentence, basis, without",
    [
        ([0.2, 0.8], [0.1, 0.7], "no difference can be seen: A minus B is 0.1 (-1.73 to 1.93)", "2 and 2 seeds", []),
        ([0.8, 0.9], [0.5], APART, "B has one seed, which proves little", []),
        ([0.8, 0.9, math.nan], [0.5, math.nan], APART, "B has one seed", ["grpo-2", "rloo-1"]),
    ],
    ids=["vary more than they differ", "one beside the mean of several", "one without numbers is left out"],
)
def test_seeds(tmp_path: Path, left: list[float], right: list[float], sentence: str, basis: str, without: list[str]) -> None:
    comparison = compare([*seeds(tmp_path, "grpo", left, GRPO), *seeds(tmp_path, "rloo", right, RLOO)], REWARD, "step")
    (verdict,) = comparison.verdicts
    assert verdict.sentence == sentence and basis in verdict.basis
    assert (verdict.higher is None) == sentence.startswith("no difference")
    assert [note.partition(":")[0] for note in comparison.notes] == without


def test_the_verdict_over_steps(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    left, right = rng.normal(0.8, 0.1, 100), rng.normal(0.5, 0.1, 60)
    runs = [single(tmp_path, "a", left.tolist()), single(tmp_path, "b", right.tolist(), recipe=RLOO)]
    comparison = compare(runs, REWARD, "step")
    (verdict,) = comparison.verdicts
    assert verdict.interval == of_series((left - np.append(right, np.zeros(40)))[45:60]), "of the steps that both have"
    assert verdict.higher == "A" and verdict.place == "steps 46 to 60" and verdict.method == "block bootstrap over steps"
    basis = verdict.basis
    assert basis.endswith("one seed each proves little") and "15 steps (block bootstrap" in basis
    assert comparison.notes == ["the runs end at different steps: a curve of several seeds ends with the shortest run"]


def test_each_group_is_compared_with_the_first(tmp_path: Path) -> None:
    runs = [
        *seeds(tmp_path, "a", [0.5, 0.51], GRPO),
        *seeds(tmp_path, "b", [0.9, 0.91], RLOO),
        *seeds(tmp_path, "c", [0.1, 0.11], {"trainer": {"kind": "grpo", "loss": "cispo"}}),
    ]
    comparison = compare(runs, REWARD, "step")
    assert [verdict.sentence.split(" by")[0] for verdict in comparison.verdicts] == ["B is better than A", "A is better than C"]
    assert comparison.notes == ["each of the 2 intervals holds with 95 %, not all of them together"]


@pytest.mark.parametrize(
    "word, changes, metrics",
    [
        ("better", {}, ("reward/mean", "reward/exact_match/mean", "eval/reward/mean", "eval/pass@8", "dpo/accuracy")),
        ("higher", {}, ("reward/std", "loss", "eval/completions/truncated")),
        ("not comparable", {"rewards": [EXACT, LENGTH]}, ("reward/mean", "eval/reward/mean")),
        ("better", {"rewards": [EXACT, LENGTH]}, ("reward/exact_match/mean", "reward/length/mean")),
        ("higher", {"rewards": [EXACT, {**LENGTH, "weight": -0.1}]}, ("reward/length/mean", "eval/reward/length/mean")),
        ("not comparable", {"rewards": [{**EXACT, "args": {"ignore_case": True}}, LENGTH]}, ("reward/exact_match/mean",)),
        ("not comparable", {"data": {"options": {"digits": 3}}}, ("reward/mean", "eval/reward/mean")),
    ],
)
def test_more_is_not_always_better(tmp_path: Path, word: str, changes: dict[str, Any], metrics: Sequence[str]) -> None:
    """It is better if the metric is one of rewards, none of which is a penalty, on the same data and rewards in both groups."""
    runs = seeds(tmp_path, "a", [2, 2.1], GRPO) + seeds(tmp_path, "b", [1, 1.1], RLOO | changes)
    for metric in metrics:
        renamed = [replace(run, metrics=[{**record, metric: record[REWARD]} for record in run.metrics]) for run in runs]
        found = compare(renamed, metric, "step")
        assert found.verdicts[0].sentence.startswith(f"A is {'better' if word == 'better' else 'higher'} than B by 1 ("), metric
        assert ("what is higher need not be better" in str(found.notes)) == (word == "not comparable"), metric


def test_a_metric_that_few_steps_have(tmp_path: Path) -> None:
    """Evaluations at every fourth of 32 steps: the last quarter of them are those at 28 and 32."""
    runs = seeds(tmp_path, "a", [2, 2.1], GRPO) + seeds(tmp_path, "b", [1, 1.1], RLOO)
    for run in runs:
        records = [dict(record) for record in run.metrics[:32]]
        for record in records[3::4]:
            record["eval/reward/mean"] = record["reward/mean"] + 1
        (run.path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (verdict,) = compare([read_run(run.path) for run in runs], "eval/reward/mean", "step").verdicts
    assert list(verdict.steps) == [28, 32] and verdict.difference == pytest.approx(0.5)


def test_a_run_that_was_killed(tmp_path: Path) -> None:
    """Its status still says that it runs, and its last line is torn."""
    killed = bare_run(tmp_path / "dead", [0.1] * 12, steps=100, state="running")
    with (killed / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "reward/me')
    other = bare_run(tmp_path / "well", [0.9] * 100, recipe=RLOO)
    said = command(killed, other)
    assert "note: dead: killed, at step 12 of 100" in said and "note: the runs end at different steps" in said
    assert "reward/mean, steps 10 to 12; no interval: both sides have a number at" in said
    assert "no verdict: A minus B is -0.8" in said


@pytest.mark.fault(82)
@pytest.mark.parametrize(
    "rewards, sentence, note",
    [
        ([], "A and B cannot be compared", "odd: done, at step 0 of 1"),
        ([0.25], "no verdict: A minus B is -0.25", "the runs end at different steps"),
        (["nan"] * 8, "A and B cannot be compared", "odd: reward/mean is missing or not finite at 8 of 8 steps"),
        ([0.5] * 6 + [None, float("nan")], "A and B cannot be compared", "odd: reward/mean is missing or not finite at 2 of 8"),
        ([0.5] * 39 + ["inf"], "no difference can be seen: A minus B is 0 (0 to 0)", "missing or not finite at 1 of 40"),
    ],
    ids=["no step", "one step", "never finite", "not finite at the end", "once infinite"],
)
def test_odd_values_are_said(tmp_path: Path, rewards: list[float | str | None], sentence: str, note: str, proof: Proof) -> None:
    odd, other = bare_run(tmp_path / "odd", rewards), bare_run(tmp_path / "well", [0.5] * 40, recipe=RLOO)
    for by in ("step", "tokens", "time"):
        said = command(odd, other, "--by", by, "--html", "--out", tmp_path / "out.html")
        assert sentence in said and note in " ".join(said.split())
    found = json.loads(command(odd, other, "--json"))
    assert found["verdicts"][0]["sentence"] == sentence and found["runs"]["odd"]["steps"] == len(rewards)
    proof(f"{len(rewards)} steps beside 40, another trainer: {note}")


def test_runs_without_any_step(tmp_path: Path) -> None:
    runs = [bare_run(tmp_path / name, [], recipe=recipe) for name, recipe in (("a", GRPO), ("b", RLOO))]
    (runs[0] / "metrics.jsonl").unlink()
    (runs[0] / "status.json").unlink()
    said = command(*runs, "--html", "--png", "--out", tmp_path / "out.html")
    assert "there is no step at which both have measured it" in " ".join(said.split()) and "trainer.kind" in said
    assert "note: a: " in said and "│" not in said, "no chart"


def test_a_metric_that_one_run_lacks(tmp_path: Path) -> None:
    evaluated = make_run(tmp_path / "evaluated", steps=6, tokens=3)
    without = make_run(tmp_path / "without", steps=6, tokens=3, recipe=RLOO, evaluates=False)
    said = command(evaluated, without, "--metric", "eval/reward/mean")
    assert "note: without: eval/reward/mean was never measured" in said and "A and B cannot be compared" in said


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["a"], "a is the only run; name two or more"),
        (["a", "a/../a"], "a/../a is named twice; name each run once"),
        (["a", "c"], "c holds no run"),
        (["a", "b", "--metric", "reward/maen"], "did you mean `reward/mean`?"),
        (["a", "b", "--html", "--out", "nonexist/x.html"], "--out: there is no folder nonexist; make it, or name another"),
        (["a", "b", "--html", "--out", ""], "--out: . is a folder; name a file"),
        (["a", "b", "--metric", "zzz"], "they have reward/mean, step, time/step, tokens/generated"),
    ],
)
def test_what_cannot_be_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str) -> None:
    monkeypatch.chdir(tmp_path)
    for name, recipe in (("a", GRPO), ("b", RLOO)):
        bare_run(tmp_path / name, [1.0], recipe=recipe)
    done = CliRunner().invoke(app, ["compare", *arguments])
    assert isinstance(done.exception, UsageError) and message in str(done.exception) and "\n" not in str(done.exception)


def test_runs_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    bare_run(tmp_path / "runs" / "mine", [1.0] * 16)
    bare_run(tmp_path / "elsewhere", [0.0] * 16, recipe=RLOO)
    assert "A is better than B by 1 (1 to 1)" in command("mine", "elsewhere")


def test_other_versions_of_rlgen_are_said(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, steps=1, tokens=3, recipe=recipe) for name, recipe in (("a", GRPO), ("b", RLOO))]
    (runs[1] / "provenance.json").write_text(json.dumps([{"rlgen": "0.0.9", "git": "0123456789abcdef+"}]))
    assert "different versions of rlgen: 0.0.9 (0123456789+), 0.1.0 (abc123)" in " ".join(command(*runs).split())


def test_a_chart_of_letters() -> None:
    """Two lines that cross in the middle, a third with a band, and a gap at its end."""
    x = list(range(61))
    band = Line(label="C", values=[30.0] * 40 + [None] * 21, low=[20.0] * 40 + [None] * 21, high=[40.0] * 40 + [None] * 21)
    chart = chart_of("", "", "", x, [Line(label="A", values=x), Line(label="B", values=x[::-1]), band])
    drawn = [line.plain for line in plot(chart, 68)]
    assert len(drawn) == HEIGHT + 2 and {len(line) for line in drawn} == {68}
    rows = [line.partition("│ ")[2] for line in drawn[:HEIGHT]]
    assert (rows[0][0], rows[0][-1], rows[-1][0], rows[-1][-1]) == ("B", "A", "A", "B")
    assert [line[:4] for line in drawn if line[:4].strip()] == ["  60", "27.7", "   0"]
    assert drawn[-1].split() == ["step", "0", "60"]
    assert all(row[30] in " *·" for row in rows) and sum(row[30] == "*" for row in rows) == 1
    assert [row[10] for row in rows].count("·") >= 3 and all(row[45] in " AB" for row in rows), "no band where C has ended"
    assert "".join(row[10] for row in rows).count("C") == 1
    assert plot(chart_of("", "", "", [], [Line(label="A", values=[])]), 66) == []
    # A letter has the same colour as in the table, which takes it from the same list.
    console = Console(force_terminal=True, color_system="standard", width=40, record=True)
    with console.capture() as caught:
        for line in plot(chart_of("", "", "", [0, 1], [Line(label="A", values=[0.0, 1.0])]), 40):
            console.print(line)
    assert "\x1b[1;34mA" in caught.get()


def test_the_page_in_a_terminal(tmp_path: Path) -> None:
    """Groups, differences, curves, verdict, in this order, at two widths."""
    runs = seeds(tmp_path, "grpo", [0.8, 0.82, 0.84], GRPO) + seeds(tmp_path, "rloo", [0.7, 0.72, 0.74], RLOO)
    for width in (80, 160):
        said = command(*(run.path for run in runs), width=width)
        parts = ("grpo-0, grpo-1", "Differences of the recipes", "reward/mean by step", "A is better")
        places = [said.index(part) for part in parts]
        assert places == sorted(places) and "\x1b" not in said
        assert re.search(r"^A  grpo-0, grpo-1, grpo-2 +0, 1, 2 +40 +0.82 \(0.77 to 0.87\)", said, re.M)
        assert re.search(r"^trainer.kind +grpo +rloo", said, re.M)
        assert max(len(line) for line in said.splitlines() if "│" in line) == width
        assert "run.seed" not in said, "both groups have the same"


def test_two_seeds_of_one_recipe_are_two_curves_and_no_verdict(tmp_path: Path) -> None:
    same = seeds(tmp_path, "grpo", [0.8, 0.82], GRPO)
    found = compare(same, REWARD, "step")
    assert [line.label for line in found.chart.lines] == ["A", "B"] and found.chart.lines[0].values != found.chart.lines[1].values
    assert found.differing == [["run.seed", "0", "1"]] and not found.verdicts
    assert found.notes == ["the recipes differ only in the seed, so there is no verdict"]
    # Seeds that both groups have are no difference.
    both = compare([*same, *seeds(tmp_path, "rloo", [0.7, 0.72], RLOO)], REWARD, "step")
    assert "run.seed" in both.differences and "run.seed" not in [row[0] for row in both.differing]
    assert both.differing[0] == ["trainer.kind", "grpo", "rloo"]
    three = seeds(tmp_path / "again", "grpo", [0.8, 0.82, 0.81], GRPO)
    assert compare(three, REWARD, "step").differing == [] and "The recipes are the same." in command(*(run.path for run in three))


def test_one_json_object(tmp_path: Path) -> None:
    runs = seeds(tmp_path, "grpo", [0.8, 0.82, 0.84], GRPO) + seeds(tmp_path, "rloo", [0.7, 0.72, 0.74], RLOO)
    said = command(*(run.path for run in runs), "--json", "--html", "--out", tmp_path / "both.html")
    assert len(said.splitlines()) == 1
    found = json.loads(said)
    assert found["runs"]["rloo-1"] == {"path": str(runs[4].path), "group": "B", "seed": 1, "state": "done", "steps": 40}
    assert found["differences"]["trainer.kind"] == {run.name: run.name[:4] for run in runs}
    assert found["groups"]["B"]["mean"] == pytest.approx(0.72) and found["curves"]["x"] == list(range(1, 41))
    assert found["curves"]["lines"]["A"]["mean"][-1] == pytest.approx(0.82) and found["curves"]["lines"]["A"]["low"][0] == 0
    (verdict,) = found["verdicts"]
    assert (verdict["left"], verdict["right"], verdict["higher"], verdict["steps"]) == ("A", "B", "A", [31, 40])
    assert verdict["difference"] == pytest.approx(0.1) and verdict["low"] == pytest.approx(0.1 - 0.045339, abs=1e-5)
    assert (found["metric"], found["by"], found["html"], found["png"]) == (REWARD, "step", str(tmp_path / "both.html"), None)
    assert (tmp_path / "both.html").is_file()


def test_what_others_wrote_is_text(tmp_path: Path) -> None:
    """A system prompt and the name of a folder that try to be markup of a page or of a terminal."""
    left = bare_run(tmp_path / "a", [1.0] * 16, recipe={"data": {"system": HOSTILE}}).rename(tmp_path / "a[red]")
    right = bare_run(tmp_path / "b", [0.0] * 16).rename(tmp_path / "<b>mine")
    said = command(left, right, "--html", "--out", tmp_path / "out.html", width=160)
    assert "[bold red]x[/] \\x1b[31m \\u202e" in "".join(said.split("\n")) and "\x1b" not in said and "a[red]" in said
    text = (tmp_path / "out.html").read_text()
    assert "<script>document" not in text and "<img" not in text and "<b>" not in text and "\u202e" not in text
    assert len(re.findall("<script", text)) == 2 and island(HOSTILE)[1:-1] in text
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", (ASSETS / "compare.js").read_text())


def test_the_curves_as_png(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of a folder may look like a formula, and a wrong one."""
    runs = [make_run(tmp_path / name, steps=3, tokens=3, recipe=recipe) for name, recipe in (("a", GRPO), ("b", RLOO))]
    runs[0] = runs[0].rename(tmp_path / "a$\\frac$")
    said = command(*runs, "--png", "--out", tmp_path / "both.html")
    content = (tmp_path / "both.png").read_bytes()
    assert content.startswith(b"\x89PNG") and int.from_bytes(content[16:20], "big") == 3 * 4.6 * 150
    assert "both.png written" in "".join(said.split("\n")) and not (tmp_path / "both.html").exists()
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    done = CliRunner().invoke(app, ["compare", *map(str, runs), "--html", "--png", "--out", str(tmp_path / "none.html")])
    assert isinstance(done.exception, SetupError) and not (tmp_path / "none.html").exists()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of two runs and of a third, by tokens."""
    folder = tmp_path_factory.mktemp("compared")
    hostile = {"data": {"system": HOSTILE}}
    runs = [make_run(folder / f"grpo-{seed}", steps=6, tokens=4, seed=seed, recipe=hostile) for seed in (0, 1)]
    runs.append(make_run(folder / "rloo", steps=6, tokens=4, recipe=RLOO))
    command(*runs, "--by", "tokens", "--html", "--out", folder / "compare.html")
    return folder / "compare.html"


@pytest.fixture(scope="module")
def driver() -> Iterator[Chrome]:
    with browser() as opened:
        yield opened


@needs_browser
def test_a_browser_shows_it(page: Path, driver: Chrome) -> None:
    """A line for each group in the same colour, the recipe's text as text; no error, no request."""
    requests(driver)
    open_page(driver, page)
    assert driver.title == "grpo-0 … and rloo – rlgen compare"
    escaped = HOSTILE.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")
    assert [text for text in texts_of(driver, "#differences td") if "pwned" in text] == [escaped]
    assert texts_of(driver, "#runs tbody td")[:4] == ["A", "grpo-0, grpo-1", "0, 1", "6"] and len(texts_of(driver, ".tile")) == 1
    first = "document.querySelector('figure.chart')"
    assert driver.execute_script(f"return {first}.querySelectorAll('path.line').length") == 2
    assert driver.execute_script(f"return {first}.querySelectorAll('path.band.series-0').length") == 1
    driver.execute_script(
        f"const plot = {first}.querySelector('svg'), box = plot.getBoundingClientRect();"
        "plot.dispatchEvent(new PointerEvent('pointermove', {clientX: box.left + 60, bubbles: true}))"
    )
    assert re.fullmatch(r"tokens [\d,]+", texts_of(driver, "figure.chart .at")[0])
    assert texts_of(driver, "figure.chart .legend")[0].startswith("A ")
    assert texts_of(driver, "nav a") == ["Runs", "Differences of the recipes", "Curves"]
    assert console(driver) == [] and requests(driver) == []


@needs_browser
@pytest.mark.parametrize("width, dark", [(1280, False), (700, True)])
def test_the_page_fits_the_screen(page: Path, width: int, dark: bool) -> None:
    with browser(width=width, dark=dark) as opened:
        open_page(opened, page)
        assert opened.execute_script("return document.documentElement.scrollWidth") == width
        assert console(opened) == []
