"""Sends many requests to servers at once, at a cost per request that does not grow with their number."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Generic, TypeAlias, TypeVar

import aiohttp

from rlgen.engines.http import AGAIN, BUSY, PROBE_SECONDS, Server
from rlgen.errors import EngineError, ServerLost

CLOSING_SECONDS = 0.2  # sampling ends this soon after the engine is closed
MISSED_PROBES = 3  # a server that fails this many health checks in a row while it has open requests counts as lost
# If `watch` wakes up this many seconds late, this process was suspended, and perhaps the server too: the delay does not count.
STOPPED = 1.0


class OpenRequests:
    """The open requests of this client to one server, within one event loop."""

    def __init__(self, server: Server, session: aiohttp.ClientSession) -> None:
        self.server = server
        self.open = 0  # requests that it has not answered
        self._session = session
        self._clock = asyncio.get_running_loop().time
        self._heard = self._clock()  # time of the last response, or of the last moment without open requests
        self._answers = 0

    async def post(self, route: str, body: bytes) -> bytes:
        """Posts one request and returns the body of the response. A repeated request changes nothing, as it has its seed."""
        if not self.open:
            self._heard = self._clock()
        self.open += 1
        try:
            for pause in (*(AGAIN if self.server.again else ()), None):
                status, content = await self.server.ask(self._session, "POST", route, body)
                self._heard = self._clock()
                self._answers += 1
                if pause is None or status not in BUSY:
                    break
                await asyncio.sleep(pause)
            return self.server.checked(route, status, content)
        finally:
            self.open -= 1

    async def watch(self) -> None:
        """Watches the server with health checks, until cancelled.

        Raises ServerLost if the server has open requests and answered none of them for `timeout` seconds, even if it still passes
        its health check, or it failed MISSED_PROBES health checks in a row.
        """
        patience = min(PROBE_SECONDS, self.server.timeout)
        looked, missed, answers = self._clock(), 0, 0
        while True:
            due = max(self._heard, looked) + patience
            await asyncio.sleep(due - self._clock())
            late = self._clock() - due
            self._heard += late if late > STOPPED else 0.0
            if self._answers != answers:
                missed, answers = 0, self._answers
            if not self.open or self._heard + patience > self._clock():
                looked = looked if self.open else self._clock()
                continue
            # A passed health check does not reset `_heard`: a server that only answers health checks counts as lost.
            missed = 0 if await self.server.is_healthy(self._session) else missed + 1
            looked = self._clock()
            if self._answers != answers or not self.open:  # it responded during the health check
                continue
            if missed >= MISSED_PROBES or looked - self._heard >= self.server.timeout:
                silent = f"has {self.open} open requests and has answered none for {looked - self._heard:.0f} s"
                if missed:
                    raise ServerLost(self.server.url, f"{silent}; it fails its health check, too")
                raise ServerLost(
                    self.server.url,
                    f"{silent}; it still passes its health check. Raise engine.timeout if completions may take that long",
                )


T = TypeVar("T")
# Waits for further things to request and returns them; (): no more will come.
More: TypeAlias = Callable[[], Awaitable[Sequence[T]]]
Ask: TypeAlias = Callable[[OpenRequests, T], Awaitable[None]]


class Lines(Generic[T]):
    """The servers of one call of `each`, and which of the things is open on which. Arguments as of `each`."""

    def __init__(
        self,
        lines: Sequence[OpenRequests],
        most: int,
        ask: Ask[T],
        key: Callable[[T], Hashable] | None,
        lost: Callable[[ServerLost], None],
    ) -> None:
        self._left = list(lines)
        self._ask, self._key, self._lost = ask, key, lost
        self._room, self._calls = asyncio.Semaphore(most), asyncio.TaskGroup()
        self._of_key: dict[Hashable, OpenRequests] = {}
        self._open: dict[asyncio.Task[None], tuple[OpenRequests, T]] = {}

    async def ask_all(self, things: Sequence[T], more: More[T] | None) -> None:
        """Requests all things. Raises ServerLost if the last server is lost."""
        async with self._calls:
            for thing in things:
                self._begin(thing)
            while more is not None and (further := await more()):
                for thing in further:
                    self._begin(thing)

    def _begin(self, thing: T) -> None:
        self._calls.create_task(self._request(thing))

    async def _request(self, thing: T) -> None:
        """Requests a thing, and if its server is lost, all that were open there again."""
        task = asyncio.current_task()
        assert task is not None
        async with self._room:
            line = self._line_of(thing)
            self._open[task] = line, thing
            try:
                await self._ask(line, thing)
            except ServerLost as lost:
                self._drop(line, lost)
            finally:
                self._open.pop(task, None)

    async def watch(self, line: OpenRequests) -> None:
        try:
            await line.watch()
        except ServerLost as lost:
            self._drop(line, lost)

    def _line_of(self, thing: T) -> OpenRequests:
        """Returns the server of the thing's key, or else that with the fewest open requests, the first of several."""
        key = None if self._key is None else self._key(thing)
        line = self._of_key.get(key)
        if key is None or line not in self._left:
            line = self._of_key[key] = min(self._left, key=lambda one: one.open)
        return line

    def _drop(self, line: OpenRequests, lost: ServerLost) -> None:
        if line in self._left:
            if len(self._left) == 1:
                raise lost
            self._left.remove(line)
            self._lost(lost)
        for task, (at, thing) in list(self._open.items()):
            if at is line:
                del self._open[task]
                self._begin(thing)
                if task is not asyncio.current_task():
                    task.cancel()


async def each(
    servers: Sequence[Server],
    most: int,
    things: Sequence[T],
    ask: Ask[T],
    *,
    key: Callable[[T], Hashable] | None = None,
    lost: Callable[[ServerLost], None],
    more: More[T] | None = None,
    closed: threading.Event | None = None,
) -> None:
    """Calls `ask` for each of `things`, with a server. When one is lost, others get what it has not answered.

    Args:
        most: maximum of open requests; how many of them run at once is decided by the servers.
        key: of a thing. Things of one key go to one server, whose prefix cache then has what they share; used if `things` have as
            many keys as there are servers, so that none stays idle.
        lost: called with each server that is lost while another is left.
        more: called again and again for further things while the others are being requested, until it returns none.
        closed: ends the calls within CLOSING_SECONDS once it is set.

    Raises the error of the first call that fails, and ServerLost when the last server is lost; the other calls are cancelled.
    """
    if key is not None and len(set(map(key, things))) < len(servers):
        key = None
    async with servers[0].session() as session:
        lines = [OpenRequests(server, session) for server in servers]
        those_left = Lines(lines, most, ask, key, lost)
        failed: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as group:
                watching = [group.create_task(those_left.watch(line)) for line in lines]
                if closed is not None:
                    watching.append(group.create_task(until(closed)))
                await those_left.ask_all(things, more)
                for watch in watching:
                    watch.cancel()
        except BaseExceptionGroup as errors:
            failed = errors
        while isinstance(failed, BaseExceptionGroup):
            failed = failed.exceptions[0]
        if failed is not None:
            raise failed


async def until(closed: threading.Event) -> None:
    """Waits for `closed`, and raises EngineError."""
    while not closed.is_set():
        await asyncio.sleep(CLOSING_SECONDS)
    raise EngineError("the engine was closed while it sampled")
