"""How heavy the house is, and where it is untidy: `PYTHONPATH=. python scripts/house.py`.

Prints the lines of `rlgen/` and `tests/`, and what a reader would stumble over: long files, long functions, circles of imports,
names that mean two things, and calls that pass a whole recipe on where single settings would do.
"""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "rlgen"
FILE_LINES, FUNCTION_LINES = 450, 60  # a longer one is listed
# Rooms between `train()` and the loop; those of the second line know settings, and no recipe.
OPENING = ("setup", "data", "models", "algorithms", "rewards", "tools", "worker_pool", "sentinel", "run")
AFTER_OPENING = ("engines", "rollout", "trainers")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def place(path: Path) -> str:
    return str(path.relative_to(ROOT))


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def long_files(folder: Path) -> list[str]:
    return [f"{place(path)}: {lines(path)}" for path in files(folder) if lines(path) > FILE_LINES]


def long_functions(folder: Path) -> list[str]:
    found = []
    for path in files(folder):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, Function) and node.end_lineno and node.end_lineno - node.lineno >= FUNCTION_LINES:
                found.append(f"{place(path)}:{node.lineno} {node.name}: {node.end_lineno - node.lineno + 1}")
    return found


def imported(path: Path) -> set[str]:
    """Returns the full names of all that a file imports, inside functions too; not what is imported for its types alone."""
    todo: list[ast.AST] = [tree_of(path)]
    names: set[str] = set()
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        todo += ast.iter_child_nodes(node)
    return names


def uses_of_modules() -> dict[str, set[str]]:
    """Returns the modules that each module of rlgen imports, but `rlgen` itself, which all may ask for the version."""
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in files(PACKAGE)}
    modules = {name.removesuffix(".__init__"): path for name, path in names.items() if name != "rlgen.__init__"}
    uses = {}
    for name, path in modules.items():
        found = imported(path)
        uses[name] = {full if full in modules else full.rpartition(".")[0] for full in found} & set(modules) - {name}
    return uses


def circles() -> list[str]:
    """Returns the modules that import each other, directly or by way of others; a line for each circle."""
    uses = uses_of_modules()
    reached = {name: reachable(name, uses) for name in uses}
    found_circles = {
        frozenset(other for other in reached[name] if name in reached[other]) for name in uses if name in reached[name]
    }
    return sorted(" ".join(sorted(circle)) for circle in found_circles)


def reachable(start: str, uses: Mapping[str, Iterable[str]]) -> set[str]:
    """Returns the modules that `start` imports, and those that they import; `start` itself is one if it is in a circle."""
    seen: set[str] = set()
    todo = [start]
    while todo:
        new = set(uses[todo.pop()]) - seen
        seen |= new
        todo += new
    return seen


def names_used_twice(kind: type[ast.ClassDef] | tuple[type[ast.AST], ...]) -> list[str]:
    """Returns the public names that top-level classes or functions of several files of rlgen have."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in files(PACKAGE):
        for name in {node.name for node in tree_of(path).body if isinstance(node, kind)}:  # type: ignore[attr-defined]
            if not name.startswith("_"):
                places[name].append(place(path).removeprefix("rlgen/"))
    return [f"{name}: {', '.join(where)}" for name, where in sorted(places.items()) if len(where) > 1]


def passes_of_a_recipe(room: str) -> list[str]:
    """Returns the calls in a room that pass a whole recipe on: `f(recipe)`, `f(recipe=self.recipe)`."""
    return [
        f"{place(path)}:{node.lineno}"
        for path in files(PACKAGE / room)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and any(is_recipe(value) for value in arguments(node))
    ]


def arguments(call: ast.Call) -> Iterator[ast.expr]:
    yield from call.args
    yield from (keyword.value for keyword in call.keywords)


def is_recipe(value: ast.expr) -> bool:
    return (isinstance(value, ast.Name) and value.id == "recipe") or (isinstance(value, ast.Attribute) and value.attr == "recipe")


def show(what: str, found: list[str]) -> None:
    print(f"{what}: {len(found)}")
    for line in found:
        print(f"  {line}")


def main() -> None:
    for folder in (PACKAGE, ROOT / "tests"):
        rooms: dict[str, int] = defaultdict(int)
        for path in files(folder):
            parts = path.relative_to(folder).parts
            rooms[parts[0] if len(parts) > 1 else "."] += lines(path)
        print(f"{folder.name}/: {sum(rooms.values())} lines: {', '.join(f'{room} {count}' for room, count in rooms.items())}")
        show(f"files over {FILE_LINES} lines in {folder.name}/", long_files(folder))
        show(f"functions over {FUNCTION_LINES} lines in {folder.name}/", long_functions(folder))
    show("circles of imports", circles())
    show("classes of one name in several files", names_used_twice(ast.ClassDef))
    show("functions of one name in several files", names_used_twice((ast.FunctionDef, ast.AsyncFunctionDef)))
    passes = {room: passes_of_a_recipe(room) for room in (*OPENING, *AFTER_OPENING)}
    counts = ", ".join(f"{room} {len(found)}" for room, found in passes.items())
    print(f"calls that pass a whole recipe on: {sum(map(len, passes.values()))}: {counts}")
    show(f"of these in {', '.join(AFTER_OPENING)}", [line for room in AFTER_OPENING for line in passes[room]])


if __name__ == "__main__":
    main()
