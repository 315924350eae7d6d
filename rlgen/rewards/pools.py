"""Several pools behind the interface of one: the functions of a recipe share one, and each reward that asks a model has its own.

So a model is loaded once, in the only process that imports torch. It has a memory limit of its own, and its calls do not wait
behind those of functions.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from queue import SimpleQueue

from rlgen.worker_pool.pool import Pool
from rlgen.worker_pool.source import FunctionFacts
from rlgen.worker_pool.stream import CallOutcome, CallStream
from rlgen.worker_pool.worker import WorkerCall


@dataclass(frozen=True, slots=True)
class JoinedStream:
    """The calls of one step in several pools, whose outcomes arrive in one queue. Its methods are those of `CallStream`."""

    streams: Sequence[CallStream]  # one a pool, which put into the queue of the first
    places: Sequence[tuple[int, int]]  # reward -> its pool, and its index there

    def add(self, calls: Sequence[WorkerCall]) -> None:
        by_pool: dict[int, list[WorkerCall]] = defaultdict(list)
        for call in calls:
            pool, place = self.places[call.source]
            by_pool[pool].append(replace(call, source=place))
        for pool, own in by_pool.items():
            self.streams[pool].add(own)

    def outcomes(self) -> Iterator[CallOutcome]:
        first = self.streams[0]
        for _ in range(sum(stream.added for stream in self.streams) - first.taken):
            yield first.take()

    def there(self) -> Iterator[CallOutcome]:
        return self.streams[0].there()

    def close(self) -> None:
        for stream in self.streams:
            stream.close()


@dataclass(frozen=True, slots=True)
class Pools:
    """The pools of one trainer process. Its methods are those of `Pool`."""

    pools: Sequence[Pool]
    places: Sequence[tuple[int, int]]  # reward -> its pool, and its index there

    def facts(self) -> list[FunctionFacts]:
        for pool in self.pools:
            pool.start()  # all of them load at the same time
        found = [pool.facts() for pool in self.pools]
        return [found[pool][place] for pool, place in self.places]

    def open(self) -> JoinedStream:
        outcomes: SimpleQueue[CallOutcome | Exception] = SimpleQueue()
        with ExitStack() as undo:
            streams = [undo.enter_context(closing(pool.open(outcomes))) for pool in self.pools]
            undo.pop_all()  # if one raises, no pool is open
        return JoinedStream(streams, self.places)

    def close(self) -> None:
        for pool in self.pools:
            pool.close()
