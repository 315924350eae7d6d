"""Collects what calls in worker processes gave."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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

    def __init__(self, pools: Sequence["Pool"], places: Sequence[tuple[int, int]] = ()) -> None:
        """Opens the pools; raises as `Pool.join` does. `places`: the pool of each source of calls, and its index there."""
        self._pools = pools
        self._places = places
        self.came: SimpleQueue[CallOutcome | Exception] = SimpleQueue()  # from all pools; none follows an error
        self._added = self._taken = 0  # numbers of calls and of outcomes
        try:
            for pool in pools:
                pool.join(self)
        except BaseException:
            self.close()  # no pool stays open
            raise

    def add(self, calls: Sequence[WorkerCall]) -> None:
        """Queues calls, which run as soon as a worker is free. May be called from any thread; after an error it does nothing."""
        self._added += len(calls)
        by_pool: dict[int, list[WorkerCall]] = defaultdict(list)
        for call in calls:
            pool, place = self._places[call.source]
            by_pool[pool].append(call if place == call.source else replace(call, source=place))
        for pool, own in by_pool.items():
            self._pools[pool].add(self, own)

    def outcomes(self) -> Iterator[CallOutcome]:
        """Waits for the outcome of each call that was added, and yields those that were not taken, in the order of their arrival.
        Raises as `take` does.
        """
        for _ in range(self._added - self._taken):
            yield self.take()

    def there(self) -> Iterator[CallOutcome]:
        """Yields the outcomes that have arrived, without waiting. Raises as `take` does."""
        while not self.came.empty():  # nobody else takes from it
            yield self.take()

    def take(self) -> CallOutcome:
        """Waits for the next outcome.

        Raises:
            RlgenError: workers that were started cannot import the functions.
            RuntimeError: a pool was closed.
        """
        outcome = self.came.get()
        if isinstance(outcome, Exception):
            raise outcome
        self._taken += 1
        return outcome

    def close(self) -> None:
        """Cancels the calls that still run, by killing their workers."""
        for pool in self._pools:
            pool.end(self)
