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
    """The servers of one call of `each`, and which of the things is open on which.

    Args:
        key: of a thing. Things of one key go to one server, whose prefix cache then has what they share.
        lost: called with each server that is lost while another is left.
    """

    def __init__(
        self, lines: Sequence[OpenRequests], key: Callable[[T], Hashable] | None, lost: Callable[[ServerLost], None]
    ) -> None:
        self._left = list(lines)
        self._key, self._lost = key, lost
        self._of_key: dict[Hashable, OpenRequests] = {}
        self._open: dict[asyncio.Task[None], tuple[OpenRequests, T]] = {}

    async def ask(self, ask: Ask[T], thing: T, again: Callable[[T], object]) -> None:
        """Requests a thing. If its server is lost, calls `again` with all that were open there.

        Raises ServerLost if it was the last server.
        """
        task = asyncio.current_task()
        assert task is not None
        line = self._line_of(thing)
        self._open[task] = line, thing
        try:
            await ask(line, thing)
        except ServerLost as lost:
            self._drop(line, lost, again)
        finally:
            self._open.pop(task, None)

    async def watch(self, line: OpenRequests, again: Callable[[T], object]) -> None:
        try:
            await line.watch()
        except ServerLost as lost:
            self._drop(line, lost, again)

    def _line_of(self, thing: T) -> OpenRequests:
        """Returns the server of the thing's key, or else that with the fewest open requests, the first of several."""
        key = None if self._key is None else self._key(thing)
        line = self._of_key.get(key)
        if key is None or line not in self._left:
            line = self._of_key[key] = min(self._left, key=lambda one: one.open)
        return line

    def _drop(self, line: OpenRequests, lost: ServerLost, again: Callable[[T], object]) -> None:
        if line in self._left:
            if len(self._left) == 1:
                raise lost
            self._left.remove(line)
            self._lost(lost)
        for task, (at, thing) in list(self._open.items()):
            if at is line:
                del self._open[task]
                again(thing)
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
        key: see `Lines`; used if `things` have as many keys as there are servers, so that none stays idle.
        lost: called with each server that is lost while another is left.
        more: called again and again for further things while the others are being requested, until it returns none.
        closed: ends the calls within CLOSING_SECONDS once it is set.

    Raises the error of the first call that fails, and ServerLost when the last server is lost; the other calls are cancelled.
    """
    room = asyncio.Semaphore(most)
    if key is not None and len(set(map(key, things))) < len(servers):
        key = None
    async with servers[0].session() as session:
        lines = [OpenRequests(server, session) for server in servers]
        those_left = Lines(lines, key, lost)
        calls = asyncio.TaskGroup()

        def begin(thing: T) -> None:
            calls.create_task(one(thing))

        async def one(thing: T) -> None:
            async with room:
                await those_left.ask(ask, thing, begin)

        async def all_of_them() -> None:
            async with calls:
                for thing in things:
                    begin(thing)
                while more is not None and (further := await more()):
                    for thing in further:
                        begin(thing)

        failed: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as group:
                watching = [group.create_task(those_left.watch(line, begin)) for line in lines]
                if closed is not None:
                    watching.append(group.create_task(until(closed)))
                await all_of_them()
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
