"""Engines' descriptions, servers that are made up, and weights that have changed."""

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import psutil
import pytest
import torch
from aiohttp import web
from aiohttp.typedefs import Handler

from rlgen.engines.base import EngineCapabilities, EngineInfo, Settings
from rlgen.engines.fleet import ServerPool
from rlgen.engines.http import Server
from rlgen.engines.launch import ServerPlan
from rlgen.engines.plan import EnginePlan
from rlgen.models.weights import own_tensors


def engine_info(dtype: str = "float32", **changes: Any) -> EngineInfo:
    settings = Settings(dtype=dtype, head_dtype="float32", logprobs_mode="processed_logprobs", vocab_size=260)
    info: dict[str, Any] = {"engine": "e 1", "plan": "p", "model": "m", "revision": None, "settings": settings, "stop_ids": ()}
    return EngineInfo(**{**info, "max_model_len": None, "cache_block": None, **changes})


def server_plan(engine: EnginePlan, **changes: Any) -> ServerPlan:
    plan: dict[str, Any] = {"host": "127.0.0.1", "port": 0, "nccl": False, "devices": None, "threads": None}
    return ServerPlan(engine=engine, **{**plan, **changes})


def changed(model: Any, size: float = 0.02, seed: int = 1) -> Any:
    """The model, with noise added to each of its tensors."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in own_tensors(model).values():
            tensor.add_(size * torch.randn(tensor.shape, generator=generator))
    return model


class FakeServer:
    """A server as far as a pool asks it about labels. Writes down what it is asked."""

    def __init__(self, url: str) -> None:
        self.url, self.labels, self.arrays = url, ["default"], True
        self.log: list[Any] = []

    def note(self, what: str, *more: Any) -> None:
        self.log.append((what, *more) if more else what)

    def pause(self, keeps_cache: bool) -> None:
        self.note("pause", *["keeps_cache"] * keeps_cache)

    def resume(self) -> None:
        self.note("resume")

    def reset_cache(self) -> None:
        self.note("reset_cache")

    def health(self) -> int:
        return 0

    def label(self) -> str:
        return self.labels[-1]

    def set_label(self, label: str) -> None:
        self.labels.append(label)
        self.note("set_label", label.partition(".")[2])


class Told(Server):
    """A server with this status of its health check."""

    status = 200

    def health(self) -> int:
        return self.status

    def _reply(self, *asked: Any) -> tuple[int, bytes]:
        return self.status, b""


def pool_of(monkeypatch: pytest.MonkeyPatch, servers: Sequence[Any], carrier: Any, **abilities: bool) -> ServerPool:
    """The pool of servers that are made up, which rlgen has not started."""
    monkeypatch.setattr(ServerPool, "_examined", staticmethod(lambda server, shape: engine_info(stop_ids=(1,))))
    settings: dict[str, Any] = {"processes": {}, "shape": {}, "row_tokens": 0, "restarts": 2, "say": print}
    return ServerPool(servers=servers, abilities=EngineCapabilities(**abilities), carrier=carrier, **settings)


@asynccontextmanager
async def answering(route: str, handler: Handler) -> AsyncIterator[str]:
    """The address of a server inside the block, which answers each POST to the route by the function."""
    app = web.Application()
    app.router.add_post(route, handler)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def kill(processes: Iterable[psutil.Process]) -> None:
    """Kills all of them at once, as the kernel does when memory runs out, and waits until they are gone."""
    family = list(processes)
    for process in family:
        with suppress(psutil.NoSuchProcess):  # a guard kills too
            process.kill()
    psutil.wait_procs(family, timeout=10)


def recoveries(engine: Any) -> int:
    """How often servers have been recovered, all servers of a `ServerEngine` together."""
    return sum(engine._keeper.brought_back.values())
