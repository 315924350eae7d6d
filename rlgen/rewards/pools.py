"""Several pools behind the interface of one: the functions of a recipe share one, and each reward that asks a model has its own.

So a model is loaded once, in the only process that imports torch. It has a memory limit of its own, and its calls do not wait
behind those of functions.
"""

from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from queue import SimpleQueue

from rlgen.worker_pool.pool import CallOutcome, CallStream, Pool
from rlgen.worker_pool.source import FunctionFacts
from rlgen.worker_pool.worker import WorkerCall


@dataclass(frozen=True, slots=True)
class JoinedStream:
    """The calls of one step in several pools, whose outcomes arrive in one queue."""

    streams: Sequence[CallStream]  # one a pool, which put into the queue of the first
    places: Sequence[tuple[int, int]]  # reward -> its pool, and its index there

    def add(self, calls: Sequence[WorkerCall]) -> None:
        """Queues each call in the pool of its reward, see `CallStream.add`."""
        by_pool: dict[int, list[WorkerCall]] = defaultdict(list)
        for call in calls:
            pool, place = self.places[call.source]
            by_pool[pool].append(replace(call, source=place))
        for pool, own in by_pool.items():
            self.streams[pool].add(own)

    def outcomes(self) -> Iterator[CallOutcome]:
        """Waits for the outcome of each call that was added, see `CallStream.outcomes`."""
        first = self.streams[0]
        return first.next_outcomes(sum(stream.added for stream in self.streams) - first.taken)

    def there(self) -> Iterator[CallOutcome]:
        """Yields the outcomes that have arrived, see `CallStream.there`."""
        return self.streams[0].there()

    def close(self) -> None:
        """Cancels the calls that still run, in every pool."""
        for stream in self.streams:
            stream.close()


@dataclass(frozen=True, slots=True)
class Pools:
    """Holds the pools of one trainer process."""

    pools: Sequence[Pool]
    places: Sequence[tuple[int, int]]  # reward -> its pool, and its index there

    def facts(self) -> list[FunctionFacts]:
        """Returns what the first worker of each pool found out, in the order of the recipe, see `Pool.facts`."""
        for pool in self.pools:
            pool.start()  # all of them load at the same time
        found = [pool.facts() for pool in self.pools]
        return [found[pool][place] for pool, place in self.places]

    def open(self) -> JoinedStream:
        """Returns a stream for calls, see `Pool.open`. Raises as it does; no pool is then open."""
        outcomes: SimpleQueue[CallOutcome | Exception] = SimpleQueue()
        with ExitStack() as undo:
            streams = [undo.enter_context(closing(pool.open(outcomes))) for pool in self.pools]
            undo.pop_all()
        return JoinedStream(streams, self.places)

    def run(self, calls: Sequence[WorkerCall]) -> Generator[CallOutcome, None, None]:
        """Yields the outcome of each call, see `Pool.run`."""
        with closing(self.open()) as stream:
            stream.add(calls)
            yield from stream.outcomes()

    def close(self) -> None:
        """Ends the worker processes of all pools."""
        for pool in self.pools:
            pool.close()
