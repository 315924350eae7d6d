"""`make learn`: does rlgen learn as much as TRL from equal samples? Tasks × trainers × seeds, each with both, and a table.

Every cell starts from the same model of its task; `learn_cells` says what else is equal. The table has each task's held-out
accuracy before and after, and the difference with its 95 % interval over the seeds (Welch's t). Exit 1 if rlgen is behind in any
row: an interval that lies wholly below 0. Finished cells are kept in `runs/learn/cells`: what was interrupted goes on, and a
folder that is deleted is trained again.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean

import numpy as np
from learn_cells import ROOT, TINY, TOOLS, TRAINERS, Cell, Learned, Size, run_cell, warm

from rlgen.analysis.aligned import BAND, band, present
from rlgen.analysis.charts import Chart, Line
from rlgen.analysis.comparison import Verdict, verdict_at
from rlgen.analysis.png import write_png
from rlgen.metrics import Metric

SMOOTHED = 5  # steps: a point of a curve is the mean of so many
Found = Mapping[Cell, Learned]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One task with one trainer: what each seed came to, and the verdict on the two tools."""

    task: str
    trainer: str
    before: float
    after: Mapping[str, Sequence[float]]  # by tool, a number for each seed
    verdict: Verdict

    @property
    def behind(self) -> bool:
        """Returns whether the whole interval of rlgen less TRL lies below 0."""
        return self.verdict.higher == "TRL"

    @property
    def cells(self) -> tuple[str, ...]:
        """Returns what stands in the table."""
        words = {"rlgen": "ahead", "TRL": "behind", None: "–"}
        interval, difference = self.verdict.interval, self.verdict.difference
        apart = f"{interval.value:+.3f} ({interval.low:+.3f} to {interval.high:+.3f})" if interval else f"{difference:+.3f}"
        means = [f"{fmean(self.after[tool]):.3f}" for tool in TOOLS]
        return self.task, self.trainer, f"{self.before:.3f}", *means, apart, words[self.verdict.higher]


HEADS = ("task", "trainer", "before", *TOOLS, "rlgen less TRL", "verdict")


def grid(seeds: int, size: Size, only: str) -> list[Cell]:
    """Returns the cells whose names hold `only`; a seed is complete before the next one begins."""
    cells = [
        Cell(task=task, trainer=trainer, seed=seed, tool=tool, size=size)
        for seed in range(seeds)
        for task in TINY
        for trainer in TRAINERS
        for tool in TOOLS
    ]
    return [cell for cell in cells if only in str(cell)]


def prepare(log: Path) -> None:
    """Sends what a process that trains prints to a file."""
    with log.open("a") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())


def trained(cells: Sequence[Cell], out: Path, workers: int) -> Iterator[tuple[Cell, Learned]]:
    """Yields the cells as they are finished. Each worker is a process with one thread, which keeps its imports."""
    (out / "warm").mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(workers, get_context("spawn"), prepare, (out / "log.txt",)) as processes:
        tasks = dict.fromkeys(cell.task for cell in cells)
        list(processes.map(warm, tasks, [out / "warm" / task for task in tasks]))
        waiting = {processes.submit(run_cell, cell, out): cell for cell in cells}
        try:
            for future in as_completed(waiting):
                yield waiting[future], future.result()
        finally:
            processes.shutdown(cancel_futures=True)  # after an error no further cell begins


def rows_of(found: Found) -> list[Row]:
    """Returns the rows of the table."""
    rows = []
    for task, trainer in dict.fromkeys((cell.task, cell.trainer) for cell in found):
        of_row = {cell: learned for cell, learned in found.items() if (cell.task, cell.trainer) == (task, trainer)}
        after = {tool: [learned.after for cell, learned in of_row.items() if cell.tool == tool] for tool in TOOLS}
        ours, theirs = ([{0: value} for value in after[tool]] for tool in TOOLS)
        verdict = verdict_at(ours, theirs, [0], TOOLS, Metric.EVAL_REWARD_MEAN)
        before = next(iter(of_row.values())).before
        rows.append(Row(task=task, trainer=trainer, before=before, after=after, verdict=verdict))
    return rows


def charts_of(found: Found) -> list[Chart]:
    """Returns a chart for each row: the mean reward of the steps, with a band over the seeds."""
    charts = []
    for task, trainer in dict.fromkeys((cell.task, cell.trainer) for cell in found):
        lines = []
        for tool in TOOLS:
            place = (task, trainer, tool)
            if not any((cell.task, cell.trainer, cell.tool) == place for cell in found):
                continue
            rows = np.array([smooth(one.rewards) for cell, one in found.items() if (cell.task, cell.trainer, cell.tool) == place])
            low, high = band(rows) if len(rows) > 1 else (rows[0], rows[0])
            lines.append(Line(label=tool, values=present(rows.mean(axis=0)), low=present(low), high=present(high)))
        steps = [SMOOTHED * (point + 1) for point in range(len(lines[0].values))]
        what = "Mean reward of the sampled answers."
        charts.append(Chart(group="Reward", title=f"{task}, {trainer}", unit="", what=what, x=steps, lines=lines))
    return charts


def smooth(rewards: Sequence[float]) -> list[float]:
    """Returns the mean of each `SMOOTHED` steps."""
    return [fmean(rewards[start : start + SMOOTHED]) for start in range(0, len(rewards), SMOOTHED)]


def markdown(rows: Sequence[Row]) -> str:
    """Returns the table as a page of `rlgen docs` has it."""
    lines = [HEADS, ["---"] * len(HEADS), *(row.cells for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def text(rows: Sequence[Row]) -> str:
    """Returns the table for a terminal of 80 columns."""
    return aligned([HEADS, *(row.cells for row in rows)])


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Returns lines of cells as columns."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def write(rows: Sequence[Row], found: Found, out: Path) -> None:
    """Writes the table as JSON and as Markdown, and the curves as a picture."""
    facts = [
        {
            "task": row.task,
            "trainer": row.trainer,
            "before": row.before,
            "after": row.after,
            "difference": row.verdict.difference,
            "interval": asdict(row.verdict.interval) if row.verdict.interval else None,
            "sentence": row.verdict.sentence,
            "basis": row.verdict.basis,
        }
        for row in rows
    ]
    cells = {str(cell): {"size": asdict(cell.size), **asdict(learned)} for cell, learned in found.items()}
    (out / "learn.json").write_text(json.dumps({"rows": facts, "cells": cells}, indent=1) + "\n")
    (out / "learn.md").write_text(markdown(rows))
    charts = charts_of(found)
    write_png(out / "learn.png", "Reward of the sampled answers: rlgen and TRL from equal samples", charts, most=len(charts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each task, trainer and tool")
    parser.add_argument("--workers", type=int, default=2, help="trainings at a time, one core each")
    parser.add_argument("--only", default="", metavar="TEXT", help="cells whose name holds it, such as reverse-grpo")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "learn", help="folder of the results")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # of the workers: each has a core
    cells, done = grid(options.seeds, Size(), options.only), {}
    for cell, learned in trained(cells, options.out.absolute(), options.workers):
        done[cell] = learned
        line = f"{len(done):>3} of {len(cells)}  {cell!s:<28} {learned.before:.3f} -> {learned.after:.3f}  {learned.cpu:.0f} s"
        print(line, flush=True)
    found = {cell: done[cell] for cell in cells}
    rows = rows_of(found)
    write(rows, found, options.out)
    print(f"\n{text(rows)}\n\nheld-out accuracy, mean of {options.seeds} seeds; –: no difference can be seen")
    print(f"each of the {len(rows)} intervals holds with 95 %, not all of them together")
    print(f"{sum(one.cpu for one in done.values()) / 60:.0f} minutes of processor time; {options.out}/learn.png: {BAND}")
    if behind := [f"{row.task} with {row.trainer}: {row.verdict.sentence}" for row in rows if row.behind]:
        raise SystemExit(f"rlgen is behind: {'; '.join(behind)}")


if __name__ == "__main__":
    main()
