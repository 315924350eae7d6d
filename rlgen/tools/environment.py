"""Imports the class that `environment` names, and leads its conversations. Runs in a worker.

An object of the class is one conversation. Its methods are called in threads, so that one that waits holds up no other.
"""

import asyncio
import inspect
import json
import math
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any, ClassVar

from rlgen.errors import ToolError
from rlgen.tools.examples import ENVIRONMENTS
from rlgen.worker_pool.failures import failure_of, short_repr
from rlgen.worker_pool.find import find_function, function_facts
from rlgen.worker_pool.source import FunctionSource, Loaded, Trade

LEAVES_AFTER = 1.0  # seconds without a conversation after which a process that may hold a hanging call ends
ENVIRONMENT = Trade("environment", "environment", ToolError)


@dataclass(frozen=True, slots=True)
class EnvironmentSource(FunctionSource):
    args: dict[str, Any]  # of the recipe
    trade: ClassVar[Trade] = ENVIRONMENT

    def load(self) -> Loaded:
        make, sha256 = (ENVIRONMENTS[self.use], None) if self.use in ENVIRONMENTS else find_function(self.use, ENVIRONMENT)
        for method in ("reset", "step"):
            if not callable(getattr(make, method, None)):
                raise ToolError(f"environment: {self.use} is not a class with a method `{method}`; see `rlgen docs environments`")
        facts = function_facts(self.use, make, sha256, ENVIRONMENT)
        parameters = [name for name, _, _ in facts.parameters]
        takes_all = any(kind == "VAR_KEYWORD" for _, kind, _ in facts.parameters)
        if not takes_all and (unknown := sorted(set(self.args) - set(parameters))):
            named = ", ".join(parameters) or "none"
            raise ToolError(f"environment: {self.use} has no parameter `{unknown[0]}`, which args gives; it has {named}")
        facts = replace(facts, is_async=True)  # its calls share one process, as those of async functions do
        return Loaded(facts, OpenConversations(partial(make, **self.args)).lead, cut_text, partial(failure_of, file=facts.file))


class OpenConversations:
    """The conversations of an environment in this process."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._talks: dict[int, Any] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._hung = False  # a thread of a call that took too long may still run

    async def lead(
        self,
        talk: int,
        begin: dict[str, Any] | None = None,
        expected: str | None = None,
        message: str | None = None,
        demonstrate: bool = False,
    ) -> dict[str, Any]:
        """Begins a conversation, answers a message in it, or does both. With neither, it ends.

        Args:
            talk: number of the conversation.
            begin: what `reset` may take, by name.
            expected: what `reset` returned for the same row when the prompt was made.
            message: of the model.
            demonstrate: the environment itself gives a good first message; the conversation ends with the answer to it.

        Returns:
            {"text": what the model reads, "reward": 0.5, "done": false}; of `reset` alone {"text": its text, or None}.
            With `demonstrate` also the first message, as "said".

        Raises:
            Exception: whatever the environment raises; ValueError for an invalid return value. The conversation has then ended.
        """
        try:
            text = None
            if begin is not None:
                self._talks[talk] = None
                one = self._talks[talk] = await call_in_thread(self._make)
                text = observation(await call_in_thread(one.reset, **taken(one.reset, begin)), "reset")
                if message is not None and text != expected:
                    raise ValueError(
                        f"reset returned {short_repr(text)}, but {short_repr(expected)} when the prompt was made: completions of"
                        " one prompt must begin alike; derive all randomness from `seed`"
                    )
            if demonstrate:
                said = str(await call_in_thread(self._talks[talk].demonstrate))
                answer = checked_step(await call_in_thread(self._talks[talk].step, said)) | {"said": said}
            elif message is None:
                answer = {"text": text}
            elif talk in self._talks:
                answer = checked_step(await call_in_thread(self._talks[talk].step, message))
            else:
                raise RuntimeError("the process that held the state of this conversation has ended")
        except BaseException as error:
            self._hung = self._hung or isinstance(error, asyncio.CancelledError)  # at its timeout
            closing = asyncio.create_task(self._end(talk))  # nobody waits for it: there is no time left
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            raise
        if demonstrate or answer.get("done", True):
            await self._end(talk)
        return answer

    async def _end(self, talk: int) -> None:
        """Forgets a conversation, and closes it. Once none is left, the process ends if a call may still run: the next one starts
        another.
        """
        one = self._talks.pop(talk, None)
        if self._hung and not self._talks:
            leaves = threading.Timer(LEAVES_AFTER, self._leave)  # the loop stands still between steps
            leaves.daemon = True
            leaves.start()
        close = getattr(one, "close", None)
        if callable(close):
            with suppress(Exception):  # the conversation is over, so an error in `close` changes nothing
                await call_in_thread(close)

    def _leave(self) -> None:
        if not self._talks:
            os._exit(0)


def cut_text(answer: dict[str, Any], size: int | None) -> dict[str, Any]:
    text = answer.get("text")
    return answer | ({"text": text[:size], "characters": len(text)} if text is not None else {})


def taken(method: Callable[..., Any], available: dict[str, Any]) -> dict[str, Any]:
    """Returns those of `available` that a method takes by name."""
    parameters = inspect.signature(method).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return available
    return {one.name: available[one.name] for one in parameters if one.name in available}


async def call_in_thread(function: Callable[..., Any], /, *given: Any, **named: Any) -> Any:
    """Calls a function in a thread of its own, or an async one in the loop, and returns what it returns."""
    if inspect.iscoroutinefunction(function):
        return await function(*given, **named)
    came: Future[tuple[Any, BaseException | None]] = Future()
    came.set_running_or_notify_cancel()  # at a timeout the thread goes on, and its result is dropped

    def run() -> None:
        try:
            came.set_result((function(*given, **named), None))
        except BaseException as error:  # user code may raise anything, StopIteration too, which no future takes
            came.set_result((None, error))

    threading.Thread(target=run, name="environment", daemon=True).start()
    result, error = await asyncio.wrap_future(came)
    if error is not None:
        raise error
    return result


def observation(value: Any, method: str) -> str | None:
    if value is None and method == "reset":
        return None
    if isinstance(value, tuple) and method == "reset" and len(value) == 2 and isinstance(value[1], dict):  # as Gymnasium has it
        raise ValueError(f"reset returned {short_repr(value)}; return the observation alone")
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{method} returned {short_repr(value)}, but an observation is a text or a JSON value") from error
    return text.encode("utf-8", "replace").decode()


def checked_step(value: Any) -> dict[str, Any]:
    if not isinstance(value, tuple | list) or len(value) != 3:
        raise ValueError(f"step returned {short_repr(value)}, not (observation, reward, done)")
    text, reward, done = value
    if not isinstance(reward, Real) or not math.isfinite(reward):  # numpy's numbers, too
        raise ValueError(f"step returned the reward {short_repr(reward)}; a reward is a finite number")
    if type(done).__name__ not in ("bool", "bool_"):  # Python's, and those of numpy
        raise ValueError(f"step returned {short_repr(done)} as done; done is True or False")
    return {"text": "" if done and text is None else observation(text, "step"), "reward": float(reward), "done": bool(done)}
