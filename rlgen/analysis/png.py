"""Draws charts into a PNG file for slides, with matplotlib, which is an extra: `pip install 'rlgen[report]'`."""

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlgen.analysis.charts import Chart
from rlgen.errors import SetupError
from rlgen.files import whole_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS, WIDTH, HEIGHT, DPI = 3, 4.6, 2.9, 150  # of one chart, in inches
COLOURS = ("#2f5bd7", "#d9652b", "#16906c", "#9a4bc9", "#b38600", "#c23b69", "#3a8fb7", "#6b7280")  # as in assets/page.css
# What a slide shows, after the evaluations: the charts of `charts.PLANS` that say most.
LEARNING = ("Reward", "Rewards by name", "Completion length", "Entropy", "Gradient norm")
TITLES = (*LEARNING, "Difference of log-probs", "Speed", "Time of a step")
MOST = 9  # charts


def chosen_curves(charts: Sequence[Chart]) -> list[Chart]:
    """Returns the charts that say most: evaluations first, then those of `TITLES`."""
    evaluations = [chart for chart in charts if chart.group == "Evaluation"]
    return [*evaluations, *(chart for title in TITLES for chart in charts if chart.title == title)]


def write_png(
    path: Path, title: str, charts: Sequence[Chart], most: int = MOST, columns: int = COLUMNS, from_zero: bool = False
) -> None:
    """Writes the first `most` charts, `columns` in a row; with `from_zero` all axes begin at 0. Raises SetupError without
    matplotlib, and CheckpointError if the file cannot be written.
    """
    try:
        from matplotlib import rc_context

        # Not pyplot: a figure of its own needs no window and leaves no global state.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SetupError(f"a PNG needs matplotlib ({error}): pip install 'rlgen[report]'") from error
    shown = charts[:most]
    rows = max(1, -(-len(shown) // columns))
    with rc_context({"text.parse_math": False}), whole_file(path) as file:  # a name with $ is no formula
        figure = Figure(figsize=(columns * WIDTH, rows * HEIGHT + 0.5), dpi=DPI, layout="constrained")
        figure.suptitle(title, fontweight="bold")
        grid = figure.subplots(rows, columns, squeeze=False)
        for place, axes in enumerate(grid.flat):
            if place < len(shown):
                paint(axes, shown[place])
                if from_zero:
                    axes.set_xlim(left=0)
                    axes.set_ylim(bottom=0)
            else:
                axes.set_axis_off()
        figure.savefig(file, format="png")


def paint(axes: "Axes", chart: Chart) -> None:
    axes.set_title(f"{chart.title}{f' ({chart.unit})' if chart.unit else ''}", fontsize=10, loc="left")
    axes.grid(color="#dfe3e8", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel(chart.axis, fontsize=8)
    if chart.log:
        axes.set_yscale("log")
    if chart.stacked:
        areas = [[value or 0.0 for value in line.values] for line in chart.lines]
        axes.stackplot(chart.x, areas, labels=[line.label for line in chart.lines], colors=COLOURS, alpha=0.8)
    for line, colour in zip(() if chart.stacked else chart.lines, cycle(COLOURS), strict=False):
        values = np.array(line.values, dtype=float)
        known = np.isfinite(np.pad(values, 1, constant_values=np.nan))
        alone = np.flatnonzero(known[1:-1] & ~known[:-2] & ~known[2:]).tolist()  # a line has no end there: it would be invisible
        axes.plot(chart.x, values, color=colour, label=line.label, linewidth=1.4, marker=".", markevery=alone)
        if line.low is not None and line.high is not None:
            edges = np.array([line.low, line.high], dtype=float)  # None: NaN
            axes.fill_between(chart.x, *edges, color=colour, alpha=0.15, linewidth=0)
    if len(chart.lines) > 1:
        axes.legend(fontsize=8, frameon=False)
