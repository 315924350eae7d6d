"""Draws a chart with letters, for any terminal: a line is its label, a band is dots, and where lines meet there is a star."""

from collections.abc import Sequence
from itertools import cycle

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from rlgen.analysis.charts import Chart

STYLES = ("blue", "red", "green", "magenta", "yellow", "cyan")
HEIGHT, MEETING, BAND = 14, "*", "·"
NOWHERE = -1  # the row of a column without a value


def plot(chart: Chart, width: int) -> list[Text]:
    """Returns the lines of text, `width` characters each, of a chart whose labels are single letters; none without a value."""
    edges = [row for line in chart.lines for row in (line.values, line.low, line.high) if row is not None]
    numbers = [value for row in edges for value in row if value is not None]
    if not numbers:
        return []
    low, high = min(numbers), max(numbers)
    room = 0.0 if high > low else abs(low) * 0.1 or 1.0
    labels = {row: f"{high + room - (high - low + 2 * room) * row / (HEIGHT - 1):.3g}" for row in (0, HEIGHT // 2, HEIGHT - 1)}
    left = max(map(len, labels.values()))
    columns = max(width - left - 3, len(chart.axis))
    cells = [[Text(" ") for _ in range(columns)] for _ in range(HEIGHT)]
    places = np.array(chart.x, dtype=float)
    span = float(places[-1] - places[0]) or 1.0
    at = np.floor((places - places[0]) / span * (columns - 1) + 0.5).astype(int)

    def rows(values: Sequence[float | None] | None) -> NDArray[np.int64]:
        heights = by_column(at, np.array(values or (), dtype=float), columns)
        share = (high + room - heights) / (high - low + 2 * room)
        return np.where(np.isfinite(share), np.floor(np.nan_to_num(share) * (HEIGHT - 1) + 0.5), NOWHERE).astype(np.int64)

    for line, style in zip(chart.lines, cycle(STYLES), strict=False):
        for column, (top, bottom) in enumerate(zip(rows(line.high), rows(line.low), strict=True)):
            for row in range(top, bottom + 1) if top != NOWHERE else ():
                cells[row][column] = Text(BAND, style=style)
    for line, style in zip(chart.lines, cycle(STYLES), strict=False):
        for column, row in enumerate(rows(line.values)):
            if row != NOWHERE:
                taken = cells[row][column].plain not in (" ", BAND)
                cells[row][column] = Text(MEETING, style="bold") if taken else Text(line.label, style=f"bold {style}")
    drawn = [Text(f"{labels.get(row, ''):>{left}} │ ").append_text(Text().join(cells[row])) for row in range(HEIGHT)]
    first, last = (f"{place:,.0f}" if place >= 1000 else f"{place:.4g}" for place in places[[0, -1]].tolist())
    ends = f"{chart.axis} {first}{last:>{max(columns - len(chart.axis) - len(first) - 1, len(last) + 1)}}"
    return [*drawn, Text(f"{'':>{left}} └{'─' * (columns + 1)}"), Text(f"{'':>{left}}   {ends}")]


def by_column(at: NDArray[np.int64], values: NDArray[np.float64], columns: int) -> NDArray[np.float64]:
    """Returns the mean of the values in each column, and between columns with values what lies on the line; NaN elsewhere."""
    kept = np.isfinite(values)
    if not kept.any():
        return np.full(columns, np.nan)
    counts = np.bincount(at[: len(values)][kept], minlength=columns)
    sums = np.bincount(at[: len(values)][kept], values[kept], minlength=columns)
    filled = np.flatnonzero(counts)
    return np.interp(np.arange(columns), filled, sums[filled] / counts[filled], left=np.nan, right=np.nan)
