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
PAIRS = 3
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
    """One run; prints the seconds of its rewards' opening and of its steps."""
    from rlgen.cli.train import train_command
    from rlgen.trainers import build, loop

    if kind == "without":
        bare()
    seconds = 0.0

    def timed(function: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal seconds
            start = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                seconds += time.perf_counter() - start

        return call

    build.build_scorer = timed(build.build_scorer)
    loop.Trainer.run = timed(loop.Trainer.run)  # type: ignore[method-assign]
    train_command(RECIPE, [f"model.path={WARM}"], False, False, int(steps), Path(directory))
    print(f"seconds {seconds}")


def measure(kind: str, directory: Path, steps: int) -> float:
    command = [sys.executable, __file__, "--child", kind, str(directory), str(steps)]
    ended = subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    kept = list((directory / "checkpoints").glob("step_*"))
    assert bool(kept) == (kind == "with"), "a run with what it should be without, or the other way round"
    return float(ended.stdout.rsplit("seconds ", 1)[1])


def main(steps: int) -> None:
    if not WARM.exists():
        command = [sys.executable, "scripts/warm_start.py", str(RECIPE), "--out", str(WARM)]
        subprocess.run(command, check=True, cwd=ROOT)
    found: dict[str, list[float]] = {"with": [], "without": []}
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(PAIRS):
            for kind in ("with", "without") if pair % 2 else ("without", "with"):
                directory = Path(folder) / f"{kind}-{pair}"
                found[kind].append(measure(kind, directory, steps))
                print(f"pair {pair + 1}, {kind}: {found[kind][-1]:.1f} s", flush=True)
        losses = [
            [json.loads(line)["loss"] for line in (Path(folder) / f"{kind}-0" / "metrics.jsonl").read_text().splitlines()]
            for kind in found
        ]
    assert losses[0] == losses[1], "the two train differently"
    ratios = [a / b for a, b in zip(found["with"], found["without"], strict=True)]
    print(f"\n{'':10}{'median s':>10}   {steps} steps of recipes/demo-grpo.yaml, {PAIRS} pairs in turns")
    for kind, seconds in found.items():
        print(f"{kind:10}{median(seconds):>10.1f}")
    overhead = median(ratios) - 1
    print(f"checkpoints, journal and reward processes take {overhead:.1%} of the demo's time; at most {MOST:.0%} is allowed")
    if overhead > MOST:
        raise SystemExit(1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 120)
