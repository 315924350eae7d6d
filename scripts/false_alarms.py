"""300 clean steps: three trainers, two engines, two dtypes. Each run ends well, or the sentinel gave a false alarm.

python scripts/false_alarms.py    prints a row a run; exit 1 if one was stopped
"""

import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

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
RUNS = list(itertools.product(("grpo", "rloo", "online_dpo"), ("colocated", "transformers"), ("float32", "bfloat16")))


def run(trainer: str, engine: str, dtype: str) -> tuple[int, float, float, str]:
    """Steps done, the largest |Δ| and largest mean |Δ| of a batch, and what the run ended with."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "clean.yaml"
        recipe.write_text(RECIPE)
        changes = [f"trainer={{kind: {trainer}}}", f"engine={{kind: {engine}}}", f"model.dtype={dtype}", f"run.steps={STEPS}"]
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
    total, alarms = 0, 0
    print(f"{'trainer':<12}{'engine':<14}{'dtype':<10}{'steps':>5}{'max |Δ|':>10}{'mean |Δ|':>10}")
    for trainer, engine, dtype in RUNS:
        steps, largest, mean, error = run(trainer, engine, dtype)
        total, alarms = total + steps, alarms + bool(error)
        print(f"{trainer:<12}{engine:<14}{dtype:<10}{steps:>5}{largest:>10.1e}{mean:>10.1e}  {error}", flush=True)
    print(f"{total} steps, {alarms} alarms")
    sys.exit(1 if alarms or total < STEPS * len(RUNS) else 0)


if __name__ == "__main__":
    main()
