"""Collects what calls in worker processes gave."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from rlgen.worker_pool.failures import Failed
from rlgen.worker_pool.worker import WorkerCall

if TYPE_CHECKING:
    from rlgen.worker_pool.pool import Pool


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """The result of one call: its value, or why it failed."""

    id: int
    value: Any | Failed  # what JSON gives of it; of a reward a list with one value a sample
    seconds: float


class CallStream:
    """Collects the outcomes of calls, which may be added while earlier ones run: those of a step, or of a run."""

    def __init__(self, pool: "Pool", came: "SimpleQueue[CallOutcome | Exception] | None") -> None:
        self._pool = pool
        self.came: SimpleQueue[CallOutcome | Exception] = SimpleQueue() if came is None else came  # none follows an error
        self.added = 0  # number of calls
        self.taken = 0  # of these and of those of streams that share the queue, outcomes that were taken

    def add(self, calls: Sequence[WorkerCall]) -> None:
        """Queues calls, which run as soon as a worker is free. May be called from any thread; after an error it does nothing."""
        self.added += len(calls)
        self._pool.add(self, calls)

    def outcomes(self) -> Iterator[CallOutcome]:
        """Waits for the outcome of each call that was added, and yields those that were not taken, in the order of their arrival.
        Raises as `take` does.
        """
        for _ in range(self.added - self.taken):
            yield self.take()

    def there(self) -> Iterator[CallOutcome]:
        """Yields the outcomes that have arrived, without waiting. Raises as `take` does."""
        while not self.came.empty():  # nobody else takes from it
            yield self.take()

    def take(self) -> CallOutcome:
        """Waits for the next outcome.

        Raises:
            RlgenError: workers that were started cannot import the functions.
            RuntimeError: the pool was closed.
        """
        outcome = self.came.get()
        if isinstance(outcome, Exception):
            raise outcome
        self.taken += 1
        return outcome

    def close(self) -> None:
        """Cancels the calls that still run, by killing their workers."""
        self._pool.end(self)
