"""Draws the live view of a recorded run as a picture, for the documentation."""

import re
from pathlib import Path
from typing import Any

from rich.console import Console as RichConsole

from rlgen.files import write_text
from rlgen.metrics import Metric
from rlgen.recipe import load_recipe
from rlgen.rollout.read import read_rollouts
from rlgen.run.clock import remaining
from rlgen.run.console import Example
from rlgen.run.directory import read_records
from rlgen.run.live import View

SCREEN = (100, 24)  # columns and lines of the picture


def draw(run: Path, out: Path) -> None:
    """Draws the view of a recorded run, at its last step, as an SVG picture.

    Args:
        run: the run's folder, with its rollouts.
        out: file to write.
    """
    view = View(load_recipe(run / "resolved.yaml").recipe)
    records = read_records(run / "metrics.jsonl")
    for record in records:
        view.add(record)
    view.examples = recorded_examples(run, len(view.rewards))
    width, height = SCREEN
    seconds = [record[Metric.TIME_STEP] for record in records if record[Metric.STEP]]
    with open("/dev/null", "w") as nowhere:
        page = RichConsole(record=True, width=width, file=nowhere, force_terminal=True, color_system="truecolor", highlight=False)
        for line in view.lines(width, height, sum(seconds), remaining(seconds, view.steps - len(view.rewards))):
            page.print(line)
    # Rich lets the picture load a font from elsewhere.
    write_text(out, re.sub(r"@font-face \{.*?\}|<!--.*?-->", "", page.export_svg(title="rlgen train"), flags=re.DOTALL))


def recorded_examples(run: Path, step: int) -> list[Example]:
    """Returns the completions of a recorded step with the highest and with the lowest reward."""
    rows: list[dict[str, Any]] = read_rollouts(run, step, ["prompt", "completion", "reward"]).to_pylist()
    known = sorted((row for row in rows if row["reward"] is not None), key=lambda row: -row["reward"])
    return [Example(**row) for row in (known[0], known[-1])] if known else []
