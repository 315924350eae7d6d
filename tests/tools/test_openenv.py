"""The client of OpenEnv servers, against a local server that speaks as openenv-core 0.3 does."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import pytest
from aiohttp import web
from helpers.waiting import HANGS

from rlgen.recipe.models import EnvironmentRecipe, ScoringRecipe
from rlgen.tools.arena import EnvPool, open_arena
from rlgen.worker_pool.failures import Failed


class Server:
    """Adds up numbers that it is told, in each session, and is done at 10 or more."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.open = 0
        self.url = ""

    async def session(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.open, total = self.open + 1, 0
        async for raw in socket:
            message = raw.json()
            self.messages.append(message)
            data = message.get("data", {})
            if message["type"] == "close":
                break
            if message["type"] == "step" and not data.get("add", "x").isdigit():
                said = ("not a number", "EXECUTION_ERROR") if "add" in data else ("no add", "VALIDATION_ERROR")
                await socket.send_json({"type": "error", "data": {"message": said[0], "code": said[1]}})
                continue
            total = data["seed"] if message["type"] == "reset" else total + int(data["add"])
            reward = None if message["type"] == "reset" else 0.5
            found = {"observation": {"total": str(total), "by": data.get("by")}, "reward": reward, "done": total >= 10}
            await socket.send_json({"type": "observation", "data": found})
        self.open -= 1
        return socket


@pytest.fixture
def server() -> Iterator[Server]:
    serving, loop, ready = Server(), asyncio.new_event_loop(), threading.Event()

    async def run() -> None:
        app = web.Application()
        app.router.add_get("/ws", serving.session)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        serving.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()

    def serve() -> None:
        loop.run_until_complete(run())
        loop.run_forever()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert ready.wait(HANGS)
    yield serving
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


@pytest.fixture
def opened() -> Iterator[Callable[..., EnvPool]]:
    with ExitStack() as undo:

        def make(url: str, **args: Any) -> EnvPool:
            settings = EnvironmentRecipe(use="openenv", args={"url": url, **args}, timeout=HANGS)
            arena = open_arena(settings, ScoringRecipe(workers=1))
            undo.callback(arena.close)
            return arena

        yield make


def told(ask: Callable[..., None], *given: Any) -> Any:
    came = Future[Any]()
    ask(*given, came.set_result)
    return came.result(HANGS)


def test_a_conversation_is_a_session(server: Server, opened: Callable[..., EnvPool]) -> None:
    arena = opened(server.url, action="add", observation="total", also={"by": "me"})
    assert told(arena.first, {"prompt": "Count.", "seed": 3})["text"] == "Count.\n3"
    one, other = arena.number(), arena.number()
    for talk, seed in ((one, 3), (other, 5)):
        said = told(arena.begin, talk, {"prompt": "Count.", "seed": seed}, f"Count.\n{seed}", "1")
        assert said == {"text": str(seed + 1), "characters": 1, "reward": 0.5, "done": False}
    assert server.open == 2
    assert told(arena.step, one, "6") == {"text": "10", "characters": 2, "reward": 0.5, "done": True}
    assert told(arena.step, other, "1")["text"] == "7"
    arena.end(other)
    arena.close()
    reset = {seed: {"type": "reset", "data": {"seed": seed}} for seed in (3, 5)}
    step = {add: {"type": "step", "data": {"by": "me", "add": add}} for add in ("1", "6")}
    begun = [reset[3], {"type": "close"}, reset[3], step["1"], reset[5], step["1"]]
    assert server.messages[:9] == [*begun, step["6"], {"type": "close"}, step["1"]]


def test_actions_as_json_and_errors(server: Server, opened: Callable[..., EnvPool]) -> None:
    arena = opened(server.url)
    talk = arena.number()
    said = told(arena.begin, talk, {"prompt": "p", "seed": 1}, 'p\n{"total": "1", "by": null}', "add 2")
    assert said["text"].startswith("Error: this is no JSON") and (said["reward"], said["done"]) == (0.0, False)
    assert told(arena.step, talk, '{"add": "2"}')["text"] == '{"total": "3", "by": null}'
    said = told(arena.step, talk, '{"sub": 2}')
    assert (said["text"], said["reward"]) == ("Error: this is no action of this environment", 0.0)
    failed = told(arena.step, talk, '{"add": "x"}')
    assert isinstance(failed, Failed) and "EXECUTION_ERROR: not a number" in failed.message
    failed = told(opened("http://127.0.0.1:9").first, {"prompt": "p", "seed": 1})
    assert isinstance(failed, Failed) and "no OpenEnv server answers at http://127.0.0.1:9" in failed.message
