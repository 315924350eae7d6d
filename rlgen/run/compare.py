"""Are two runs the same run? Metrics, rollouts, weights, optimizer and random states, to the last bit."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

# How long things took, who did them, and what happened to be in a cache of the engine: not what was trained.
MEASURED = ("time", "pid", "cached_tokens")
TRAINED = ("*.safetensors", "state/state.json", "adapter_config.json", "config.json")  # of a checkpoint, whatever else is there


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Difference(file="metrics.jsonl", step=3, key="loss", left=0.1, right=0.2)"""

    file: str  # in the run's directory
    step: int
    key: str
    left: Any
    right: Any

    def __str__(self) -> str:
        return f"{self.file}, step {self.step}, {self.key}: {short(self.left)} and {short(self.right)}"


def first_difference(left: Path, right: Path) -> Difference | None:
    """The first step at which two run directories differ, and the first thing that does; None: they are the same run.

    Compared are all steps' metrics but times, all rollouts, and the checkpoints that are there: the same in both, with the same
    weights, optimizer's state, schedule, data position and random states.
    """
    return min(differences(left, right), key=lambda difference: difference.step, default=None)


def differences(left: Path, right: Path) -> Iterator[Difference]:
    """The first of each kind: what samples came before what was learned from them."""
    yield from first(rollouts(left, right))
    yield from first(metrics(left, right))
    yield from first(checkpoints(left, right))


def first(found: Iterator[Difference]) -> Iterator[Difference]:
    for difference in found:
        yield difference
        return


def metrics(left: Path, right: Path) -> Iterator[Difference]:
    name = "metrics.jsonl"
    ours, theirs = ({line["step"]: line for line in read_lines(run / name)} for run in (left, right))
    for step in sorted(ours.keys() | theirs.keys()):
        yield from records(name, step, "", ours.get(step), theirs.get(step))
    counts = [len(read_lines(run / name)) for run in (left, right)]
    if counts[0] != counts[1]:  # one step twice
        yield Difference(file=name, step=max(ours), key="lines", left=counts[0], right=counts[1])


def rollouts(left: Path, right: Path) -> Iterator[Difference]:
    names = sorted({path.name for run in (left, right) for path in (run / "rollouts").glob("step_*.jsonl")})
    for name in names:
        rows = [read_lines(run / "rollouts" / name) for run in (left, right)]
        step = number(name)
        for place in range(max(map(len, rows))):
            ours, theirs = (row[place] if place < len(row) else None for row in rows)
            yield from records(f"rollouts/{name}", step, f"sample {place}, ", ours, theirs)


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
            place, step = f"checkpoints/{name}/{file}", number(name)
            if any(file not in there for there in files):
                said = ["there" if file in there else "(not there)" for there in files]
                yield Difference(file=place, step=step, key="file", left=said[0], right=said[1])
            elif file.endswith(".json"):
                ours, theirs = (json.loads((folder / file).read_text(encoding="utf-8")) for folder in folders)
                yield from records(place, step, "", ours, theirs)
            else:
                yield from tensors(place, step, *(folder / file for folder in folders))


def tensors(file: str, step: int, left: Path, right: Path) -> Iterator[Difference]:
    ours, theirs = load_file(left), load_file(right)
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in ours or name not in theirs:
            said = ["there" if name in side else "(not there)" for side in (ours, theirs)]
            yield Difference(file=file, step=step, key=name, left=said[0], right=said[1])
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
    """Equal; NaN equals NaN."""
    both_nan = isinstance(left, float) and isinstance(right, float) and math.isnan(left) and math.isnan(right)
    return both_nan or (left == right and type(left) is type(right))


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def number(name: str) -> int:
    return int(name.partition(".")[0].removeprefix("step_"))


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
