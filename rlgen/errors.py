"""Every error a user can meet, with its exit code.

A message says where, what and what to do, in one line if it can. `rlgen` prints it and ends with `exit_code`; a traceback
appears only with `--debug`. An exception that is not an `RlgenError` is a bug in rlgen (exit 70).
"""

from dataclasses import dataclass


class RlgenError(Exception):
    """Base of all expected failures. `str(error)` is the whole message for the user."""

    exit_code = 70


class UsageError(RlgenError):
    """A wrong command line: an option, a run directory that is taken."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake in a recipe.

    Problem(where="demo.yaml:17:3", what="`clip_hgih` is not a key of `trainer` (kind: grpo)", hint="did you mean `clip_high`?")
    """

    where: str
    what: str
    hint: str | None = None

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" + (f"; {self.hint}" if self.hint else "")


class RecipeError(RlgenError):
    """All mistakes of one recipe, in line order."""

    exit_code = 2

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        super().__init__("\n".join(map(str, problems)))


class SetupError(RlgenError):
    """The machine or the model lacks something: a package, a device, a file of weights."""

    exit_code = 3


class DataError(RlgenError):
    """The data set cannot serve: a missing column, no rows left."""

    exit_code = 4


class RewardError(RlgenError):
    """A reward function cannot be found, called, or it failed."""

    exit_code = 5


class EngineError(RlgenError):
    """The engine failed, answered something else than it was asked, or did not take the weights."""

    exit_code = 6


class SentinelError(EngineError):
    """Engine and trainer disagree: training on these samples would be training on garbage.

    Args:
        fault: name of the cause, a value of `rlgen.sentinel.verdict.Fault`; the message contains it.
    """

    def __init__(self, message: str, fault: str) -> None:
        self.fault = fault
        super().__init__(message)


class DivergedError(RlgenError):
    """A loss or gradient is not finite."""

    exit_code = 7


class CheckpointError(RlgenError):
    """A checkpoint cannot be written or read."""

    exit_code = 8


class ProcessError(RlgenError):
    """The processes that run are not the ones that were asked for."""

    exit_code = 9


class Stopped(RlgenError):
    """Stopped on request after a good checkpoint: run again with --resume."""

    exit_code = 75
