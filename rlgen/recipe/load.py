"""From files and `--set` to a frozen recipe, or to all of its mistakes at once, each with its place.

Command line wins over file, a file over the one that it `extends`, any file over the defaults. Mappings merge, lists replace.
"""

import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rlgen.errors import Problem, RecipeError
from rlgen.recipe import yaml
from rlgen.recipe.models import BUILT_IN_REWARDS, TASKS, ColocatedEngineRecipe, Recipe
from rlgen.recipe.rules import (
    REFUSED,
    REFUSED_BY_KIND,
    RENAMED,
    Finding,
    contradictions,
    inert,
    is_local_model,
    is_local_source,
    notices,
)
from rlgen.recipe.trainers import GRPORecipe
from rlgen.redact import CERTAIN, holds_secret, is_secret_name, secrets_of_environment

MAX_BYTES = 1 << 18
MAX_PARENTS = 8
MAX_PROBLEMS = 100  # that are told; nobody reads more
MORE = "…"  # where the rest is
INTO_ENVIRONMENT = "put it into an environment variable and have the code read that: a run keeps copies of its recipe"
UNIONS: dict[str, type[BaseModel]] = {
    "engine": ColocatedEngineRecipe,
    "trainer": GRPORecipe,
}  # the variant when a recipe names no kind
REWARD_PLACE = r"(.+\.py|[A-Za-z_]\w*(\.[A-Za-z_]\w*)*):[A-Za-z_]\w*"
PLAIN_WORDS = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be text; put quotes around it",
    "finite_number": "must be a finite number",
    "list_type": "must be a list",
    "dict_type": "must be a mapping of keys to values",
    "model_type": "must be a mapping of keys to values",
    "model_attributes_type": "must be a mapping of keys to values",
}


@dataclass(frozen=True, slots=True)
class LoadedRecipe:
    """A recipe, and where it comes from."""

    recipe: Recipe
    path: Path
    text: str  # verbatim
    origins: dict[str, str]  # "trainer.beta" -> "default", "FILE:LINE:COL" or "--set N: ..."
    notices: tuple[str, ...]


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Reads and validates a recipe. Command line wins over file, file over default; of a repeated override the last wins.

    Local paths in it become absolute: relative ones start at the recipe's folder, except `run.dir`.

    Raises:
        RecipeError: all mistakes, in line order; overrides last.
    """
    source = read_source(path)
    data, places, problems = source.data, source.places, list(source.problems)
    problems += apply_overrides(data, places, overrides)
    given = {place: where for place, where in places.items() if place}
    _fill(data, path)

    recipe: Recipe | None = None
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        found = sorted(
            error.errors(include_url=False),
            key=lambda details: _rank(_place(places, _plain(details)) or str(path), source.files),
        )
        problems += [_translate(details, data, places, path) for details in found[:MAX_PROBLEMS]]
        problems += [Problem(MORE, f"and {len(found) - MAX_PROBLEMS} more")] if len(found) > MAX_PROBLEMS else []
    names = _look_up(data, places, path)
    if recipe is not None and not names:
        problems += [_locate(finding, places, path) for finding in _findings(recipe, given)]
    problems += names
    told = {problem.where for problem in problems}
    problems += [problem for problem in _secrets(data, places, source) if problem.where not in told]
    if recipe is not None and not problems:
        recipe, problems = _absolute(recipe, places, path)
    if problems or recipe is None:
        raise RecipeError(_told(problems, source.files))
    origins = {".".join(map(str, leaf)): _origin(places, leaf) for leaf in leaves(recipe.model_dump(mode="json"))}
    said = (*notices(recipe), *_outside(recipe, path.resolve().parent))
    return LoadedRecipe(recipe, path, source.files[str(path)].text, origins, said)


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe: every value that has an effect. Loading it gives the same recipe, dumping that the same bytes."""
    data = recipe.model_dump(mode="json")
    for finding in inert(recipe):
        *parents, key = finding.path.split(".")
        node: Any = data
        for parent in parents:
            node = node[int(parent)] if isinstance(node, list) else node[parent]
        node.pop(key, None)
    return yaml.dump(data)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a recipe."""

    text: str  # verbatim
    chain: str  # "demo.yaml → base.yaml": how it came to be read


@dataclass(frozen=True, slots=True)
class Source:
    """A file with those that it extends, merged."""

    data: dict[str, Any]
    places: dict[yaml.Path, str]
    problems: tuple[Problem, ...]
    files: dict[str, SourceFile]  # by name, the recipe before its parents


def read_source(path: Path) -> Source:
    """Reads a recipe and what it `extends:`, the path of another recipe, relative to the one that names it.

    A mapping of the child is merged into that of the parent, unless it names another `kind`: then it replaces it, as lists and
    values do.

    Raises:
        RecipeError: a file that cannot be read or is no mapping, or a chain that does not end.
    """
    files: dict[str, SourceFile] = {}
    problems: list[Problem] = []
    data: dict[str, Any] = {}
    places: dict[yaml.Path, str] = {}
    asked = ""  # where the file is named, if it is a parent
    while True:
        name = str(path)
        chain = " → ".join([*files, name])
        if any(os.path.realpath(name) == os.path.realpath(other) for other in files):
            raise RecipeError(_told([*problems, Problem(asked, f"extends itself: {chain}", "remove one `extends`")], {}))
        if len(files) > MAX_PARENTS:
            raise RecipeError(_told([*problems, Problem(asked, f"extends more than {MAX_PARENTS} files: {chain}")], {}))
        try:
            text = read_text(path)
        except RecipeError as error:
            if not asked:
                raise
            told = [Problem(asked, f"extends: {problem.where} {problem.what} ({chain})") for problem in error.problems]
            raise RecipeError(_told([*problems, *told], {})) from error
        document = yaml.parse(text, name)
        files[name] = SourceFile(text, chain)
        problems += [problem for _, problem in sorted(document.problems, key=lambda item: item[0])]
        if document.data is None and not document.problems:
            problems.append(Problem(name, "the recipe is empty", "start from one of `rlgen recipes list`"))
        elif not isinstance(document.data, dict) and not document.problems:
            problems.append(Problem(document.places[()], "a recipe is a mapping of sections: run, model, data, …"))
        if not isinstance(document.data, dict):
            raise RecipeError(_told(problems, files))
        parent, asked = document.data.pop("extends", None), document.places.pop(("extends",), "")
        data, places = _merged(document.data, document.places, data, places)
        if not asked:
            return Source(data, places, tuple(problems), files)
        if not isinstance(parent, str) or not parent:
            raise RecipeError(_told([*problems, Problem(asked, "extends: must be the path of one recipe, as text")], files))
        path = Path(os.path.normpath(path.parent / Path(parent)))


def _merged(
    below: dict[str, Any], places_below: dict[yaml.Path, str], above: dict[str, Any], places_above: dict[yaml.Path, str]
) -> tuple[dict[str, Any], dict[yaml.Path, str]]:
    """What the parent says, `below`, under what the child says."""
    replaced: set[yaml.Path] = set()

    def merge(old: dict[str, Any], new: dict[str, Any], path: yaml.Path) -> dict[str, Any]:
        result = dict(old)
        for key, value in new.items():
            before = old.get(key)
            if isinstance(before, dict) and isinstance(value, dict) and value.get("kind") in (None, before.get("kind")):
                result[key] = merge(before, value, (*path, key))
            else:
                result[key] = value
                replaced.add((*path, key))
        return result

    data = merge(below, above, ())
    kept = {
        place: where
        for place, where in places_below.items()
        if not any(place[:end] in replaced for end in range(1, len(place) + 1))
    }
    return data, kept | places_above


def read_text(path: Path) -> str:
    """Raises RecipeError with the reason where there is nothing to read."""

    def refused(what: str, hint: str | None = None) -> RecipeError:
        return RecipeError([Problem(str(path), what, hint)])

    if str(path) == "-":
        raise refused("standard input is not read", "name a recipe file")
    if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+:/", str(path)):
        raise refused("is an address, and a recipe is a file", "download it and read it first")
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise refused("is a folder", "name a recipe file")
        if not stat.S_ISREG(mode):
            raise refused("is a pipe or a device", "name a recipe file")
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise refused("does not exist", "`rlgen recipes list` shows recipes to copy") from None
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise refused(f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(raw) > MAX_BYTES:
        raise refused(f"is larger than {MAX_BYTES >> 10} KiB: not a recipe")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise refused(f"is not text in UTF-8 (byte {error.start}, line {line})", "save it as UTF-8") from error


def apply_overrides(data: dict[str, Any], places: dict[yaml.Path, str], overrides: Sequence[str]) -> list[Problem]:
    """Puts each `a.b=value` into `data`; its place becomes `--set N: a.b=value`."""
    problems: list[Problem] = []
    for number, override in enumerate(overrides, 1):
        dotted, equals, value = override.partition("=")
        keys = dotted.strip().split(".")
        where = f"--set {number}: {yaml.shortened(override, 200)}"
        if len(override) > MAX_BYTES or len(keys) > yaml.MAX_DEPTH:
            problems.append(Problem(where, "is too long"))
            continue
        if not equals or not all(keys):
            problems.append(Problem(where, "is not of the form section.key=value"))
            continue
        parsed = yaml.parse(value, where)
        if _secret_leaves(parsed.data, tuple(keys)):
            where = f"--set {number}: {dotted}=…"  # which is not to be shown either
        if parsed.problems:
            problems += [Problem(where, problem.what, problem.hint) for _, problem in parsed.problems]
            continue
        node: Any = data
        path: yaml.Path = ()
        try:
            for index, key in enumerate(keys):
                step: str | int = _index(node, key) if isinstance(node, list) else key
                path = (*path, step)
                if index == len(keys) - 1:
                    node[step] = parsed.data
                elif isinstance(node, dict):
                    node = node.setdefault(key, {})
                else:
                    node = node[step]
        except (TypeError, IndexError, ValueError):
            problems.append(Problem(where, f"there is no place {dotted}", "`rlgen show RECIPE` lists all"))
            continue
        for old in [place for place in places if place[: len(path)] == path]:
            del places[old]
        places.update({(*path, *inner): where for inner in parsed.places} | {path: where})
    return problems


def _index(node: list[Any], key: str) -> int:
    if not 0 <= int(key) < len(node):
        raise IndexError(key)
    return int(key)


def _fill(data: dict[str, Any], path: Path) -> None:
    """What a recipe may leave out: the name of the run, the kind of engine and trainer."""
    run = data.setdefault("run", {})
    if isinstance(run, dict) and "name" not in run:
        run["name"] = re.sub(r"[^A-Za-z0-9._-]", "-", path.stem).lstrip("._-") or "run"
    for section, variant in UNIONS.items():
        if isinstance(data.get(section), dict):
            data[section].setdefault("kind", variant.model_fields["kind"].default)


def _findings(recipe: Recipe, given: dict[yaml.Path, str]) -> list[Finding]:
    """Contradictions, and fields without effect that the user wrote."""
    written = sorted((".".join(map(str, place)) for place in given), key=len)
    useless = []
    for finding in inert(recipe):
        # The field itself, or a part of it alone.
        place = next((place for place in written if f"{place}.".startswith(f"{finding.path}.")), None)
        useless += [] if place is None else [replace(finding, path=place)]
    return contradictions(recipe) + useless


def _look_up(data: dict[str, Any], places: dict[yaml.Path, str], path: Path) -> list[Problem]:
    """Names of tasks, their options, and built-in rewards."""
    problems: list[Problem] = []
    section = data.get("data")
    source = section.get("source") if isinstance(section, dict) else None
    if isinstance(source, str) and source.startswith("task:"):
        name = source.removeprefix("task:")
        options = section.get("options", {}) if isinstance(section, dict) else {}
        if name not in TASKS:
            where = _place(places, ("data", "source")) or str(path)
            problems.append(Problem(where, f"there is no task:{yaml.shortened(name)}", _suggest(name, list(TASKS), "tasks")))
        elif isinstance(options, dict):
            try:
                TASKS[name].model_validate(options)
            except ValidationError as error:
                for details in error.errors():
                    details["loc"] = ("data", "options", *details["loc"])
                    problems.append(_translate(details, data, places, path, TASKS[name]))
    rewards = data.get("rewards")
    for index, entry in enumerate(rewards if isinstance(rewards, list) else []):
        use = entry.get("use") if isinstance(entry, dict) else None
        where = _place(places, ("rewards", index, "use")) or str(path)
        if isinstance(use, str) and "://" in use:
            what = f"`{yaml.shortened(use)}` is code of another place, which is never run"
            problems.append(Problem(where, what, "read it, put it beside the recipe, and say file.py:function"))
        elif isinstance(use, str) and use not in BUILT_IN_REWARDS and not re.fullmatch(REWARD_PLACE, use):
            hint = _suggest(use, list(BUILT_IN_REWARDS), "built-in rewards")
            use = yaml.shortened(use)
            problems.append(Problem(where, f"`{use}` is no built-in reward, file.py:function or pkg.mod:function", hint))
    return problems


def _translate(
    details: ErrorDetails,
    data: dict[str, Any],
    places: dict[yaml.Path, str],
    path: Path,
    model: type[BaseModel] | None = None,
) -> Problem:
    """One error of pydantic in plain words, at its place in the file."""
    loc = _plain(details)
    where = _place(places, loc) or str(path)
    name, key, kind = ".".join(map(str, loc)), str(loc[-1]), details["type"]
    value = details["input"]
    if kind == "extra_forbidden":
        owner = ".".join(map(str, loc[:-1])) or "a recipe"
        variant = data.get(str(loc[0]))
        tag = f" (kind: {variant['kind']})" if loc[0] in UNIONS and isinstance(variant, dict) else ""
        reason = REFUSED_BY_KIND.get(str(variant["kind"]) if tag and isinstance(variant, dict) else "", {}).get(name)
        allowed = list((model or _model_at(loc[:-1], data)).model_fields)
        general = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        hint = reason or RENAMED.get(general) or REFUSED.get(name) or _suggest(key, allowed, "keys")
        key, owner = yaml.shortened(key), yaml.shortened(owner)
        return Problem(where, f"`{key}` is not a key of {f'`{owner}`' if owner != 'a recipe' else owner}{tag}", hint)
    if kind == "missing":
        return Problem(where, f"`{name}` is missing")
    if kind in ("literal_error", "union_tag_invalid"):
        expected = details.get("ctx", {}).get("expected" if kind == "literal_error" else "expected_tags", "")
        options = re.findall(r"'([^']*)'", expected)
        if kind == "union_tag_invalid":
            name, value = f"{name}.kind", data[str(loc[0])]["kind"]
            where = _place(places, (loc[0], "kind")) or where
        return Problem(where, f"{name}: {_short(value)} is not one of {', '.join(options)}", _suggest(str(value), options, None))
    what = PLAIN_WORDS.get(kind) or details["msg"].replace("Input should", "must").replace("String should", "must")
    return Problem(where, f"{name}: {what}, not {_short(value)}")


def _plain(details: ErrorDetails) -> yaml.Path:
    """Where the error is, without the tag of a union."""
    loc = tuple(details["loc"])
    return (loc[0], *loc[2:]) if loc[0] in UNIONS and len(loc) > 1 and details["type"] != "union_tag_invalid" else loc


def _model_at(loc: tuple[str | int, ...], data: dict[str, Any]) -> type[BaseModel]:
    """The model whose keys stand at `loc`."""
    model: type[BaseModel] = Recipe
    for index, part in enumerate(loc):
        if isinstance(part, int):
            continue
        annotation = model.model_fields[part].annotation
        variants: list[type[BaseModel]] = [
            v for v in (annotation, *get_args(annotation)) if isinstance(v, type) and issubclass(v, BaseModel)
        ]
        kind = data[part].get("kind") if index == 0 and part in UNIONS else None
        named = [v for v in variants if kind and kind in get_args(v.model_fields["kind"].annotation)]
        model = (named or variants)[0]
    return model


def _suggest(word: str, known: list[str], what: str | None) -> str | None:
    close = get_close_matches(word[:100], known, n=1)
    if close:
        return f"did you mean `{close[0]}`?"
    return f"{what} are {', '.join(known)}" if what else None


def _short(value: Any) -> str:
    text = repr(value)
    return yaml.shortened(text)


def _place(places: dict[yaml.Path, str], loc: tuple[str | int, ...]) -> str | None:
    """The place of the key, or of the nearest one above it."""
    return next((places[loc[:end]] for end in range(len(loc), 0, -1) if loc[:end] in places), None)


def _origin(places: dict[yaml.Path, str], leaf: yaml.Path) -> str:
    """Where a value comes from: its own place, or an override that brought the whole section."""
    above = _place(places, leaf) or ""
    return places.get(leaf) or (above if above.startswith("--set") else "default")


def _locate(finding: Finding, places: dict[yaml.Path, str], path: Path) -> Problem:
    loc = tuple(int(part) if re.fullmatch(r"[0-9]{1,6}", part) else part for part in finding.path.split("."))
    return Problem(_place(places, loc) or str(path), finding.what, finding.hint)


def _told(problems: list[Problem], files: dict[str, SourceFile]) -> list[Problem]:
    """Each once, in line order; one in a parent says by which files it came to be read."""
    found = sorted(dict.fromkeys(problems), key=lambda problem: _rank(problem.where, files))
    for index, problem in enumerate(found[:MAX_PROBLEMS]):
        file = _file(problem.where)
        if file in list(files)[1:]:
            found[index] = replace(problem, what=f"{problem.what} (extended: {files[file].chain})")
    if len(found) > MAX_PROBLEMS:
        found[MAX_PROBLEMS:] = [Problem(MORE, f"and {len(found) - MAX_PROBLEMS} more")]
    return found


def _rank(where: str, files: dict[str, SourceFile]) -> tuple[int, int, int]:
    """The recipe before what it extends, those before the command line; by line and column."""
    if where == MORE:
        return len(files) + 2, 0, 0
    if where.startswith("--set"):
        return len(files) + 1, int(where[6:].partition(":")[0]), 0
    match = re.search(r":(\d+):(\d+)$", where)
    order = list(files).index(file) if (file := _file(where)) in files else 0
    return (order, int(match[1]), int(match[2])) if match else (order, 0, 0)


def _file(where: str) -> str:
    """The file of "FILE:LINE:COL"."""
    return re.sub(r":\d+:\d+$", "", where)


def _secrets(data: dict[str, Any], places: dict[yaml.Path, str], source: Source) -> list[Problem]:
    """Secrets under a name that says so, in a value, in a comment."""
    found: dict[str, Problem] = {}
    for leaf in _secret_leaves(data):
        where = _place(places, leaf) or next(iter(source.files))
        found[where] = Problem(where, f"{'.'.join(map(str, leaf))} holds a secret", INTO_ENVIRONMENT)
    lines = {tuple(where.rsplit(":", 2)[:2]) for where in found}
    known = secrets_of_environment(CERTAIN)
    for file, read in source.files.items():
        for number, line in enumerate(read.text.splitlines(), 1):
            if holds_secret(line, known) and (file, str(number)) not in lines:
                found[f"{file}:{number}:1"] = Problem(f"{file}:{number}:1", "the line holds a secret", INTO_ENVIRONMENT)
    return list(found.values())


def _secret_leaves(data: Any, above: yaml.Path = ()) -> list[yaml.Path]:
    """Paths of texts that are secrets, by their name or by their form."""
    found, known = [], secrets_of_environment(CERTAIN)
    for leaf in leaves(data, above):
        value: Any = data
        for part in leaf[len(above) :]:
            value = value[part]
        texts = [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str) and text]
        name = next((part for part in reversed(leaf) if isinstance(part, str)), "")
        if (texts and is_secret_name(name)) or any(holds_secret(text, known) for text in texts):
            found.append(leaf)
    return found


def _absolute(recipe: Recipe, places: dict[yaml.Path, str], path: Path) -> tuple[Recipe, list[Problem]]:
    """Inputs that are files start at the folder of the recipe that names them, wherever rlgen is called."""
    problems: list[Problem] = []

    def absolute(text: str, loc: yaml.Path, always: bool) -> str:
        where = places.get(loc) or str(path)
        folder = (path if where.startswith("--set") else Path(_file(where))).resolve().parent
        try:
            place = (folder / Path(text).expanduser()).resolve()
            place.exists()  # raises for what can be no path
            return str(place) if always or (folder / text).is_dir() else text
        except (OSError, RuntimeError) as error:  # too long, or of a user who is not there
            problems.append(Problem(where, f"{_short(text)} is no path: {getattr(error, 'strerror', None) or error}"))
            return text

    model, data = recipe.model, recipe.data
    if not model.path.startswith("tiny:"):
        found = absolute(model.path, ("model", "path"), is_local_model(model.path))
        model = model.model_copy(update={"path": found})
    if is_local_source(data.source):
        data = data.model_copy(update={"source": absolute(data.source, ("data", "source"), True)})
    rewards = []
    for index, reward in enumerate(recipe.rewards):
        file, _, function = reward.use.rpartition(":")
        if file.endswith(".py"):
            reward = reward.model_copy(update={"use": f"{absolute(file, ('rewards', index, 'use'), True)}:{function}"})
        rewards.append(reward)
    return recipe.model_copy(update={"model": model, "data": data, "rewards": rewards}), problems


def _outside(recipe: Recipe, folder: Path) -> list[str]:
    """Files of rewards that do not lie beside the recipe: their code runs all the same, because the recipe names them."""
    files = {file for reward in recipe.rewards if (file := reward.use.rpartition(":")[0]).endswith(".py")}
    return [
        f"rewards: {file} lies outside of the recipe's folder; its hash goes into provenance.json"
        for file in sorted(files)
        if not Path(file).is_relative_to(folder)
    ]


def leaves(data: Any, path: yaml.Path = ()) -> list[yaml.Path]:
    """Paths of all values; lists of plain values and empty mappings are values."""
    if isinstance(data, dict) and data:
        return [leaf for key, value in data.items() for leaf in leaves(value, (*path, key))]
    if isinstance(data, list) and data and isinstance(data[0], dict):
        return [leaf for index, value in enumerate(data) for leaf in leaves(value, (*path, index))]
    return [path]
