"""Reads recipe files and `--set` overrides into a frozen recipe, or reports all mistakes in them at once, each with its position.

The command line overrides a file, a file overrides the one that it `extends`, and any file overrides the defaults. Mappings are
merged, lists are replaced.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from rlgen.errors import Problem, RecipeError
from rlgen.recipe import yaml
from rlgen.recipe.beside import beside
from rlgen.recipe.data import TASKS
from rlgen.recipe.inert import inert
from rlgen.recipe.judges import MODEL_REWARDS
from rlgen.recipe.messages import UNIONS, plain, suggest, translate
from rlgen.recipe.models import BUILT_IN_ENVIRONMENTS, BUILT_IN_REWARDS, Recipe
from rlgen.recipe.paths import absolute_paths, outside
from rlgen.recipe.rules import Finding, contradictions, notices, warnings
from rlgen.recipe.sizes import FOLLOWING, is_written
from rlgen.recipe.source import MAX_PROBLEMS, MORE, apply_overrides, in_order, rank, read_source, rename, secrets_in, section_kind

SINGLE = ("environment", "rollout", "trainer")  # sections that are one function instead of a list
# Built-in names by section; sections that are not listed have those of rewards.
BUILT_IN: dict[Any, list[str]] = {"tools": [], "rollout": [], "trainer": [], "environment": list(BUILT_IN_ENVIRONMENTS)}
REWARD_PLACE = r"(.+\.py|[A-Za-z_]\w*(\.[A-Za-z_]\w*)*):[A-Za-z_]\w*"


@dataclass(frozen=True, slots=True)
class LoadedRecipe:
    """A validated recipe, with its text and the origin of every value."""

    recipe: Recipe
    path: Path
    text: str  # verbatim
    origins: dict[str, str]  # "trainer.beta" -> "default", "FILE:LINE:COL" or "--set N: ..."
    notices: tuple[str, ...]  # valid, but unusual
    warnings: tuple[str, ...]  # valid, but probably a mistake

    @property
    def resolved(self) -> str:
        return dump_recipe(self.recipe)


def load_recipe(path: Path, overrides: Sequence[str] = (), resolved: bool = False) -> LoadedRecipe:
    """Reads and validates a recipe. Command line wins over file, file over default; of a repeated override the last wins.

    Local paths become absolute: relative ones start at the recipe's folder, except `run.dir`.

    Args:
        resolved: the file is the `resolved.yaml` of a run, which holds every value and was valid when the run began: only
            overrides are refused for having no effect, and contradictions beside overrides.

    Raises:
        RecipeError: with all mistakes, in line order; those in overrides come last.
    """
    source = read_source(path)
    data, places, problems = source.data, source.places, source.problems
    problems += apply_overrides(data, places, overrides)
    renamed, twice = rename(data, places)
    problems += twice
    given = {place: where for place, where in places.items() if place and (not resolved or where.startswith("--set"))}
    _fill(data, path)

    def where(loc: yaml.Path) -> str:
        inside = (at for place, at in places.items() if loc and place[: len(loc)] == loc)  # overrides that made it
        return yaml.place_of(places, loc) or next(inside, str(path))

    recipe: Recipe | None = None
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        found = sorted(error.errors(include_url=False), key=lambda details: rank(where(plain(details)), source.files))
        problems += without_echoes([(plain(details), translate(details, data, where)) for details in found[:MAX_PROBLEMS]])
        problems += [Problem(MORE, f"and {len(found) - MAX_PROBLEMS} more")] if len(found) > MAX_PROBLEMS else []
    names = _Names(data, where).problems()
    if recipe is not None and not names and (overrides or not resolved):
        problems += [Problem(where(_path(one.path)), one.what, one.hint) for one in _findings(recipe, given)]
    problems += names
    told = {problem.where for problem in problems}
    problems += [problem for problem in secrets_in(source, where) if problem.where not in told]
    if recipe is not None and not problems:
        recipe, problems = absolute_paths(recipe, path, where)
    if problems or recipe is None:
        raise RecipeError(in_order(problems, source.files))
    origins = {".".join(map(str, leaf)): _origin(places, leaf) for leaf in yaml.leaves(recipe.model_dump(mode="json"))}
    said = (*([] if resolved else renamed), *notices(recipe), *outside(recipe, path.resolve().parent))
    return LoadedRecipe(recipe, path, source.files[str(path)].text, origins, said, tuple(warnings(recipe)))


def dump_recipe(recipe: Recipe) -> str:
    """Returns the resolved recipe as YAML. Loading it gives the same recipe, dumping that the same bytes."""
    return yaml.dump(effective(recipe))


def effective(recipe: Recipe) -> dict[str, Any]:
    """Returns every value of a recipe that has an effect and does not follow from model and data, by section."""
    data = recipe.model_dump(mode="json")
    open_sizes = [path for path in FOLLOWING if not is_written(recipe, path)]
    for path in (*open_sizes, *(finding.path for finding in inert(recipe))):
        *parents, key = _path(path)
        node = yaml.value_at(data, tuple(parents))
        if node is not None:  # a section that the recipe leaves out
            node.pop(key, None)
    return data


def without_echoes(found: list[tuple[yaml.Path, Problem]]) -> list[Problem]:
    """Returns the problems without the missing keys that another problem of their section names already, as what was meant."""
    meant = {(loc[:-1], word) for loc, problem in found for word in re.findall(r"`(\w+)`", problem.hint or "")}
    return [problem for loc, problem in found if not (problem.what.endswith(" is missing") and (loc[:-1], str(loc[-1])) in meant)]


def _fill(data: dict[str, Any], path: Path) -> None:
    """Fills in what a recipe may omit: the name of the run, and the kinds of engine and trainer."""
    run = data.setdefault("run", {})
    if isinstance(run, dict) and "name" not in run:
        run["name"] = re.sub(r"[^A-Za-z0-9._-]", "-", path.stem).lstrip("._-") or "run"
    for section in UNIONS:
        if isinstance(data.get(section), dict):
            data[section].setdefault("kind", section_kind(section, data[section]))


def _findings(recipe: Recipe, given: dict[yaml.Path, str]) -> list[Finding]:
    """Returns contradictions between fields, and fields without effect that the user wrote."""
    written = sorted((".".join(map(str, place)) for place in given), key=len)
    useless = []
    for finding in inert(recipe):
        # The field itself, or a part of it.
        place = next((place for place in written if f"{place}.".startswith(f"{finding.path}.")), None)
        useless += [] if place is None else [replace(finding, path=place)]
    return [*contradictions(recipe), *beside(recipe), *useless]


@dataclass(frozen=True, slots=True)
class _Names:
    """Looks up the names of tasks, rewards and other functions, and checks the options of those that are built in."""

    data: dict[str, Any]
    where: yaml.Where

    def problems(self) -> list[Problem]:
        data = self.data
        training, held = (data[name] if isinstance(data.get(name), dict) else {} for name in ("data", "eval"))
        found = self._of_task(training.get("source"), training.get("options", {}), "data")
        if "options" in held or held.get("source") is not None:
            found += self._of_task(held.get("source", training.get("source")), held.get("options", {}), "eval")
        lists = {("rewards",): data.get("rewards"), ("eval", "rewards"): held.get("rewards"), ("tools",): data.get("tools")}
        for section, entries in lists.items():
            for index, entry in enumerate(entries if isinstance(entries, list) else []):
                found += self._of_function(entry, (*section, index))
        for name in SINGLE:
            found += self._of_function(data.get(name), (name,))
        return found

    def _of_task(self, source: Any, options: Any, section: str) -> list[Problem]:
        """Returns what is wrong with the name of a `task:` source and its options; nothing for other sources."""
        if not isinstance(source, str) or not source.startswith("task:"):
            return []
        name = source.removeprefix("task:")
        if name in TASKS:
            return self._of_options(options, (section, "options"), TASKS[name])
        what = f"there is no task:{yaml.cut_short(name)}"
        return [Problem(self.where((section, "source")), what, suggest(name, list(TASKS), "tasks"))]

    def _of_function(self, entry: Any, place: yaml.Path) -> list[Problem]:
        """Returns what is wrong with the name of a function, and with the `args` of a reward that asks a model."""
        use = entry.get("use") if isinstance(entry, dict) else None
        built_in = BUILT_IN.get(place[0], [*BUILT_IN_REWARDS, *MODEL_REWARDS])
        if not isinstance(use, str):
            return []
        if use in MODEL_REWARDS and use in built_in:
            return self._of_options(entry.get("args", {}), (*place, "args"), MODEL_REWARDS[use])
        if use in built_in or ("://" not in use and re.fullmatch(REWARD_PLACE, use)):
            return []
        kind = "environment" if place[0] == "environment" else "reward"
        hint: str | None = "read the code, put it beside the recipe, and write file.py:function"
        what = "is an address, and rlgen runs no remote code"
        if "://" not in use:
            what = f"is not a {f'built-in {kind}, ' if built_in else ''}file.py:function or pkg.mod:function"
            hint = _reward_place(use) or (suggest(use, built_in, f"built-in {kind}s") if built_in else None)
        return [Problem(self.where((*place, "use")), f"`{yaml.cut_short(use)}` {what}", hint)]

    def _of_options(self, options: Any, section: yaml.Path, model: type[BaseModel]) -> list[Problem]:
        """Returns what is wrong with the options of a task, or the `args` of a reward, which stand at `section`."""
        found: list[tuple[yaml.Path, Problem]] = []
        try:
            model.model_validate(options if isinstance(options, dict) else {})
        except ValidationError as error:
            for details in error.errors():
                whole = not details["loc"]
                details["loc"] = (*section, *details["loc"])
                said = f"{'.'.join(map(str, section))}: {details['msg'].removeprefix('Value error, ')}"
                problem = Problem(self.where(section), said) if whole else translate(details, self.data, self.where, model)
                found.append((details["loc"], problem))
        return without_echoes(found)


def _reward_place(use: str) -> str | None:
    """Returns what to write for a file without a function, or for a function after a dot; None if `use` is neither."""
    if use.endswith(".py"):
        return f"name the function too: {use}:my_reward"
    if re.fullmatch(REWARD_PLACE, plain := use.replace("::", ":").removesuffix("()")):
        return f"did you mean `{plain}`?"
    file, slash, name = use.rpartition("/")
    if slash and ":" not in use:
        function = f"a function is written {file}.py:{name}, " if re.fullmatch(REWARD_PLACE, f"{file}.py:{name}") else ""
        return f"{function}a model {{use: reward_model, args: {{path: {use}}}}}"
    module, dot, function = use.rpartition(".")
    return f"did you mean `{module}:{function}`?" if dot and re.fullmatch(REWARD_PLACE, f"{module}:{function}") else None


def _origin(places: dict[yaml.Path, str], leaf: yaml.Path) -> str:
    """Returns the origin of a value: its own position, the override that set its whole section, or "default"."""
    above = yaml.place_of(places, leaf) or ""
    return places.get(leaf) or (above if above.startswith("--set") else "default")


def _path(dotted: str) -> yaml.Path:
    """Returns the path of a field: "rewards.1.use" -> ("rewards", 1, "use")."""
    return tuple(int(part) if re.fullmatch(r"[0-9]{1,6}", part) else part for part in dotted.split("."))
