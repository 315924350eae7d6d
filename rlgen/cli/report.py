"""Writes the report of a run: `rlgen report`."""

import json
from pathlib import Path

from rlgen.cli.output import echo
from rlgen.run.find import find_run


def report_command(name: Path, out: Path | None, png: bool, rollouts: int, as_json: bool) -> None:
    """Writes `report.html`, with `png` also the curves beside it, and prints where they are.

    Raises:
        UsageError: no run is there.
        SetupError: `png`, and matplotlib is not installed.
        CheckpointError: a file of the run is damaged, or the report cannot be written.
    """
    from rlgen.analysis.charts import charts_of
    from rlgen.analysis.png import chosen, write_png
    from rlgen.analysis.report import write_report
    from rlgen.analysis.run import read_run

    run = read_run(find_run(name))
    path = out or run.path / "report.html"
    if png:  # first: it fails without matplotlib, before anything is written
        write_png(path.with_suffix(".png"), run.name, chosen(charts_of(run)))
    packed = write_report(run, path, rollouts)
    size = path.stat().st_size
    if as_json:
        shown = {
            "report": str(path),
            "png": str(path.with_suffix(".png")) if png else None,
            "bytes": size,
            "rollouts": packed["count"],
            "rollouts_of_run": packed["total"],
        }
        echo(json.dumps({**shown, "steps": len(run.metrics), "evaluations": len(run.evaluations)}))
        return
    part = "" if packed["count"] == packed["total"] else f" of {packed['total']:,}"
    held = f"{len(run.metrics)} steps, {packed['count']:,}{part} rollouts, {size / 2**20:.1f} MiB"
    echo(f"{path} written: {held}; open it in a browser")
    if png:
        echo(f"{path.with_suffix('.png')} written")
