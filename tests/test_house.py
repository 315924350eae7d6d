"""The order of the rooms, and what may not be imported where."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "rlgen"
ORDER = ["redact", "errors", "types", "files", "recipe", "data", "rewards", "losses", "processes", "models"]
ORDER += ["engines", "rollout", "sentinel", "run", "trainers", "cli"]
FILES = sorted(PACKAGE.rglob("*.py"))


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


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if room in ("__init__", "__main__"):
        return
    used = {name.split(".")[1] for name in imported(path) if name.startswith("rlgen.")} & set(ORDER)
    assert {other for other in used if ORDER.index(other) > ORDER.index(room)} == set()


def test_every_room_is_in_the_order() -> None:
    rooms = {path.name.removesuffix(".py") for path in PACKAGE.iterdir() if not path.name.startswith("_")}
    assert rooms == set(ORDER)


def test_vllm_is_imported_in_engines_only() -> None:
    users = {str(path.relative_to(PACKAGE)) for path in FILES if any(n.split(".")[0] == "vllm" for n in imported(path))}
    assert users == {"engines/vllm_compat.py"}
