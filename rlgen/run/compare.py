"""Compares two runs bit by bit: metrics, rollouts, weights, optimizer and random states."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from safetensors.torch import load_file

from rlgen.rollout.parquet import parts_of
from rlgen.rollout.read import read_rollouts, rollout_steps
from rlgen.run.directory import RunDirectory

# Columns and keys that differ between equal runs: times, process ids, and hits of the engine's prefix cache.
MEASURED = ("time", "pid", "cached_tokens")
# Files of a checkpoint that are compared; others are ignored.
TRAINED = ("*.safetensors", "state/state.json", "adapter_config.json", "config.json")
THERE = {True: "there", False: "(not there)"}


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference between two runs. Difference("metrics.jsonl", 3, "loss", 0.1, 0.2)"""

    file: str  # path in the run's directory
    step: int
    key: str
    left: Any
    right: Any

    def __str__(self) -> str:
        return f"{self.file}, step {self.step}, {self.key}: {shortened_repr(self.left)} and {shortened_repr(self.right)}"


def first_difference(left: Path, right: Path) -> Difference | None:
    """Returns the first step at which two run directories differ, with the first difference in it; None if the runs are equal.

    Compares the metrics of all steps except times, all samples, and all checkpoints: both runs must have the same ones, with
    equal weights, optimizer state, schedule, data position and random states.
    """
    kinds = (
        rollout_differences("rollouts", left, right),  # first: the step learned from them
        rollout_differences("evals", left, right),
        metric_differences(left, right),
        checkpoint_differences(left, right),
    )
    found = [difference for kind in kinds for difference in islice(kind, 1)]
    return min(found, key=lambda difference: difference.step, default=None)


def metric_differences(left: Path, right: Path) -> Iterator[Difference]:
    name = "metrics.jsonl"
    lines = [RunDirectory(run, None).read_metrics() for run in (left, right)]
    ours, theirs = ({line["step"]: line for line in side} for side in lines)
    for step in sorted(ours.keys() | theirs.keys()):
        yield from record_differences(name, step, ours.get(step), theirs.get(step))
    if len(lines[0]) != len(lines[1]):  # one step twice
        yield Difference(name, max(ours | theirs), "lines", len(lines[0]), len(lines[1]))


def rollout_differences(folder: str, left: Path, right: Path) -> Iterator[Difference]:
    steps = sorted({step for run in (left, right) for step in rollout_steps(run / folder)})
    for step in steps:
        name = f"{folder}/step_{step:06d}.parquet"
        ours, theirs = (read_rollouts(run / name) if parts_of(run / name) else None for run in (left, right))
        if ours is None or theirs is None:
            yield Difference(name, step, "file", THERE[ours is not None], THERE[theirs is not None])
            continue
        rows = min(len(ours), len(theirs))
        names = [key for key in dict.fromkeys([*ours.column_names, *theirs.column_names]) if key not in MEASURED]
        places = {key: unequal_row(ours[:rows], theirs[:rows], key) for key in names}
        found = [(row, key) for key, row in places.items() if row is not None]
        for row, key in sorted(found, key=lambda at: at[0])[:1]:  # sorted is stable: within a row, the first column
            sides = (side[key][row].as_py() if key in side.column_names else THERE[False] for side in (ours, theirs))
            yield Difference(name, step, f"sample {row}, {key}", *sides)
        if len(ours) != len(theirs):
            yield Difference(name, step, "samples", len(ours), len(theirs))


def unequal_row(left: pa.Table, right: pa.Table, name: str) -> int | None:
    """Returns the first row in which a column differs in any bit; None if it does not differ. NaN equals NaN."""
    if name not in left.column_names or name not in right.column_names or left[name].type != right[name].type:
        return 0
    ours, theirs = (side.select([name]).combine_chunks() for side in (left, right))
    if [one.serialize() for one in ours.to_batches()] == [one.serialize() for one in theirs.to_batches()]:
        return None
    rows = zip(ours[name], theirs[name], strict=True)
    return next((row for row, (one, other) in enumerate(rows) if repr(one.as_py()) != repr(other.as_py())), None)


def record_differences(file: str, step: int, left: Any, right: Any) -> Iterator[Difference]:
    if not isinstance(left, Mapping) or not isinstance(right, Mapping):
        if left is not right:
            yield Difference(file, step, "all of it", left, right)
        return
    for key in [*left, *(key for key in right if key not in left)]:
        if key in MEASURED or key.startswith("time/"):
            continue
        ours, theirs = (side.get(key, THERE[False]) for side in (left, right))
        # Text tells -0.0 from 0.0, 1 from 1.0, and each other float from its neighbours.
        if json.dumps(ours, sort_keys=True, default=repr) != json.dumps(theirs, sort_keys=True, default=repr):
            yield Difference(file, step, key, ours, theirs)


def checkpoint_differences(left: Path, right: Path) -> Iterator[Difference]:
    names = sorted({path.name for run in (left, right) for path in (run / "checkpoints").glob("step_*")})
    for name in names:
        folders = [run / "checkpoints" / name for run in (left, right)]
        files = [{str(p.relative_to(f)) for pattern in TRAINED for p in f.rglob(pattern)} for f in folders]
        for file in sorted(files[0] | files[1]):
            place, step = f"checkpoints/{name}/{file}", int(name.partition(".")[0].removeprefix("step_"))
            if any(file not in there for there in files):
                yield Difference(place, step, "file", THERE[file in files[0]], THERE[file in files[1]])
            elif file.endswith(".json"):
                ours, theirs = (json.loads((folder / file).read_text(encoding="utf-8")) for folder in folders)
                yield from record_differences(place, step, ours, theirs)
            else:
                yield from tensor_differences(place, step, *(folder / file for folder in folders))


def tensor_differences(file: str, step: int, left: Path, right: Path) -> Iterator[Difference]:
    ours, theirs = load_file(left), load_file(right)
    kinds = [{name: f"{one.dtype} {[*one.shape]}" for name, one in sorted(side.items())} for side in (ours, theirs)]
    yield from record_differences(file, step, *kinds)
    for name in [name for name, kind in kinds[0].items() if kinds[1].get(name) == kind]:
        a, b = ours[name], theirs[name]
        unequal = (a.reshape(-1, 1).view(torch.uint8) != b.reshape(-1, 1).view(torch.uint8)).any(-1).nonzero()[:, 0].tolist()
        if unequal:
            at = unequal[0]
            key = f"{name}[{at}] ({len(unequal)} of {a.numel()} differ)"
            yield Difference(file, step, key, a.reshape(-1)[at].item(), b.reshape(-1)[at].item())


def shortened_repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
