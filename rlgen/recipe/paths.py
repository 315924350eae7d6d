"""Makes the paths of a recipe absolute: those of local inputs start at the folder of the file that names them."""

import errno
import glob
import os
import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rlgen.errors import Problem
from rlgen.recipe import yaml
from rlgen.recipe.judges import LOCAL_ARGS, MODEL_REWARDS
from rlgen.recipe.messages import quoted
from rlgen.recipe.models import Recipe, RewardRecipe, ToolRecipe
from rlgen.recipe.rules import is_local_model, is_local_source
from rlgen.recipe.sizes import is_written
from rlgen.recipe.source import file_of

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def absolute_paths(recipe: Recipe, path: Path, where: yaml.Where) -> tuple[Recipe, list[Problem]]:
    """Makes the paths of local inputs absolute; they start at the folder of the recipe file that names them."""
    problems = impossible_run_path(recipe, where)
    for loc, text, always in local_inputs(recipe):
        told = where(loc)
        folder = (path if told.startswith("--set") else Path(file_of(told))).resolve().parent
        file, colon, function = text.rpartition(":") if loc[-1] == "use" else (text, "", "")
        try:
            place = (folder / Path(file).expanduser()).resolve()
            place.exists()  # raises if the text cannot be a path
            if loc[-1] == "source" and not place.exists() and any(one in file for one in "*?["):
                place = (Path(glob.escape(str(folder))) / Path(file).expanduser()).resolve()  # the folder itself is no glob
            if always or (folder / file).is_dir():
                if yaml.NO_TEXT.search(str(place)):  # the run's copy of the recipe is UTF-8
                    raise RuntimeError("a folder above it has a name that is not UTF-8; rename that folder")
                recipe = _with(recipe, loc, f"{place}{colon}{function}")
        except (OSError, RuntimeError) as error:  # too long, or ~ of an unknown user
            what = f"{quoted(file)} is not a path: {getattr(error, 'strerror', None) or error}"
            problems.append(Problem(told, what))
    model, source = recipe.model.path, recipe.data.source
    names = [] if model.startswith("tiny:") or is_local_model(model) else [("model", "path", model, "Qwen/Qwen3-0.6B")]
    names += [] if recipe.task is not None or is_local_source(source) else [("data", "source", source, "openai/gsm8k")]
    for section, key, name, example in names:
        if not HUB_NAME.fullmatch(name):
            what = f"{section}.{key}: {quoted(name)} is no folder or file, and no name of the hub"
            hint = f"a name of the hub is owner/name, such as {example}"
            problems.append(Problem(where((section, key)), what, hint))
    return recipe, problems


def local_inputs(recipe: Recipe) -> Iterator[tuple[yaml.Path, str, bool]]:
    """Yields the place and the text of each local input; False: it is one only if there is a folder of that name."""
    if not recipe.model.path.startswith("tiny:"):
        yield ("model", "path"), recipe.model.path, is_local_model(recipe.model.path)
    for section in ("data", "eval"):
        source = getattr(getattr(recipe, section), "source", None)
        if source is not None and is_local_source(source):
            yield (section, "source"), source, True
    if recipe.data.chat_template is not None:
        yield ("data", "chat_template"), recipe.data.chat_template, True
    for loc, use, args in named_functions(recipe):
        if use.rpartition(":")[0].endswith(".py"):
            yield (*loc, "use"), use, True
        for name, always in LOCAL_ARGS.items():
            if use in MODEL_REWARDS and isinstance(text := args.get(name), str):
                yield (*loc, "args", name), text, always or is_local_model(text)


def named_functions(recipe: Recipe) -> Iterator[tuple[yaml.Path, str, dict[str, Any]]]:
    """Yields place, `use` and `args` of each function that the recipe names."""
    held = recipe.eval.rewards or [] if recipe.eval is not None else []
    lists: dict[yaml.Path, Sequence[RewardRecipe | ToolRecipe]] = {("rewards",): recipe.rewards, ("eval", "rewards"): held}
    for section, listed in (lists | {("tools",): recipe.tools}).items():
        for index, one in enumerate(listed):
            yield (*section, index), one.use, one.args
    for name in ("environment", "rollout", "trainer"):
        if (use := getattr(getattr(recipe, name), "use", None)) is not None:
            yield (name,), use, {}


def _with(node: Any, loc: yaml.Path, value: object) -> Any:
    """Returns a copy of a section, a list or a mapping with another value at `loc`."""
    if not loc:
        return value
    step, further = loc[0], loc[1:]
    if isinstance(node, BaseModel):
        return node.model_copy(update={str(step): _with(getattr(node, str(step)), further, value)})
    copy = node.copy()
    copy[step] = _with(node[step], further, value)
    return copy


def impossible_run_path(recipe: Recipe, where: yaml.Where) -> list[Problem]:
    """Returns a problem if no file system could hold the run's folder: a name that is too long, or ~ of an unknown user."""
    position = where(("run", "dir" if is_written(recipe, "run.dir") else "name"))
    said = f"run.dir: {quoted(recipe.run.dir)} is not a path"
    try:
        place = recipe.run_path
    except RuntimeError as error:
        return [Problem(position, f"{said}: {error}", "write the path without ~")]
    for part in (str(place), *place.parts):  # each name alone, too: lstat checks none below a missing folder
        try:
            os.lstat(part)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return [Problem(position, f"{said}: {error.strerror}", "a folder's name has at most 255 characters")]
    return []


def like(path: str) -> str | None:
    """Returns a hint with the file or folder beside a missing path that has the most similar name; None if none is similar."""
    missing = Path(path)
    while not missing.parent.is_dir():  # the innermost folder that exists
        missing = missing.parent
    if any(character in missing.name for character in "*?["):
        return None
    try:
        names = [entry.name for entry in missing.parent.iterdir()]
    except OSError:
        return None
    close = get_close_matches(missing.name, names, n=1)
    return f"did you mean `{missing.parent / close[0]}`?" if close else None


def matches(source: str) -> list[str]:
    """Returns the file or folder of exactly this path, or what the path matches as a glob."""
    return [source] if os.path.exists(source) else glob.glob(source, recursive=True)


def outside(recipe: Recipe, folder: Path) -> list[str]:
    """Returns a notice for each file of code outside the recipe's folder. It runs all the same, because the recipe names it."""
    named = {("rewards" if loc[0] == "eval" else str(loc[0]), use.rpartition(":")[0]) for loc, use, _ in named_functions(recipe)}
    return [
        f"{section}{'.use' if section in ('rollout', 'trainer') else ''}: {file} lies outside of the recipe's folder; its hash"
        " goes into provenance.json"
        for section, file in sorted(named)
        if file.endswith(".py") and not Path(file).is_relative_to(folder)
    ]
