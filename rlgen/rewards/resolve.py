"""From an entry of `rewards` to a function and the names it is called with."""

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from rlgen.errors import RewardError
from rlgen.recipe.models import RewardRecipe
from rlgen.rewards.builtin import BUILTIN

# What rlgen gives to a reward, besides the data set's columns: for one sample, and for a group as lists.
OF_EITHER = frozenset({"prompt_ids", "completion_ids", "finish_reason", "max_completion_tokens", "step"})
SAMPLE_NAMES = OF_EITHER | {"prompt", "completion"}
GROUP_NAMES = OF_EITHER | {"prompts", "completions", "finish_reasons"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFunction:
    """A reward that is ready to be called."""

    label: str
    weight: float
    function: Callable[..., Any]
    of_group: bool  # takes lists over a group and returns a list
    is_async: bool
    names: frozenset[str] | None  # parameters to fill; None: all there are (`**kwargs`)
    args: Mapping[str, Any]  # from the recipe
    file: str | None  # source of the function: errors name its line there
    sha256: str | None  # of the user's file

    def arguments(self, available: Mapping[str, Any]) -> dict[str, Any]:
        """Those of `available` that the function takes, and the recipe's."""
        taken = available if self.names is None else {n: v for n, v in available.items() if n in self.names}
        return {**taken, **self.args}


def resolve(entry: RewardRecipe, columns: Collection[str]) -> RewardFunction:
    """Finds the function and checks that every parameter will be filled.

    Args:
        columns: of the data set, `answer` included if the recipe maps it.

    Raises:
        RewardError: not found, cannot be imported, or a parameter that nobody provides.
    """
    function, sha256 = find(entry.use)
    try:
        parameters = inspect.signature(function).parameters.values()
        file = inspect.getsourcefile(inspect.unwrap(function))
    except (TypeError, ValueError) as error:
        raise RewardError(f"rewards: {entry.use} is not a function that can be called by name: {error}") from error
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    of_group = bool({"completions", "prompts"} & set(named))
    given = (GROUP_NAMES if of_group else SAMPLE_NAMES) | set(columns)
    where = f"rewards: {entry.use}"
    if positional := [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]:
        raise RewardError(f"{where}: `{positional[0]}` is positional-only, but parameters are filled by name; remove the `/`")
    if unknown := sorted(set(entry.args) - set(named)) if not takes_all else []:
        raise RewardError(f"{where} has no parameter `{unknown[0]}`; it has {', '.join(named)}")
    if both := sorted(set(entry.args) & given):
        raise RewardError(f"{where}: `{both[0]}` in args is given by rlgen or a column of the data already; rename it")
    required = {name for name, p in named.items() if p.default is p.empty}
    if missing := sorted(required - given - set(entry.args)):
        close = get_close_matches(missing[0], given, n=1)
        hint = f"did you mean `{close[0]}`? " if close else ""
        raise RewardError(
            f"{where} needs `{missing[0]}`, which is no column of the data; {hint}there are {', '.join(sorted(given))},"
            " and what `args` gives"
        )
    return RewardFunction(
        label=entry.label,
        weight=entry.weight,
        function=function,
        of_group=of_group,
        is_async=inspect.iscoroutinefunction(function),
        names=None if takes_all else frozenset(named),
        args=entry.args,
        file=file,
        sha256=sha256,
    )


def find(use: str) -> tuple[Callable[..., Any], str | None]:
    """The function behind `use`, and the hash of its file if it is the user's.

    Raises:
        RewardError: there is no such module or function.
    """
    if use in BUILTIN:
        return BUILTIN[use], None
    source, _, name = use.rpartition(":")
    sha256 = None
    if source.endswith(".py"):
        path = Path(source)
        if not path.is_file():
            raise RewardError(f"rewards: {path} does not exist; a path in a recipe starts at the recipe's folder")
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        module = run_module(source, lambda: load_file(path, f"rlgen_reward_{sha256[:16]}"))
    else:
        module = run_module(source, lambda: importlib.import_module(source))
    function = vars(module).get(name)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        close = get_close_matches(name, functions, n=1)
        hint = f"did you mean `{close[0]}`?" if close else f"there are {', '.join(functions) or 'none'}"
        raise RewardError(f"rewards: {source} has no function `{name}`; {hint}")
    return function, sha256


def load_file(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # a file whose name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # as for any module: dataclasses and pickles look it up
    spec.loader.exec_module(module)
    return module


def run_module(source: str, load: Callable[[], ModuleType]) -> ModuleType:
    """Imports the user's code; whatever it raises is located there."""
    try:
        return load()
    except (Exception, SystemExit) as error:
        raise RewardError(
            f"rewards: {source} cannot be imported: {type(error).__name__}: {error} {user_line(error, source)}"
        ) from error


def user_line(error: BaseException, file: str | None) -> str:
    """ "(rewards.py:12)": the innermost line of the user's own file, else the innermost of all."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"({error.filename}:{error.lineno})"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    own = [f for f in frames if f.filename == file] or frames
    return f"({own[-1].filename}:{own[-1].lineno})" if own else ""
