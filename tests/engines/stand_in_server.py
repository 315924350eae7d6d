"""A stand-in for a vLLM server, for tests of a fleet that loses servers: it computes ids from seed and version alone.

stand_in_server.py HOST PORT FACTS     FACTS: what it tells of itself, as JSON. POST /slow {"seconds"}: how long answers take
"""

import asyncio
import json
import random
import sys
from typing import Any

from aiohttp import web

from rlgen.engines.answer import JSON_ROUTE, ROUTE, Labelled, ServerAnswer

LABEL, SECONDS, FACTS = "label", "seconds", "facts"


def completion(seed: int, version: int) -> list[int]:
    """The ids of a request."""
    return [random.Random(f"{seed} {version}").randrange(3, 200)] * 3


async def generate(request: web.Request) -> web.Response:
    held: dict[str, Any] = request.app["held"]
    asked, label = await request.json(), held[LABEL]
    await asyncio.sleep(held[SECONDS])
    ids = completion(asked["sampling_params"]["seed"], int(label.partition(".")[2] or -1))
    spans = [Labelled(label, 0, len(ids))]
    raw = ServerAnswer.of(asked["token_ids"], ids, [-0.5] * len(ids), "length", spans, 0).packed()
    return web.Response(body=raw)


async def rpc(request: web.Request) -> web.Response:
    told: dict[str, Any] = {"received": {}, "not_loaded": []}
    if (await request.json())["method"] == "rlgen_facts":
        told = request.app["held"][FACTS]
    return web.json_response({"results": [told]})


async def set_label(request: web.Request) -> web.Response:
    request.app["held"][LABEL] = (await request.json())["new_version"]
    return web.json_response({})


async def slow(request: web.Request) -> web.Response:
    request.app["held"][SECONDS] = (await request.json())["seconds"]
    return web.json_response({})


async def fine(request: web.Request) -> web.Response:
    return web.json_response({"success": True, "weight_version": request.app["held"][LABEL]})


async def without_ids(request: web.Request) -> web.Response:
    return web.Response(status=400)


def main(host: str, port: int, facts: dict[str, Any]) -> None:
    app = web.Application()
    app["held"] = {LABEL: "default", SECONDS: 0.0, FACTS: facts}
    app.router.add_get("/health", fine)
    app.router.add_get("/weight_info", fine)
    posts = {ROUTE: generate, JSON_ROUTE: without_ids, "/collective_rpc": rpc, "/update_weight_version": set_label, "/slow": slow}
    for route in ("/pause", "/resume", "/reset_prefix_cache"):
        posts[route] = fine
    for route, handler in posts.items():
        app.router.add_post(route, handler)
    web.run_app(app, host=host, port=port, print=lambda words: print(json.dumps(port), flush=True), access_log=None)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
