"""Compares two runs bit by bit: metrics, rollouts, weights, optimizer and random states."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from rlgen.rollout.parquet import parts_of
from rlgen.run.directory import RunDirectory
from rlgen.run.rollouts import read_rollouts, rollout_steps

# Columns and keys that differ between equal runs: times, process ids, and hits of the engine's prefix cache.
MEASURED = ("time", "pid", "cached_tokens")
# Files of a checkpoint that are compared; others are ignored.
TRAINED = ("*.safetensors", "state/state.json", "adapter_config.json", "config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One difference between two runs. Difference(file="metrics.jsonl", step=3, key="loss", left=0.1, right=0.2)"""

    file: str  # path in the run's directory
    step: int
    key: str
    left: Any
    right: Any

    def __str__(self) -> str:
        return f"{self.file}, step {self.step}, {self.key}: {short(self.left)} and {short(self.right)}"


def first_difference(left: Path, right: Path) -> Difference | None:
    """Returns the first step at which two run directories differ, with the first difference in it; None if the runs are equal.

    Compares the metrics of all steps except times, all samples, and all checkpoints: both runs must have the same ones, with
    equal weights, optimizer state, schedule, data position and random states.
    """
    # Rollouts come first: the step learned from them.
    kinds = (rollouts("rollouts", left, right), rollouts("evals", left, right), metrics(left, right), checkpoints(left, right))
    found = [difference for kind in kinds for difference in islice(kind, 1)]
    return min(found, key=lambda difference: difference.step, default=None)


def presence(file: str, step: int, key: str, ours: bool, theirs: bool) -> Difference:
    words = {True: "there", False: "(not there)"}
    return Difference(file=file, step=step, key=key, left=words[ours], right=words[theirs])


def metrics(left: Path, right: Path) -> Iterator[Difference]:
    name = "metrics.jsonl"
    lines = [RunDirectory(run, None).read_metrics() for run in (left, right)]
    ours, theirs = ({line["step"]: line for line in side} for side in lines)
    for step in sorted(ours.keys() | theirs.keys()):
        yield from records(name, step, "", ours.get(step), theirs.get(step))
    if len(lines[0]) != len(lines[1]):  # one step twice
        yield Difference(file=name, step=max(ours | theirs), key="lines", left=len(lines[0]), right=len(lines[1]))


def rollouts(folder: str, left: Path, right: Path) -> Iterator[Difference]:
    steps = sorted({step for run in (left, right) for step in rollout_steps(run / folder)})
    for step in steps:
        name = f"{folder}/step_{step:06d}.parquet"
        ours, theirs = (read_rollouts(run / name) if parts_of(run / name) else None for run in (left, right))
        if ours is None or theirs is None:
            yield presence(name, step, "file", ours is not None, theirs is not None)
            continue
        rows = min(len(ours), len(theirs))
        names = [key for key in dict.fromkeys([*ours.column_names, *theirs.column_names]) if key not in MEASURED]
        places = {key: unequal_row(ours[:rows], theirs[:rows], key) for key in names}
        found = [(row, key) for key, row in places.items() if row is not None]
        for row, key in sorted(found, key=lambda at: at[0])[:1]:  # sorted is stable: within a row, the first column
            sides = [side[key][row].as_py() if key in side.column_names else "(not there)" for side in (ours, theirs)]
            yield Difference(file=name, step=step, key=f"sample {row}, {key}", left=sides[0], right=sides[1])
        if len(ours) != len(theirs):
            yield Difference(file=name, step=step, key="samples", left=len(ours), right=len(theirs))


def unequal_row(left: pa.Table, right: pa.Table, name: str) -> int | None:
    """Returns the first row in which a column differs; None if it does not differ."""
    if name not in left.column_names or name not in right.column_names:
        return 0
    rows = unequal(*(side[name].combine_chunks() for side in (left, right))).nonzero()[0]
    return int(rows[0]) if len(rows) else None


def unequal(left: pa.Array, right: pa.Array) -> NDArray[np.bool_]:
    """Returns a bool array [N]: which values of two arrays of one length differ in any bit. NaN equals NaN."""
    if left.type != right.type:
        return np.ones(len(left), dtype=bool)
    valid = left.is_valid().to_numpy(zero_copy_only=False)
    found: NDArray[np.bool_] = valid != right.is_valid().to_numpy(zero_copy_only=False)
    if pa.types.is_struct(left.type):
        for ours, theirs in zip(left.flatten(), right.flatten(), strict=True):
            found = found | unequal(ours, theirs)
    elif pa.types.is_list(left.type) or pa.types.is_map(left.type):
        lengths, others = (side.offsets.to_numpy()[1:] - side.offsets.to_numpy()[:-1] for side in (left, right))
        found = found | (lengths != others)
        if found.any():  # from the first differing row on, elements do not line up
            first = int(found.argmax())
            found[:first] |= unequal(left[:first], right[:first])
            return found
        inner = unequal(*(side.values[side.offsets[0].as_py() : side.offsets[-1].as_py()] for side in (left, right)))
        counts = np.concatenate([[0], inner.cumsum()])
        starts = left.offsets.to_numpy() - left.offsets[0].as_py()
        found = found | (counts[starts[1:]] != counts[starts[:-1]])
    elif pa.types.is_floating(left.type):
        ours, theirs = (side.fill_null(0).to_numpy(zero_copy_only=False) for side in (left, right))
        bits = ours.view(f"u{ours.itemsize}") != theirs.view(f"u{ours.itemsize}")
        found = found | (bits & ~(np.isnan(ours) & np.isnan(theirs)))
    elif not pa.types.is_null(left.type):
        found = found | pc.not_equal(left, right).fill_null(False).to_numpy(zero_copy_only=False)
    return found


def records(file: str, step: int, place: str, left: Any, right: Any) -> Iterator[Difference]:
    if not isinstance(left, Mapping) or not isinstance(right, Mapping):
        if left is not right:
            yield Difference(file=file, step=step, key=f"{place}all of it", left=left, right=right)
        return
    for key in [*left, *(key for key in right if key not in left)]:
        if key in MEASURED or key.startswith("time/"):
            continue
        if not same(left.get(key), right.get(key)) or (key in left) != (key in right):
            ours, theirs = (side.get(key, "(not there)") for side in (left, right))
            yield Difference(file=file, step=step, key=f"{place}{key}", left=ours, right=theirs)


def checkpoints(left: Path, right: Path) -> Iterator[Difference]:
    names = sorted({path.name for run in (left, right) for path in (run / "checkpoints").glob("step_*")})
    for name in names:
        folders = [run / "checkpoints" / name for run in (left, right)]
        files = [{str(p.relative_to(f)) for pattern in TRAINED for p in f.rglob(pattern)} for f in folders]
        for file in sorted(files[0] | files[1]):
            place, step = f"checkpoints/{name}/{file}", int(name.partition(".")[0].removeprefix("step_"))
            if any(file not in there for there in files):
                yield presence(place, step, "file", file in files[0], file in files[1])
            elif file.endswith(".json"):
                ours, theirs = (json.loads((folder / file).read_text(encoding="utf-8")) for folder in folders)
                yield from records(place, step, "", ours, theirs)
            else:
                yield from tensors(place, step, *(folder / file for folder in folders))


def tensors(file: str, step: int, left: Path, right: Path) -> Iterator[Difference]:
    ours, theirs = load_file(left), load_file(right)
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in ours or name not in theirs:
            yield presence(file, step, name, name in ours, name in theirs)
            continue
        a, b = ours[name], theirs[name]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            yield Difference(file=file, step=step, key=name, left=f"{a.dtype} {[*a.shape]}", right=f"{b.dtype} {[*b.shape]}")
            continue
        unequal = (a.reshape(-1, 1).view(torch.uint8) != b.reshape(-1, 1).view(torch.uint8)).any(-1).nonzero()[:, 0].tolist()
        if unequal:
            at = unequal[0]
            key = f"{name}[{at}] ({len(unequal)} of {a.numel()} differ)"
            yield Difference(file=file, step=step, key=key, left=a.reshape(-1)[at].item(), right=b.reshape(-1)[at].item())


def same(left: Any, right: Any) -> bool:
    """Returns whether two values are equal and of one type. NaN equals NaN."""
    both_nan = isinstance(left, float) and isinstance(right, float) and math.isnan(left) and math.isnan(right)
    return both_nan or (left == right and type(left) is type(right))


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
