"""The built-in environments; that of OpenEnv against a local server that speaks as openenv-core 0.3 does."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from aiohttp import web
from helpers.web_app import serving_route
from tool_files import answered, worlds

from rlgen.tools.arena import EnvPool
from rlgen.tools.examples import Calculator, Grid, GuessNumber
from rlgen.worker_pool.failures import Failed

__all__ = ["worlds"]


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
    serving = Server()
    with serving_route("GET", "/ws", serving.session) as port:
        serving.url = f"http://127.0.0.1:{port}"
        yield serving


def test_a_conversation_is_a_session(server: Server, worlds: Callable[..., EnvPool]) -> None:
    arena = worlds("openenv", args={"url": server.url, "action": "add", "observation": "total", "also": {"by": "me"}})
    assert answered(arena.first, {"prompt": "Count.", "seed": 3})["text"] == "Count.\n3"
    one, other = arena.number(), arena.number()
    for talk, seed in ((one, 3), (other, 5)):
        said = answered(arena.begin, talk, {"prompt": "Count.", "seed": seed}, f"Count.\n{seed}", "1")
        assert said == {"text": str(seed + 1), "characters": 1, "reward": 0.5, "done": False}
    assert server.open == 2
    assert answered(arena.step, one, "6") == {"text": "10", "characters": 2, "reward": 0.5, "done": True}
    assert answered(arena.step, other, "1")["text"] == "7"
    arena.end(other)
    arena.close()
    reset = {seed: {"type": "reset", "data": {"seed": seed}} for seed in (3, 5)}
    step = {add: {"type": "step", "data": {"by": "me", "add": add}} for add in ("1", "6")}
    begun = [reset[3], {"type": "close"}, reset[3], step["1"], reset[5], step["1"]]
    assert server.messages[:9] == [*begun, step["6"], {"type": "close"}, step["1"]]


def test_actions_as_json_and_errors(server: Server, worlds: Callable[..., EnvPool]) -> None:
    arena = worlds("openenv", args={"url": server.url})
    talk = arena.number()
    said = answered(arena.begin, talk, {"prompt": "p", "seed": 1}, 'p\n{"total": "1", "by": null}', "add 2")
    assert said["text"].startswith("Error: this is no JSON") and (said["reward"], said["done"]) == (0.0, False)
    assert answered(arena.step, talk, '{"add": "2"}')["text"] == '{"total": "3", "by": null}'
    said = answered(arena.step, talk, '{"sub": 2}')
    assert (said["text"], said["reward"]) == ("Error: this is no action of this environment", 0.0)
    failed = answered(arena.step, talk, '{"add": "x"}')
    assert isinstance(failed, Failed) and "EXECUTION_ERROR: not a number" in failed.message
    failed = answered(worlds("openenv", args={"url": "http://127.0.0.1:9"}).first, {"prompt": "p", "seed": 1})
    assert isinstance(failed, Failed) and "no OpenEnv server answers at http://127.0.0.1:9" in failed.message


def test_guess_number() -> None:
    one = GuessNumber(highest=9, guesses=3)
    one.reset(prompt="", seed=5)
    number = one.number
    assert one.step("hm") == ("say a whole number", 0.0, False)
    low, high = number - 1, number + 1
    assert one.step(f"is it {low}?") == ("higher", 0.0, False)
    assert one.step(f"then {high}") == ("lower", 0.0, True)
    again = GuessNumber(highest=9)
    again.reset(prompt="", seed=5)
    assert again.step(f"{high} or {number}") == ("right", 1.0, True)


def test_grid() -> None:
    one = Grid(size=3, steps=20)
    first = one.reset(prompt="Go.", seed=1)
    (x, y), (to_x, to_y) = one.at, one.goal
    assert first == f"Go.\nYou are at {x},{y}. The goal is at {to_x},{to_y}."
    assert one.step("hm") == ("say up, down, left or right", 0.0, False)
    moves = ["right" if to_x > x else "left"] * abs(to_x - x) + ["up" if to_y > y else "down"] * abs(to_y - y)
    said = [one.step(f"I go {move.upper()}.") for move in moves]
    assert said[-1] == ("there", 1.0, True) and all(reward == 0.0 and not done for _, reward, done in said[:-1])
    edge = Grid(size=2, steps=1)
    edge.reset(prompt="", seed=1)
    edge.at, edge.goal = (0, 0), (1, 1)
    assert edge.step("left") == ("You are at 0,0.", 0.0, True)


def test_calculator() -> None:
    one = Calculator(uses=3)
    one.reset(prompt="37*52=", answer=1924)
    assert one.demonstrate() == "37*52?"
    assert one.step("37*52?") == ("1924", 0.0, False)
    assert one.step("(1+2)/4 = ?") == ("3/4", 0.0, False)
    assert one.step(" 1924 ") == ("", 1.0, True) and one.step("192") == ("", 0.0, True)
    assert one.step("9**9**9?") == ("error", 0.0, True)
