"""From a file and `--set` to a frozen recipe, or to all of its mistakes at once, each with its place."""

import re
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
    Finding,
    contradictions,
    inert,
    is_local_model,
    is_local_source,
    notices,
)
from rlgen.recipe.trainers import GRPORecipe

MAX_BYTES = 1 << 20
UNIONS: dict[str, type[BaseModel]] = {
    "engine": ColocatedEngineRecipe,
    "trainer": GRPORecipe,
}  # the variant when a recipe names no kind
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
    text = read_text(path)
    document = yaml.parse(text, str(path))
    problems = [problem for _, problem in sorted(document.problems, key=lambda item: item[0])]
    if document.data is None and not problems:
        problems.append(Problem(str(path), "the recipe is empty", "start from one of `rlgen recipes list`"))
    if not isinstance(document.data, dict):
        if not problems:
            problems.append(Problem(document.places[()], "a recipe is a mapping of sections: run, model, data, …"))
        raise RecipeError(problems)
    data, places = document.data, document.places
    problems += apply_overrides(data, places, overrides)
    given = {place: where for place, where in places.items() if place}
    _fill(data, path)

    recipe: Recipe | None = None
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        problems += [_translate(details, data, places, path) for details in error.errors()]
    names = _look_up(data, places, path)
    if recipe is not None and not names:
        problems += [_locate(finding, places, path) for finding in _findings(recipe, given)]
    problems += names
    if problems or recipe is None:
        raise RecipeError(_in_line_order(problems))
    recipe = _absolute(recipe, path.resolve().parent)
    origins = {".".join(map(str, leaf)): _origin(places, leaf) for leaf in _leaves(recipe.model_dump(mode="json"))}
    return LoadedRecipe(recipe, path, text, origins, tuple(notices(recipe)))


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe: every value that has an effect. Loading it gives the same recipe, dumping that the same bytes."""
    data = recipe.model_dump(mode="json")
    for finding in inert(recipe):
        *parents, key = finding.path.split(".")
        node = data
        for parent in parents:
            node = node[parent]
        node.pop(key, None)
    return yaml.dump(data)


def read_text(path: Path) -> str:
    """Raises RecipeError with the reason where there is nothing to read."""
    if path.is_dir():
        raise RecipeError([Problem(str(path), "is a folder", "name a recipe file")])
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise RecipeError([Problem(str(path), "does not exist", "`rlgen recipes list` shows recipes to copy")]) from None
    except OSError as error:
        raise RecipeError([Problem(str(path), f"cannot be read: {error.strerror}")]) from error
    if len(raw) > MAX_BYTES:
        raise RecipeError([Problem(str(path), "is larger than 1 MiB: not a recipe")])
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError([Problem(str(path), f"is not text in UTF-8 (byte {error.start})", "save it as UTF-8")]) from error


def apply_overrides(data: dict[str, Any], places: dict[yaml.Path, str], overrides: Sequence[str]) -> list[Problem]:
    """Puts each `a.b=value` into `data`; its place becomes `--set N: a.b=value`."""
    problems: list[Problem] = []
    for number, override in enumerate(overrides, 1):
        where = f"--set {number}: {override}"
        dotted, equals, value = override.partition("=")
        keys = dotted.strip().split(".")
        if not equals or not all(keys):
            problems.append(Problem(where, "is not of the form section.key=value"))
            continue
        parsed = yaml.parse(value, where)
        problems += [Problem(where, problem.what, problem.hint) for _, problem in parsed.problems]
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
            problems.append(Problem(where, f"there is no task:{name}", _suggest(name, list(TASKS), "tasks")))
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
        if isinstance(use, str) and use not in BUILT_IN_REWARDS and not re.fullmatch(r".+:[A-Za-z_]\w*", use):
            where = _place(places, ("rewards", index, "use")) or str(path)
            hint = _suggest(use, list(BUILT_IN_REWARDS), "built-in rewards")
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
    loc = tuple(details["loc"])
    if loc[0] in UNIONS and len(loc) > 1 and details["type"] not in ("union_tag_invalid",):
        loc = (loc[0], *loc[2:])  # without the tag of the union
    where = _place(places, loc) or str(path)
    name, key, kind = ".".join(map(str, loc)), str(loc[-1]), details["type"]
    value = details["input"]
    if kind == "extra_forbidden":
        owner = ".".join(map(str, loc[:-1])) or "a recipe"
        variant = data.get(str(loc[0]))
        tag = f" (kind: {variant['kind']})" if loc[0] in UNIONS and isinstance(variant, dict) else ""
        reason = REFUSED_BY_KIND.get(str(variant["kind"]) if tag and isinstance(variant, dict) else "", {}).get(name)
        allowed = list((model or _model_at(loc[:-1], data)).model_fields)
        hint = reason or REFUSED.get(name) or _suggest(key, allowed, "keys")
        return Problem(where, f"`{key}` is not a key of {f'`{owner}`' if owner != 'a recipe' else owner}{tag}", hint)
    if kind == "missing":
        return Problem(where, f"`{name}` is missing")
    if kind in ("literal_error", "union_tag_invalid"):
        expected = details.get("ctx", {}).get("expected" if kind == "literal_error" else "expected_tags", "")
        options = re.findall(r"'([^']*)'", expected)
        if kind == "union_tag_invalid":
            name, value = f"{name}.kind", data[str(loc[0])]["kind"]
            where = _place(places, (loc[0], "kind")) or where
        return Problem(where, f"{name}: {value!r} is not one of {', '.join(options)}", _suggest(str(value), options, None))
    what = PLAIN_WORDS.get(kind) or details["msg"].replace("Input should", "must").replace("String should", "must")
    return Problem(where, f"{name}: {what}, not {_short(value)}")


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
    close = get_close_matches(word, known, n=1)
    if close:
        return f"did you mean `{close[0]}`?"
    return f"{what} are {', '.join(known)}" if what else None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _place(places: dict[yaml.Path, str], loc: tuple[str | int, ...]) -> str | None:
    """The place of the key, or of the nearest one above it."""
    return next((places[loc[:end]] for end in range(len(loc), 0, -1) if loc[:end] in places), None)


def _origin(places: dict[yaml.Path, str], leaf: yaml.Path) -> str:
    """Where a value comes from: its own place, or an override that brought the whole section."""
    above = _place(places, leaf) or ""
    return places.get(leaf) or (above if above.startswith("--set") else "default")


def _locate(finding: Finding, places: dict[yaml.Path, str], path: Path) -> Problem:
    loc = tuple(int(part) if part.isdigit() else part for part in finding.path.split("."))
    return Problem(_place(places, loc) or str(path), finding.what, finding.hint)


def _in_line_order(problems: list[Problem]) -> list[Problem]:
    def line(problem: Problem) -> tuple[int, int, int]:
        match = re.search(r":(\d+):(\d+)$", problem.where)
        return (0, int(match[1]), int(match[2])) if match else (int(problem.where.startswith("--set")), 0, 0)

    return sorted(dict.fromkeys(problems), key=line)


def _absolute(recipe: Recipe, base: Path) -> Recipe:
    """Inputs that are files start at the recipe's folder, wherever rlgen is called."""

    def absolute(path: str) -> str:
        return str((base / Path(path).expanduser()).resolve())

    model, data = recipe.model, recipe.data
    if is_local_model(model.path) or (not model.path.startswith("tiny:") and (base / model.path).is_dir()):
        model = model.model_copy(update={"path": absolute(model.path)})
    if is_local_source(data.source):
        data = data.model_copy(update={"source": absolute(data.source)})
    rewards = []
    for reward in recipe.rewards:
        file, _, function = reward.use.rpartition(":")
        use = f"{absolute(file)}:{function}" if file.endswith(".py") else reward.use
        rewards.append(reward.model_copy(update={"use": use}))
    return recipe.model_copy(update={"model": model, "data": data, "rewards": rewards})


def _leaves(data: Any, path: yaml.Path = ()) -> list[yaml.Path]:
    """Paths of all values; lists of plain values and empty mappings are values."""
    if isinstance(data, dict) and data:
        return [leaf for key, value in data.items() for leaf in _leaves(value, (*path, key))]
    if isinstance(data, list) and data and isinstance(data[0], dict):
        return [leaf for index, value in enumerate(data) for leaf in _leaves(value, (*path, index))]
    return [path]
