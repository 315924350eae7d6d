"""Several pools behind the interface of one: the functions of a recipe share one, and each reward that asks a model has its own.

So a model is loaded once, in the only process that imports torch. It has a memory limit of its own, and its calls do not wait
behind those of functions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlgen.recipe.judges import JudgeArgs, RewardModelArgs, settings_of
from rlgen.recipe.models import RewardRecipe
from rlgen.rewards.load import RewardSource
from rlgen.worker_pool.pool import Pool, WorkerLimits
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


def open_pools(
    entries: Sequence[RewardRecipe], limits: WorkerLimits, output: Path | None, answers: Path | None, group_size: int | None
) -> Pool | Pools:
    """Returns the processes, not started yet: one pool for all functions, and one for each reward that asks a model."""
    functions = [RewardSource(entry.use, entry.timeout) for entry in entries if settings_of(entry) is None]
    pools = [Pool(functions, limits, output)] if functions else []
    if len(functions) == len(entries):
        return pools[0]
    places: list[tuple[int, int]] = []
    for entry in entries:
        if (settings := settings_of(entry)) is None:
            places.append((0, sum(pool == 0 for pool, _ in places)))
            continue
        places.append((len(pools), 0))
        source = RewardSource(entry.use, entry.timeout, settings, entry.label, answers, limits.memory or 0)
        pools.append(Pool([source], limits_of_model(settings, limits, group_size), output))
    return Pools(pools, places)


def limits_of_model(settings: RewardModelArgs | JudgeArgs, limits: WorkerLimits, group_size: int | None) -> WorkerLimits:
    """Returns the limits of the one process that asks a model."""
    if isinstance(settings, RewardModelArgs):  # it limits itself once the model is loaded
        return replace(limits, workers=1, memory=None, import_timeout=settings.load_timeout)
    # The timeout of a call covers its requests, so that they must not wait behind those of other calls.
    requests = 1 if not settings.pairwise else settings.concurrency if group_size is None else group_size * (group_size - 1)
    return replace(limits, workers=1, concurrency=max(1, settings.concurrency // max(1, requests)))
