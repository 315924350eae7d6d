"""Calls one vLLM server over HTTP, always with a timeout.

A call raises ServerLost if the server is gone, hangs, or fails with a status of 500 or more, and EngineError if it refuses.

Why not `HTTPVLLMWeightSyncClient` of vLLM: it has five of these calls, from version 0.29, and none is async.
"""

import asyncio
import resource
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from rlgen.engines.answer import JSON_ROUTE, ROUTE
from rlgen.engines.base import EngineInfo, SyncReport
from rlgen.errors import EngineError, ServerLost

ANSWER_SECONDS = 30.0  # timeout of a request that needs no computing
PROBE_SECONDS = 5.0  # timeout of a health check
KEPT_SECONDS = 1.0  # idle connections are closed before vLLM closes them after 5 s, so that no request is sent on a closed one
MOST_FILES = 1 << 16

# The routes that rlgen uses, and how to start a server that has them.
DEV_MODE = "VLLM_SERVER_DEV_MODE=1 in its environment"
FLAGS = {
    JSON_ROUTE: "--enable-scale-out",
    **dict.fromkeys(("/collective_rpc", "/reset_prefix_cache", "/pause", "/resume"), DEV_MODE),
    "/update_weight_version": f"{DEV_MODE} and vLLM 0.32 or newer",
}
BUSY = (429, 500, 502, 503)  # statuses of a server, or of a proxy in front of it, that may pass within seconds
AGAIN = (0.5, 1.0, 2.0, 4.0, 8.0)  # seconds between attempts
NOT_OURS = (
    "the server's workers are not rlgen's; start it with --worker-extension-cls rlgen.engines.worker.Worker, or by `rlgen serve`"
)


class WeightsKept(EngineError):
    """Weights that were refused before any was loaded: the server still has the ones it had."""


class Server:
    """The HTTP client of the server at `url`.

    Args:
        timeout: seconds without any response after which a server with open requests counts as lost.
        again: whether a request is sent again when the server is busy or fails, see `AGAIN`. For a server that somebody else
            runs: the proxy in front of it may fail for a moment. A server that rlgen started is restarted instead.
    """

    def __init__(self, url: str, token: str, timeout: float, again: bool = False) -> None:
        self.url = url.rstrip("/")
        self.again = again
        self.timeout = timeout
        self.arrays = False  # whether the server has rlgen's route, which returns arrays; set by `look`
        self._token = token
        self._soon = min(ANSWER_SECONDS, timeout)

    def like(self, url: str, arrays: bool) -> "Server":
        """Returns a server of the same run, at `url`."""
        other = Server(url, self._token, self.timeout, self.again)
        other.arrays = arrays
        return other

    def session(self) -> aiohttp.ClientSession:
        """Returns a client session of the running event loop. It sets no limit of connections, and uses no proxy."""
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_SECONDS),
            headers={"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"},
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )

    async def ask(
        self, session: aiohttp.ClientSession, method: str, route: str, body: bytes | None, timeout: float | None = None
    ) -> tuple[int, bytes]:
        """Sends one request and returns status and body of the response. Raises ServerLost if there is none.

        Without `timeout`, in seconds, the caller must detect a server that hangs.
        """
        limit = aiohttp.ClientTimeout(total=timeout)
        try:
            async with session.request(method, self.url + route, data=body, timeout=limit, allow_redirects=False) as answer:
                return answer.status, await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self.lost(route, error, timeout or self.timeout) from error

    def call(self, method: str, route: str, body: Mapping[str, Any] | None = None, timeout: float | None = None) -> Any:
        """Sends one request and returns the JSON of the response. Must not be called inside an event loop.

        Without `timeout`, in seconds, there is the short limit for a request that needs no computing.
        """
        raw = None if body is None else msgspec.json.encode(body)
        content = self.checked(route, *self._reply(method, route, raw, timeout or self._soon))
        return msgspec.json.decode(content) if content else None

    def _reply(self, method: str, route: str, body: bytes | None, timeout: float) -> tuple[int, bytes]:
        """Does as `ask`, in an event loop and a session of its own."""

        async def ask() -> tuple[int, bytes]:
            async with self.session() as session:
                return await self.ask(session, method, route, body, timeout)

        return asyncio.run(ask())

    def rpc(self, method: str, timeout: float, **arguments: Any) -> list[dict[str, Any]]:
        """Calls `method` of `rlgen.engines.worker.Worker` on every worker of the server and returns one object per worker.

        Raises WeightsKept if every worker refused what it was sent before it changed anything.
        """
        body = {"method": method, "kwargs": arguments}
        results = self.call("POST", "/collective_rpc", body, timeout)["results"]
        if not all(isinstance(result, dict) for result in results):
            raise EngineError(f"{self.url}: {NOT_OURS}")
        for result in results:
            if "error" in result:
                kept = all(other.get("intact") for other in results)
                raise (WeightsKept if kept else EngineError)(f"{self.url}: {result['error']}")
        return list(results)

    def require(self) -> None:
        """Raises EngineError unless the server has every route that rlgen uses."""
        for route in FLAGS:
            # A route for POST responds to GET with 405. JSON_ROUTE exists even if it is disabled; it then rejects an empty POST
            # with another status than 400 or 422.
            method, present = ("POST", (400, 422)) if route == JSON_ROUTE else ("GET", (405,))
            status, body = self._reply(method, route, b"{}", self._soon)
            if status not in present:
                self.checked(route, status, body)

    def look(self, needs_token: bool = True) -> None:
        """Sets `arrays`: whether the server has rlgen's own route, which comes with the gate."""
        status, body = self._reply("GET", ROUTE, None, self._soon)
        if status == 401 and needs_token:
            self.checked(ROUTE, status, body)
        self.arrays = status == 405

    def health(self) -> int:
        """Returns the status of its health check, in an event loop of its own; 0: no answer within PROBE_SECONDS."""
        try:
            return self._reply("GET", "/health", None, PROBE_SECONDS)[0]
        except ServerLost:
            return 0

    async def is_healthy(self, session: aiohttp.ClientSession) -> bool:
        """Returns whether the server passes its health check within PROBE_SECONDS."""
        try:
            return (await self.ask(session, "GET", "/health", None, PROBE_SECONDS))[0] == 200
        except ServerLost:
            return False

    def facts(self) -> tuple[EngineInfo, dict[str, Any]]:
        """Returns the description of the server's engine, and the shape of its model (see `model_shape`)."""
        told = self.rpc("rlgen_facts", self._soon)[0]
        try:
            return msgspec.convert(told, EngineInfo), told["shape"]
        except (msgspec.ValidationError, KeyError) as error:
            raise EngineError(f"{self.url} has another version of rlgen than this run ({error}); install one on both") from error

    def load(self, folder: str, version: int, hashed: bool) -> SyncReport:
        """Makes every worker load the weights in `folder`. Raises WeightsKept if the files cannot be loaded."""
        heard = self.rpc("rlgen_load", self.timeout, path=folder, version=version, hashed=hashed)
        return report_of(self.url, heard, version)

    def label(self) -> str:
        """Returns the server's label of its weights, such as `RUN.VERSION`."""
        return str(self.call("GET", "/weight_info")["weight_version"])

    def set_label(self, label: str) -> None:
        self.call("POST", "/update_weight_version", {"new_version": label})

    def reset_cache(self) -> None:
        """Empties the prefix cache; activations of running requests are computed again. Raises EngineError if that failed."""
        if not self.call("POST", "/reset_prefix_cache?reset_running_requests=true", timeout=self.timeout)["success"]:
            raise EngineError(f"{self.url} did not empty its prefix cache after a weight sync")

    def pause(self, keeps_cache: bool = False) -> None:
        """Running requests stop where they are until `resume`; without `keeps_cache` vLLM then computes their tokens again."""
        self.call("POST", f"/pause?mode=keep&clear_cache={not keeps_cache}", timeout=self.timeout)

    def resume(self) -> None:
        self.call("POST", "/resume", timeout=self.timeout)

    def lost(self, route: str, error: Exception, timeout: float) -> ServerLost:
        path = route.partition("?")[0]
        if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
            return ServerLost(self.url, f"cannot be reached: no server listens there ({error}); `rlgen serve RECIPE` starts one")
        if isinstance(error, TimeoutError):
            return ServerLost(self.url, f"has not answered {path} within {timeout:.0f} s: it hangs")
        return ServerLost(self.url, f"closed the connection while it worked on {path}: it died")

    def checked(self, route: str, status: int, body: bytes) -> bytes:
        """Returns the body of a response with status 200. Raises EngineError otherwise."""
        path = route.partition("?")[0]
        if status == 200:
            return body
        if status == 401:
            raise EngineError(
                f"{self.url} refuses rlgen's token; set the variable that engine.token_env names to the token of that server"
            )
        if status in (403, 404, 405) and path in FLAGS:
            raise EngineError(f"{self.url} has no {path}: start the server with {FLAGS[path]}, or by `rlgen serve`")
        words = error_words(body)
        if status >= 500 and path != "/collective_rpc":
            raise ServerLost(self.url, f"failed at {path} with {status}: {words}")
        if path == "/collective_rpc" and "no attribute" in words:
            raise EngineError(f"{self.url}: {NOT_OURS}")
        raise EngineError(f"{self.url} answered {path} with {status}: {words}")


def report_of(url: str, heard: Sequence[Mapping[str, Any]], version: int) -> SyncReport:
    """Returns the report of one server from the records of its workers; lists every tensor that any worker did not load.

    Raises EngineError if the workers received different weights.
    """
    received = heard[0]["received"]
    if any(other["received"] != received for other in heard):
        raise EngineError(f"{url}: its workers received different weights of version {version}")
    missed = {name for worker in heard for name in worker["not_loaded"]}
    return SyncReport(version=version, received=received, not_loaded=tuple(sorted(missed)))


def connections() -> int:
    """Returns how many connections this process may hold: half of the files that it may open.

    Raises the process's limit of open files first, from the usual 1024 to at most MOST_FILES.
    """
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if most == resource.RLIM_INFINITY else min(MOST_FILES, most)
    if 0 <= allowed < wanted:  # infinity is negative
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    return wanted // 2


def error_words(body: bytes) -> str:
    """Returns the error message in a response's body, cut to 300 characters."""
    try:
        told: Any = msgspec.json.decode(body)
        told = told.get("error", told.get("detail", told)) if isinstance(told, dict) else told
        told = told.get("message", told) if isinstance(told, dict) else told
    except (msgspec.MsgspecError, ValueError):
        told = body.decode(errors="replace")
    return str(told)[:300]
