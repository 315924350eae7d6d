"""From `rewards[].use` to a function: a built-in, `file.py:function` or `pkg.mod:function`, and what each parameter gets."""

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from rlgen.errors import RewardError
from rlgen.recipe.models import RewardRecipe
from rlgen.rewards.builtin import BUILTIN

# What a reward of one sample, and one of a whole group, can ask for beside columns and the entry's `args`.
SAMPLE_NAMES = frozenset(("prompt", "completion", "prompt_ids", "completion_ids", "finish_reason", "step"))
GROUP_NAMES = frozenset(
    ("prompts", "completions", "prompt_ids", "completion_ids", "finish_reason", "finish_reasons", "step")
)
# One of these in the signature makes a function a reward of a group.
GROUP_MARKS = ("completions", "prompts")
FILLED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFunction:
    """A reward that can be called: every parameter without a default is known to be provided.

    RewardFunction(name="brevity", weight=0.1, function=<brevity>, args={"limit": 200}, wants=frozenset({"completion"}),
                   takes_rest=False, of_group=False, is_async=False, file="/x/rewards.py", sha256="9f86d0...")
    """

    name: str  # of its metrics
    weight: float
    function: Callable[..., Any]
    args: Mapping[str, Any]  # from the recipe entry
    wants: frozenset[str]  # parameters that samples and columns fill
    takes_rest: bool  # **kwargs: it gets all there is
    of_group: bool
    is_async: bool
    file: str | None  # source of the function
    sha256: str | None  # of that file

    def pick(self, available: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword arguments of a call: of `available` what the function wants, and the entry's `args` before all."""
        return {k: v for k, v in available.items() if self.takes_rest or k in self.wants} | dict(self.args)


def resolve(entry: RewardRecipe, columns: frozenset[str]) -> RewardFunction:
    """Finds, imports and checks the function of a recipe entry. Importing runs the user's code.

    A parameter is filled from the entry's `args`, else from the sample (SAMPLE_NAMES, GROUP_NAMES), else from the column of
    that name.

    Args:
        entry: the path of a file in `use` is absolute.
        columns: names of the data set's columns.

    Raises:
        RewardError: no such function, its import failed, a parameter that nothing fills, an argument it does not take.
    """
    target, colon, name = entry.use.rpartition(":")
    if not colon:
        function = lookup(BUILTIN, entry.use, "built-in rewards", entry.use)
    else:
        module = load_file(Path(target)) if target.endswith(".py") else load_module(target)
        function = lookup(vars(module), name, f"functions of {target}", entry.use)
    try:
        parameters = inspect.signature(function).parameters
        file = inspect.getsourcefile(inspect.unwrap(function))
    except (TypeError, ValueError) as error:
        raise RewardError(f"rewards: {entry.use} is not a function with a signature: {error}") from error
    of_group = any(mark in parameters for mark in GROUP_MARKS)
    provided = (GROUP_NAMES if of_group else SAMPLE_NAMES) | columns
    check_parameters(entry, parameters, provided, of_group)
    return RewardFunction(
        name=entry.label,
        weight=entry.weight,
        function=function,
        args=entry.args,
        wants=frozenset(p.name for p in parameters.values() if p.kind in FILLED) & provided,
        takes_rest=any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()),
        of_group=of_group,
        is_async=inspect.iscoroutinefunction(function),
        file=file,
        sha256=hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else None,
    )


def check_parameters(
    entry: RewardRecipe, parameters: Mapping[str, inspect.Parameter], provided: frozenset[str], of_group: bool
) -> None:
    """Raises RewardError unless every required parameter is filled and every key of `args` is taken."""
    takes_rest = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    taken = {p.name for p in parameters.values() if p.kind in FILLED}
    for p in parameters.values():
        if p.kind is inspect.Parameter.POSITIONAL_ONLY:
            raise RewardError(
                f"rewards: {entry.use}: `{p.name}` is positional-only; parameters are filled by name"
            )
        required = p.kind in FILLED and p.default is inspect.Parameter.empty
        if required and p.name not in provided and p.name not in entry.args:
            kind = "of a group" if of_group else "of one sample"
            raise RewardError(
                f"rewards: {entry.use} needs `{p.name}`, which nothing provides{did_you_mean(p.name, provided)}. "
                f"As a reward {kind} it can have {', '.join(sorted(provided))}; "
                f"or set args: {{{p.name}: ...}} in its entry, or give the parameter a default"
            )
    for key in entry.args:
        if key not in taken and not takes_rest:
            raise RewardError(
                f"rewards: {entry.use} takes no argument `{key}`{did_you_mean(key, taken)}. "
                f"It takes {', '.join(sorted(taken))}"
            )
        if key in SAMPLE_NAMES | GROUP_NAMES:
            raise RewardError(
                f"rewards: {entry.use}: args: `{key}` comes from the sample and cannot be set; rename it"
            )


def lookup(functions: Mapping[str, Any], name: str, where: str, use: str) -> Callable[..., Any]:
    """Raises RewardError, naming the closest, where `functions` has no function of that name."""
    function = functions.get(name)
    if callable(function):
        return function  # type: ignore[no-any-return]
    known = sorted(
        key for key, value in functions.items() if inspect.isroutine(value) and not key.startswith("_")
    )
    raise RewardError(
        f"rewards: {use}: there is no function `{name}`{did_you_mean(name, known)}. "
        f"The {where} are {', '.join(known) or 'none'}"
    )


def did_you_mean(name: str, known: "frozenset[str] | set[str] | list[str]") -> str:
    """ "; did you mean `clip_high`?" or nothing."""
    close = get_close_matches(name, sorted(known), n=1)
    return f"; did you mean `{close[0]}`?" if close else ""


def load_file(path: Path) -> ModuleType:
    """Imports a file as a module of its own; a file that two entries name is imported once.

    Raises:
        RewardError: no such file, or its code failed; names the line.
    """
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise RewardError(
            f"rewards: {path} cannot be read: {error.strerror}; paths are relative to the recipe"
        ) from error
    name = f"rlgen_reward_{hashlib.sha256(f'{path}:{digest}'.encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    # Registered before it runs, as `import` does: dataclasses look their module up.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise RewardError(f"rewards: importing {path} failed: {describe(error, str(path))}") from error
    return module


def load_module(name: str) -> ModuleType:
    """Imports `pkg.mod`. Raises RewardError where that fails; names the line."""
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise RewardError(
                f"rewards: there is no module `{error.name}`; install it, or name a file: path/to/file.py:function"
            ) from error
        raise RewardError(f"rewards: importing {name} failed: {describe(error, None)}") from error


def describe(error: BaseException, file: str | None) -> str:
    """ "/x/rewards.py:12: ValueError: no digits": the deepest line in `file`, else the deepest of all."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if file is not None and frame.filename == file] or list(frames)
    place = f"{own[-1].filename}:{own[-1].lineno}: " if own else ""
    return f"{place}{type(error).__name__}: {error}"
