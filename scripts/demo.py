"""`make demo`: a warm-started tiny model learns to reverse words, with GRPO, RLOO and Online DPO on vLLM in this process.

Each run is one command, `rlgen train RECIPE`. Then the last checkpoint answers new prompts with plain transformers, and the
numbers are checked: exact match over the last five steps and over the first three, and what the saved model scores.
"""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean

from plain import answers

from rlgen.data.tasks import generate
from rlgen.metrics import Family, Metric
from rlgen.recipe.data import ReverseOptions

ROOT = Path(__file__).parent.parent
# recipe -> least reward of the last five steps, least rise over the first three
RUNS = {"demo-grpo": (0.8, 0.3), "demo-rloo": (0.0, 0.2), "demo-online-dpo": (0.0, 0.2)}
NEW_PROMPTS_SEED = 31337


def call(*command: object) -> None:
    print(f"\n$ {' '.join(map(str, command))}", flush=True)
    subprocess.run(list(map(str, command)), check=True, cwd=ROOT)


def plain_score(folder: Path, count: int = 256) -> float:
    """Share of new prompts that the saved model answers right, sampled at temperature 1 by transformers alone."""
    rows = generate("reverse", ReverseOptions(size=count), NEW_PROMPTS_SEED)
    texts = answers(folder, [row["prompt"] for row in rows], max_new_tokens=12, sampled=True)
    return fmean(text == row["answer"] for text, row in zip(texts, rows, strict=True))


def main() -> None:
    start = time.monotonic()
    warm = ROOT / "runs" / "warm" / "qwen3"
    shutil.rmtree(warm, ignore_errors=True)
    call(sys.executable, "-m", "rlgen", "recipes", "warm-start", "recipes/demo-grpo.yaml")
    table, failed = [], []
    for name, (level, rise) in RUNS.items():
        directory = ROOT / "runs" / name
        shutil.rmtree(directory, ignore_errors=True)  # the demo's own runs; `rlgen train` itself never overwrites
        call(sys.executable, "-m", "rlgen", "train", f"recipes/{name}.yaml", "--run-dir", directory)
        records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        rewards = [record[Family.REWARD_MEAN.of("exact_match")] for record in records]
        first, last = fmean(rewards[:3]), fmean(rewards[-5:])
        gaps = [record[Metric.SAMPLER_DELTA_MAX] for record in records if record[Metric.SAMPLER_DELTA_MAX] is not None]
        saved = plain_score(max((directory / "checkpoints").glob("step_*")))
        table.append((name, first, last, saved, max(gaps), sum(record[Metric.TIME_STEP] for record in records)))
        if last < level or last - first < rise or abs(saved - last) > 0.15 or max(gaps) > 1e-4:
            failed.append(name)
    print(f"\n{'recipe':<16} {'first 3':>8} {'last 5':>8} {'saved model':>12} {'max |Δ|':>9} {'seconds':>8}")
    for name, first, last, saved, gap, seconds in table:
        print(f"{name:<16} {first:>8.3f} {last:>8.3f} {saved:>12.3f} {gap:>9.1e} {seconds:>8.0f}")
    print(f"exact match of answers; |Δ| is the gap between vLLM and trainer, in nats; {time.monotonic() - start:.0f} s in all")
    if failed:
        raise SystemExit(f"not as expected: {', '.join(failed)}")


if __name__ == "__main__":
    main()
