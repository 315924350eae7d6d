"""The order of the rooms, what may not be imported where, and that nothing grows too long. `scripts/house.py` prints the rest."""

import ast
import re
from functools import cache
from pathlib import Path

import house
import pytest
from house import AFTER_OPENING, PACKAGE

ROW = re.compile(r"^\| `(\w+)` \| ((?:`\w+`(?:, )?)+|nothing of rlgen) \|$", re.M)
# Room -> the rooms that it imports from, in the order of the rooms: the table of the documentation is the rule.
TABLE = {room: re.findall(r"`(\w+)`", cell) for room, cell in ROW.findall((PACKAGE / "docs" / "walk.md").read_text())}
FILES = house.files(PACKAGE)


@cache
def imported(path: Path) -> set[str]:
    """Full names of everything a file imports, inside functions too."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    calls = [n for n in nodes if isinstance(n, ast.Call) and n.args and not ast.unparse(n.func).endswith("getLogger")]
    strings = {n.args[0].value for n in calls if isinstance(n.args[0], ast.Constant)}
    return names | {text for text in strings if isinstance(text, str) and text.split(".")[0] == "vllm"}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def rooms_used(room: str) -> dict[str, set[str]]:
    """The rooms that the modules of a room import from, each with these modules."""
    used: dict[str, set[str]] = {}
    for path in (path for path in FILES if room_of(path) == room):
        for other in {name.split(".")[1] for name in imported(path) if name.startswith("rlgen.")} & set(TABLE) - {room}:
            used.setdefault(other, set()).add(str(path.relative_to(PACKAGE)))
    return used


@pytest.mark.parametrize("room", TABLE)
def test_a_room_imports_from_those_of_the_table(room: str) -> None:
    used = rooms_used(room)
    assert {other: users for other, users in used.items() if other not in TABLE[room]} == {}, (
        "not in the table of `rlgen docs walk`"
    )
    assert set(TABLE[room]) - set(used) == set(), "no module needs it any more"


@pytest.mark.parametrize(("room", "other"), [(room, other) for room, others in TABLE.items() for other in others])
def test_imports_point_up_the_table(room: str, other: str) -> None:
    rooms = list(TABLE)
    assert rooms.index(other) < rooms.index(room)


def test_every_room_is_in_the_table() -> None:
    assert {room_of(path) for path in FILES} - {"__init__", "__main__"} == set(TABLE)


def test_vllm_is_imported_in_engines_only() -> None:
    users = {str(path.relative_to(PACKAGE)) for path in FILES if any(n.split(".")[0] == "vllm" for n in imported(path))}
    # Scheduler and worker are loaded by vLLM itself, and only by the version that `vllm_compat` names.
    loaded = {"engines/cpu_decode/scheduler.py", "engines/cpu_decode/worker.py"}
    assert users == {"engines/vllm_compat.py", "engines/vllm_weights.py", *loaded}
    others = [path for path in FILES if path.parent.name != "cpu_decode"]
    assert not any(name.startswith("rlgen.engines.cpu_decode") for path in others for name in imported(path))


def test_no_file_and_no_function_of_the_product_is_too_long() -> None:
    assert house.long_files(PACKAGE) == []
    assert house.long_functions(PACKAGE) == []


def test_no_modules_import_each_other() -> None:
    assert house.circles() == []
    uses = {"a": ["b"], "b": ["c"], "c": ["b"]}
    assert house.reachable("b", uses) == {"b", "c"} and "a" not in house.reachable("a", uses)


def test_a_policy_needs_no_recipe() -> None:
    """`make gpu-check` compares log-probs on machines that lack pydantic."""
    assert not [name for name in house.reachable("rlgen.models.policy", house.uses_of_modules()) if "recipe" in name]


def test_the_rooms_after_the_opening_know_no_recipe() -> None:
    """They take settings one by one; the only file that reads a recipe for an engine is the one that opens it."""
    passed = {line.partition(":")[0] for room in AFTER_OPENING for line in house.passes_of_a_recipe(room)}
    assert passed <= {"rlgen/engines/open.py"} and house.passes_of_a_recipe("setup")
