"""Reads the files of a recipe, and writes the overrides of the command line over them, with the position of every value."""

import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

from rlgen.errors import Problem, RecipeError
from rlgen.recipe import yaml
from rlgen.recipe.messages import UNIONS
from rlgen.redact import CERTAIN, holds_secret, is_secret_name, secrets_of_environment

MAX_BYTES = 1 << 18
MAX_PARENTS = 8
MAX_PROBLEMS = 100  # most problems that are reported
# Names that keys had in earlier versions, and their names of today.
RENAMED = {("rollout", "ahead"): "async_steps", ("rollout", "refill"): "dynamic_sampling"}
MORE = "…"  # position of the line that counts the unreported ones
INTO_ENVIRONMENT = "put it into an environment variable and read that in the code: a run keeps copies of its recipe"


class SourceFile(NamedTuple):
    text: str  # verbatim
    chain: str  # "demo.yaml → base.yaml": the files that led to this one


@dataclass(slots=True)
class Source(yaml.Document):
    """A recipe file merged with the files that it extends."""

    files: dict[str, SourceFile] = field(default_factory=dict)  # by name, the recipe first


def read_source(path: Path) -> Source:
    """Reads a recipe and the files that it extends. `extends:` is the path of another recipe, relative to the file that names it.

    A mapping of the child is merged into the parent's, but an engine or a trainer of another kind replaces the parent's, as lists
    and plain values do.

    Raises:
        RecipeError: a file cannot be read or is not a mapping, or the chain is circular or longer than MAX_PARENTS.
    """
    files: dict[str, SourceFile] = {}
    problems: list[Problem] = []
    documents: list[yaml.Document] = []  # the recipe first
    asked = ""  # position of the `extends` that names the file; "" for the recipe itself

    def refused(what: str, hint: str | None = None) -> RecipeError:
        return RecipeError(in_order([*problems, Problem(asked, what, hint)], {}))

    while True:
        name = str(path)
        chain = " → ".join([*files, name])
        if any(os.path.realpath(name) == os.path.realpath(other) for other in files):
            raise refused(f"extends itself: {chain}", "remove one `extends`")
        if len(files) > MAX_PARENTS:
            raise refused(f"extends more than {MAX_PARENTS} files: {chain}")
        try:
            text = recipe_text(path)
        except RecipeError as error:
            if not asked:
                raise
            (problem,) = error.problems
            hint = "the path starts at the folder of the file that names it"
            raise refused(f"extends: {problem.where} {problem.what} ({chain})", hint) from error
        document = yaml.parse(text, name)
        files[name] = SourceFile(text, chain)
        problems += document.problems
        if document.data is None and not document.problems:
            problems.append(Problem(name, "the recipe is empty", "start from one of `rlgen recipes list`"))
        elif not isinstance(document.data, dict) and not document.problems:
            problems.append(Problem(document.places[()], "a recipe is a mapping of sections: run, model, data, …"))
        if not isinstance(document.data, dict):
            raise RecipeError(in_order(problems, files))
        parent, asked = document.data.pop("extends", None), document.places.pop(("extends",), "")
        documents.append(document)
        if not asked:
            merged = reduce(_merged, reversed(documents))  # from the last parent on: a file without a kind has its parents'
            return Source(merged.data, merged.places, problems, files)
        if not isinstance(parent, str) or not parent:
            raise RecipeError(in_order([*problems, Problem(asked, "extends: must be the path of one recipe, as text")], files))
        # As other paths: beside the file, not beside a link to it. Unlike Path.resolve, realpath accepts a link to itself.
        place = os.path.realpath(os.path.join(os.path.dirname(os.path.realpath(path)), os.path.expanduser(parent)))
        written = os.path.normpath(path.parent / os.path.expanduser(parent))
        path = Path(written if os.path.realpath(written) == place else place)


def _merged(below: yaml.Document, above: yaml.Document) -> yaml.Document:
    """Returns a file merged over its parents."""
    replaced: set[yaml.Path] = set()

    def merge(old: dict[str, Any], new: dict[str, Any], path: yaml.Path) -> dict[str, Any]:
        result = dict(old)
        for key, value in new.items():
            before = old.get(key)
            if isinstance(before, dict) and isinstance(value, dict) and (path or _one_kind(key, before, value)):
                result[key] = merge(before, value, (*path, key))
            else:
                result[key] = value
                replaced.add((*path, key))
        return result

    data = merge(below.data, above.data, ())
    kept = {
        place: where
        for place, where in below.places.items()
        if not any(place[:end] in replaced for end in range(1, len(place) + 1))
    }
    return replace(above, data=data, places=kept | above.places)


def _one_kind(name: str, old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Returns whether the section `name` of a file adds to that of its parents, instead of naming another kind."""
    return name not in UNIONS or not {"kind", "use"} & new.keys() or section_kind(name, new) == section_kind(name, old)


def section_kind(name: str, section: dict[str, Any]) -> Any:
    """Returns the kind of an engine or a trainer, which a recipe need not write."""
    own = name == "trainer" and "use" in section
    return section.get("kind") or ("own" if own else UNIONS[name].model_fields["kind"].default)


def recipe_text(path: Path) -> str:
    """Returns the text of a recipe file. Raises RecipeError if it is not a readable UTF-8 file of at most MAX_BYTES."""

    def refused(what: str, hint: str | None = None) -> RecipeError:
        return RecipeError([Problem(str(path), what, hint)])

    if str(path) == "-":
        raise refused("standard input cannot be a recipe", "name a recipe file")
    if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+:/", str(path)):
        raise refused("is an address, but a recipe must be a file", "download it and read it first")
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise refused("is a folder" if stat.S_ISDIR(mode) else "is a pipe or a device", "name a recipe file")
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise refused("does not exist", "`rlgen recipes list` shows recipes to copy") from None
    except (OSError, ValueError) as error:  # ValueError: the name is invalid, such as one with a null byte
        raise refused(f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(raw) > MAX_BYTES:
        raise refused(f"is larger than {MAX_BYTES >> 10} KiB: not a recipe")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise refused(f"is not text in UTF-8 (byte {error.start}, line {line})", "save it as UTF-8") from error


def apply_overrides(data: dict[str, Any], places: dict[yaml.Path, str], overrides: Sequence[str]) -> list[Problem]:
    """Writes each override `a.b=value` into `data`, and its position `--set N: a.b=value` into `places`. Returns the problems."""
    problems: list[Problem] = []
    for number, override in enumerate(overrides, 1):
        dotted, equals, value = override.partition("=")
        keys = dotted.strip().split(".")
        where, wrong = f"--set {number}: {yaml.cut_short(override, 200)}", None
        if len(override) > MAX_BYTES or len(keys) > yaml.MAX_DEPTH:
            wrong = "is too long"
        elif not equals or not all(keys):
            wrong = "is not of the form section.key=value"
        elif yaml.NO_TEXT.search(dotted):
            wrong = "a key must be plain text"
        if wrong:
            problems.append(Problem(where, wrong))
            continue
        parsed = yaml.parse(value, where)
        if secret_leaves(parsed.data, tuple(keys)):
            where = f"--set {number}: {dotted}=…"  # without the value, which is a secret
        if parsed.problems:
            problems += [replace(problem, where=where) for problem in parsed.problems]
            continue
        node: Any = data
        path: yaml.Path = ()
        try:
            for index, key in enumerate(keys):
                step: str | int = range(len(node)).index(int(key)) if isinstance(node, list) else key  # no negative one
                path = (*path, step)
                if index == len(keys) - 1:
                    node[step] = parsed.data
                elif isinstance(node, dict):
                    if node.get(key) is None:  # left out, or null
                        node[key] = {}
                    node = node[key]
                else:
                    node = node[step]
        except (TypeError, IndexError, ValueError):
            held = ".".join(map(str, path[:-1]))
            whole = isinstance(node, bool | int | float | str) and len(path) == len(keys)
            hint = f"{held} has a value; set all of it: {{{keys[-1]}: …}}" if whole else "`rlgen show RECIPE` lists all"
            problems.append(Problem(where, f"there is no key {dotted}", hint))
            continue
        for old in [place for place in places if place[: len(path)] == path]:
            del places[old]
        places.update({(*path, *inner): where for inner in parsed.places} | {path: where})
    return problems


def rename(data: dict[str, Any], places: dict[yaml.Path, str]) -> tuple[list[str], list[Problem]]:
    """Gives keys that have an old name their new one.

    Returns a notice for each that is renamed, and a problem for each that stands there by both names.
    """
    notices, problems = [], []
    for (section, old), new in RENAMED.items():
        keys, where = data.get(section), places.pop((section, old), None)
        if not isinstance(keys, dict) or old not in keys:
            continue
        if new in keys and where is not None:
            problems.append(Problem(where, f"{section}.{old} is the old name of {section}.{new}, which is set too", "remove it"))
        keys[new] = keys.pop(old)
        if where is not None:
            places[section, new] = where
            notices.append(f"{section}.{old} is called {section}.{new} now: rename it ({where})")
    return notices, problems


def secrets_in(source: Source, where: yaml.Where) -> list[Problem]:
    """Returns a problem for each secret in a recipe: under a key whose name says so, in a value, or in a comment."""
    found: dict[str, Problem] = {}
    for leaf in secret_leaves(source.data):
        found[where(leaf)] = Problem(where(leaf), f"{'.'.join(map(str, leaf))} holds a secret", INTO_ENVIRONMENT)
    lines = {tuple(place.rsplit(":", 2)[:2]) for place in found}
    known = secrets_of_environment(CERTAIN)
    for name, file in source.files.items():
        for number, line in enumerate(file.text.splitlines(), 1):
            if holds_secret(line, known) and (name, str(number)) not in lines:
                found[f"{name}:{number}:1"] = Problem(f"{name}:{number}:1", "the line holds a secret", INTO_ENVIRONMENT)
    return list(found.values())


def secret_leaves(data: Any, above: yaml.Path = ()) -> list[yaml.Path]:
    """Returns the paths of text values that are secrets, by the name of their key or by their form."""
    found, known = [], secrets_of_environment(CERTAIN)
    for leaf in yaml.leaves(data, above):
        value = yaml.value_at(data, leaf[len(above) :])
        texts = [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str) and text]
        name = next((part for part in reversed(leaf) if isinstance(part, str)), "")
        if (texts and is_secret_name(name)) or any(holds_secret(text, known) for text in texts):
            found.append(leaf)
    return found


def in_order(problems: list[Problem], files: dict[str, SourceFile]) -> list[Problem]:
    """Removes duplicates, sorts by position, and limits to MAX_PROBLEMS. Problems in an extended file name the chain of files."""
    found = sorted(dict.fromkeys(problems), key=lambda problem: rank(problem.where, files))
    for index, problem in enumerate(found[:MAX_PROBLEMS]):
        file = file_of(problem.where)
        if file in list(files)[1:]:
            found[index] = replace(problem, what=f"{problem.what} (extended: {files[file].chain})")
    if len(found) > MAX_PROBLEMS:
        found[MAX_PROBLEMS:] = [Problem(MORE, f"and {len(found) - MAX_PROBLEMS} more")]
    return found


def rank(where: str, files: dict[str, SourceFile]) -> tuple[int, int, int]:
    """Returns the sort key of a position: recipe, files that it extends, command line; each by line and column."""
    if where == MORE:
        return len(files) + 2, 0, 0
    if where.startswith("--set"):
        return len(files) + 1, int(where[6:].partition(":")[0]), 0
    match = re.search(r":(\d+):(\d+)$", where)
    order = list(files).index(file) if (file := file_of(where)) in files else 0
    return (order, int(match[1]), int(match[2])) if match else (order, 0, 0)


def file_of(where: str) -> str:
    """Returns the file of "FILE:LINE:COL"."""
    return re.sub(r":\d+:\d+$", "", where)
