"""Groups runs whose recipes differ only in the seed, and aligns their curves by step, tokens or time: the seeds of a group become
their mean with a band.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from string import ascii_uppercase
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlgen.analysis.charts import Chart, Line, chart_of, charts_of, thinned
from rlgen.analysis.interval import reach_of_mean
from rlgen.analysis.run import Run, number
from rlgen.errors import UsageError
from rlgen.metrics import Metric
from rlgen.recipe import effective
from rlgen.recipe.yaml import by_key

SEED = "run.seed"
PLACE = frozenset(["run.name", "run.dir"])  # where a run is stored, which is not a difference
By = Literal["step", "tokens", "time"]
AXES: Mapping[By, str] = {"step": "step", "tokens": "tokens", "time": "seconds"}
BAND = "A band is the 95 % interval of the mean over the seeds (Student's t); with two seeds it reaches from one to the other."

Series: TypeAlias = Mapping[int, float]  # step -> value; one that is not finite is missing
Floats: TypeAlias = NDArray[np.float64]
Curve: TypeAlias = Floats  # [2, N], places on an axis and the values of one run there; NaN: it is missing


@dataclass(frozen=True, slots=True, kw_only=True)
class RunGroup:
    """Runs of one recipe with different seeds."""

    letter: str  # "A"
    runs: Sequence[Run]
    again: bool  # an earlier group has the same recipe and seeds

    @property
    def seeds(self) -> list[int]:
        return [run.recipe.run.seed for run in self.runs]


def grouped(runs: Sequence[Run]) -> list[RunGroup]:
    """Returns the runs by recipe, in the order in which they are given. Raises UsageError for more groups than letters.

    Two runs of the same recipe and seed are not independent: the second one begins a group of repetitions. Two seeds
    alone are two groups, so that each has its own curve.
    """
    found: dict[tuple[str, int], list[Run]] = {}
    seen: Counter[tuple[str, int]] = Counter()
    for run in runs:
        recipe = json.dumps({key: value for key, value in compared(run).items() if key != SEED}, sort_keys=True)
        seen[recipe, run.recipe.run.seed] += 1
        found.setdefault((recipe, seen[recipe, run.recipe.run.seed]), []).append(run)
    if len(found) > len(ascii_uppercase):
        raise UsageError(f"the runs have {len(found)} recipes, and compare shows {len(ascii_uppercase)} at most; name fewer runs")
    groups = [(members, times > 1) for (_, times), members in found.items()]
    if len(groups) == 1 and len(runs) == 2:
        groups = [([run], False) for run in runs]
    return [RunGroup(letter=letter, runs=own, again=again) for letter, (own, again) in zip(ascii_uppercase, groups, strict=False)]


def compared(run: Run) -> dict[str, Any]:
    """Returns the values of a run's recipe that have an effect, by dotted key, without the names of its folder."""
    return {key: value for key, value in by_key(effective(run.recipe)).items() if key not in PLACE}


def series_of(run: Run, metric: str) -> dict[int, float]:
    """Returns the values of a metric by step, of training or of evaluations; NaN where a record has no number for it."""
    found: dict[int, float] = {}
    for record in (*run.metrics, *run.evaluations):
        if metric in record:
            value = number(record, metric)
            found[record[Metric.STEP]] = float("nan") if value is None else value
    return found


def axis_places(run: Run, by: By) -> dict[int, float]:
    """Returns where each step of a run stands on the axis: tokens that were sampled, or seconds, up to its end."""
    steps = [record[Metric.STEP] for record in run.metrics]
    if by == "step":
        return {step: step for step in (*steps, *(record[Metric.STEP] for record in run.evaluations))}
    key = Metric.TOKENS_GENERATED if by == "tokens" else Metric.TIME_STEP
    sums = np.cumsum([number(record, key) or 0.0 for record in run.metrics])
    return {0: 0.0, **{step: round(total, 3) for step, total in zip(steps, sums.tolist(), strict=True)}}


def metric_chart(groups: Sequence[RunGroup], metric: str, by: By) -> Chart:
    found = {run: curve_of(run, series_of(run, metric), by) for group in groups for run in group.runs}
    curves = {run: curve for run, curve in found.items() if curve is not None}
    return compared_chart(chart_of(metric, "Compared", metric), groups, curves, by)


def other_charts(groups: Sequence[RunGroup], by: By) -> list[Chart]:
    """Returns a chart for each curve that the report of any of the runs draws, in the order of the report."""
    drawn = [(run, chart) for group in groups for run in group.runs for chart in charts_of(run)]
    several = {(chart.group, chart.title) for _, chart in drawn if len(chart.lines) > 1}
    charts: dict[tuple[str, str, str], Chart] = {}
    curves: dict[tuple[str, str, str], dict[Run, Curve]] = {}
    for run, chart in drawn:
        for line in chart.lines:
            key = (chart.group, chart.title, line.label)
            title = f"{chart.title}: {line.label}" if key[:2] in several else chart.title
            charts.setdefault(key, replace(chart, title=title, stacked=False))
            values = zip(chart.x, line.values, strict=True)
            curve = curve_of(run, {int(step): float("nan") if value is None else value for step, value in values}, by)
            if curve is not None:
                curves.setdefault(key, {})[run] = curve
    return [compared_chart(chart, groups, curves.get(key, {}), by) for key, chart in charts.items()]


def curve_of(run: Run, series: Series, by: By) -> Curve | None:
    """Returns a series along an axis; None if it has no value. A missing value stays missing: the curve has a gap there."""
    places = axis_places(run, by)
    points = [(places[step], value) for step, value in sorted(series.items()) if step in places]
    if not any(np.isfinite(value) for _, value in points):
        return None
    return np.array(points, dtype=float).T


def compared_chart(chart: Chart, groups: Sequence[RunGroup], curves: Mapping[Run, Curve], by: By) -> Chart:
    """Returns a chart with one line for each group, on the places of all its curves."""
    x = np.array(thinned(sorted({place for places, _ in curves.values() for place in places.tolist()})), dtype=float)
    lines = [line_of(group, [curves[run] for run in group.runs if run in curves], x) for group in groups]
    return replace(chart, x=[int(place) if place == int(place) else place for place in x.tolist()], axis=AXES[by], lines=lines)


def line_of(group: RunGroup, curves: Sequence[Curve], x: Floats) -> Line:
    """Returns the mean of a group's runs with its band, up to the end of the shortest: a mean of fewer runs would jump there."""
    if not curves:
        return Line(label=group.letter, values=[None] * len(x))
    rows = np.array([np.interp(x, places, values, left=np.nan, right=np.nan) for places, values in curves])
    if len(rows) == 1:
        return Line(label=group.letter, values=present(rows[0]))
    low, high = band(rows)
    return Line(label=group.letter, values=present(rows.mean(axis=0)), low=present(low), high=present(high))


def band(rows: Floats) -> tuple[Floats, Floats]:
    """Returns the edges of the band of two runs or more [runs, places]: see `BAND`."""
    if len(rows) == 2:
        return rows.min(axis=0), rows.max(axis=0)
    mean, reach = rows.mean(axis=0), reach_of_mean(rows)
    return mean - reach, mean + reach


def present(values: Floats) -> list[float | None]:
    return [value if np.isfinite(value) else None for value in values.tolist()]
