"""An aiohttp server in a thread."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from aiohttp import web


@contextmanager
def serving_route(
    method: str, path: str, handler: Callable[[web.Request], Awaitable[web.StreamResponse]], port: int = 0
) -> Iterator[int]:
    """Yields the port of a server with one route, which runs until the block ends."""
    loop = asyncio.new_event_loop()

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_route(method, path, handler)
        runner = web.AppRunner(app, shutdown_timeout=0.01)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        return runner

    runner = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield runner.addresses[0][1]
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
