"""What a worker imports, and what it reports: the interface that rewards and tools implement."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

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


class Loaded(Protocol):
    """An imported function, in a worker."""

    @property
    def facts(self) -> FunctionFacts: ...  # what the trainer must know of it

    @property
    def timeout(self) -> float: ...  # seconds of a call

    @property
    def function(self) -> Callable[..., Any]: ...  # takes the arguments by name

    def value(self, answer: Any, size: int | None) -> Any:
        """Checks what the function returned to a call of this size. Returns a value that JSON can encode, or `Failed`."""
        ...

    def failure(self, error: BaseException) -> Failed:
        """Describes what the function raised."""
        ...


class Source(Protocol):
    """What a worker imports. It is pickled, and unpickled in the worker, where `load` is called."""

    @property
    def use(self) -> str: ...  # file.py:function, pkg.mod:function or a built-in name

    @property
    def timeout(self) -> float: ...  # seconds of a call

    @property
    def trade(self) -> Trade: ...

    def load(self) -> Loaded:
        """Imports the function. Raises `trade.error`."""
        ...
