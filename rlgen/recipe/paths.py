"""Makes the paths of a recipe absolute: those of local inputs start at the folder of the file that names them."""

import errno
import os
import re
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar

from rlgen.errors import Problem
from rlgen.recipe import yaml
from rlgen.recipe.judges import LOCAL_ARGS, MODEL_REWARDS
from rlgen.recipe.messages import short
from rlgen.recipe.models import Recipe, RewardRecipe, ToolRecipe
from rlgen.recipe.rules import is_local_model, is_local_source
from rlgen.recipe.source import file_of
from rlgen.recipe.trainers import OwnRecipe

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
Function = TypeVar("Function", RewardRecipe, ToolRecipe)


def absolute_paths(recipe: Recipe, places: dict[yaml.Path, str], path: Path) -> tuple[Recipe, list[Problem]]:
    """Makes the paths of local inputs absolute; they start at the folder of the recipe file that names them."""
    problems: list[Problem] = []

    def absolute(text: str, loc: yaml.Path, always: bool) -> str:
        where = places.get(loc) or str(path)
        folder = (path if where.startswith("--set") else Path(file_of(where))).resolve().parent
        try:
            place = (folder / Path(text).expanduser()).resolve()
            place.exists()  # raises if the text cannot be a path
            return str(place) if always or (folder / text).is_dir() else text
        except (OSError, RuntimeError) as error:  # too long, or ~ of an unknown user
            problems.append(Problem(where, f"{short(text)} is not a path: {getattr(error, 'strerror', None) or error}"))
            return text

    def own(use: str, loc: yaml.Path) -> str:
        """Returns a function of the user's, file.py:name, with the file's whole path; other names as they are."""
        file, _, name = use.rpartition(":")
        return f"{absolute(file, loc, True)}:{name}" if file.endswith(".py") else use

    def on_the_hub(name: str, loc: yaml.Path, example: str) -> None:
        """Records a problem if a name cannot be one of the hub."""
        if not HUB_NAME.fullmatch(name):
            what = f"{'.'.join(map(str, loc))}: {short(name)} is no folder or file, and no name of the hub"
            problems.append(Problem(places.get(loc) or str(path), what, f"a name of the hub is owner/name, such as {example}"))

    problems += impossible_run_path(recipe, places, path)
    model, data = recipe.model, recipe.data
    if not model.path.startswith("tiny:"):
        found = absolute(model.path, ("model", "path"), is_local_model(model.path))
        model = model.model_copy(update={"path": found})
        if not is_local_model(found):
            on_the_hub(found, ("model", "path"), "Qwen/Qwen3-0.6B")
    if is_local_source(data.source):
        data = data.model_copy(update={"source": absolute(data.source, ("data", "source"), True)})
    elif recipe.task is None:
        on_the_hub(data.source, ("data", "source"), "openai/gsm8k")
    if data.chat_template is not None:
        data = data.model_copy(update={"chat_template": absolute(data.chat_template, ("data", "chat_template"), True)})

    def in_place(functions: list[Function], section: yaml.Path) -> list[Function]:
        found = []
        for index, one in enumerate(functions):
            one = one.model_copy(update={"use": own(one.use, (*section, index, "use"))})
            if one.use in MODEL_REWARDS:
                named = {name: text for name in LOCAL_ARGS if isinstance(text := one.args.get(name), str)}
                local = {
                    name: absolute(text, (*section, index, "args", name), LOCAL_ARGS[name] or is_local_model(text))
                    for name, text in named.items()
                }
                one = one.model_copy(update={"args": {**one.args, **local}})
            found.append(one)
        return found

    held = recipe.eval
    if held is not None and held.source is not None and is_local_source(held.source):
        held = held.model_copy(update={"source": absolute(held.source, ("eval", "source"), True)})
    if held is not None and held.rewards is not None:
        held = held.model_copy(update={"rewards": in_place(held.rewards, ("eval", "rewards"))})
    changes: dict[str, object] = {"model": model, "data": data, "rewards": in_place(recipe.rewards, ("rewards",)), "eval": held}
    changes["tools"] = in_place(recipe.tools, ("tools",))
    if recipe.rollout.use is not None:
        changes["rollout"] = recipe.rollout.model_copy(update={"use": own(recipe.rollout.use, ("rollout", "use"))})
    if isinstance(recipe.trainer, OwnRecipe):
        changes["trainer"] = recipe.trainer.model_copy(update={"use": own(recipe.trainer.use, ("trainer", "use"))})
    if (environment := recipe.environment) is not None:
        changes["environment"] = environment.model_copy(update={"use": own(environment.use, ("environment", "use"))})
    return recipe.model_copy(update=changes), problems


def impossible_run_path(recipe: Recipe, places: dict[yaml.Path, str], path: Path) -> list[Problem]:
    """Returns a problem if no file system could hold the run's folder: a name that is too long, or ~ of an unknown user."""
    where = places.get(("run", "dir")) or places.get(("run", "name")) or str(path)
    said = f"run.dir: {short(recipe.run.dir)} is not a path"
    try:
        place = recipe.run_path
    except RuntimeError as error:
        return [Problem(where, f"{said}: {error}", "write the path without ~")]
    for part in (str(place), *place.parts):  # each name alone, too: lstat checks none below a missing folder
        try:
            os.lstat(part)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return [Problem(where, f"{said}: {error.strerror}", "a folder's name has at most 255 characters")]
    return []


def like(path: str) -> str | None:
    """Returns a hint with the file or folder beside a missing path that has the most similar name; None if none is similar."""
    missing = Path(path)
    if any(character in path for character in "*?["):
        return None
    while not missing.parent.is_dir():  # the innermost folder that exists
        missing = missing.parent
    try:
        names = [entry.name for entry in missing.parent.iterdir()]
    except OSError:
        return None
    close = get_close_matches(missing.name, names, n=1)
    return f"did you mean `{missing.parent / close[0]}`?" if close else None


def outside(recipe: Recipe, folder: Path) -> list[str]:
    """Returns a notice for each file of code outside the recipe's folder. It runs all the same, because the recipe names it."""
    rewards = recipe.rewards if recipe.eval is None else [*recipe.rewards, *(recipe.eval.rewards or ())]
    uses = [("rewards", reward.use) for reward in rewards] + [("tools", tool.use) for tool in recipe.tools]
    uses += [("environment", recipe.environment.use)] if recipe.environment is not None else []
    uses += [("rollout.use", recipe.rollout.use)] if recipe.rollout.use is not None else []
    uses += [("trainer.use", recipe.trainer.use)] if isinstance(recipe.trainer, OwnRecipe) else []
    files = {(section, file) for section, use in uses if (file := use.rpartition(":")[0]).endswith(".py")}
    return [
        f"{section}: {file} lies outside of the recipe's folder; its hash goes into provenance.json"
        for section, file in sorted(files)
        if not Path(file).is_relative_to(folder)
    ]
