"""Protects a vLLM server: every request without the token is refused."""

import hmac
import logging
import os
import time

from rlgen.engines.arrays import App, Arrays, Message, Receive, Send
from rlgen.errors import SetupError

TOKEN_VARIABLE = "RLGEN_SERVER_TOKEN"
PLAN_VARIABLE = "RLGEN_ENGINE_PLAN"  # digest of the plan that a server was started with
QUIET = 10.0  # seconds between two log lines about refused requests

log = logging.getLogger("vllm.rlgen.gate")  # a child of vLLM's logger, so that records go to the server's log


class Gate:
    """ASGI middleware for `vllm --middleware rlgen.engines.gate.Gate`: requires `Authorization: Bearer TOKEN` on every route.

    vLLM's own `--api-key` protects only some path prefixes; routes that load weights or run methods stay open. The middleware
    also adds one route, see `rlgen.engines.arrays`.

    Raises:
        SetupError: the environment variable RLGEN_SERVER_TOKEN is not set.
    """

    def __init__(self, app: App) -> None:
        token = os.environ.get(TOKEN_VARIABLE)
        if not token:
            raise SetupError(f"{TOKEN_VARIABLE} is not set: the server would be open to everyone; set it to a long secret")
        self._app = Arrays(app)
        self._expected = f"Bearer {token}".encode()
        self._refused, self._told = 0, 0.0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Passes on a request with the token; refuses any other with status 401, or closes its websocket."""
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
        """Returns whether the request has exactly one Authorization header, with the right token."""
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)

    def _tell(self, scope: Message) -> None:
        """Counts a refused request and logs the count, at most once in QUIET seconds."""
        self._refused += 1
        if time.monotonic() - self._told >= QUIET:
            who = (scope.get("client") or ["unknown"])[0]
            log.warning("%d requests refused without the token, the last from %s to %r", self._refused, who, scope["path"])
            self._refused, self._told = 0, time.monotonic()
