"""Writes a comparison as one self-contained HTML file."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlgen.analysis.aligned import BAND
from rlgen.analysis.charts import Chart
from rlgen.analysis.comparison import Comparison, Verdict
from rlgen.analysis.page import write_page
from rlgen.analysis.report import as_facts

SCRIPTS = ("base.js", "chart.js", "compare.js")


def write_comparison(comparison: Comparison, charts: Sequence[Chart], by: str, path: Path) -> None:
    """Writes the page.

    Args:
        charts: in the order in which they are shown.
        by: what the curves are aligned by.

    Raises:
        CheckpointError: the file cannot be written.
    """
    title = title_of(comparison)
    facts = {
        "title": title,
        "metric": comparison.metric,
        "by": by,
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "verdicts": [facts_of(verdict) for verdict in comparison.verdicts],
        "notes": comparison.notes,
        "letters": [group.letter for group in comparison.groups],
        "groups": [comparison.row_of(group) for group in comparison.groups],
        "differences": comparison.differing,
        "charts": [as_facts(chart) for chart in charts],
        "band": BAND if any(len(group.runs) > 1 for group in comparison.groups) else "",
    }
    write_page(path, f"{title} – rlgen compare", SCRIPTS, facts, {})


def title_of(comparison: Comparison) -> str:
    """Returns the groups by the first of their runs: "grpo-0 … and rloo-0 …"."""
    names = [comparison.names[group.runs[0]] + (" …" if len(group.runs) > 1 else "") for group in comparison.groups]
    return " and ".join(names)


def facts_of(verdict: Verdict) -> dict[str, Any]:
    """Returns a verdict as the script takes it."""
    return {
        "of": f"{verdict.left} and {verdict.right}, {verdict.place}",
        "sentence": verdict.sentence,
        "basis": verdict.estimate.basis,
        "higher": verdict.higher is not None,
    }
