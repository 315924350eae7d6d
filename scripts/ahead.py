"""`make ahead`: steps that sample ahead on one server, beside strictly on-policy ones, in turns; medians of both.

The demo's recipe one step ahead, and a recipe whose tool takes 50 to 500 ms a call four steps ahead. The server is started
before, by hand so to say (`rlgen serve`), and all runs of a recipe connect to it.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rlgen.metrics import Family, Metric

ROOT = Path(__file__).parent.parent
TOOLS = ROOT / "tests" / "tools"
WARM_UP = 6  # steps at the start of a run that do not count: the first ones are sampled at once


@dataclass(frozen=True, slots=True)
class Case:
    """A recipe that is trained with `ahead` and without it."""

    words: str
    recipe: Path
    warm: str  # folder of the warm-started model
    ahead: int
    times: float  # it must be so many times as fast
    changes: Sequence[str] = ()


CASES = (
    Case("the demo", ROOT / "recipes" / "demo-grpo.yaml", "qwen3", 1, 1.0),
    Case(
        "a tool that takes 50 to 500 ms",
        TOOLS / "tools-tiny-grpo.yaml",
        "tools",
        4,
        1.5,
        (
            f"tools=[{{use: '{TOOLS / 'calculator.py'}:far_away', name: calc}}]",
            "optim.learning_rate=1.0e-6",  # next to nothing is learned, so that both go on doing the same work
            "rollout={prompts_per_step: 8, group_size: 4, max_completion_tokens: 80, max_turns: 3}",
        ),
    ),
)


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


def train(url: str, directory: Path, recipe: Path, *overrides: str) -> list[dict[str, Any]]:
    """The metrics of a run on the server at `url`."""
    shutil.rmtree(directory, ignore_errors=True)
    changes = [f"engine={{kind: server, url: '{url}'}}", "checkpoint.every=1000", *overrides]
    settings = [part for change in changes for part in ("--set", change)]
    command = [sys.executable, "-m", "rlgen", "train", str(recipe), "--run-dir", str(directory), *settings]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, timeout=600)
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def compare(case: Case, model: Path, folder: Path, steps: int, rounds: int) -> dict[int, list[dict[str, Any]]]:
    """The counted steps by `rollout.async_steps`, of `rounds` runs each, in turns."""
    counted: dict[int, list[dict[str, Any]]] = {0: [], case.ahead: []}
    changes = [f"model.path={model}", f"run.steps={steps}", *case.changes]
    launched = ["engine={kind: server, launch: true}", f"rollout.async_steps={case.ahead}"]
    server, url = serve(case.recipe, folder, *changes, *launched)
    try:
        for turn in range(rounds):
            for ahead in (0, case.ahead) if turn % 2 == 0 else (case.ahead, 0):
                run = folder / f"{model.name}{ahead}"
                # The last steps do not count: nothing is sampled ahead any more.
                records = train(url, run, case.recipe, *changes, f"rollout.async_steps={ahead}")
                counted[ahead] += records[WARM_UP : -1 - case.ahead]
    finally:
        server.terminate()
        server.wait(timeout=60)
    return counted


def warmed(case: Case) -> Path:
    """The model that a case begins with."""
    model = ROOT / "runs" / "warm" / case.warm
    if not model.exists():
        command = [sys.executable, "-m", "rlgen", "recipes", "warm-start", str(case.recipe), "--out", str(model)]
        subprocess.run(command, check=True, cwd=ROOT)
    return model


def show(case: Case, counted: dict[int, list[dict[str, Any]]]) -> float:
    """Prints the medians; how many times as fast a step is."""
    print(f"{case.words}, {len(counted[0])} steps each")
    print("rollout.async_steps   s a step   waiting  training  reward  oldest  mixed  dropped")
    for ahead, records in counted.items():
        phases = (Metric.TIME_STEP, Metric.TIME_GENERATE, Metric.TIME_TRAIN)
        times = " ".join(f"{median(record[phase] for record in records):>9.3f}" for phase in phases)
        reward = fmean(record[Family.REWARD_MEAN.of("exact_match")] for record in records[-5:])
        oldest = max(record[Metric.ROLLOUT_STALENESS_MAX] for record in records)
        mixed = fmean(record[Metric.ROLLOUT_MIXED] for record in records)
        dropped = sum(record[Metric.ROLLOUT_DROPPED_STALE] for record in records)
        print(f"{ahead:<14} {times} {reward:>7.3f} {oldest:>7} {mixed:>6.2f} {dropped:>8}")
        if oldest > ahead:
            raise SystemExit(f"a token was {oldest} versions old, {ahead} are allowed")
    ratio = median(r[Metric.TIME_STEP] for r in counted[case.ahead]) / median(r[Metric.TIME_STEP] for r in counted[0])
    print(f"a step takes {ratio:.2f} of the time: {1 / ratio:.2f} times as fast\n", flush=True)
    return 1 / ratio


def main() -> None:
    folder = ROOT / "runs" / "ahead"
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("RLGEN_SERVER_TOKEN", os.urandom(16).hex())
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # one core for the server, one for the trainer
    chosen = CASES if len(sys.argv) < 2 else [CASES[int(number)] for number in sys.argv[1:]]
    slow = [case.words for case in chosen if show(case, compare(case, warmed(case), folder, 22, 2)) <= case.times]
    if slow:
        raise SystemExit(f"sampling ahead was not as fast as it must be: {', '.join(slow)}")


if __name__ == "__main__":
    main()
