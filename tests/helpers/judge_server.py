"""An OpenAI-compatible server in a thread, which answers, fails, is slow or goes away as a test says."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from helpers.web_app import serving_route

HANG = object()  # no answer at all
Answer = Any  # a text; (status, text) or (status, text, headers); HANG


@dataclass
class JudgeServer:
    """What was asked, and what is answered."""

    answer: Callable[[str], Answer]  # to the question, which is the last message
    port: int = 0
    tokens: int = 10  # of each answer, as it says
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def questions(self) -> list[str]:
        return [body["messages"][-1]["content"] for body in self.bodies]

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization"))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(0.02)
            said = self.answer(body["messages"][-1]["content"])
            if said is HANG:
                await asyncio.sleep(100_000)
        finally:
            self.at_once -= 1
        if isinstance(said, tuple):
            return web.Response(status=said[0], text=said[1], headers=said[2] if len(said) > 2 else None)
        message = {"role": "assistant", "content": said}
        return web.json_response(
            {"choices": [{"message": message, "finish_reason": "stop"}], "usage": {"total_tokens": self.tokens}}
        )


@contextmanager
def serving(answer: Callable[[str], Answer], port: int = 0) -> Iterator[JudgeServer]:
    """Yields a server that runs until the block ends."""
    judge = JudgeServer(answer)
    with serving_route("POST", "/v1/chat/completions", judge.chat, port) as judge.port:
        yield judge


def lines_of(path: Any) -> list[dict[str, Any]]:
    """The records in a file of answers."""
    return [json.loads(line) for line in path.read_text().splitlines() if line]
