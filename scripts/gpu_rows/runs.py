"""Rows that start `rlgen` as a user does, and their recipes."""

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from gpu_rows.record import Finding, Place, Value, failed, judged

ROOT = Path(__file__).parent.parent.parent
RECIPE = """\
run: {name: check}
model: {path: MODEL, dtype: DTYPE}
data: {source: "task:sort", chat: true, max_prompt_tokens: 64}
rewards: [{use: "judge.py:REWARD"}]
rollout: {prompts_per_step: PROMPTS, group_size: 8, max_completion_tokens: TOKENS, temperature: 0.9}
engine: ENGINE
optim: {learning_rate: RATE}
checkpoint: {every: 1000}
"""
REWARDS = """\
# Never the same for two completions, so that each step has something to learn from.
def spread(completion_ids):
    return sum(completion_ids) % 97 / 97


# Learned by a random model: half of its tokens are even at first.
def even(completion_ids):
    return sum(one % 2 == 0 for one in completion_ids) / len(completion_ids)
"""
STEPS = 30  # of the learning run
RISE = 0.2  # of its reward, which is about 0.5 at first and at most 1
AT_START, AT_END = 3, 5  # steps that are averaged


def recipe(place: Place, model: str, engine: dict[str, Any], **changes: object) -> Path:
    """Writes a recipe into a folder of its own, with its rewards beside it, and returns its path.

    Args:
        model: a `model.path`.
        changes: DTYPE, PROMPTS, TOKENS, REWARD or RATE, where they differ from small ones.
    """
    usual = {"DTYPE": "float32", "PROMPTS": 4, "TOKENS": 16, "REWARD": "spread", "RATE": 1e-5}
    text = RECIPE
    for name, value in {**usual, **changes, "MODEL": model, "ENGINE": json.dumps(engine)}.items():
        text = text.replace(name, str(value))
    path = Path(tempfile.mkdtemp(dir=place.folder)) / "recipe.yaml"
    path.write_text(text)
    path.with_name("judge.py").write_text(REWARDS)
    return path


def rlgen(*words: object, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs the command line; the row's limit bounds its time. What it prints on stderr is also in the row's log."""
    command = [sys.executable, "-m", "rlgen", *map(str, words)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {**os.environ, "PYTHONPATH": path, **(environment or {})}
    ended = subprocess.run(command, capture_output=True, text=True, env=variables, cwd=ROOT)
    sys.stderr.write(ended.stderr)
    return ended


def last_output(ended: subprocess.CompletedProcess[str]) -> str:
    """Returns the last two lines that a command printed on stderr."""
    lines = [line for line in ended.stderr.splitlines() if line.strip()]
    return " / ".join(lines[-2:])[-400:] or "it said nothing"


def trained(path: Path, *overrides: str) -> list[dict[str, Any]] | Finding:
    """Runs `rlgen train`, and returns the metrics of each step; or why there are none."""
    folder = path.parent / "run"
    words = [word for override in overrides for word in ("--set", override)]
    ended = rlgen("train", path, "--run-dir", folder, *words)
    if ended.returncode:
        return failed(f"rlgen train ended with {ended.returncode}: {last_output(ended)}")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def resume(place: Place) -> Finding:
    """A run that stops after two steps and goes on for two more equals one that did all four, to the last bit: with the fused
    optimizer, and packed rows in bfloat16."""
    from rlgen.run.compare import first_difference
    from rlgen.setup import TrainOptions, train

    folders = []
    for stops in ((4,), (2, 4)):
        path = recipe(place, "tiny:qwen3", {"kind": "transformers"}, DTYPE="bfloat16", RATE=1e-4)
        folders.append(path.with_name("run"))
        for steps in stops:
            settings = ["checkpoint.every=2", "run.deterministic=true"]
            train(path, TrainOptions(overrides=settings, max_steps=steps, run_dir=folders[-1], resume=steps > stops[0]))
    if difference := first_difference(*folders):
        return failed(f"resume is not exact here: {difference} (undisturbed and resumed)")
    records = [json.loads(line) for line in (folders[1] / "metrics.jsonl").read_text().splitlines()]
    values = [
        Value("steps that equal those of a run that never stopped", len(records), "", least=4, most=4),
        Value("least norm of the gradient after the resume", min(record["grad_norm"] for record in records[2:]), "", least=1e-3),
    ]
    return judged(values, "tiny:qwen3, bfloat16, 32 completions a step", {"losses": [record["loss"] for record in records]})


def per_second(records: list[dict[str, Any]], tokens: str, seconds: str) -> float:
    """Returns NaN where nothing was timed."""
    time = sum(record[seconds] for record in records)
    return sum(record[tokens] for record in records) / time if time else math.nan


def learning(place: Place) -> Finding:
    """`rlgen train` on the transformers engine: the reward rises, and the sentinel stays silent."""
    path = recipe(place, "tiny:qwen3", {"kind": "transformers"}, PROMPTS=8, REWARD="even", RATE=1e-3)
    records = trained(path, f"run.steps={STEPS}")
    if isinstance(records, Finding):
        return records
    rewards = [record["reward/mean"] for record in records]
    first, last = fmean(rewards[:AT_START]), fmean(rewards[-AT_END:])
    values = [
        Value(f"reward of the last {AT_END} steps", last, ""),
        Value(f"that reward minus the reward of the first {AT_START} steps", last - first, "", least=RISE),
        Value("largest |Δ| of engine and trainer", max(record["sampler/delta_max"] for record in records), "nats", most=1e-4),
        Value("steps with an alarm of the sentinel", sum(bool(record["sentinel/drift"]) for record in records), "", most=0),
        Value("tokens generated", per_second(records[1:], "tokens/generated", "time/generate"), "a second"),
    ]
    return judged(values, f"tiny:qwen3, {STEPS} steps of 64 completions, float32, GRPO", {"rewards": rewards})
