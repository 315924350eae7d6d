"""Curves as lines of a chart and of a PNG."""

from dataclasses import replace

import pytest
from matplotlib.figure import Figure

from rlgen.analysis.charts import Line, chart_of
from rlgen.analysis.png import COLOURS, paint


@pytest.mark.parametrize("values, dots", [([0.5], [0]), ([1.0, None, 2.0, 3.0, None, 4.0], [0, 5]), ([1.0, 2.0], [])])
def test_a_value_without_neighbours_is_a_dot(values: list[float | None], dots: list[int]) -> None:
    """A line through one point is invisible: that of a run of one step, or of one evaluation."""
    axes = Figure().add_subplot()
    paint(axes, chart_of("reward/mean", "", "", range(len(values)), [Line(label="A", values=values)]))
    (line,) = axes.get_lines()
    assert (line.get_marker(), line.get_markevery()) == (".", dots)


def test_more_lines_than_colours_are_drawn() -> None:
    axes = Figure().subplots()
    named = [Line(label=chr(65 + place), values=[0.0, 1.0]) for place in range(len(COLOURS) + 2)]
    paint(axes, replace(chart_of("", "Evaluation", "Evaluation: mine", [1, 2], named), unit="s", axis="tokens"))
    assert len(axes.lines) == len(named) and axes.get_xlabel() == "tokens" and axes.get_title("left") == "Evaluation: mine (s)"
