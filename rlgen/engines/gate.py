"""The door of a vLLM server: nothing behind it answers without the token."""

import hmac
import logging
import os
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from rlgen.errors import SetupError

TOKEN_VARIABLE = "RLGEN_SERVER_TOKEN"
QUIET = 10.0  # seconds between two lines about refusals

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

log = logging.getLogger("vllm.rlgen.gate")  # below vLLM's logger, so that it lands in the server's log


class Gate:
    """ASGI middleware for `vllm --middleware rlgen.engines.gate.Gate`: `Authorization: Bearer TOKEN`, on every route.

    vLLM's own `--api-key` guards only some prefixes; routes that load weights or run methods stand open beside them.

    Raises:
        SetupError: the environment variable RLGEN_SERVER_TOKEN is not set.
    """

    def __init__(self, app: App) -> None:
        token = os.environ.get(TOKEN_VARIABLE)
        if not token:
            raise SetupError(f"{TOKEN_VARIABLE} is not set: the server would be open to everyone; set it to a long secret")
        self._app = app
        self._expected = f"Bearer {token}".encode()
        self._refused, self._told = 0, 0.0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._admits(scope):
            await self._app(scope, receive, send)
            return
        self._tell(scope)
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer"), (b"content-length", b"13")]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"detail":""}'})

    def _admits(self, scope: Message) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)

    def _tell(self, scope: Message) -> None:
        self._refused += 1
        if time.monotonic() - self._told >= QUIET:
            who = (scope.get("client") or ["unknown"])[0]
            log.warning("%d requests refused without the token, the last from %s to %r", self._refused, who, scope["path"])
            self._refused, self._told = 0, time.monotonic()
