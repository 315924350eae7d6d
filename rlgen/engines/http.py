"""One vLLM server over HTTP: every call has a timeout, and every answer that is not the one hoped for has a name."""

import asyncio
import resource
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx

from rlgen.engines.base import Facts, Receipt, Settings
from rlgen.errors import EngineError, ServerLost
from rlgen.types import Completion, Request, Sampling

ANSWER_SECONDS = 30.0  # within which a server answers a question that needs no computing
MOST_FILES = 1 << 16
PROBE_SECONDS, MISSED_PROBES = 5.0, 3  # a server that misses so many probes in a row while it is sampling is lost
STOPPED = 1.0  # seconds that a look comes too late, after which this process was stopped, and the server perhaps with it

# What rlgen asks of a server, and how a server is started that has it.
DEV_MODE = "VLLM_SERVER_DEV_MODE=1 in its environment"
FLAGS = {
    "/inference/v1/generate": "--enable-scale-out",
    "/collective_rpc": DEV_MODE,
    "/reset_prefix_cache": DEV_MODE,
    "/pause": DEV_MODE,
    "/resume": DEV_MODE,
    "/update_weight_version": f"{DEV_MODE} and vLLM 0.32 or newer",
}
WORKER = "--worker-extension-cls rlgen.engines.worker.Worker"


class Server:
    """Calls to the server at `url`.

    Args:
        url: "http://127.0.0.1:8000".
        token: sent with every request.
        timeout: seconds without any answer after which a server that works counts as lost.
    """

    def __init__(self, url: str, token: str, timeout: float) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"}
        self._timeout = timeout
        self._soon = min(ANSWER_SECONDS, timeout)

    def call(self, method: str, route: str, body: Mapping[str, Any] | None = None, timeout: float | None = None) -> Any:
        """The JSON that the server answers.

        Args:
            timeout: seconds. None: for a question that needs no computing.

        Raises:
            ServerLost: it is gone, or silent for that long.
            EngineError: it refuses.
        """
        timeout = timeout or self._soon
        try:
            answer = httpx.request(method, self.url + route, json=body, headers=self._headers, timeout=timeout, trust_env=False)
        except httpx.HTTPError as error:
            raise self.lost(route, error, timeout) from error
        return self.checked(route, answer)

    def rpc(self, method: str, timeout: float, **arguments: Any) -> list[dict[str, Any]]:
        """What the method `method` of `rlgen.engines.worker.Worker` answers, one object a worker.

        Raises:
            EngineError: the server has no such worker, or the worker says what is wrong.
        """
        body = {"method": method, "kwargs": arguments}
        results = self.call("POST", "/collective_rpc", body, timeout)["results"]
        for result in results:
            if not isinstance(result, dict):
                raise EngineError(
                    f"{self.url}: the server's workers are not rlgen's; start it with {WORKER}, or by `rlgen serve`"
                )
            if "error" in result:
                raise EngineError(f"{self.url}: {result['error']}")
        return list(results)

    def require(self) -> None:
        """Raises EngineError unless the server has every route that rlgen uses."""
        for route in FLAGS:
            # A route that takes work only with POST answers 405 to a look; the one for ids is there even when it is switched off,
            # and says so when it is asked for nothing.
            method, present = ("POST", (400, 422)) if route == "/inference/v1/generate" else ("GET", (405,))
            try:
                answer = httpx.request(
                    method, self.url + route, json={}, headers=self._headers, timeout=self._soon, trust_env=False
                )
            except httpx.HTTPError as error:
                raise self.lost(route, error, self._soon) from error
            if answer.status_code not in present:
                self.checked(route, answer)

    def facts(self) -> tuple[Facts, dict[str, Any]]:
        """What the server is, and the shape of its model, see `model_shape`."""
        told = dict(self.rpc("rlgen_facts", self._soon)[0])
        facts = Facts(
            engine=told["engine"],
            model=told["model"],
            revision=told["revision"],
            settings=Settings(**told["settings"]),
            stop_ids=tuple(told["stop_ids"]),
            max_model_len=told["max_model_len"],
            cache_block=told["cache_block"],
        )
        return facts, told["shape"]

    def load(self, folder: str, version: int, hashed: bool) -> Receipt:
        """Has every worker read the weights in `folder`; the receipt holds what any of them missed."""
        results = self.rpc("rlgen_load", self._timeout, path=folder, version=version, hashed=hashed)
        received = results[0]["received"]
        if any(result["received"] != received for result in results):
            raise EngineError(f"{self.url}: its workers received different weights from {folder}")
        missed = sorted({name for result in results for name in result["not_loaded"]})
        return Receipt(version=results[0]["version"], received=received, not_loaded=tuple(missed))

    def label(self) -> str:
        """The name of the weights that the server says it has."""
        return str(self.call("GET", "/weight_info")["weight_version"])

    def set_label(self, label: str) -> None:
        self.call("POST", "/update_weight_version", {"new_version": label})

    def reset_cache(self) -> None:
        """Forgets every cached activation; those of running requests are computed again.

        Raises:
            EngineError: the server keeps them.
        """
        if not self.call("POST", "/reset_prefix_cache?reset_running_requests=true", timeout=self._timeout)["success"]:
            raise EngineError(f"{self.url} did not empty its prefix cache after a weight sync")

    def pause(self) -> None:
        """Running requests wait where they are."""
        self.call("POST", "/pause?mode=keep", timeout=self._timeout)

    def resume(self) -> None:
        self.call("POST", "/resume", timeout=self._timeout)

    async def sample(
        self,
        requests: Mapping[int, Request],
        sampling: Sampling,
        salt: str,
        version_of: Callable[[str], int],
        arrived: Callable[[int, Completion], None],
        connections: int,
    ) -> None:
        """Samples one completion for each request and hands it over as it comes.

        Args:
            requests: by place.
            salt: keeps cached activations of other weights out.
            version_of: from the label of weights to their version.
            arrived: receives place and completion.
            connections: the most requests under way; how many of them it works on at once the server decides.

        Raises:
            ServerLost: the server is gone, or nothing arrives for `timeout` seconds, though it may still say that it is well.
            EngineError: it refuses a request.
        """

        async def ask(place: int, request: Request) -> None:
            body = {
                "token_ids": list(request.prompt_ids),
                "sampling_params": sampling_body(request.seed, sampling),
                "cache_salt": salt,
                "return_token_ids": True,
            }
            arrived(place, self.completion(await self._post("/inference/v1/generate", body, client), version_of))

        limits = httpx.Limits(max_connections=connections)
        async with httpx.AsyncClient(headers=self._headers, timeout=None, limits=limits, trust_env=False) as client:
            await self._together([ask(place, request) for place, request in requests.items()])

    async def prefill(self, rows: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[tuple[float, ...]]:
        """As `Engine.prefill_logp`."""
        found: dict[int, tuple[float, ...]] = {}

        async def ask(place: int, prompt_ids: tuple[int, ...], completion_ids: tuple[int, ...]) -> None:
            ids = [*prompt_ids, *completion_ids]
            params = {"temperature": 1.0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
            answer = await self._post("/inference/v1/generate", {"token_ids": ids, "sampling_params": params}, client)
            logp = answer["prompt_logprobs"]
            found[place] = tuple(logp[at][str(ids[at])]["logprob"] for at in range(len(prompt_ids), len(ids)))

        async with httpx.AsyncClient(headers=self._headers, timeout=None, trust_env=False) as client:
            await self._together([ask(place, *row) for place, row in enumerate(rows)])
        return [found[place] for place in range(len(rows))]

    async def _together(self, calls: Sequence[Any]) -> None:
        """Awaits all of `calls`, as long as one of them ends every `timeout` seconds and the server answers its probes."""
        asked = [asyncio.ensure_future(call) for call in calls]
        pending = set(asked)
        clock = asyncio.get_running_loop().time
        last, missed = clock(), 0
        try:
            while pending:
                looked, patience = clock(), min(PROBE_SECONDS, self._timeout)
                done, pending = await asyncio.wait(pending, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                late = clock() - looked - patience
                last += late if late > STOPPED else 0.0
                for call in done:
                    call.result()
                if done:
                    last, missed = clock(), 0
                    continue
                # An idle look: a good probe does not excuse a server that answers nothing else.
                missed = 0 if await self._healthy() else missed + 1
                if any(call.done() for call in pending):  # it was busy with the answer
                    continue
                if missed >= MISSED_PROBES or clock() - last >= self._timeout:
                    silent = f"has {len(pending)} requests and has answered none for {clock() - last:.0f} s"
                    if missed:
                        raise ServerLost(self.url, f"{silent}; it does not answer its health probe either")
                    raise ServerLost(
                        self.url,
                        f"{silent}; it still says that it is healthy. Raise engine.timeout if completions may take that long",
                    )
        finally:
            for call in pending:
                call.cancel()
            await asyncio.gather(*asked, return_exceptions=True)  # those that failed together have been heard

    async def _healthy(self) -> bool:
        try:
            async with httpx.AsyncClient(headers=self._headers, timeout=PROBE_SECONDS, trust_env=False) as client:
                return (await client.get(f"{self.url}/health")).status_code == 200
        except httpx.HTTPError:
            return False

    async def _post(self, route: str, body: Mapping[str, Any], client: httpx.AsyncClient) -> Any:
        try:
            answer = await client.post(self.url + route, json=body)
        except httpx.HTTPError as error:
            raise self.lost(route, error, self._timeout) from error
        return self.checked(route, answer)

    def lost(self, route: str, error: httpx.HTTPError, timeout: float) -> ServerLost:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return ServerLost(self.url, f"cannot be reached: no server listens there ({error})")
        if isinstance(error, httpx.TimeoutException):
            return ServerLost(self.url, f"has not answered {route.partition('?')[0]} within {timeout:.0f} s: it hangs")
        return ServerLost(self.url, f"closed the connection while it worked on {route.partition('?')[0]}: it died")

    def checked(self, route: str, answer: httpx.Response) -> Any:
        """The JSON of a good answer."""
        path = route.partition("?")[0]
        if answer.status_code == 200:
            return answer.json() if answer.content else None
        if answer.status_code == 401:
            raise EngineError(
                f"{self.url} refuses rlgen's token; set the variable that engine.token_env names to the token of that server"
            )
        if answer.status_code in (403, 404, 405) and path in FLAGS:
            raise EngineError(f"{self.url} has no {path}: start the server with {FLAGS[path]}, or by `rlgen serve`")
        words = error_words(answer)
        if answer.status_code >= 500 and path != "/collective_rpc":
            raise ServerLost(self.url, f"failed at {path} with {answer.status_code}: {words}")
        if path == "/collective_rpc" and "no attribute" in words:
            raise EngineError(f"{self.url}: the server's workers are not rlgen's; start it with {WORKER}, or by `rlgen serve`")
        raise EngineError(f"{self.url} answered {path} with {answer.status_code}: {words}")

    def completion(self, answer: Any, version_of: Callable[[str], int]) -> Completion:
        choice = answer["choices"][0]
        ids, reason = choice["token_ids"] or [], choice["finish_reason"]
        if reason not in ("stop", "length"):
            raise ServerLost(self.url, f"ended a completion with finish_reason {reason!r}: it was stopped by somebody else")
        details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        content = (choice.get("logprobs") or {}).get("content") or []
        return Completion(
            token_ids=tuple(ids),
            logp=tuple(token["logprob"] for token in content),
            finish_reason=reason,
            # In an update that does not wait, the last tokens may be of newer weights: the sample is as old as its first.
            weight_version=min((version_of(span["version"]) for span in choice["weight_versions"] or []), default=-1),
            prompt_ids=tuple(answer["prompt_token_ids"] or ()),
            cached_tokens=details.get("cached_tokens") or 0,
        )


def connections() -> int:
    """How many this process may hold: half of the files that it may open, of which it allows itself more than the usual 1024."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if most == resource.RLIM_INFINITY else min(MOST_FILES, most)
    if 0 <= allowed < wanted:  # infinity is negative
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    return wanted // 2


def sampling_body(seed: int, sampling: Sampling) -> dict[str, Any]:
    """Every field that decides what is sampled, so that no default of the server's does."""
    body: dict[str, Any] = {
        "n": 1,
        "temperature": sampling.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": sampling.max_tokens,
        "seed": seed,
        "stop_token_ids": list(sampling.stop_ids),
        "logprobs": 0,
        "detokenize": False,
    }
    return body


def error_words(answer: httpx.Response) -> str:
    """The server's own words, cut."""
    try:
        told = answer.json()
        told = told.get("error", told.get("detail", told)) if isinstance(told, dict) else told
        told = told.get("message", told) if isinstance(told, dict) else told
    except ValueError:
        told = answer.text
    return str(told)[:300]
