"""`make first-run`: what the page "First run" trains first, with ten seeds: reward and evaluation before and after, in a table.

Ends with 1 if one of them rises by less than RISE, takes longer than MOST_SECONDS, or breaks a health rule.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean

from rlgen.metrics import Metric

SEEDS, RISE, MOST_SECONDS = 10, 0.3, 120.0


def call(folder: Path, *words: str) -> float:
    """Returns the seconds that a command of rlgen takes."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "rlgen", *words], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - began


def main() -> None:
    failed = False
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "mine"
        call(Path(place), "init", "mine")
        warm = call(folder, "recipes", "warm-start", "recipe.yaml")
        print(
            f"warm start: {warm:.0f} s\nseed  reward: first 10  last 10  evaluation: before  after  seconds  health rules broken"
        )
        for seed in range(SEEDS):
            name = f"seed-{seed}"
            seconds = call(folder, "train", "recipe.yaml", "--set", f"run.seed={seed}", "--set", f"run.name={name}")
            records = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
            rewards = [record[Metric.REWARD_MEAN] for record in records if record["step"]]
            first, last = fmean(rewards[:10]), fmean(rewards[-10:])
            before, *_, after = [record[Metric.EVAL_REWARD_MEAN] for record in records if Metric.EVAL_REWARD_MEAN in record]
            broken = sorted({key for record in records for key in record if key.startswith("health/") and record[key]})
            row = f"{seed:4}  {first:15.3f}  {last:7.3f}  {before:18.3f}  {after:5.3f}  {seconds:7.0f}"
            print(f"{row}  {', '.join(broken) or 'none'}", flush=True)
            failed |= min(last - first, after - before) < RISE or warm + seconds > MOST_SECONDS or bool(broken)
    sys.exit(failed)


if __name__ == "__main__":
    main()
