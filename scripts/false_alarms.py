"""Clean steps: three trainers, two engines, two dtypes. Each run ends well, or the sentinel gave a false alarm.

python scripts/false_alarms.py           300 steps of a tiny model; prints a row a run; exit 1 if one was stopped
python scripts/false_alarms.py --real    60 steps of a pretrained model, with completions of 24 to 512 tokens
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from real_model import real_model

from rlgen.metrics import Metric

ROOT = Path(__file__).parent.parent
STEPS = 25
RECIPE = """\
run: {name: clean}
model: {path: "tiny:qwen3"}
data: {source: "task:sort", chat: true, max_prompt_tokens: 64}
rewards:
  - {use: exact_match}
  - {use: length, args: {target: 6}, weight: 0.1}
rollout: {prompts_per_step: 8, group_size: 4, max_completion_tokens: 24, temperature: 0.9}
optim: {learning_rate: 1.0e-3}
checkpoint: {every: 100}
"""
# A pretrained model: steps of a run, and the tokens of a completion, longer from run to run.
REAL_STEPS, REAL_TOKENS = 5, (24, 24, 32, 32, 48, 48, 64, 96, 128, 192, 256, 512)
REAL = """\
run: {name: clean}
model: {path: MODEL}
data: {source: "task:word_problems", chat: true}
rewards: [{use: numeric_match}, {use: length, args: {target: 6}, weight: 0.1}]
rollout: {prompts_per_step: 2, group_size: 4}
optim: {learning_rate: 5.0e-6}
checkpoint: {every: 100}
"""
RUNS = list(itertools.product(("grpo", "rloo", "online_dpo"), ("colocated", "transformers"), ("float32", "bfloat16")))


def run(trainer: str, engine: str, dtype: str, text: str, others: list[str]) -> tuple[int, float, float, str]:
    """Steps done, the largest |Δ| and largest mean |Δ| of a batch, and what the run of the recipe `text` ended with."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "clean.yaml"
        recipe.write_text(text)
        changes = [f"trainer={{kind: {trainer}}}", f"engine={{kind: {engine}}}", f"model.dtype={dtype}", *others]
        command = [sys.executable, "-m", "rlgen", "train", str(recipe), "--run-dir", f"{folder}/run"]
        for change in changes:
            command += ["--set", change]
        ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        metrics = Path(folder) / "run" / "metrics.jsonl"
        records = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    scored = [record for record in records if record.get(Metric.SAMPLER_DELTA_MAX) is not None]
    largest = max((record[Metric.SAMPLER_DELTA_MAX] for record in scored), default=float("nan"))
    mean = max((record[Metric.SAMPLER_DELTA_MEAN] for record in scored), default=float("nan"))
    return len(records), largest, mean, "" if not ended.returncode else ended.stderr.strip().splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", action="store_true", help="train a pretrained model")
    real = parser.parse_args().real
    each, text = (REAL_STEPS, REAL.replace("MODEL", str(real_model()))) if real else (STEPS, RECIPE)
    total, alarms = 0, 0
    print(f"{'trainer':<12}{'engine':<14}{'dtype':<10}{'steps':>5}{'max |Δ|':>10}{'mean |Δ|':>10}")
    for (trainer, engine, dtype), tokens in zip(RUNS, REAL_TOKENS, strict=True):
        others = [f"run.steps={each}", *([f"rollout.max_completion_tokens={tokens}"] if real else [])]
        steps, largest, mean, error = run(trainer, engine, dtype, text, others)
        total, alarms = total + steps, alarms + bool(error)
        print(f"{trainer:<12}{engine:<14}{dtype:<10}{steps:>5}{largest:>10.1e}{mean:>10.1e}  {error}", flush=True)
    print(f"{total} steps, {alarms} alarms")
    sys.exit(1 if alarms or total < each * len(RUNS) else 0)


if __name__ == "__main__":
    main()
