"""Several pools behind the interface of one: the functions of a recipe share one, and each reward that asks a model has its own.

So a model is loaded once, in the only process that imports torch. It has a memory limit of its own, and its calls do not wait
behind those of functions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rlgen.worker_pool.pool import Pool
from rlgen.worker_pool.source import FunctionFacts
from rlgen.worker_pool.stream import CallStream


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

    def open(self) -> CallStream:
        stream = CallStream(self.pools, self.places)
        try:
            for pool in self.pools:
                pool.open(stream)
        except BaseException:
            stream.close()  # no pool stays open
            raise
        return stream

    def close(self) -> None:
        for pool in self.pools:
            pool.close()
