"""Adds a route to a vLLM server that returns arrays: ids in, ids and log-probs out, without an object or text per token.

vLLM's own route creates an object and about 140 bytes of JSON for each token, in the one process that serves all requests.
"""

import asyncio
import itertools
import json
import logging
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from rlgen.engines import vllm_compat
from rlgen.engines.answer import ARRAYS, ROUTE, Labelled, packed

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

log = logging.getLogger("vllm.rlgen.arrays")  # a child of vLLM's logger, so that records go to the server's log


class Asked(msgspec.Struct):
    """The body of a request; the fields are those of vLLM's own route."""

    token_ids: list[int]
    sampling_params: dict[str, Any]
    cache_salt: str


ASKED = msgspec.json.Decoder(Asked)


class Arrays:
    """ASGI middleware inside `rlgen.engines.gate.Gate`: handles POST /rlgen/generate and passes all other requests on."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._numbers = itertools.count()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handles one request. If the client disconnects, the engine aborts the request."""
        if scope["type"] != "http" or scope["path"] != ROUTE:
            await self._app(scope, receive, send)
        elif scope["method"] != "POST":
            await reply(send, 405, b"{}")
        else:
            body = await whole_body(receive)
            answering = asyncio.ensure_future(self._answer(scope["app"].state.engine_client, body))
            leaving = asyncio.ensure_future(gone(receive))
            try:
                await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if answering.done():
                    await reply(send, *answering.result())
            finally:
                for task in (answering, leaving):
                    task.cancel()  # the engine aborts a cancelled request
                await asyncio.gather(answering, leaving, return_exceptions=True)

    async def _answer(self, engine: Any, body: bytes) -> tuple[int, bytes]:
        """Samples one completion and returns the HTTP status and the body: 400 for an invalid request, 500 for a failure."""
        try:
            asked = ASKED.decode(body)
            prompt = {"prompt_token_ids": asked.token_ids, "cache_salt": asked.cache_salt}
            request_id = f"rlgen-{os.getpid()}-{next(self._numbers)}"
            output = await vllm_compat.completed(engine, prompt, asked.sampling_params, request_id)
            answer = output.outputs[0]
            spans = [Labelled(span.version, span.start, span.end) for span in answer.weight_versions or ()]
            return 200, packed(
                output.prompt_token_ids,
                answer.token_ids,
                answer.logprobs.logprobs,
                answer.finish_reason,
                spans,
                output.num_cached_tokens or 0,
            )
        except Exception as error:  # of any class; vLLM itself ends a server whose engine is dead
            if isinstance(error, msgspec.MsgspecError) or vllm_compat.is_refusal(error):
                return 400, words(error)
            log.exception("%s failed", ROUTE)
            return 500, words(error)


def words(error: Exception) -> bytes:
    """Returns the JSON body of an error response."""
    return json.dumps({"error": {"message": f"{type(error).__name__}: {error}"}}).encode()


async def whole_body(receive: Receive) -> bytes:
    """Receives and returns the whole body of a request."""
    parts: list[bytes] = []
    more = True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message["type"] == "http.request" and message.get("more_body", False)
    return b"".join(parts)


async def gone(receive: Receive) -> None:
    """Returns when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def reply(send: Send, status: int, body: bytes) -> None:
    """Sends a complete response."""
    kind = ARRAYS if status == 200 else "application/json"
    headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
