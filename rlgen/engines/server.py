"""Samples from vLLM servers, which rlgen started or which ran before. Every process of a run sends its own requests."""

import asyncio
import threading
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from rlgen.engines import client
from rlgen.engines.base import EngineCapabilities, EngineInfo, Finished, SyncReport
from rlgen.engines.further import FollowUpQueue
from rlgen.engines.http import Server, connections
from rlgen.errors import EngineError, ServerLost
from rlgen.types import Completion, Ids, Image, LogProbs, Request, Sampling

CLOSING_SECONDS = 0.2  # sampling ends this soon after the engine is closed


@dataclass(slots=True, kw_only=True)
class Call:
    """One call of `ServerEngine.generate`: it outlives the servers that are lost meanwhile."""

    waiting: dict[int, Request]  # by index; those that are not answered
    finished: Finished | None
    further: FollowUpQueue | None
    answers: dict[int, Completion] = field(default_factory=dict)  # by index
    event: asyncio.Event = field(default_factory=asyncio.Event)  # a request was added or answered; of one event loop

    @property
    def goes_on(self) -> bool:
        """Returns whether any request is waiting, or may still come."""
        return bool(self.waiting) or (self.further is not None and self.further.expected)

    def arrived(self, place: int, answer: Completion) -> None:
        """Records an answer, and passes it on to `finished`."""
        self.answers[place] = answer
        del self.waiting[place]
        if self.finished:
            self.finished(place, answer)
        self.event.set()

    @contextmanager
    def coming(self) -> Iterator[client.More[tuple[int, Request]] | None]:
        """Yields the function that waits for further requests in the running event loop; None: there can be none."""
        if self.further is None:
            yield None
            return
        loop, self.event = asyncio.get_running_loop(), asyncio.Event()
        self.further.call(lambda: loop.call_soon_threadsafe(self.event.set))
        try:
            yield self.more
        finally:
            self.further.call(None)

    async def more(self) -> list[tuple[int, Request]]:
        """Waits for further requests, and returns them by index; [] when all are answered and none can come."""
        assert self.further is not None
        while self.goes_on:
            self.event.clear()
            if there := self.further.take():
                numbered = list(enumerate(there, len(self.answers) + len(self.waiting)))
                self.waiting.update(numbered)
                return numbered
            if self.goes_on:
                await self.event.wait()
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The weights that all servers were sent last, labelled `RUN.VERSION`. Held(run="5f0c2b7a", version=3, syncs=4)"""

    run: str
    version: int
    syncs: int  # number of syncs so far


class Keeper(Protocol):
    """The manager of the servers.

    It is `fleet.ServerPool` in a run of one process, `shared.SharedServerPool` in each of several processes.
    """

    @property
    def servers(self) -> Sequence[Server]:
        """Returns the servers in the order in which this process prefers them."""
        ...

    @property
    def facts(self) -> EngineInfo: ...

    @property
    def in_flight(self) -> bool:
        """Returns whether a sync pauses running requests instead of waiting for them."""
        ...

    @property
    def merges(self) -> bool:
        """Returns whether the servers take an adapter alone, see `EngineCapabilities.merges`."""
        ...

    @property
    def held(self) -> Held: ...

    @property
    def brought_back(self) -> Mapping[str, int]:
        """Returns how often each server has been recovered, by URL."""
        ...

    def recover(self, lost: ServerLost, before: Mapping[str, int]) -> None:
        """Sends a server the current weights again, after a restart if it does not answer.

        Args:
            before: `brought_back` from before the failed request was sent: another thread or process may have recovered it since.

        Raises:
            EngineError: the server cannot be restarted from here, or the limit engine.restarts is reached.
        """
        ...

    def sync(self, weights: Iterable[tuple[str, Tensor]], version: int, hashed: bool) -> SyncReport:
        """Sends all weights to all servers, as `Engine.sync` describes."""
        ...

    def stop(self) -> None:
        """Ends the servers that were started here, and every recovery in progress."""
        ...

    def close(self) -> None:
        """Frees the remaining resources. Must be called after all sampling and recovery has ended."""
        ...


class ServerEngine:
    """An engine that samples from one or several servers with the same weights.

    Every completion carries the label of the weights that sampled it. A server with other weights, or a lost one, is recovered by
    `keeper`, and its requests are sent again. A completion depends only on its request and on the weights, so a repeated request
    gives the same completion.

    Args:
        calls: maximum of calls that sample at the same time; they share the connections of this process.
    """

    def __init__(self, keeper: Keeper, calls: int = 1) -> None:
        self._keeper = keeper
        self._connections = max(1, connections() // calls)
        self._background = ThreadPoolExecutor(max_workers=calls, thread_name_prefix="rlgen-sampling")
        self._closed = threading.Event()

    @property
    def weight_version(self) -> int:
        return self._keeper.held.version

    @property
    def abilities(self) -> EngineCapabilities:
        keeper = self._keeper
        return EngineCapabilities(
            sleeps=False,
            submit=self.submit,
            whole_step=False,
            elsewhere=True,
            in_flight=keeper.in_flight,
            merges=keeper.merges,
        )

    def facts(self) -> EngineInfo:
        return self._keeper.facts

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        finished: Finished | None = None,
        further: FollowUpQueue | None = None,
    ) -> list[Completion]:
        call = Call(waiting=dict(enumerate(requests)), finished=finished, further=further)
        while call.goes_on:
            before = self._keeper.brought_back
            try:
                asyncio.run(self._sample(call, sampling))
            except ServerLost as lost:
                if self._closed.is_set():
                    raise
                self._keeper.recover(lost, before)
        return [call.answers[place] for place in range(len(call.answers))]

    async def _sample(self, call: Call, sampling: Sampling) -> None:
        """Samples all requests, also those that are added. Raises EngineError within CLOSING_SECONDS if the engine is closed."""

        def salt() -> str:
            held = self._keeper.held
            return f"{held.run}.{held.version}.{held.syncs}"

        servers, waiting = self._keeper.servers, dict(call.waiting)
        with call.coming() as more:
            held, arrived = not self._keeper.in_flight, call.arrived
            asked = client.sample(servers, waiting, sampling, salt, self._version_of, arrived, self._connections, more, held)
            await self._unless_closed(asked)

    async def _unless_closed(self, asked: Coroutine[Any, Any, None]) -> None:
        """Awaits `asked`. Raises EngineError if the engine is closed meanwhile."""
        work: asyncio.Future[Any] = asyncio.ensure_future(asked)
        closed: asyncio.Future[Any] = asyncio.ensure_future(self._until_closed())
        try:
            await asyncio.wait({work, closed}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise EngineError("the engine was closed while it sampled")
            await work
        finally:
            for call in (work, closed):
                call.cancel()
            await asyncio.gather(work, closed, return_exceptions=True)

    async def _until_closed(self) -> None:
        while not self._closed.is_set():
            await asyncio.sleep(CLOSING_SECONDS)

    def _version_of(self, label: str, url: str) -> int:
        """Returns the weight version in `label`. Raises ServerLost if the weights are not of this run."""
        run, _, version = label.partition(".")
        if run != self._keeper.held.run:
            raise ServerLost(url, f"has weights {label!r}, not those of this run: it was restarted, or another run uses it")
        return int(version)

    def submit(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        finished: Finished | None = None,
        further: FollowUpQueue | None = None,
    ) -> Future[list[Completion]]:
        """Runs `generate` in the background and returns its future. Calls beyond `calls` wait."""
        return self._background.submit(self.generate, requests, sampling, finished, further)

    def prefill_logp(self, rows: Sequence[tuple[Ids, Ids]], images: Sequence[tuple[Image, ...]] = ()) -> list[LogProbs]:
        assert not any(images)  # the recipe refuses them
        return asyncio.run(client.prefill(self._keeper.servers, rows, self._connections))

    def sync(self, weights: Iterable[tuple[str, Tensor]], version: int, hashed: bool = False) -> SyncReport:
        return self._keeper.sync(weights, version, hashed)

    @property
    def recoveries(self) -> int:
        """Returns how often servers have been recovered, all servers together."""
        return sum(self._keeper.brought_back.values())

    def sleep(self) -> None:
        pass

    def close(self) -> None:
        self._closed.set()  # ends sampling in progress
        self._keeper.stop()
        self._background.shutdown(cancel_futures=True)
        self._keeper.close()
