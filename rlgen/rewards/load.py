"""Imports the function that an entry of `rewards` names, or loads its model, and checks what it returns. Runs in a worker."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rlgen.errors import RewardError
from rlgen.rewards.builtin import BUILTIN
from rlgen.worker_pool.failures import Failed, failure_of, short_repr
from rlgen.worker_pool.find import find_function, function_facts
from rlgen.worker_pool.source import FunctionFacts, FunctionSource, Loaded, Trade

if TYPE_CHECKING:  # a worker of functions does without pydantic
    from rlgen.recipe.judges import JudgeArgs, RewardModelArgs

REWARDS = Trade("rewards", "reward", RewardError)
LARGEST = (2 - 2**-23) * 2.0**127  # reward: of float32, in which a step computes with rewards
TEXTS = "a completion is a text here, not a list of messages: take `completion`, not completion[0]['content']"


@dataclass(frozen=True, slots=True)
class RewardSource(FunctionSource):
    # Of a reward that asks a model:
    settings: "RewardModelArgs | JudgeArgs | None" = None
    name: str = ""  # of its files in `answers`
    answers: Path | None = None  # folder of the run for the answers of judges; None: they are kept in memory only
    memory: int = 0  # bytes that it may use besides the model
    trade: ClassVar[Trade] = REWARDS

    def load(self) -> Loaded:
        """Imports the function, or loads the model.

        Raises:
            RewardError: there is none, its import fails, it cannot be called by name, or what a judge needs is not there.
            CheckpointError: what a judge has said before cannot be read.
        """
        function: Callable[..., Any]
        if self.settings is not None:
            function, facts = load_model_reward(self, self.settings)
        else:
            function, sha256 = (BUILTIN[self.use], None) if self.use in BUILTIN else find_function(self.use, REWARDS)
            facts = function_facts(self.use, function, sha256, REWARDS)
        return Loaded(facts, function, reward_values, partial(reward_failure, facts.file))


def load_model_reward(source: RewardSource, settings: "RewardModelArgs | JudgeArgs") -> tuple[Callable[..., Any], FunctionFacts]:
    """Loads a reward model, or prepares the requests to a judge. Returns what scores, and its facts with the SHA-256 of files."""
    from rlgen.recipe.judges import RewardModelArgs

    facts = facts_of_model(settings)
    if isinstance(settings, RewardModelArgs):
        from rlgen.rewards.reward_model import RewardModel

        model = RewardModel(settings, source.memory)
        return model.score, replace(facts, sha256=model.sha256)
    from rlgen.rewards.judge import Judge

    judge = Judge(settings, source.timeout, source.answers, source.name)
    return judge.compare if settings.pairwise else judge.rate, facts


def facts_of_model(settings: "RewardModelArgs | JudgeArgs") -> FunctionFacts:
    """Returns what a reward that asks a model is called with. Raises RewardError if its question is not there."""
    from rlgen.recipe.judges import RewardModelArgs
    from rlgen.rewards.judge import facts_of_judge
    from rlgen.rewards.reward_model import FACTS

    return FACTS if isinstance(settings, RewardModelArgs) else facts_of_judge(settings)


def reward_values(answer: Any, size: int | None) -> list[float | None] | Failed:
    """Returns what a reward returned as a list, of `size` values or with None of one; Failed if it is malformed."""
    if size is None:
        values: Any = [answer]
    elif not isinstance(answer, Sequence) or isinstance(answer, str) or len(answer) != size:
        return Failed("error", f"returned {short_repr(answer)}, not a list of {size} rewards")
    else:
        values = answer
    numbers = [None if value is None else as_number(value) for value in values]
    for value, number in zip(values, numbers, strict=True):
        if number is not None and not abs(number) <= LARGEST:  # true of NaN, too
            said = f"returned {short_repr(value)}; a reward is a finite number, or None if it does not apply"
            return Failed("error", f"{said}; the largest is {LARGEST:.2g}")
    return numbers


def reward_failure(file: str | None, error: BaseException) -> Failed:
    """Returns the record of an exception that a reward raised, with a hint for a mistake that many make."""
    failed = failure_of(error, file)
    if isinstance(error, TypeError) and "string ind" in str(error):
        failed = replace(failed, message=f"{failed.message}; {TEXTS}")
    return failed


def as_number(value: Any) -> float:
    """Returns a reward as a float; NaN for a string and for anything that is not a number."""
    try:
        return math.nan if isinstance(value, str) else float(value)
    except Exception:  # user-defined types may raise anything
        return math.nan
