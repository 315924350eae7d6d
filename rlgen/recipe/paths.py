"""Makes the paths of a recipe absolute: those of local inputs start at the folder of the file that names them."""

import errno
import os
import re
from collections import defaultdict
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar

from rlgen.errors import Problem
from rlgen.recipe import yaml
from rlgen.recipe.judges import LOCAL_ARGS, MODEL_REWARDS
from rlgen.recipe.messages import short
from rlgen.recipe.models import Recipe, RewardRecipe, ToolRecipe
from rlgen.recipe.rules import is_local_model, is_local_source
from rlgen.recipe.sizes import is_written
from rlgen.recipe.source import file_of
from rlgen.recipe.trainers import OwnRecipe

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
Function = TypeVar("Function", RewardRecipe, ToolRecipe)


class _Absolute:
    """Makes texts of one recipe absolute, and collects the problems of those that cannot be paths."""

    def __init__(self, path: Path, where: yaml.Where) -> None:
        self.path = path
        self.where = where
        self.problems: list[Problem] = []

    def file(self, text: str, loc: yaml.Path, always: bool = True) -> str:
        """Returns the whole path; unless `always`, the text as it is if there is no folder of that name."""
        where = self.where(loc)
        folder = (self.path if where.startswith("--set") else Path(file_of(where))).resolve().parent
        try:
            place = (folder / Path(text).expanduser()).resolve()
            place.exists()  # raises if the text cannot be a path
            return str(place) if always or (folder / text).is_dir() else text
        except (OSError, RuntimeError) as error:  # too long, or ~ of an unknown user
            what = f"{short(text)} is not a path: {getattr(error, 'strerror', None) or error}"
            self.problems.append(Problem(where, what))
            return text

    def use(self, use: str, loc: yaml.Path) -> str:
        """Returns a function of the user's, file.py:name, with the file's whole path; other names as they are."""
        file, _, name = use.rpartition(":")
        return f"{self.file(file, loc)}:{name}" if file.endswith(".py") else use

    def functions(self, listed: list[Function], section: yaml.Path) -> list[Function]:
        """Returns rewards or tools with the whole paths of their files, and of those that their `args` name."""
        found = []
        for index, one in enumerate(listed):
            changes: dict[str, object] = {"use": self.use(one.use, (*section, index, "use"))}
            if one.use in MODEL_REWARDS:
                local = {
                    name: self.file(text, (*section, index, "args", name), always or is_local_model(text))
                    for name, always in LOCAL_ARGS.items()
                    if isinstance(text := one.args.get(name), str)
                }
                changes["args"] = {**one.args, **local}
            found.append(one.model_copy(update=changes))
        return found

    def check_name(self, name: str, loc: yaml.Path, example: str) -> None:
        """Records a problem if a name cannot be one of the hub."""
        if not HUB_NAME.fullmatch(name):
            what = f"{'.'.join(map(str, loc))}: {short(name)} is no folder or file, and no name of the hub"
            self.problems.append(Problem(self.where(loc), what, f"a name of the hub is owner/name, such as {example}"))


def absolute_paths(recipe: Recipe, path: Path, where: yaml.Where) -> tuple[Recipe, list[Problem]]:
    """Makes the paths of local inputs absolute; they start at the folder of the recipe file that names them."""
    made, held = _Absolute(path, where), recipe.eval
    made.problems += impossible_run_path(recipe, where)
    changes: defaultdict[str, dict[str, object]] = defaultdict(dict)  # by section
    model, source, template = recipe.model.path, recipe.data.source, recipe.data.chat_template
    if not model.startswith("tiny:"):
        changes["model"]["path"] = found = made.file(model, ("model", "path"), is_local_model(model))
        if not is_local_model(found):
            made.check_name(found, ("model", "path"), "Qwen/Qwen3-0.6B")
    if is_local_source(source):
        changes["data"]["source"] = made.file(source, ("data", "source"))
    elif recipe.task is None:
        made.check_name(source, ("data", "source"), "openai/gsm8k")
    if template is not None:
        changes["data"]["chat_template"] = made.file(template, ("data", "chat_template"))
    if held is not None and held.source is not None and is_local_source(held.source):
        changes["eval"]["source"] = made.file(held.source, ("eval", "source"))
    if held is not None and held.rewards is not None:
        changes["eval"]["rewards"] = made.functions(held.rewards, ("eval", "rewards"))
    for section in ("rollout", "trainer", "environment"):
        if (use := getattr(getattr(recipe, section), "use", None)) is not None:
            changes[section]["use"] = made.use(use, (section, "use"))
    sections: dict[str, object] = {name: getattr(recipe, name).model_copy(update=new) for name, new in changes.items()}
    sections["rewards"] = made.functions(recipe.rewards, ("rewards",))
    sections["tools"] = made.functions(recipe.tools, ("tools",))
    return recipe.model_copy(update=sections), made.problems


def impossible_run_path(recipe: Recipe, where: yaml.Where) -> list[Problem]:
    """Returns a problem if no file system could hold the run's folder: a name that is too long, or ~ of an unknown user."""
    position = where(("run", "dir" if is_written(recipe, "run.dir") else "name"))
    said = f"run.dir: {short(recipe.run.dir)} is not a path"
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
