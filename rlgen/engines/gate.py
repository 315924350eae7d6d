"""Protects a vLLM server, where every request without the token is refused, and adds a route that returns arrays.

vLLM's own route creates an object and about 140 bytes of JSON for each token, in the one process that serves all requests.
"""

import asyncio
import hmac
import itertools
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from rlgen.engines import vllm_compat
from rlgen.engines.answer import ARRAYS, ROUTE, Labelled, ServerAnswer
from rlgen.errors import SetupError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

TOKEN_VARIABLE = "RLGEN_SERVER_TOKEN"
PLAN_VARIABLE = "RLGEN_ENGINE_PLAN"  # digest of the plan that a server was started with
QUIET = 10.0  # seconds between two log lines about refused requests

log = logging.getLogger("vllm.rlgen.gate")  # a child of vLLM's logger, so that records go to the server's log


class Gate:
    """ASGI middleware for `vllm --middleware rlgen.engines.gate.Gate`: requires `Authorization: Bearer TOKEN` on every route.

    vLLM's own `--api-key` protects only some path prefixes; routes that load weights or run methods stay open. The middleware
    also adds one route, see `respond_with_arrays`. Raises SetupError if the environment variable RLGEN_SERVER_TOKEN is not set.
    """

    def __init__(self, app: App) -> None:
        token = os.environ.get(TOKEN_VARIABLE)
        if not token:
            raise SetupError(f"{TOKEN_VARIABLE} is not set: the server would be open to everyone; set it to a long secret")
        self._app = app
        self._expected = f"Bearer {token}".encode()
        self._refused, self._told = 0, 0.0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan" and not self._admits(scope):
            await self._refuse(scope, send)
        elif scope["type"] == "http" and scope["path"] == ROUTE:
            await respond_with_arrays(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _admits(self, scope: Message) -> bool:
        """Returns whether the request has exactly one Authorization header, with the right token."""
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)

    async def _refuse(self, scope: Message, send: Send) -> None:
        """Sends status 401, or closes a websocket. Logs how many requests were refused, at most once in QUIET seconds."""
        self._refused += 1
        if time.monotonic() - self._told >= QUIET:
            who = (scope.get("client") or ["unknown"])[0]
            log.warning("%d requests refused without the token, the last from %s to %r", self._refused, who, scope["path"])
            self._refused, self._told = 0, time.monotonic()
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await reply(send, 401, b'{"detail":""}', (b"www-authenticate", b"Bearer"))


class Asked(msgspec.Struct):
    """The body of a request, with the fields of vLLM's own route."""

    token_ids: list[int]
    sampling_params: dict[str, Any]
    cache_salt: str


ASKED = msgspec.json.Decoder(Asked)
NUMBERS = itertools.count()  # of requests, for their ids


async def respond_with_arrays(scope: Message, receive: Receive, send: Send) -> None:
    """Handles a request to rlgen's route. If the client disconnects, the engine aborts the request."""
    if scope["method"] != "POST":
        await reply(send, 405, b"{}")
        return
    body = await whole_body(receive)
    answering = asyncio.ensure_future(answered(scope["app"].state.engine_client, body))
    leaving = asyncio.ensure_future(gone(receive))
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            await reply(send, *answering.result())
    finally:
        for task in (answering, leaving):
            task.cancel()  # the engine aborts a cancelled request
        await asyncio.gather(answering, leaving, return_exceptions=True)


async def answered(engine: Any, body: bytes) -> tuple[int, bytes]:
    """Samples one completion and returns the HTTP status and the body: 400 for an invalid request, 500 for a failure."""
    try:
        asked = ASKED.decode(body)
        prompt = {"prompt_token_ids": asked.token_ids, "cache_salt": asked.cache_salt}
        request_id = f"rlgen-{os.getpid()}-{next(NUMBERS)}"
        output = await vllm_compat.completed(engine, prompt, asked.sampling_params, request_id)
        answer = output.outputs[0]
        spans = [Labelled(span.version, span.start, span.end) for span in answer.weight_versions or ()]
        ids, logp, cached = answer.token_ids, answer.logprobs.logprobs, output.num_cached_tokens or 0
        told = ServerAnswer.of(output.prompt_token_ids, ids, logp, answer.finish_reason, spans, cached, answer.routed_experts)
        return 200, told.packed()
    except Exception as error:  # of any class; vLLM itself ends a server whose engine is dead
        refused = isinstance(error, msgspec.MsgspecError) or vllm_compat.is_refusal(error)
        if not refused:
            log.exception("%s failed", ROUTE)
        message = {"message": f"{type(error).__name__}: {error}"}
        return 400 if refused else 500, json.dumps({"error": message}).encode()


async def whole_body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    more = True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message["type"] == "http.request" and message.get("more_body", False)
    return b"".join(parts)


async def gone(receive: Receive) -> None:
    """Waits until the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def reply(send: Send, status: int, body: bytes, *more: tuple[bytes, bytes]) -> None:
    """Sends a complete response, with `more` headers."""
    kind = ARRAYS if status == 200 else "application/json"
    headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode()), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
