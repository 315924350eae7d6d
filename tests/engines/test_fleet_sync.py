"""A sync takes a fleet of two servers hardly longer than one of them: the servers load at the same time."""

import statistics
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.waiting import HANGS

from rlgen.engines.base import EngineInfo, Settings, SyncReport
from rlgen.engines.fleet import Member, ServerPool
from rlgen.engines.server import ServerEngine
from rlgen.engines.transfer import FileTransfer
from rlgen.types import Sampling

LOADS = 0.2  # seconds that a server takes to load, in which it needs no core of this machine
ROUNDS = 5
WEIGHTS = {"w": torch.zeros(8, 8)}


class RemoteServer:
    """A server on another machine: all that this one sees of its load is that it takes a while."""

    def __init__(self, url: str) -> None:
        self.url, self.labels = url, [""]
        self.loading: list[tuple[float, float]] = []

    def label(self) -> str:
        return self.labels[-1]

    def set_label(self, label: str) -> None:
        self.labels.append(label)

    def load(self, folder: str, version: int, hashed: bool) -> SyncReport:
        assert (Path(folder) / "manifest.json").exists()
        began = time.perf_counter()
        time.sleep(LOADS)
        self.loading.append((began, time.perf_counter()))
        return SyncReport(version=version, received={"w": "fingerprint"}, not_loaded=())

    def reset_cache(self) -> None:
        assert self.loading, "the old weights' cache is emptied after the load"


def fleet(monkeypatch: pytest.MonkeyPatch, folder: Path, servers: list[Any]) -> ServerPool:
    settings = Settings(dtype="float32", head_dtype="float32", logprobs_mode="processed_logprobs", vocab_size=8)
    facts = EngineInfo(
        engine="e 1", plan="p", model="m", revision=None, settings=settings, stop_ids=(1,), max_model_len=None, cache_block=None
    )
    monkeypatch.setattr(ServerPool, "_examined", staticmethod(lambda server, shape: facts))
    members = [Member(server, None) for server in servers]
    return ServerPool(members=members, shape={}, in_flight=False, restarts=2, carrier=FileTransfer(str(folder)), say=print)


def test_two_servers_load_a_sync_in_the_time_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    servers = [RemoteServer(f"http://{name}") for name in ("one", "two")]
    single, both = fleet(monkeypatch, tmp_path, servers[:1]), fleet(monkeypatch, tmp_path, servers)
    took: dict[int, list[float]] = {1: [], 2: []}
    try:
        for version in range(ROUNDS):
            for count, of in ((1, single), (2, both)):  # in pairs, because the machine is busier at some times than at others
                began = time.perf_counter()
                of.sync(WEIGHTS.items(), version)
                took[count].append(time.perf_counter() - began)
        ratio = statistics.median(two / one for one, two in zip(took[1], took[2], strict=True))
        assert ratio <= 1.2, took
        first, second = servers[0].loading[1], servers[1].loading[0]  # of the first sync of both
        assert max(first[0], second[0]) < min(first[1], second[1]), "they load one after the other"
        assert {server.labels[-1].rpartition(".")[2] for server in servers} == {str(ROUNDS - 1)}
    finally:
        for of in (single, both):
            of.close()


def test_a_server_is_asked_by_several_calls_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(3)

    def generate(self: ServerEngine, *asked: Any) -> list[Any]:
        together.wait(HANGS)  # breaks if the three calls come one after the other
        return []

    monkeypatch.setattr(ServerEngine, "generate", generate)
    engine = ServerEngine(SimpleNamespace(stop=lambda: None, close=lambda: None), calls=3)  # type: ignore[arg-type]
    sampling = Sampling(max_tokens=4, temperature=1.0, stop_ids=(257,))
    assert [call.result() for call in [engine.submit([], sampling) for _ in range(3)]] == [[], [], []]
    engine.close()
