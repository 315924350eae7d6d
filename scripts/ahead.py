"""`make ahead`: the demo's recipe on one server, sampling a step ahead and strictly on-policy, in turns; medians of both.

The server is started before, by hand so to say (`rlgen serve`), and both connect to it.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rlgen.metrics import Family, Metric

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "recipes" / "demo-grpo.yaml"
WARM_UP = 2  # steps at the start of a run that do not count


def serve(recipe: Path, folder: Path, *overrides: str) -> tuple[subprocess.Popen[str], str]:
    """`rlgen serve` and the address that it prints once it is ready; the token is the environment's."""
    settings = [part for override in overrides for part in ("--set", override)]
    command = [sys.executable, "-m", "rlgen", "serve", str(recipe), "--port", "0", *settings]
    with (folder / "serve.log").open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT)
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if ready := re.search(r"ready after .* at (http://\S+?);", line):
            return process, ready[1]
    raise SystemExit(f"rlgen serve ended with {process.wait()}: {said}")


def train(url: str, directory: Path, steps: int, model: Path, *overrides: str) -> list[dict[str, Any]]:
    """The metrics of a run on the server at `url`."""
    shutil.rmtree(directory, ignore_errors=True)
    changes = [f"engine={{kind: server, url: '{url}'}}", f"model.path={model}", f"run.steps={steps}", *overrides]
    settings = [part for change in changes for part in ("--set", change)]
    command = [sys.executable, "-m", "rlgen", "train", str(RECIPE), "--run-dir", str(directory), *settings]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, timeout=600)
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def compare(model: Path, folder: Path, steps: int, rounds: int) -> dict[int, list[dict[str, Any]]]:
    """The counted steps by `rollout.ahead`, of `rounds` runs each, in turns."""
    counted: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
    server, url = serve(RECIPE, folder, f"model.path={model}")
    try:
        for turn in range(rounds):
            for ahead in (0, 1) if turn % 2 == 0 else (1, 0):
                extra = [f"rollout.ahead={ahead}", "checkpoint.every=1000"]
                counted[ahead] += train(url, folder / f"ahead{ahead}", steps, model, *extra)[WARM_UP:-1]
    finally:
        server.terminate()
        server.wait(timeout=60)
    return counted


def main() -> None:
    folder = ROOT / "runs" / "ahead"
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("RLGEN_SERVER_TOKEN", os.urandom(16).hex())
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # one core for the server, one for the trainer
    model = ROOT / "runs" / "warm" / "qwen3"
    if not model.exists():
        command = [sys.executable, "-m", "rlgen", "recipes", "warm-start", str(RECIPE), "--out", str(model)]
        subprocess.run(command, check=True, cwd=ROOT)
    counted = compare(model, folder, steps=24, rounds=2)
    print(f"{'rollout.ahead':<14} {'s a step':>9} {'waiting':>9} {'training':>9} {'reward':>7} {'oldest':>7}")
    for ahead, records in counted.items():
        phases = (Metric.TIME_STEP, Metric.TIME_GENERATE, Metric.TIME_TRAIN)
        times = [median(record[phase] for record in records) for phase in phases]
        reward = fmean(record[Family.REWARD_MEAN.of("exact_match")] for record in records[-5:])
        oldest = max(record[Metric.ROLLOUT_STALENESS_MAX] for record in records)
        print(f"{ahead:<14} {times[0]:>9.3f} {times[1]:>9.3f} {times[2]:>9.3f} {reward:>7.3f} {oldest:>7}")
    ratio = median(r[Metric.TIME_STEP] for r in counted[1]) / median(r[Metric.TIME_STEP] for r in counted[0])
    print(f"a step takes {ratio:.2f} of the time when the next one's prompts are answered meanwhile")
    if ratio >= 1:
        raise SystemExit("sampling ahead was not faster")


if __name__ == "__main__":
    main()
