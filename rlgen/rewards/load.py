"""Imports the function that an entry of `rewards` names, or loads its model, and checks what it returns. Runs in a worker."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rlgen.errors import RewardError
from rlgen.rewards.builtin import BUILTIN
from rlgen.worker_pool.failures import Failed, failure_of, shortened
from rlgen.worker_pool.find import facts_of, find
from rlgen.worker_pool.source import FunctionFacts, Trade

if TYPE_CHECKING:  # a worker of functions does without pydantic
    from rlgen.recipe.judges import JudgeArgs, RewardModelArgs

REWARDS = Trade("rewards", "reward", RewardError)
TEXTS = "a completion is a text here, not a list of messages: take `completion`, not completion[0]['content']"


@dataclass(frozen=True, slots=True)
class LoadedReward:
    """One imported reward function, ready to be called."""

    function: Callable[..., Any]
    facts: FunctionFacts
    timeout: float

    def value(self, answer: Any, size: int | None) -> list[float | None] | Failed:
        """Returns what the function returned as a list, of `size` values or with None of one; Failed if it is malformed."""
        if size is None:
            values: Any = [answer]
        elif not isinstance(answer, Sequence) or isinstance(answer, str) or len(answer) != size:
            return Failed("error", f"returned {shown(answer)}, not a list of {size} rewards")
        else:
            values = answer
        numbers = [None if value is None else as_number(value) for value in values]
        for value, number in zip(values, numbers, strict=True):
            if number is not None and not math.isfinite(number):
                return Failed("error", f"returned {shown(value)}; a reward is a finite number, or None if it does not apply")
        return numbers

    def failure(self, error: BaseException) -> Failed:
        """Returns the record of an exception that the function raised, with a hint for a mistake that many make."""
        failed = failure_of(error, self.facts.file)
        if isinstance(error, TypeError) and "string ind" in str(error):
            failed = replace(failed, message=f"{failed.message}; {TEXTS}")
        return failed


@dataclass(frozen=True, slots=True)
class RewardSource:
    """One reward that a worker imports: its `use`, and the seconds that a call of it may take."""

    use: str
    timeout: float
    # Of a reward that asks a model:
    settings: "RewardModelArgs | JudgeArgs | None" = None
    name: str = ""  # of its files in `answers`
    answers: Path | None = None  # folder of the run for the answers of judges; None: they are kept in memory only
    memory: int = 0  # bytes that it may use besides the model
    trade: ClassVar[Trade] = REWARDS

    def load(self) -> LoadedReward:
        """Imports the function, or loads the model.

        Raises:
            RewardError: there is none, its import fails, it cannot be called by name, or what a judge needs is not there.
            CheckpointError: what a judge has said before cannot be read.
        """
        if self.settings is not None:
            return load_model(self, self.settings)
        function, sha256 = (BUILTIN[self.use], None) if self.use in BUILTIN else find(self.use, REWARDS)
        return LoadedReward(function, facts_of(self.use, function, sha256, REWARDS), self.timeout)


def load_model(source: RewardSource, settings: "RewardModelArgs | JudgeArgs") -> LoadedReward:
    """Loads the model that `settings` name, or prepares the requests to it. Raises as `RewardSource.load` does."""
    from rlgen.recipe.judges import RewardModelArgs

    if isinstance(settings, RewardModelArgs):
        from rlgen.rewards.reward_model import RewardModel

        model = RewardModel(settings, source.memory)
        return LoadedReward(model.score, facts_of_model(settings, model.sha256), source.timeout)
    from rlgen.rewards.judge import Judge, digest_of

    judge = Judge(settings, source.timeout, source.answers, source.name)
    function = judge.compare if settings.pairwise else judge.rate
    return LoadedReward(function, facts_of_model(settings, digest_of(settings)), source.timeout)


def facts_of_model(settings: "RewardModelArgs | JudgeArgs", sha256: str | None = None) -> FunctionFacts:
    """Returns what a reward that asks a model is called with. Raises RewardError if its question is not there."""
    from rlgen.recipe.judges import RewardModelArgs

    if isinstance(settings, RewardModelArgs):
        from rlgen.rewards.reward_model import PARAMETERS

        return FunctionFacts(PARAMETERS, is_async=False, file=None, sha256=sha256)
    from rlgen.rewards.judge import parameters_of

    return FunctionFacts(parameters_of(settings), is_async=True, file=None, sha256=sha256)


def as_number(value: Any) -> float:
    """Returns a reward as a float; NaN for a string and for anything that is not a number."""
    try:
        return math.nan if isinstance(value, str) else float(value)
    except Exception:  # user-defined types may raise anything
        return math.nan


def shown(value: Any) -> str:
    """Returns the repr of a value in at most 80 characters; the type's name if its repr fails."""
    try:
        return shortened(repr(value), 80)
    except Exception:
        return f"a {type(value).__name__}"
