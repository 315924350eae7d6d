"""Combines an entry of `rewards` with what a worker found out about its function, and checks the names of its parameters."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from rlgen.errors import DataError, RewardError
from rlgen.recipe.judges import MODEL_REWARDS
from rlgen.recipe.models import RewardRecipe
from rlgen.worker_pool.source import FunctionFacts

# Arguments that rlgen passes to a reward besides the data set's columns: for one sample, or as lists for a group.
OF_EITHER = frozenset({"prompt_ids", "completion_ids", "finish_reason", "max_completion_tokens", "step", "prompt_messages"})
SAMPLE_NAMES = OF_EITHER | {"prompt", "completion"}
GROUP_NAMES = OF_EITHER | {"prompts", "completions", "finish_reasons"}
ANOTHER_NAME = dict.fromkeys(("response", "output", "solution_str", "generation", "text"), "completion")  # in other tools
MESSAGES = "messages"  # with tools only: data sets often have a column of this name


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFunction:
    """One reward, ready to be called by a worker: its code is not imported in this process."""

    entry: RewardRecipe
    of_group: bool  # takes lists over a group and returns a list
    names: frozenset[str] | None  # parameters to fill; None: all there are (`**kwargs`)
    args: Mapping[str, Any]  # from the recipe
    sha256: str | None  # of the user's code

    @property
    def label(self) -> str:
        return self.entry.label

    def arguments(self, available: Mapping[str, Any]) -> dict[str, Any]:
        taken = available if self.names is None else {n: v for n, v in available.items() if n in self.names}
        return {**taken, **self.args}


def resolve(entry: RewardRecipe, facts: FunctionFacts, columns: Collection[str]) -> RewardFunction:
    """Checks that every parameter of the function will be filled, and returns the reward.

    Raises:
        DataError: a parameter is no column of the data (`answer` included, if the recipe maps it), and nothing else provides it.
        RewardError: a parameter cannot be filled by name, or is filled twice.
    """
    named = {name: required for name, kind, required in facts.parameters if kind in ("POSITIONAL_OR_KEYWORD", "KEYWORD_ONLY")}
    takes_all = any(kind == "VAR_KEYWORD" for _, kind, _ in facts.parameters)
    of_group = bool({"completions", "prompts"} & set(named))
    given = (GROUP_NAMES if of_group else SAMPLE_NAMES) | set(columns)
    where = f"rewards: {entry.use}"
    args = {} if entry.use in MODEL_REWARDS else entry.args  # of those they are the settings
    if positional := [name for name, kind, _ in facts.parameters if kind == "POSITIONAL_ONLY"]:
        raise RewardError(f"{where}: `{positional[0]}` is positional-only, but parameters are filled by name; remove the `/`")
    if unknown := sorted(set(args) - set(named)) if not takes_all else []:
        raise RewardError(f"{where} has no parameter `{unknown[0]}`; it has {', '.join(named)}")
    if both := sorted(set(args) & given):
        raise RewardError(f"{where}: `{both[0]}` in args is also the name of a column or of a value from rlgen; rename it")
    required = {name for name, must in named.items() if must}
    if missing := sorted(required - given - set(args)):
        close = get_close_matches(missing[0], given, n=1)
        meant = ANOTHER_NAME.get(missing[0]) or (close[0] if close else "")
        hint = f"did you mean `{meant}`? " if meant else ""
        raise DataError(
            f"{where} needs `{missing[0]}`, which is no column of the data; {hint}there are {', '.join(sorted(given))},"
            " and what `args` gives"
        )
    return RewardFunction(
        entry=entry, of_group=of_group, names=None if takes_all else frozenset(named), args=args, sha256=facts.sha256
    )
