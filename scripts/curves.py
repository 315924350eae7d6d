"""`make curves`: how time and memory of a step grow with completions, their length, the vocabulary and the parameters.

    python scripts/curves.py                          # all axes
    python scripts/curves.py completions --steps 15   # one, with more steps

Each point is a run of its own, as `make bench` has them: GRPO with vLLM in its process, in float32, all completions of one
length, micro-batches of 1,024 tokens. The points of an axis take steps in turns, as the sides of `make bench` do; the first ones
do not count. The time is the median of a step. The memory is the most that tensors made by the first update take at once, as
torch's profiler counts them: gradients, moments and activations.

Prints a table with R² of the straight line through each curve, and writes `curves.json` and `curves.png` to the folder `--out`.
Nothing else may run on the machine meanwhile.
"""

import argparse
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
from bench import WARM_UP, Side, turned
from bench_sides import Steps, Workload, build_model, run_rlgen
from rich.console import Console
from rich.table import Table
from safetensors.numpy import load_file
from torch.profiler import ProfilerActivity, profile

from rlgen.analysis.charts import Chart, Line
from rlgen.analysis.png import write_png
from rlgen.trainers.update import Updater

ROOT = Path(__file__).parent.parent
GROUP, PROMPT, LENGTH, COMPLETIONS = 8, 24, 64, 64
AXES: dict[str, tuple[int, ...]] = {
    "completions": (16, 32, 64, 128, 192, 256),
    "length": (32, 64, 128, 192, 256),
    "vocabulary": (4_096, 32_768, 65_536, 98_304, 151_936),
    "width": (128, 256, 384, 512, 640),
}
LABELS = {
    "completions": "completions of 64 tokens",
    "length": "tokens of each of 64 completions",
    "vocabulary": "thousand ids of the vocabulary",
    "width": "million parameters",
}


def workload(axis: str, value: int) -> Workload:
    """Returns the workload of a point."""
    plain = Workload(
        prompts=COMPLETIONS // GROUP,
        group_size=GROUP,
        prompt_tokens=PROMPT,
        lengths=[LENGTH] * COMPLETIONS,
        micro_batch_tokens=1024,
    )
    if axis == "completions":
        return replace(plain, prompts=value // GROUP, lengths=[LENGTH] * value)
    if axis == "length":
        return replace(plain, lengths=[value] * COMPLETIONS)
    if axis == "vocabulary":
        return replace(plain, model={"vocab_size": value})
    heads = {"num_attention_heads": value // 32, "num_key_value_heads": value // 64}
    return replace(plain, model={"hidden_size": value, "intermediate_size": 3 * value, **heads})


class Measured(Steps):
    """Says as each step begins also what memory the first update has taken."""

    def __init__(self) -> None:
        super().__init__()
        self.added: int | None = None  # bytes, by the first update

    def said(self) -> dict[str, Any]:
        """Returns what is known of the step before."""
        return {**super().said(), "mib": (self.added or 0) / (1 << 20)}

    def watched(self, update: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `Updater.__call__` that notes the memory which its first call takes."""

        def call(*arguments: Any) -> Any:
            if self.added is not None:
                return update(*arguments)
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
                told = update(*arguments)
            assert seen.profiler is not None
            found = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
            found.sort(key=lambda event: event.start_ns())
            self.added = max(accumulate(event.nbytes() for event in found))
            return told

        return call


def run_point(axis: str, value: int, folder: Path) -> None:
    """Runs one point, until the process is killed."""
    logging.disable(logging.WARNING)
    point, measured = workload(axis, value), Measured()
    build_model(point, folder / "model")
    os.chdir(folder)
    with patch.object(Updater, "__call__", measured.watched(Updater.__call__)):
        run_rlgen(point, folder, measured)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The points of an axis."""

    x: list[float]
    seconds: list[float]  # of a step
    mib: list[float]  # of the update

    def straight(self) -> float:
        """Returns R² of the straight line through the times."""
        slope, offset = np.polyfit(self.x, self.seconds, 1)
        rest = np.array(self.seconds) - (slope * np.array(self.x) + offset)
        return float(1 - (rest**2).sum() / ((np.array(self.seconds) - np.mean(self.seconds)) ** 2).sum())


def measure(axis: str, steps: int, folder: Path) -> Curve:
    """Runs the points of an axis, each in a process of its own, in turns."""
    running: list[Side] = []
    parameters: list[int] = []
    try:
        for value in AXES[axis]:
            print(f"{axis}: starting {value} …", flush=True)
            place = folder / f"{axis}-{value}"
            place.mkdir()
            command = [sys.executable, __file__, "--point", axis, str(value), str(place)]
            running.append(Side.begin(f"{axis} {value}", command, place))
            parameters.append(sum(tensor.size for tensor in load_file(place / "model" / "model.safetensors").values()))
        for step in range(WARM_UP + steps):
            for point in turned(running, step):
                point.step(step >= WARM_UP)
    finally:
        for point in running:
            point.end()
    x = [number / 1e6 for number in parameters] if axis == "width" else [float(value) for value in AXES[axis]]
    x = [value / 1000 for value in x] if axis == "vocabulary" else x
    return Curve(x=x, seconds=[median(point.seconds) for point in running], mib=[point.first["mib"] for point in running])


def charts(curves: dict[str, Curve]) -> list[Chart]:
    """Returns two charts for each axis: times in the first row, memory in the second."""
    found = []
    for unit, title in (("s", "Time of a step"), ("MiB", "Memory of the update")):
        for axis, curve in curves.items():
            values: Sequence[float] = curve.seconds if unit == "s" else curve.mib
            line = Line(label=title, values=values)
            found.append(Chart(group="", title=title, unit=unit, what="", x=curve.x, lines=[line], axis=LABELS[axis]))
    return found


def table(curves: dict[str, Curve]) -> Table:
    """Returns the table of all axes."""
    shown = Table("axis", "from", "to", "s a step", "R²", "MiB of the update")
    for axis, curve in curves.items():
        ends = (f"{curve.x[0]:g}", f"{curve.x[-1]:g}")
        seconds, mib = ", ".join(f"{value:.2f}" for value in curve.seconds), ", ".join(f"{value:.0f}" for value in curve.mib)
        shown.add_row(LABELS[axis], *ends, seconds, f"{curve.straight():.4f}", mib)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("axes", nargs="*", choices=[*AXES, []], help="all if none is named")
    parser.add_argument("--steps", type=int, default=7, help="counted steps of each point")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "curves")
    parser.add_argument("--point", nargs=3, metavar=("AXIS", "VALUE", "FOLDER"), help="run one point in this process")
    chosen = parser.parse_args()
    if chosen.point:
        run_point(chosen.point[0], int(chosen.point[1]), Path(chosen.point[2]))
    chosen.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="rlgen-curves-") as folder:
        curves = {axis: measure(axis, chosen.steps, Path(folder)) for axis in chosen.axes or AXES}
    facts = {axis: {**asdict(curve), "r2": curve.straight()} for axis, curve in curves.items()}
    (chosen.out / "curves.json").write_text(json.dumps(facts, indent=1) + "\n")
    shown = charts(curves)
    write_png(chosen.out / "curves.png", "Time and memory of a step", shown, len(shown), columns=len(curves), from_zero=True)
    Console(width=150).print(table(curves))
    print(f"{chosen.out / 'curves.json'}, {chosen.out / 'curves.png'}")


if __name__ == "__main__":
    main()
