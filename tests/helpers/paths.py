"""Which ways through training a test goes, read from what it leaves: a declaration is compared with this.

`@pytest.mark.path("grpo", "colocated", "one process", "float32", "packed", "full")` says that a test trains in this way, two
steps or more, in `tmp_path` or another folder that it is given. It may stand on a test more than once, and on no slow one. The
contributor's page has the table.
"""

import ast
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import yaml

AXES = {
    "trainer": ("grpo", "rloo", "online_dpo"),
    "engine": ("colocated", "server", "transformers"),
    "processes": ("one process", "ddp", "fsdp"),
    "dtype": ("float32", "bfloat16"),
    "rows": ("packed", "padded"),
    "trained": ("full", "lora"),
}
STEPS = 2
Way = tuple[str, ...]  # a value of each axis


def went(folder: Path) -> set[Way]:
    """The ways of all runs in `folder` that made two updates; of a program that makes no run, what it says in `ran.json` itself.

    That is a list of `{"path": [one value of each axis], "steps": updates that it made}`.
    """
    ways = set()
    for path in folder.rglob("metrics.jsonl"):
        records = [record for record in map(json.loads, path.read_text().splitlines()) if record.get("updates/done")]
        if len(records) >= STEPS:
            ways.add(way_of(path.parent, records))
    for path in folder.rglob("ran.json"):
        ways |= {tuple(one["path"]) for one in json.loads(path.read_text()) if one["steps"] >= STEPS}
    return ways


def way_of(run: Path, records: Sequence[Mapping[str, Any]]) -> Way:
    """As the run has it: the resolved recipe, whether several processes wrote rollouts, and whether rows were padded."""
    recipe = yaml.safe_load((run / "resolved.yaml").read_text())
    several = (run / "rollouts" / "step_000002.parquet").is_dir()  # a file of each process
    return (
        recipe["trainer"]["kind"],
        recipe["engine"]["kind"],
        recipe["processes"]["strategy"] if several else "one process",
        recipe["model"]["dtype"],
        "padded" if any(record["tokens/padding"] for record in records) else "packed",
        "lora" if recipe["model"]["lora"] else "full",
    )


def declared(tests: Path) -> Iterator[tuple[Way, str]]:
    """(way, "trainers/test_runs.py::test_x") of each declaration in the test files of a folder."""
    for path in sorted(tests.rglob("test_*.py")):
        text = path.read_text()
        for node in ast.parse(text).body if "mark.path(" in text else ():
            for mark in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.path":
                    yield tuple(ast.literal_eval(one) for one in mark.args), f"{path.relative_to(tests)}::{node.name}"


def pairs() -> Iterator[tuple[str, str]]:
    """Every two values of two axes."""
    for one, other in combinations(AXES.values(), 2):
        yield from ((left, right) for left in one for right in other)


def uncovered(ways: Iterable[Way]) -> list[tuple[str, str]]:
    """The pairs of values that none of these ways has."""
    found = {pair for way in ways for pair in combinations(way, 2)}
    return [pair for pair in pairs() if pair not in found]
