"""Writes the card of a model that a run has trained: what it comes from, how its reward rose, its recipe, and what it ran on."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from rlgen.analysis.charts import evaluated_keys
from rlgen.analysis.run import Record, Run, interval_of, mean_of, number
from rlgen.metrics import Family, Metric
from rlgen.recipe import Recipe
from rlgen.recipe.rules import is_local_model, is_local_source
from rlgen.recipe.yaml import dump, parse

SPANS = 10  # rows of the table of rewards
PATHS = ("path", "source", "use", "dir", "chat_template", "prompt_file", "folder")  # keys of recipes
ADDRESSES = ("url", "address", "host", "port", "transfer_dir", "uri")
OF_MACHINE = ("rlgen", "time", "python", "platform", "processor", "gpus", "packages")  # of provenance.json: nothing private


def model_card(run: Run, step: int, dtype: str) -> str:
    """Returns README.md of a model that was exported from this step, with the metadata of the hub. Later steps do not count."""
    recipe = run.recipe
    trained = [row for row in run.metrics if row[Metric.STEP] <= step]
    parts = [
        f"---\n{dump(metadata(recipe))}---\n",
        f"# {run.name}\n",
        f"`{last_name(recipe.model.path)}`, trained by rlgen with {recipe.trainer.kind} on `{last_name(recipe.data.source)}`:"
        f" step {step} of {recipe.run.steps}, weights in {dtype}.\n",
        f"## Reward\n\n{reward_table(trained)}",
        evaluation_table([row for row in run.evaluations if row[Metric.STEP] <= step]),
        f"## Recipe\n\nEvery value, without folders and addresses:\n\n{fenced(dump(portable(parse(run.resolved, '').data)))}",
        f"## Provenance\n\n{provenance_table(run, step)}",
    ]
    return "\n".join(part for part in parts if part)


def metadata(recipe: Recipe) -> dict[str, object]:
    """Returns what the hub reads: library, tags, and model and data set where these are names of the hub."""
    task = "text-generation" if recipe.data.columns.images is None else "image-text-to-text"
    found: dict[str, object] = {"library_name": "transformers", "pipeline_tag": task}
    found["tags"] = ["rlgen", "reinforcement-learning", recipe.trainer.kind]
    if not recipe.model.path.startswith("tiny:") and not is_local_model(recipe.model.path):
        found["base_model"] = recipe.model.path
    if recipe.task is None and not is_local_source(recipe.data.source):
        found["datasets"] = [recipe.data.source]
    return found


def reward_table(rows: Sequence[Record]) -> str:
    """Returns the means of rewards and length over at most `SPANS` spans of steps."""
    names = list(dict.fromkeys(key for row in rows for key in Family.REWARD_MEAN.keys(row)))
    keys = [Metric.REWARD_MEAN, *(names if len(names) > 1 else []), Metric.COMPLETIONS_MEAN_TOKENS]
    count = min(SPANS, len(rows))
    spans = [rows[len(rows) * part // count : len(rows) * (part + 1) // count] for part in range(count)]
    body = [
        [f"{span[0][Metric.STEP]} to {span[-1][Metric.STEP]}", *(cell(mean_of(number(row, key) for row in span)) for key in keys)]
        for span in spans
    ]
    return markdown_table(["steps", *(f"`{key}`" for key in keys)], body)


def evaluation_table(evaluations: Sequence[Record]) -> str:
    """Returns the first and the newest evaluation; an empty text if there is none."""
    if not evaluations:
        return ""
    first, last = evaluations[0], evaluations[-1]
    body = []
    for key in (key for key in evaluated_keys([last]) if number(last, key) is not None):
        interval = f" ({found})" if (found := interval_of(last, key)) else ""
        body.append([f"`{key}`", cell(number(first, key)), cell(number(last, key)) + interval])
    head = ["", f"step {first[Metric.STEP]}", f"step {last[Metric.STEP]}"]
    return f"## Evaluation\n\n{markdown_table(head, body)}"


def provenance_table(run: Run, step: int) -> str:
    """Returns versions and machine of the attempt that trained the step."""
    attempts = [attempt for attempt in run.attempts if attempt.get("from_step", 0) < step]
    rows = []
    for key in OF_MACHINE if attempts else ():
        value = attempts[-1].get(key)
        if isinstance(value, dict):
            rows += [[name, str(version)] for name, version in value.items()]
        elif value:
            rows.append([key, ", ".join(value) if isinstance(value, list) else str(value)])
    return markdown_table(["", ""], rows)


def portable(value: Any, key: str = "") -> Any:
    """Returns the data of a recipe, or what stands under `key` in it, with local paths cut to their last name and without
    addresses: both mean nothing elsewhere, and may name a person or a machine.
    """
    if isinstance(value, dict):
        return {name: portable(one, name) for name, one in value.items() if name not in ADDRESSES}
    if isinstance(value, list):
        return [portable(one, key) for one in value]
    return last_name(value) if key in PATHS and isinstance(value, str) else value


def last_name(path: str) -> str:
    """Returns the last name of an absolute path, and any other text unchanged: "/home/me/train.jsonl" -> "train.jsonl"."""
    return path.rstrip("/").rpartition("/")[2] if path.startswith("/") else path


def cell(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *rows))


def fenced(text: str) -> str:
    """Returns a text as a block of code, whose fence is longer than any row of backticks in it."""
    fence = "`" * max(3, 1 + max((len(found) for found in re.findall("`+", text)), default=0))
    return f"{fence}yaml\n{text}{fence}\n"
