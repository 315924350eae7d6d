"""Compares runs: what differs in their recipes, how far a metric is apart at their ends, and what limits the verdict."""

import difflib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from rlgen.analysis.aligned import SEED, By, RunGroup, Series, compared, grouped, metric_chart, series_of
from rlgen.analysis.charts import Chart
from rlgen.analysis.interval import LEAST, Interval, block_size, of_difference, of_mean, of_series
from rlgen.analysis.run import Run
from rlgen.errors import UsageError
from rlgen.metrics import Metric
from rlgen.recipe import Recipe
from rlgen.recipe.evaluation import data_of, eval_rewards

# Metrics of which more is better, see `measure_of`; for all others the verdict only has the word "higher".
BETTER = re.compile(r"(eval/)?reward/(.+/)?mean|eval/(pass|avg)@\d+|dpo/accuracy")
ABSENT = "–"
LISTED = 5  # names of metrics that a message shows


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The mean of a metric in one group minus that in another, over the last quarter of the steps that both have."""

    left: str  # letter of a group
    right: str
    metric: str
    steps: Sequence[int]  # the last quarter
    difference: float | None = None  # None: one of them has measured nothing there
    interval: Interval | None = None
    method: Literal["Welch's t over seeds", "block bootstrap over steps"] | None = None
    basis: str  # what the interval rests on, or why there is none
    better: bool = True  # more of the metric is better, and it measures the same in both groups

    @property
    def place(self) -> str:
        return f"steps {self.steps[0]} to {self.steps[-1]}" if self.steps else "no step"

    @property
    def higher(self) -> str | None:
        """Returns the group whose metric is higher; None if the interval holds 0, or if there is none."""
        if self.interval is None or self.interval.low <= 0 <= self.interval.high:
            return None
        return self.left if self.interval.value > 0 else self.right

    @property
    def sentence(self) -> str:
        """Returns the verdict: "A is better than B by 0.12 (0.05 to 0.19)"."""
        interval = self.interval
        if self.difference is None:
            return f"{self.left} and {self.right} cannot be compared"
        if interval is None:
            return f"no verdict: {self.left} minus {self.right} is {self.difference:.3g}"
        if self.higher is None:
            return f"no difference can be seen: {self.left} minus {self.right} is {interval}"
        word = "better" if self.better else "higher"
        if self.higher == self.left:
            return f"{self.left} is {word} than {self.right} by {interval}"
        return f"{self.right} is {word} than {self.left} by {Interval(-interval.value, -interval.high, -interval.low)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The result of a comparison, without the curves of further metrics."""

    names: Mapping[Run, str]  # of all runs, in the order in which they are given
    groups: Sequence[RunGroup]
    differences: Mapping[str, Mapping[Run, Any]]  # key of the recipe -> value in each run that has it
    metric: str
    chart: Chart  # of the metric
    ends: Mapping[str, Interval | float | None]  # letter of a group -> mean over the last quarter of its steps; see `end_of`
    verdicts: Sequence[Verdict]  # of each group against the first
    notes: Sequence[str]

    def row_of(self, group: RunGroup) -> tuple[str, str, str, str]:
        """Returns what stands in the table of groups: names, seeds, steps, and the mean of the metric."""
        steps = dict.fromkeys(str(run.metrics[-1][Metric.STEP]) if run.metrics else "0" for run in group.runs)
        end = self.ends[group.letter]
        return (
            ", ".join(self.names[run] for run in group.runs),
            ", ".join(map(str, group.seeds)),
            ", ".join(steps),
            ABSENT if end is None else f"{end:.3g}" if isinstance(end, float) else str(end),
        )

    @property
    def differing(self) -> list[list[str]]:
        """Returns the table of differences: each key with its value in each group. Seeds that every group has are none."""
        rows = []
        for key, values in self.differences.items():
            of_groups = [dict.fromkeys(value_of(values, run) for run in group.runs) for group in self.groups]
            rows.append([key, *map(", ".join, of_groups)])
        return [row for row in rows if len(set(row[1:])) > 1]


def compare(runs: Sequence[Run], metric: str, by: By) -> Comparison:
    """Compares two runs or more. Raises UsageError if none has measured the metric although there are steps, or as `grouped`."""
    check(runs, metric)
    groups = grouped(runs)
    folders = [run.name for run in runs]
    names = {run: run.name if folders.count(run.name) == 1 else str(run.path) for run in runs}
    differing = differences_of(runs)
    alike = not differing.keys() - {SEED} and not any(group.again for group in groups)
    verdicts = [] if alike else [verdict(groups[0], other, metric) for other in groups[1:]]
    return Comparison(
        names=names,
        groups=groups,
        differences=differing,
        metric=metric,
        chart=metric_chart(groups, metric, by),
        ends={group.letter: end_of(group, metric) for group in groups},
        verdicts=verdicts,
        notes=[*(note for run in runs for note in notes_of(run, names[run], metric)), *notes_of_all(runs, groups, verdicts)],
    )


def differences_of(runs: Sequence[Run]) -> dict[str, dict[Run, Any]]:
    """Returns the keys in which recipes differ, by section, kinds first, each with its value in the runs that have it."""
    recipes = {run: compared(run) for run in runs}
    sections = list(Recipe.model_fields)
    keys = dict.fromkeys(key for recipe in recipes.values() for key in recipe)
    keys = dict.fromkeys(sorted(keys, key=lambda key: (sections.index(key.partition(".")[0]), not key.endswith(".kind"))))
    values = {key: {run: recipe[key] for run, recipe in recipes.items() if key in recipe} for key in keys}
    return {key: of_runs for key, of_runs in values.items() if len({value_of(of_runs, run) for run in runs}) > 1}


def value_of(values: Mapping[Run, Any], run: Run) -> str:
    if run not in values:
        return ABSENT
    value = values[run]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def check(runs: Sequence[Run], metric: str) -> None:
    """Raises UsageError if no run has a finite number of that name, although there are metrics."""
    records = [record for run in runs for record in (*run.metrics, *run.evaluations)]
    keys = sorted({key for record in records for key, value in record.items() if isinstance(value, int | float)})
    if not keys or any(math.isfinite(value) for run in runs for value in series_of(run, metric).values()):
        return
    close = difflib.get_close_matches(metric, keys, n=1)
    hint = f"did you mean `{close[0]}`?" if close else f"they have {', '.join(keys[:LISTED])} and others: rlgen docs metrics"
    raise UsageError(f"--metric {metric}: none of the runs has a number of that name; {hint}")


def last_quarter(series: Sequence[Series]) -> list[int]:
    """Returns the last quarter of the steps that all of these series have, at least one of them."""
    steps = sorted(set.intersection(*map(set, series))) if series else []
    return steps[-math.ceil(len(steps) / 4) :] if steps else []


def end_of(group: RunGroup, metric: str) -> Interval | float | None:
    """Returns the mean over the last quarter of the steps that a group's runs have: with its interval over two seeds or more."""
    values = [values for run in group.runs if (values := series_of(run, metric))]
    shared = last_quarter(values)
    means = [mean for one in values if math.isfinite(mean := mean_at(one, shared))]
    return of_mean(means) if len(means) > 1 else means[0] if means else None


def mean_at(values: Series, steps: Sequence[int]) -> float:
    """Returns the mean of the numbers at these steps; NaN if there are none."""
    numbers = [values[step] for step in steps if math.isfinite(values[step])]
    return sum(numbers) / len(numbers) if numbers else math.nan


def verdict(left: RunGroup, right: RunGroup, metric: str) -> Verdict:
    """Returns the verdict on two groups. Runs that never measured the metric are left out."""
    sides = [[values for run in group.runs if (values := series_of(run, metric))] for group in (left, right)]
    steps = last_quarter([*sides[0], *sides[1]]) if all(sides) else []
    (one, good), (other, too) = (measure_of(group, metric) for group in (left, right))
    found = verdict_at(sides[0], sides[1], steps, (left.letter, right.letter), metric)
    return replace(found, better=good and too and one == other)


def measure_of(group: RunGroup, metric: str) -> tuple[Any, bool]:
    """Returns the data and the rewards that a metric of rewards is of, and whether more of it is better."""
    recipe = group.runs[0].recipe
    data, rewards = recipe.data, recipe.rewards
    if metric.startswith("eval/") and recipe.eval is not None:
        data, rewards = data_of(recipe.eval, data), eval_rewards(recipe.eval, rewards)
    named = [one for one in rewards if metric.endswith(f"reward/{one.label}/mean")]
    scored = [(one.use, one.args, None if named else one.weight) for one in named or rewards]
    measured = data.source, data.subset, data.split, data.options, scored
    return measured, BETTER.fullmatch(metric) is not None and all(one.weight >= 0 for one in named)


def verdict_at(
    left: Sequence[Series], right: Sequence[Series], steps: Sequence[int], letters: tuple[str, str], metric: str
) -> Verdict:
    """Returns the verdict on the runs of two groups at these steps: over seeds if each has two, else over the steps."""
    made = partial(Verdict, left=letters[0], right=letters[1], metric=metric, steps=steps)
    sides = [[values for values in side if math.isfinite(mean_at(values, steps))] for side in (left, right)]
    means = [[mean_at(values, steps) for values in side] for side in sides]
    if not all(means):
        empty = " and ".join(letter for letter, found in zip(letters, means, strict=True) if not found)
        return made(basis=f"{empty} measured nothing there" if steps else "there is no step at which both have measured it")
    seeds, difference = [len(found) for found in means], float(np.mean(means[0]) - np.mean(means[1]))
    if min(seeds) > 1:
        basis = f"95 % interval over {seeds[0]} and {seeds[1]} seeds (Welch's t)"
        return made(difference=difference, interval=of_difference(*means), method="Welch's t over seeds", basis=basis)
    caution = "one seed each proves little" if max(seeds) == 1 else f"{letters[seeds.index(1)]} has one seed, which proves little"
    curves = [np.mean([[values[step] for step in steps] for values in side], axis=0) for side in sides]
    apart = [value for value in (curves[0] - curves[1]).tolist() if math.isfinite(value)]  # where all runs have a number
    if len(apart) < LEAST:
        basis = f"no interval: both sides have a number at {len(apart)} steps, but at least {LEAST} are needed; {caution}"
        return made(difference=difference, basis=basis)
    basis = f"95 % interval over {len(apart)} steps (block bootstrap, {block_size(apart)} steps a block); {caution}"
    interval = of_series(apart)
    return made(difference=interval.value, interval=interval, method="block bootstrap over steps", basis=basis)


def notes_of(run: Run, name: str, metric: str) -> list[str]:
    """Returns what to know about one run: that it did not end, and which values it lacks."""
    state = run.status.get("state", "not begun")
    last, steps = (run.metrics[-1][Metric.STEP] if run.metrics else 0), run.recipe.run.steps
    found = [] if state == "done" and last == steps else [f"{name}: {state}, at step {last} of {steps}"]
    values = series_of(run, metric)
    missing = sum(not math.isfinite(value) for value in values.values())
    if not values and run.metrics:
        found.append(f"{name}: {metric} was never measured")
    if missing:
        found.append(f"{name}: {metric} is missing or not finite at {missing} of {len(values)} steps")
    return found


def rlgen_version(attempt: Mapping[str, Any]) -> str:
    """Returns the version of rlgen and the first digits of its commit, with `+` if files differed: "0.1.0 (08ae11a74f+)"."""
    commit = str(attempt.get("git"))
    return f"{attempt.get('rlgen')} ({commit.removesuffix('+')[:10]}{'+' if commit.endswith('+') else ''})"


def notes_of_all(runs: Sequence[Run], groups: Sequence[RunGroup], verdicts: Sequence[Verdict]) -> list[str]:
    found, metric = [], verdicts[0].metric if verdicts else ""
    if not verdicts:
        found.append("the recipes differ only in the seed, so there is no verdict")
    others = [group.letter for group in groups if measure_of(group, metric)[0] != measure_of(groups[0], metric)[0]]
    if others and BETTER.fullmatch(metric):
        named = " and ".join(others)
        found.append(f"{metric} is of other data or rewards in {named} than in A: what is higher need not be better")
    found += [f"{group.letter} repeats the recipe and the seeds of an earlier group" for group in groups if group.again]
    if len({run.metrics[-1][Metric.STEP] for run in runs if run.metrics}) > 1:
        found.append("the runs end at different steps: a curve of several seeds ends with the shortest run")
    versions = {rlgen_version(run.attempts[-1]) for run in runs if run.attempts}
    if len(versions) > 1:
        found.append(f"the runs are of different versions of rlgen: {', '.join(sorted(versions))}")
    if len(verdicts) > 1:
        found.append(f"each of the {len(verdicts)} intervals holds with 95 %, not all of them together")
    return found
