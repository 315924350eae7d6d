"""Sends many requests to servers at once, at a cost per request that does not grow with their number."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias, TypeVar

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


async def each(
    servers: Sequence[Server],
    most: int,
    things: Sequence[T],
    ask: Callable[[OpenRequests, T], Awaitable[None]],
    more: More[T] | None = None,
    closed: threading.Event | None = None,
) -> None:
    """Calls `ask` for each of `things`, with the server that has the fewest open requests of this client, the first of several.

    Args:
        most: maximum of open requests; how many of them run at once is decided by the servers.
        more: called again and again for further things while the others are being requested, until it returns none.
        closed: ends the calls within CLOSING_SECONDS once it is set.

    Raises the error of the first call that fails; the others are cancelled.
    """
    room = asyncio.Semaphore(most)
    async with servers[0].session() as session:
        lines = [OpenRequests(server, session) for server in servers]

        async def one(thing: T) -> None:
            async with room:
                await ask(min(lines, key=lambda line: line.open), thing)

        async def all_of_them() -> None:
            async with asyncio.TaskGroup() as calls:
                for thing in things:
                    calls.create_task(one(thing))
                while more is not None and (further := await more()):
                    for thing in further:
                        calls.create_task(one(thing))

        failed: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as group:
                watching = [group.create_task(line.watch()) for line in lines]
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
