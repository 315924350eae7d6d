"""`make overhead`: what checkpoints, the journal and processes for rewards cost the demo, beside the same run without them.

The recipe has no switch for any of the three: the runs without them are this script's, which takes the three out of `rlgen`.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parent.parent
RECIPE, WARM = ROOT / "recipes" / "demo-grpo.yaml", ROOT / "runs" / "warm" / "qwen3"
PAIRS = 5
MOST = 0.05


def bare() -> None:
    """Takes checkpoints, journal and reward processes out of rlgen, in this process."""
    from rlgen.rewards.pool import Outcome, Pool
    from rlgen.rewards.worker import Call, load
    from rlgen.rollout.journal import Journal
    from rlgen.trainers import loop

    def run(pool: Pool, calls: Sequence[Call]) -> Iterator[Outcome]:
        functions = [load(source).function for source in pool._sources]
        for call in calls:
            yield Outcome(call.id, (float(functions[call.reward](**call.arguments)),), 0.0)

    replaced: list[tuple[Any, str, Any]] = [
        (Pool, "facts", lambda pool: [load(source).facts for source in pool._sources]),
        (Pool, "run", run),
        (Journal, "append", lambda *_: None),
        (Journal, "score", lambda journal, step, groups, scorer: scorer(list(groups))),
        (loop, "bits", lambda *_: ""),
        (loop.Trainer, "save", lambda *_: None),
    ]
    for place, name, instead in replaced:
        assert hasattr(place, name)
        setattr(place, name, instead)


def child(kind: str, directory: str, steps: str) -> None:
    """One run; prints the seconds of its rewards' opening, of each step, and of what follows the last one."""
    from rlgen.cli.train import train_command
    from rlgen.trainers import build
    from rlgen.trainers.loop import Trainer
    from rlgen.trainers.report import Reporter

    if kind == "without":
        bare()
    seconds, began = [], 0.0

    def lap() -> None:
        nonlocal began
        now = time.perf_counter()
        seconds.append(now - began)
        began = now

    def lapping(function: Any, anew: bool) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal began
            began = time.perf_counter() if anew else began
            try:
                return function(*arguments, **named)
            finally:
                lap()

        return call

    build.build_scorer = lapping(build.build_scorer, anew=True)
    Trainer.run = lapping(Trainer.run, anew=True)  # type: ignore[method-assign]
    Reporter.metrics = lapping(Reporter.metrics, anew=False)  # type: ignore[method-assign]
    train_command(RECIPE, [f"model.path={WARM}"], False, False, int(steps), Path(directory))
    print(f"seconds {json.dumps(seconds)}")


def measure(kind: str, directory: Path, steps: int) -> list[float]:
    command = [sys.executable, __file__, "--child", kind, str(directory), str(steps)]
    ended = subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    kept = list((directory / "checkpoints").glob("step_*"))
    assert bool(kept) == (kind == "with"), "a run with what it should be without, or the other way round"
    seconds: list[float] = json.loads(ended.stdout.rsplit("seconds ", 1)[1])
    assert len(seconds) == 1 + steps + 1
    return seconds


def main(steps: int) -> None:
    if not WARM.exists():
        command = [sys.executable, "scripts/warm_start.py", str(RECIPE), "--out", str(WARM)]
        subprocess.run(command, check=True, cwd=ROOT)
    found: dict[str, list[list[float]]] = {"with": [], "without": []}
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(PAIRS):
            for kind in ("with", "without") if pair % 2 else ("without", "with"):
                found[kind].append(measure(kind, Path(folder) / f"{kind}-{pair}", steps))
                print(f"pair {pair + 1}, {kind}: {sum(found[kind][-1]):.1f} s", flush=True)
        losses = [
            [json.loads(line)["loss"] for line in (Path(folder) / f"{kind}-0" / "metrics.jsonl").read_text().splitlines()]
            for kind in found
        ]
    assert losses[0] == losses[1], "the two train differently"
    # Step k is the same work in each run: its median leaves out what the machine did beside it.
    total = {kind: sum(map(median, zip(*runs, strict=True))) for kind, runs in found.items()}
    print(
        f"\n{'':10}{'s':>8}   {steps} steps of recipes/demo-grpo.yaml: medians of each step over {PAIRS} runs in turns, added up"
    )
    for kind, seconds in total.items():
        print(f"{kind:10}{seconds:>8.1f}")
    overhead = total["with"] / total["without"] - 1
    print(f"checkpoints, journal and reward processes take {overhead:.1%} of the demo's time; at most {MOST:.0%} is allowed")
    if overhead > MOST:
        raise SystemExit(1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 120)
