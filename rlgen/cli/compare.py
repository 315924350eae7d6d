"""Compares runs, and writes the report of one: `rlgen compare`, `rlgen report`."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from rlgen.analysis.aligned import BAND, By, other_charts
from rlgen.analysis.charts import charts_of
from rlgen.analysis.comparison import Comparison, Verdict, compare
from rlgen.analysis.interval import Interval
from rlgen.analysis.plot import STYLES, plot
from rlgen.analysis.png import chosen_curves, write_png
from rlgen.analysis.report import title_of, write_comparison, write_report
from rlgen.analysis.run import Run, read_run
from rlgen.cli.output import check_file, echo, page_for_terminal, plain_table
from rlgen.cli.rollouts import as_json_value
from rlgen.cli.status import status_of
from rlgen.errors import UsageError
from rlgen.recipe.rules import repeated
from rlgen.redact import printable, printable_json
from rlgen.run.find import find_run


def compare_command(names: Sequence[Path], metric: str, by: By, html: bool, png: bool, out: Path, as_json: bool) -> None:
    if html or png:
        check_file(out)
    runs = runs_of(names)
    comparison = compare(runs, metric, by)
    charts = [comparison.chart, *other_charts(comparison.groups, by)] if html or png else []
    files = {"html": str(out) if html else None, "png": str(out.with_suffix(".png")) if png else None}
    if png:  # first: it fails without matplotlib, before anything is written
        write_png(out.with_suffix(".png"), title_of(comparison), [charts[0], *chosen_curves(charts[1:])])
    if html:
        write_comparison(comparison, charts, by, out)
    if as_json:
        echo(printable_json(json.dumps(as_json_value({**comparison_object(comparison, by), **files}))), exact=True)
        return
    with page_for_terminal(whole_lines=False) as page:
        print_comparison(comparison, by, page)
    for file in filter(None, files.values()):
        echo(f"{file} written")


def runs_of(names: Sequence[Path]) -> list[Run]:
    paths = [find_run(name) for name in names]
    if len(paths) < 2:
        raise UsageError(f"compare: {names[0]} is the only run; name two or more")
    if twice := repeated([path.resolve() for path in paths]):
        raise UsageError(f"compare: {names[twice[0]]} is named twice; name each run once")
    return [run_at(path) for path in paths]


def run_at(path: Path) -> Run:
    """Returns a run with its state, also of one that was killed and could not write it."""
    return replace(read_run(path), status=status_of(path))


def comparison_object(comparison: Comparison, by: By) -> dict[str, Any]:
    """Returns what `--json` prints. Runs are keyed by their names, which are unique."""
    names = comparison.names
    letters = {run: group.letter for group in comparison.groups for run in group.runs}
    return {
        "metric": comparison.metric,
        "by": by,
        "runs": {
            name: {
                "path": str(run.path),
                "group": letters[run],
                "seed": run.recipe.run.seed,
                "state": run.status["state"],
                "steps": len(run.metrics),
            }
            for run, name in names.items()
        },
        "groups": {letter: bounds(end) for letter, end in comparison.ends.items()},
        "differences": {key: {names[run]: value for run, value in of.items()} for key, of in comparison.differences.items()},
        "curves": {
            "x": comparison.chart.x,
            "lines": {line.label: {"mean": line.values, "low": line.low, "high": line.high} for line in comparison.chart.lines},
        },
        "verdicts": [verdict_object(verdict) for verdict in comparison.verdicts],
        "notes": comparison.notes,
    }


def bounds(value: Interval | float | None) -> dict[str, float | None]:
    if isinstance(value, Interval):
        return {"mean": value.value, "low": value.low, "high": value.high}
    return {"mean": value, "low": None, "high": None}


def verdict_object(verdict: Verdict) -> dict[str, Any]:
    """Returns a verdict: `difference` is `left` minus `right`, with its interval."""
    return {
        "left": verdict.left,
        "right": verdict.right,
        "higher": verdict.higher,
        "difference": verdict.difference,
        "low": verdict.interval.low if verdict.interval else None,
        "high": verdict.interval.high if verdict.interval else None,
        "method": verdict.method,
        "steps": [verdict.steps[0], verdict.steps[-1]] if verdict.steps else None,
        "sentence": verdict.sentence,
        "basis": verdict.basis,
    }


def print_comparison(comparison: Comparison, by: By, page: Console) -> None:
    letters = {group.letter: style for group, style in zip(comparison.groups, cycle(STYLES), strict=False)}
    runs = plain_table(["", "runs", "seeds", "steps", f"{comparison.metric}, last quarter"])
    for group in comparison.groups:
        runs.add_row(Text(group.letter, style=f"bold {letters[group.letter]}"), *cells(comparison.row_of(group)))
    page.print(runs)
    page.print(Text("\nDifferences of the recipes", style="bold"))
    recipes = plain_table(["key", *letters])
    for row in comparison.differing:
        recipes.add_row(*cells(row))
    page.print(recipes if comparison.differing else Text("The recipes are the same."))
    if lines := plot(comparison.chart, page.width):
        page.print(Text(printable(f"\n{comparison.metric} by {by}"), style="bold"))
        for line in lines:
            page.print(line)
        if any(len(group.runs) > 1 for group in comparison.groups):
            page.print(Text(BAND, style="dim"))
    for verdict in comparison.verdicts:
        page.print(Text(f"\n{verdict.sentence}", style="bold"))
        page.print(Text(printable(f"{comparison.metric}, {verdict.place}; {verdict.basis}"), style="dim"))
    for place, note in enumerate(comparison.notes):
        page.print(Text(printable(("" if place else "\n") + f"note: {note}"), style="yellow"))


def cells(texts: Sequence[str]) -> list[Text]:
    """Returns texts that others wrote as cells: literally, without markup or control characters."""
    return [Text(printable(text)) for text in texts]


def report_command(name: Path, out: Path | None, png: bool, rollouts: int, as_json: bool) -> None:
    run = run_at(find_run(name))
    path = out or run.path / "report.html"
    check_file(path)
    if png:  # first: it fails without matplotlib, before anything is written
        write_png(path.with_suffix(".png"), run.name, chosen_curves(charts_of(run)))
    packed = write_report(run, path, rollouts)
    size, drawn = path.stat().st_size, str(path.with_suffix(".png")) if png else None
    if as_json:
        shown = {
            "report": str(path),
            "png": drawn,
            "bytes": size,
            "rollouts": packed["count"],
            "rollouts_of_run": packed["total"],
        }
        echo(json.dumps({**shown, "steps": len(run.metrics), "evaluations": len(run.evaluations)}))
        return
    part = "" if packed["count"] == packed["total"] else f" of {packed['total']:,}"
    held = f"{len(run.metrics)} steps, {packed['count']:,}{part} rollouts, {size / 2**20:.1f} MiB"
    echo(f"{path} written: {held}; open it in a browser")
    if drawn:
        echo(f"{drawn} written")
