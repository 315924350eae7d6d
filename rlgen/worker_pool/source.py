"""What a worker imports, and what it reports: rewards, tools and environments are such sources."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from rlgen.errors import RlgenError
from rlgen.worker_pool.failures import Failed


@dataclass(frozen=True, slots=True)
class Trade:
    """The words for messages about what a pool runs: Trade("rewards", "reward", RewardError)"""

    plural: str  # also the section of the recipe
    one: str
    error: type[RlgenError]  # raised for what cannot be imported


@dataclass(frozen=True, slots=True)
class FunctionFacts:
    """The signature and origin of a function, which the trainer itself never imports."""

    parameters: tuple[tuple[str, str, bool], ...]  # name, kind as in `inspect`, whether it has no default
    is_async: bool
    file: str | None  # source file of the function, for the line in error messages
    sha256: str | None  # of the user's code
    schema: dict[str, Any] | None = None  # of a tool, as chat templates take it; None: a reward


@dataclass(frozen=True, slots=True)
class Loaded:
    """An imported function, in a worker."""

    facts: FunctionFacts  # what the trainer must know of it
    function: Callable[..., Any]  # takes the arguments by name
    # Checks what the function returned to a call of this size; returns a value that JSON can encode, or `Failed`.
    value: Callable[[Any, int | None], Any]
    failure: Callable[[BaseException], Failed]  # describes what the function raised


@dataclass(frozen=True, slots=True)
class FunctionSource(ABC):
    """What a worker imports. It is pickled, and unpickled in the worker, where `load` is called."""

    use: str  # file.py:function, pkg.mod:function or a built-in name
    timeout: float  # seconds of a call
    trade: ClassVar[Trade]

    @abstractmethod
    def load(self) -> Loaded:
        """Imports the function. Raises `trade.error`."""
