"""Writes `report.html`: everything that a colleague wants to see of a run, in one file."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlgen.analysis.card import last_name
from rlgen.analysis.charts import Chart, charts_of
from rlgen.analysis.health import verdicts_of
from rlgen.analysis.pack import Packed, pack, packed_json, short
from rlgen.analysis.page import write_page
from rlgen.analysis.pieces import pieces_of, tokenizer_of
from rlgen.analysis.run import Run
from rlgen.analysis.summary import facts_of, phases_of

SCRIPTS = ("base.js", "chart.js", "tokens.js", "rollouts.js", "report.js")


def write_report(run: Run, path: Path, most_rows: int) -> Packed:
    """Writes the report of a run, and returns its rollouts as they are packed.

    Args:
        most_rows: most rollouts in the report; of a longer run only every n-th step is taken, counted from the newest.

    Raises:
        CheckpointError: a file of rollouts is damaged, or the report cannot be written.
    """
    rollouts, ids = pack(run, most_rows)
    tokenizer = tokenizer_of(run)
    parts = {**rollouts.parts, "pieces": packed_json({"ids": ids, "texts": pieces_of(tokenizer, ids)})}
    facts = {**facts_of_page(run), "rollouts": {**rollouts.facts, "tokenizer": tokenizer is not None}}
    write_page(path, f"{run.name} – rlgen report", SCRIPTS, facts, parts)
    return rollouts


def facts_of_page(run: Run) -> dict[str, Any]:
    """Returns everything of the page but the rollouts."""
    verdicts = verdicts_of(run)
    recipe = run.recipe
    return {
        "name": run.name,
        "about": [
            f"{recipe.trainer.kind} on {last_name(recipe.model.path)}",
            last_name(recipe.data.source),
            f"{recipe.rollout.prompts_per_step} prompts × {recipe.rollout.group_size}",
            f"seed {recipe.run.seed}",
        ],
        "state": {
            "name": run.status.get("state", "not begun"),
            "step": run.status.get("step", 0),
            "steps": run.status.get("steps", recipe.run.steps),
            "message": run.status.get("message", ""),
        },
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "summary": [asdict(fact) for fact in facts_of(run, verdicts)],
        "charts": [as_facts(chart) for chart in charts_of(run)],
        "phases": [{"name": phase.name, "seconds": short(phase.seconds)} for phase in phases_of(run)],
        "seconds": short(run.seconds),
        "health": [{**asdict(verdict), "last": None if verdict.last is None else short(verdict.last)} for verdict in verdicts],
        "sentinel": [
            {key: rung.get(key) for key in ("name", "verdict", "sentence", "measured")}
            for rung in (run.attempts[-1] if run.attempts else {}).get("sentinel", [])
        ],
        "recipe": {"resolved": run.resolved, "written": run.written},
        "attempts": [
            {key: attempt.get(key) for key in ("time", "rlgen", "git", "command", "platform", "gpus", "packages", "data")}
            for attempt in run.attempts
        ],
    }


def as_facts(chart: Chart) -> dict[str, Any]:
    """Returns a chart as the scripts take it, with short numbers."""
    lines = []
    for line in chart.lines:
        edges = {"values": line.values, "low": line.low, "high": line.high}
        kept = {name: [short(value) for value in values] for name, values in edges.items() if values is not None}
        lines.append({"label": line.label, **kept})
    return {
        "group": chart.group,
        "title": chart.title,
        "unit": chart.unit,
        "what": chart.what,
        "log": chart.log,
        "stacked": chart.stacked,
        "axis": chart.axis,
        "whole": all(place == int(place) for place in chart.x),
        "x": list(chart.x),
        "lines": lines,
    }
