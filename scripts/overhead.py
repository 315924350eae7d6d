"""`make overhead`: what checkpoints, the journal and processes for rewards cost the demo, beside the same steps without them.

The recipe has no switch for any of the three: this script takes them out of `rlgen` in every second step. Half of its runs do so
in the odd steps and half in the even ones, so that each step is timed with and without, and what makes a whole run slow or quick
on this machine is on both sides. So are the reward processes while they wait: what it costs that they are there is not seen.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rlgen.metrics import Metric
from rlgen.rollout.frames import AnswerRecord, Rewards, read_frames

ROOT = Path(__file__).parent.parent
RECIPE, WARM = ROOT / "recipes" / "demo-grpo.yaml", ROOT / "runs" / "warm" / "qwen3"
PAIRS = 4
MOST = 0.05


class Laps:
    """Seconds of the steps of one run, and whether the present one has what is measured."""

    def __init__(self, first: bool) -> None:
        self.seconds: list[float] = []
        self.has = first
        self.began = time.perf_counter()

    def end(self) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self.began)
        self.has = not self.has
        self.began = time.perf_counter()


def toggle(laps: Laps) -> None:
    """Takes checkpoints, journal and reward processes out of rlgen, in this process, while `laps.has` is false."""
    from rlgen.rewards.score import Scorer
    from rlgen.rollout.journal import Journal
    from rlgen.trainers import loop
    from rlgen.trainers.saving import Saver
    from rlgen.worker_pool.source import Loaded
    from rlgen.worker_pool.stream import CallOutcome
    from rlgen.worker_pool.worker import WorkerCall

    loaded: list[Loaded] = []

    class Here:
        """Instead of a `CallStream`: calls in this process."""

        def __init__(self, scorer: Scorer) -> None:
            loaded[:] = loaded or [source.load() for pool in scorer.pools for source in pool._sources]
            self.calls: list[WorkerCall] = []

        def add(self, calls: Sequence[WorkerCall]) -> None:
            self.calls += calls

        def outcomes(self) -> Iterator[CallOutcome]:
            for call in self.calls:
                yield CallOutcome(call.id, [float(loaded[call.source].function(**call.arguments))], 0.0)

        def close(self) -> None:
            pass

    Journal.retire = lambda *_: None  # type: ignore[method-assign]  # what stays in the journal shows which steps had one
    replaced: list[tuple[Any, str, Callable[..., Any]]] = [
        (Scorer, "open", Here),
        (Journal, "answered", lambda *_: None),
        (Journal, "append", lambda *_: None),
        (Journal, "score", lambda journal, step, groups, scorer: scorer(list(groups))),
        (loop, "bits", lambda *_: ""),
        (Saver, "__call__", lambda *_, **__: None),
    ]
    for place, name, instead in replaced:
        setattr(place, name, either(laps, getattr(place, name), instead))


def either(laps: Laps, real: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, **named: (real if laps.has else instead)(*arguments, **named)


def child(first: str, directory: str, steps: str) -> None:
    """One run; prints the seconds that opening the rewards took, and of each step; the last are those after the last step."""
    from rlgen.cli.train import train_command
    from rlgen.setup import trainer as opening_room
    from rlgen.trainers.loop import Trainer
    from rlgen.trainers.report import Reporter

    laps, opening = Laps(first == "with"), 0.0
    toggle(laps)
    open_rewards, train, write = opening_room.build_scorer, Trainer.run, Reporter.metrics

    def timed_open(*arguments: Any) -> Any:
        nonlocal opening
        began = time.perf_counter()
        scorer = open_rewards(*arguments)
        opening = time.perf_counter() - began
        return scorer

    def timed_run(*arguments: Any) -> None:
        laps.began = time.perf_counter()
        train(*arguments)
        laps.end()

    def timed_metrics(*arguments: Any) -> Any:
        checkup = write(*arguments)
        laps.end()
        return checkup

    opening_room.build_scorer, Trainer.run, Reporter.metrics = timed_open, timed_run, timed_metrics  # type: ignore[method-assign]
    train_command(RECIPE, [f"model.path={WARM}"], False, False, int(steps), Path(directory))
    print(f"seconds {json.dumps([opening, *laps.seconds])}")


def measure(first: str, directory: Path, steps: int) -> tuple[float, list[float]]:
    """Seconds for the opening of the rewards, and of each lap."""
    command = [sys.executable, __file__, "--child", first, str(directory), str(steps)]
    ended = subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    opening, *laps = json.loads(ended.stdout.rsplit("seconds ", 1)[1])
    assert len(laps) == steps + 1
    journal = {
        path: {type(record) for record in read_frames(path).records} for path in (directory / "journal").glob("step_*.bin")
    }
    wrote = {int(path.stem[-1]) % 2 for path, kinds in journal.items() if kinds == {AnswerRecord, Rewards}}
    saved = list((directory / "checkpoints").glob("step_*"))
    # What is saved after step 50 counts to step 51.
    assert (wrote, bool(saved)) == (({1}, True) if first == "with" else ({0}, False)), "a step with what it should be without"
    return opening, laps


def main(steps: int) -> None:
    if not WARM.exists():
        command = [sys.executable, "-m", "rlgen", "recipes", "warm-start", str(RECIPE), "--out", str(WARM)]
        subprocess.run(command, check=True, cwd=ROOT)
    openings: list[float] = []
    found: dict[str, list[list[float]]] = {kind: [[] for _ in range(steps + 1)] for kind in ("with", "without")}
    losses: list[list[float]] = []
    with tempfile.TemporaryDirectory() as folder:
        for run in range(2 * PAIRS):
            kinds = ("with", "without") if run % 2 else ("without", "with")
            directory = Path(folder) / str(run)
            opening, laps = measure(kinds[0], directory, steps)
            openings.append(opening)
            for lap, seconds in enumerate(laps):
                found[kinds[lap % 2]][lap].append(seconds)
            lines = (directory / "metrics.jsonl").read_text().splitlines()
            losses.append([json.loads(line)[Metric.LOSS] for line in lines])
            own = {kind: sum(laps[first:steps:2]) for first, kind in enumerate(kinds)}
            print(f"run {run + 1}: {own['with']:.1f} s for the steps with, {own['without']:.1f} s for those without", flush=True)
    assert all(one == losses[0] for one in losses), "steps with and without train differently"
    total = {kind: sum(map(median, laps)) for kind, laps in found.items()}
    total["with"] += median(openings)
    print(f"\n{'':10}{'s':>8}   {steps} steps of recipes/demo-grpo.yaml: medians of each step, {PAIRS} times each way")
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
