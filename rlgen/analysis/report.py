"""Writes `report.html`, everything that a colleague wants to see of a run, and the page of a comparison: one file each.

A page is self-contained: styles, scripts and data are in the file, which requests nothing from the network. What a model, a data
set or a person wrote is data and never markup: it stands in the page as JSON or base64, and the scripts put it on the screen as
text nodes. The browser enforces both. Only scripts and styles of the hashes in the page's policy run, nothing is fetched, and
assignments that would parse a text as markup raise an error (trusted types).
"""

import base64
import hashlib
import html
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from string import Template
from typing import Any

from rlgen.analysis.aligned import BAND
from rlgen.analysis.card import last_name
from rlgen.analysis.charts import Chart, charts_of
from rlgen.analysis.comparison import Comparison
from rlgen.analysis.pack import pack_rollouts, packed_json, piece, short, tokenizer_of
from rlgen.analysis.run import Run
from rlgen.analysis.summary import phases_of, summary_of, verdicts_of
from rlgen.files import write_text

ASSETS = Path(__file__).parent / "assets"
COMPARE_SCRIPTS = ("base.js", "chart.js", "compare.js")
SCRIPTS = ("base.js", "chart.js", "tokens.js", "rollouts.js", "report.js")


def write_report(run: Run, path: Path, most_rows: int) -> Mapping[str, Any]:
    """Writes the report of a run, and returns what it says of its rollouts: at most `most_rows`; of a longer run only every n-th
    step is taken, counted from the newest. Raises CheckpointError if a file of rollouts is damaged, or the report cannot be
    written.
    """
    rollouts, parts, ids = pack_rollouts(run, most_rows)
    tokenizer = tokenizer_of(run)
    parts["pieces"] = packed_json({"ids": ids, "texts": [piece(tokenizer, one) for one in ids]})
    facts = {**facts_of_page(run), "rollouts": {**rollouts, "tokenizer": tokenizer is not None}}
    write_page(path, f"{run.name} – rlgen report", SCRIPTS, facts, parts)
    return rollouts


def write_comparison(comparison: Comparison, charts: Sequence[Chart], by: str, path: Path) -> None:
    """Writes the page of a comparison, with these charts; `by` is what they are aligned by. Raises CheckpointError."""
    title = title_of(comparison)
    facts = {
        "title": title,
        "metric": comparison.metric,
        "by": by,
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "verdicts": [
            {
                "of": f"{verdict.left} and {verdict.right}, {verdict.place}",
                "sentence": verdict.sentence,
                "basis": verdict.basis,
                "higher": verdict.higher is not None,
            }
            for verdict in comparison.verdicts
        ],
        "notes": comparison.notes,
        "letters": [group.letter for group in comparison.groups],
        "groups": [comparison.row_of(group) for group in comparison.groups],
        "differences": comparison.differing,
        "charts": [as_facts(chart) for chart in charts],
        "band": BAND if any(len(group.runs) > 1 for group in comparison.groups) else "",
    }
    write_page(path, f"{title} – rlgen compare", COMPARE_SCRIPTS, facts, {})


def title_of(comparison: Comparison) -> str:
    """Returns the groups by the first of their runs: "grpo-0 … and rloo-0 …"."""
    return " and ".join(comparison.names[group.runs[0]] + " …" * (len(group.runs) > 1) for group in comparison.groups)


def facts_of_page(run: Run) -> dict[str, Any]:
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
        "summary": [asdict(fact) for fact in summary_of(run, verdicts)],
        "charts": [as_facts(chart) for chart in charts_of(run)],
        "phases": [{"name": name, "seconds": short(seconds)} for name, seconds in phases_of(run).items()],
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
    lines: list[dict[str, Any]] = []
    for line in chart.lines:
        series = {"values": line.values, "low": line.low, "high": line.high}
        kept = {name: [short(value) for value in values] for name, values in series.items() if values is not None}
        lines.append({"label": line.label, **kept})
    whole = all(place == int(place) for place in chart.x)
    return {**asdict(replace(chart, x=list(chart.x), lines=())), "whole": whole, "lines": lines}


def write_page(path: Path, title: str, scripts: Sequence[str], facts: Any, parts: Mapping[str, str]) -> None:
    """Writes a page. Raises CheckpointError if that fails.

    Args:
        scripts: names of the scripts in `assets`, in the order in which they run.
        facts: the data that the page shows at once, as JSON can hold it.
        parts: packed data by id, which scripts unpack when they need them.
    """
    style = (ASSETS / "page.css").read_text(encoding="utf-8")
    script = "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in scripts)
    islands = [f'<script type="application/json" id="facts">{island(facts)}</script>']
    islands += [f'<script type="text/plain" id="{name}">{content}</script>' for name, content in parts.items()]
    policy = (
        f"default-src 'none'; script-src {hash_of(script)}; style-src {hash_of(style)}; img-src data:; base-uri 'none';"
        " form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    page = Template((ASSETS / "page.html").read_text(encoding="utf-8"))
    title, data = html.escape(title), "\n".join(islands)
    write_text(path, page.substitute(policy=policy, title=title, style=style, islands=data, script=script))


def island(value: Any) -> str:
    r"""Returns JSON that may stand in a `<script>`: `<`, `>` and `&` are written as escapes, and so is all that is not ASCII."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def hash_of(text: str) -> str:
    """Returns the hash of an inline script or style as a Content-Security-Policy names it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
