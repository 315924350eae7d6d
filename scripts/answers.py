"""What answers of servers cost the process that asks: CPU time a token to read them, and a request to ask for them.

    python scripts/answers.py

Also the stub of a server that the second measurement asks, in a process of its own: `python scripts/answers.py stub WAIT_FOR`.
"""

import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import numpy
from aiohttp import web

from rlgen.engines.answer import ARRAYS, JSON_ROUTE, ROUTE, Labelled, ServerAnswer, read_answer
from rlgen.engines.base import EngineCapabilities
from rlgen.engines.fleet import SentWeights
from rlgen.engines.http import Server, connections
from rlgen.engines.server import ServerEngine
from rlgen.errors import ServerLost
from rlgen.types import Request, Sampling, ids_of

URL = "http://127.0.0.1:1"
LABEL = "run.3"


def synthetic(tokens: int, arrays: bool, prompt_tokens: int = 512) -> bytes:
    """Return an answer in the form of rlgen's route, or in that of vLLM 0.32's."""
    draw = random.Random(0)
    ids = [draw.randrange(151_936) for _ in range(tokens)]
    logp = [float(numpy.float32(-draw.expovariate(2.0))) for _ in range(tokens)]
    prompt = [draw.randrange(151_936) for _ in range(prompt_tokens)]
    if arrays:
        return ServerAnswer.of(prompt, ids, logp, "stop", [Labelled(LABEL, 0, tokens)], 0).packed()
    ranks = [{"token_id": one, "logprob": value, "rank": 1} for one, value in zip(ids, logp, strict=True)]
    choice = {
        **{"index": 0, "finish_reason": "stop", "stop_reason": 2, "token_ids": ids, "routed_experts": None},
        **{"sampling_mask": None, "weight_versions": [{"version": LABEL, "start": 0, "end": tokens}]},
        "logprobs": {"content": [{**one, "top_logprobs": [one]} for one in ranks]},
    }
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": prompt_tokens + tokens}
    usage = {**counts, "prompt_tokens_details": {"cached_tokens": 0}}
    answer = {"request_id": "r", "model": "m", "created": 1, "usage": usage, "prompt_logprobs": None, "prompt_token_ids": prompt}
    return json.dumps({**answer, "output_mode": "tokens", "choices": [choice]}, separators=(",", ":")).encode()


def best(repeats: int, work: Callable[[], object]) -> float:
    """Return the least seconds of CPU time that one call took this process."""
    took = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        took.append(time.process_time() - began)
    return min(took)


def reading(tokens: int, arrays: bool, repeats: int = 20) -> float:
    """Return the nanoseconds a token that it costs to make arrays of an answer's bytes."""
    raw = synthetic(tokens, arrays)
    return best(repeats, lambda: read_answer(raw, arrays, URL, lambda label: 3)) / tokens * 1e9


def asking(count: int, repeats: int = 3) -> float:
    """Return the milliseconds of CPU time a request, when `count` of them are open at once on a stub."""
    with asked(count) as sample:
        return best(repeats, sample) / count * 1e3


def calls(count: int) -> float:
    """Return the calls of functions a request, when `count` of them are open at once: a measure that no other process changes."""
    seen = 0

    def count_one(_frame: object, event: str, _argument: object) -> None:
        nonlocal seen
        seen += event in ("call", "c_call")

    with asked(count) as sample:
        sample()  # imports, and what is computed once
        sys.setprofile(count_one)
        try:
            sample()
        finally:
            sys.setprofile(None)
    return seen / count


@contextmanager
def asked(count: int) -> Iterator[Callable[[], None]]:
    """Inside the block, what it yields sends `count` requests at once to a stub and reads the answers."""
    requests = [Request(prompt_ids=ids_of(range(3, 67)), seed=place) for place in range(count)]
    sampling = Sampling(max_tokens=16, temperature=1.0, stop_ids=(2,))
    with stub(count) as url:
        server = Server(url, "token", 60.0)
        server.look()
        engine = engine_on([server])

        def sample() -> None:
            assert len(engine.generate(requests, sampling)) == count

        yield sample


def engine_on(servers: Sequence[Server], run: str = "run", version: int = 3) -> ServerEngine:
    """Return an engine on servers that nobody manages: they have these weights, and one that is lost stays so."""

    def recover(lost: ServerLost, before: object) -> None:
        raise lost

    held = SentWeights(run=run, version=version, syncs=1)
    keeper = SimpleNamespace(servers=servers, held=held, abilities=EngineCapabilities(), brought_back={}, recover=recover)
    keeper.lose = recover
    return ServerEngine(keeper)  # type: ignore[arg-type]


@contextmanager
def stub(wait_for: int) -> Iterator[str]:
    """Inside the block a stub answers at the address, in a process of its own."""
    process = subprocess.Popen([sys.executable, __file__, "stub", str(wait_for)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def serve(wait_for: int) -> None:
    """Answers requests once `wait_for` of them are open, all with the same 16 tokens."""
    answers = {ROUTE: synthetic(16, True, 64), JSON_ROUTE: synthetic(16, False, 64)}
    waiting: list[asyncio.Future[None]] = []

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.append(turn)
        if len(waiting) == wait_for:
            for one in waiting:
                one.set_result(None)
            waiting.clear()
        await turn
        return web.Response(body=answers[request.path], content_type=ARRAYS if request.path == ROUTE else "application/json")

    async def run() -> None:
        connections()  # allows itself as many files
        application = web.Application()
        application.add_routes([web.post(route, generate) for route in answers])
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=8192)
        await site.start()
        print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
        await asyncio.Event().wait()

    asyncio.run(run())


def main() -> None:
    for arrays in (True, False):
        print(f"reading {'arrays' if arrays else 'JSON'}: {reading(8192, arrays):.0f} ns a token")
    for count in (128, 1024, 4096):
        print(f"asking, {count} requests open: {asking(count):.2f} ms of CPU time a request")


if __name__ == "__main__":
    if sys.argv[1:2] == ["stub"]:
        serve(int(sys.argv[2]))
    else:
        main()
