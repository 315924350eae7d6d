"""Samples from vLLM servers, which rlgen started or which ran before. Every process of a run sends its own requests."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec

from rlgen.engines import client
from rlgen.engines.answer import JSON_ROUTE, ROUTE, read_answer, read_prefilled
from rlgen.engines.base import EngineInfo, Finished, FollowUpQueue, Pending, SyncReport, Weights, require_experts
from rlgen.engines.client import OpenRequests
from rlgen.engines.fleet import ServerPool
from rlgen.engines.http import connections
from rlgen.engines.shared_fleet import SharedServerPool
from rlgen.engines.vllm_compat import sampling_arguments
from rlgen.errors import ServerLost
from rlgen.types import Completion, Ids, Image, LogProbs, Request, Sampling, Span, no_experts


@dataclass(slots=True, kw_only=True)
class SamplingCall:
    """One call of `ServerEngine.generate`: it outlives the servers that are lost meanwhile."""

    waiting: dict[int, Request]  # by index; those that are not answered
    finished: Finished | None
    further: FollowUpQueue | None
    answers: dict[int, Completion] = field(default_factory=dict)  # by index
    event: asyncio.Event = field(default_factory=asyncio.Event)  # a request was added or answered; of one event loop

    @property
    def goes_on(self) -> bool:
        """Returns whether any request is waiting, or may still come."""
        return bool(self.waiting) or (self.further is not None and self.further.expected)

    def arrived(self, place: int, answer: Completion) -> None:
        """Records an answer, and passes it on to `finished`."""
        self.answers[place] = answer
        del self.waiting[place]
        if self.finished:
            self.finished(place, answer)
        self.event.set()

    async def more(self) -> list[tuple[int, Request]]:
        """Waits for further requests, and returns them by index; [] when all are answered and none can come."""
        while self.further is not None and self.goes_on:
            self.event.clear()
            if there := self.further.take():
                numbered = list(enumerate(there, len(self.answers) + len(self.waiting)))
                self.waiting.update(numbered)
                return numbered
            if self.goes_on:
                await self.event.wait()
        return []


class ServerEngine:
    """An engine that samples from one or several servers with the same weights.

    Every completion carries the label of the weights that sampled it. The unfinished requests of a lost server, or of one with
    other weights, go to the others; when none is left, `keeper` recovers one. A completion depends only on its request and on the
    weights, so a repeated request gives the same completion.

    Args:
        keeper: manages the servers: in a run of one process directly, in each of several processes through the main one.
        calls: maximum of calls that sample at the same time; they share the connections of this process.
    """

    def __init__(self, keeper: ServerPool | SharedServerPool, calls: int = 1) -> None:
        self._keeper = keeper
        self._connections = max(1, connections() // calls)
        self._background = ThreadPoolExecutor(max_workers=calls, thread_name_prefix="rlgen-sampling")
        self._closed = threading.Event()
        self.abilities = replace(keeper.abilities, submit=self.submit)

    @property
    def weight_version(self) -> int:
        return self._keeper.held.version

    def facts(self) -> EngineInfo:
        return self._keeper.facts

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        finished: Finished | None = None,
        further: FollowUpQueue | None = None,
    ) -> list[Completion]:
        call = SamplingCall(waiting=dict(enumerate(requests)), finished=finished, further=further)
        while call.goes_on:
            before = self._keeper.brought_back
            try:
                asyncio.run(self._sample(call, sampling, partial(self._keeper.lose, before=before)))
            except ServerLost as lost:
                if self._closed.is_set():
                    raise
                self._keeper.recover(lost, before)
        return [call.answers[place] for place in range(len(call.answers))]

    async def _sample(self, call: SamplingCall, sampling: Sampling, lost: Callable[[ServerLost], None]) -> None:
        """Samples all requests, also those that are added. Raises EngineError soon after the engine is closed.

        Calls `lost` with each server that is lost; raises ServerLost when none is left.
        """
        shared = sampling_arguments(sampling, held=not self.abilities.in_flight)

        async def ask(line: OpenRequests, asked: tuple[int, Request]) -> None:
            (place, request), server, held = asked, line.server, self._keeper.held
            body = {
                "token_ids": request.prompt_ids.tolist(),
                "sampling_params": {**shared, "seed": request.seed, "max_tokens": sampling.limit_of(request)},
                "cache_salt": f"{held.run}.{held.version}.{held.syncs}",  # activations of other weights are not used
                "return_token_ids": True,
            }
            raw = await line.post(ROUTE if server.arrays else JSON_ROUTE, msgspec.json.encode(body))
            answer = read_answer(raw, server.arrays, server.url, lambda label: self._version_of(label, server.url))
            if self.abilities.experts:
                require_experts(answer)
            elif len(answer.experts):  # another run asked the server for them
                answer = replace(answer, experts=no_experts())
            if self.abilities.keeps_cache and answer.spans and answer.spans[0].version > held.version:
                # Sent before a sync, sampled after it: the cached activations of its prompt may be of the earlier weights.
                answer = replace(answer, spans=(Span(0, 0, held.version), *answer.spans))
            call.arrived(place, answer)

        if call.further is not None:
            loop, call.event = asyncio.get_running_loop(), asyncio.Event()
            call.further.call(lambda: loop.call_soon_threadsafe(call.event.set))
        try:
            waiting = list(call.waiting.items())
            await client.each(
                self._keeper.servers,
                self._connections,
                waiting,
                ask,
                key=lambda asked: asked[1].prompt_ids.tobytes(),
                lost=lost,
                more=call.more,
                closed=self._closed,
            )
        finally:
            if call.further is not None:
                call.further.call(None)

    def _version_of(self, label: str, url: str) -> int:
        """Returns the weight version in `label`. Raises ServerLost if the weights are not of this run."""
        run, _, version = label.partition(".")
        if run != self._keeper.held.run:
            raise ServerLost(url, f"has weights {label!r}, not those of this run: it was restarted, or another run uses it")
        return int(version)

    def submit(self, *asked: Any) -> Pending:
        """Runs `generate` in the background. Calls beyond `calls` wait."""
        return self._background.submit(self.generate, *asked)

    def prefill_logp(self, rows: Sequence[tuple[Ids, Ids]], images: Sequence[tuple[Image, ...]] = ()) -> list[LogProbs]:
        assert not any(images)  # the recipe refuses them
        found: dict[int, LogProbs] = {}
        params = {"temperature": 1.0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}

        async def ask(line: OpenRequests, place: int) -> None:
            prompt_ids, completion_ids = rows[place]
            ids = [*prompt_ids.tolist(), *completion_ids.tolist()]
            raw = await line.post(JSON_ROUTE, msgspec.json.encode({"token_ids": ids, "sampling_params": params}))
            found[place] = read_prefilled(raw, ids, len(prompt_ids), line.server.url)

        before = self._keeper.brought_back
        lost = partial(self._keeper.lose, before=before)
        asyncio.run(client.each(self._keeper.servers, self._connections, range(len(rows)), ask, lost=lost))
        return [found[place] for place in range(len(rows))]

    def sync(self, weights: Weights, version: int, hashed: bool = False) -> SyncReport:
        return self._keeper.sync(weights, version, hashed)

    def sleep(self) -> None:
        pass

    def close(self) -> None:
        self._closed.set()  # ends sampling in progress
        self._keeper.stop()
        self._background.shutdown(cancel_futures=True)
        self._keeper.close()
