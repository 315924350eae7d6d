"""Weights from GPU to GPU, as far as a machine without one can show it.

Broadcast and servers: against servers and a group in Python that block as theirs do: an update of a worker ends when the trainer
has broadcast what it waits for. Workers: vLLM's own transfer engine on the CPU, with a group in Python below it.
NCCL itself is run by none of these tests.
"""

import importlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import open_vllm, tiny_model
from helpers.adapters import gap
from helpers.engines import FakeServer, changed, pool_of
from helpers.samples import answered, request
from helpers.waiting import HANGS
from torch import Tensor

from rlgen.engines import client, nccl
from rlgen.engines.base import SyncRecorder, fingerprint
from rlgen.engines.colocated import ColocatedEngine
from rlgen.engines.http import report_of
from rlgen.engines.nccl import BUCKET_BYTES, Broadcast, bucket_bytes, own_address
from rlgen.engines.open import build_engine
from rlgen.engines.server import ServerEngine
from rlgen.engines.transfer import buckets
from rlgen.engines.worker import Worker
from rlgen.errors import EngineError, SentinelError, ServerLost, SetupError
from rlgen.models.policy import Policy
from rlgen.models.weights import checkpoint_tensors
from rlgen.processes import Processes
from rlgen.recipe import load_recipe
from rlgen.sentinel.sync import check_receipt
from rlgen.types import Sampling

Proof = Callable[[str], None]

WEIGHTS = {name: torch.full((2, 3), float(number)) for number, name in enumerate("abcde")}


class Group:
    """What the ranks meet in: each tensor that the trainer broadcasts is taken by every worker."""

    def __init__(self, workers: int) -> None:
        self.log: list[Any] = []
        self.lines: list[queue.Queue[Tensor]] = [queue.Queue() for _ in range(workers)]
        self.joined = threading.Barrier(workers + 1)
        self.closed = False
        self.sent: list[int] = []  # bytes of each broadcast

    def connect(self, host: str, port: int, world: int) -> "Group":
        self.log.append(("trainer joins", host, port, world))
        self.joined.wait(HANGS)
        self.closed = False
        return self

    def ready(self, tensor: Tensor) -> Tensor:
        return tensor.contiguous()

    def broadcast(self, tensor: Tensor) -> None:
        self.sent.append(tensor.nbytes)
        for line in self.lines:
            line.put(tensor)
        while not self.closed and any(line.qsize() for line in self.lines):  # it returns when all have it
            time.sleep(0.001)

    def close(self) -> None:
        self.closed = True


class GroupServer(FakeServer):
    """A server whose workers have the `ranks` of the group."""

    def __init__(self, url: str, group: Group, ranks: Sequence[int], transfer: str | None = "nccl", cuda: bool = True) -> None:
        super().__init__(url)
        self._group, self._ranks = group, ranks
        self._facts = {"cuda": cuda, "transfer": transfer}
        self._ledgers = [SyncRecorder(True) for _ in ranks]
        self.failing: dict[str, BaseException] = {}  # by route or method
        self.deaf_to: str | None = None

    def note(self, what: str, *more: Any) -> None:
        self._group.log.append((self.url, what, *more))
        if what in self.failing:
            raise self.failing[what]

    def rpc(self, method: str, timeout: float, **arguments: Any) -> list[dict[str, Any]]:
        self.note(method)
        if method == "rlgen_facts":
            return [self._facts for _ in self._ranks]
        if method == "rlgen_listen":
            self._ledgers = [SyncRecorder(arguments["hashed"]) for _ in self._ranks]
            return [{} for _ in self._ranks]
        assert method == "rlgen_heard"
        return [{"received": ledger.received, "not_loaded": []} for ledger in self._ledgers]

    def call(self, method: str, route: str, body: Any = None, timeout: float = 5.0) -> Any:
        assert method == "POST"
        if route == "/init_weight_transfer_engine":
            self.note(route, body["init_info"])
            workers = [started(self._group.joined.wait, HANGS) for _ in self._ranks]
        elif route == "/update_weights":
            info = body["update_info"]
            self.note(route, info["names"], info["dtype_names"], info["shapes"])
            workers = [started(self._receive, place, info, timeout) for place in range(len(self._ranks))]
        else:
            self.note(route)
            workers = []
        for worker in workers:
            worker.join(timeout)
            if worker.is_alive():
                raise ServerLost(self.url, f"has not answered {route} within {timeout:.0f} s: it hangs")
        return {"message": "done"}

    def _receive(self, place: int, info: dict[str, Any], timeout: float) -> None:
        try:
            bucket = self._group.lines[self._ranks[place] - 1].get(timeout=timeout + 5)
        except queue.Empty:  # nobody waits any more
            return
        dtypes = [getattr(torch, name) for name in info["dtype_names"]]
        sizes = [prod(shape) * dtype.itemsize for shape, dtype in zip(info["shapes"], dtypes, strict=True)]
        for name, dtype, shape, part in zip(info["names"], dtypes, info["shapes"], bucket.split(sizes), strict=True):
            tensor = part.view(dtype).view(shape)  # as vLLM does: an error where the bytes of a wide dtype begin at an odd place
            if name != self.deaf_to:
                list(self._ledgers[place].record([(name, tensor)]))


def started(call: Any, *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=call, args=arguments, daemon=True)
    thread.start()
    return thread


def bench(seconds: float = HANGS) -> tuple[Group, list[GroupServer], Broadcast]:
    """Two servers of two workers each, and the seconds that a phase may take."""
    group = Group(4)
    servers: Any = [GroupServer("http://one", group, (1, 2)), GroupServer("http://two", group, (3, 4))]
    return group, servers, Broadcast(servers, "127.0.0.1", group.connect, seconds)


def of(log: list[Any], url: str) -> list[Any]:
    return [entry[1:] if len(entry) > 2 else entry[1] for entry in log if entry[0] == url]


def test_every_worker_of_every_server_gets_a_rank_of_its_own() -> None:
    group, _, broadcast = bench()
    ((_, host, port, world),) = [entry for entry in group.log if entry[0] == "trainer joins"]
    assert (host, world) == ("127.0.0.1", 5) and port > 0
    packing = {"packed": True, "packed_buffer_size_bytes": BUCKET_BYTES, "packed_num_buffers": 1}
    info = {"master_address": host, "master_port": port, "world_size": 5, **packing}
    assert of(group.log, "http://one") == ["rlgen_facts", ("/init_weight_transfer_engine", {**info, "rank_offset": 1})]
    assert of(group.log, "http://two") == ["rlgen_facts", ("/init_weight_transfer_engine", {**info, "rank_offset": 3})]
    broadcast.close()
    assert group.closed and of(group.log, "http://two")[-1] == "/shutdown_weight_transfer_engine"


def test_all_tensors_arrive_in_order_and_in_few_broadcasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "BUCKET_BYTES", 50)  # two tensors of 24 bytes
    group, _, broadcast = bench()
    weights = {**WEIGHTS, "turned": torch.arange(6.0).reshape(2, 3).T, "large": torch.zeros(9, 3, dtype=torch.bfloat16)}
    group.log.clear()
    pulled = iter(weights.items())
    receipts = broadcast.send(pulled, 7, hashed=True)
    assert next(pulled, None) is None
    expected = [
        "rlgen_listen",
        "/start_weight_update",
        ("/update_weights", ["a", "b"], ["float32"] * 2, [[2, 3]] * 2),
        ("/update_weights", ["c", "d"], ["float32"] * 2, [[2, 3]] * 2),
        ("/update_weights", ["e", "turned"], ["float32"] * 2, [[2, 3], [3, 2]]),
        ("/update_weights", ["large"], ["bfloat16"], [[9, 3]]),
        "/finish_weight_update",
        "rlgen_heard",
    ]
    assert of(group.log, "http://one") == expected and of(group.log, "http://two") == expected
    # no server is a phase ahead of the other
    assert [entry[1] for entry in group.log][::2] == [entry[1] for entry in group.log][1::2]
    sent = {name: fingerprint(tensor, True) for name, tensor in weights.items()}
    assert len(receipts) == 2
    for receipt in receipts:
        check_receipt(sent, receipt, 7, 7)
        assert list(receipt.received) == list(weights)
    assert group.sent == [48, 48, 48, 54]  # four broadcasts of seven tensors; the last one is larger than a bucket
    assert list(buckets([], 1)) == []


def test_a_model_is_one_broadcast_and_dtypes_of_a_bucket_are_aligned() -> None:
    sent = dict(checkpoint_tensors(tiny_model("qwen3")))
    group, _, broadcast = bench()
    broadcast.send(sent.items(), 1, hashed=False)
    assert group.sent == [sum(tensor.nbytes for tensor in sent.values())] and len(sent) > 40
    # Three elements of two bytes before one of four: it could not be read where it begins.
    narrow, wide = torch.ones(3, dtype=torch.bfloat16), torch.ones(2)
    receipts = broadcast.send([("n", narrow), ("w", wide), ("m", narrow)], 1, hashed=True)
    assert [list(receipt.received) for receipt in receipts] == [["w", "n", "m"]] * 2
    assert receipts[0].received == {name: fingerprint(t, True) for name, t in (("w", wide), ("n", narrow), ("m", narrow))}
    assert group.sent[1:] == [20]


def test_a_tensor_that_a_server_does_not_hear_is_found() -> None:
    _, servers, broadcast = bench()
    sent = {name: fingerprint(tensor, False) for name, tensor in WEIGHTS.items()}
    servers[1].deaf_to = "c"
    good, bad = broadcast.send(WEIGHTS.items(), 1, hashed=False)
    check_receipt(sent, good, 1, 1)
    with pytest.raises(SentinelError, match="1 tensors did not arrive or were not loaded, among them c"):
        check_receipt(sent, bad, 1, 1)


def test_a_receipt_holds_what_any_worker_missed() -> None:
    heard: list[dict[str, Any]] = [{"received": {"a": "x"}, "not_loaded": names} for names in ([], ["q", "p"], ["q"])]
    assert report_of("http://one", heard, 2).not_loaded == ("p", "q")
    heard[2]["received"] = {"a": "y"}
    with pytest.raises(EngineError, match="http://one: its workers received different weights"):
        report_of("http://one", heard, 2)


@pytest.mark.parametrize(
    "route", ["rlgen_listen", "/start_weight_update", "/update_weights", "/finish_weight_update", "rlgen_heard"]
)
def test_a_server_that_fails_ends_the_sync_at_once_and_for_good(route: str) -> None:
    group, servers, broadcast = bench()
    servers[1].failing[route] = ServerLost("http://two", f"failed at {route} with 500: Internal Server Error")
    began = time.monotonic()
    with pytest.raises(EngineError) as error:
        broadcast.send(WEIGHTS.items(), 1, hashed=False)
    assert time.monotonic() - began < HANGS  # nobody waits for those that still do
    said = str(error.value)
    assert f"nccl, {route}: the vLLM server http://two failed at {route} with 500" in said and "restart the servers" in said
    assert not isinstance(error.value, ServerLost)
    assert broadcast.broken and group.closed
    group.log.clear()
    with pytest.raises(EngineError, match="an earlier sync failed"):
        broadcast.send(WEIGHTS.items(), 2, hashed=False)
    broadcast.close()
    assert group.log == []


@pytest.mark.slow
@pytest.mark.fault(56)
def test_a_side_that_hangs_ends_the_sync_in_time(monkeypatch: pytest.MonkeyPatch, proof: Proof) -> None:
    group, servers, broadcast = bench()
    monkeypatch.setattr(group, "broadcast", lambda tensor: time.sleep(10 * HANGS))
    for server in servers:  # their workers wait for what is not broadcast, until no answer has come for too long
        hangs = "has not answered /update_weights within 600 s: it hangs"
        server.failing["/update_weights"] = ServerLost(server.url, hangs)
    began = time.monotonic()
    words = r"/update_weights: the vLLM server http://(one|two) has not answered /update_weights within 600 s: it hangs"
    with pytest.raises(EngineError, match=words):
        broadcast.send(WEIGHTS.items(), 1, hashed=False)
    assert time.monotonic() - began < HANGS and broadcast.broken, "nobody waits for this side"
    # the servers have all they want, this side never ends
    group, servers, broadcast = bench(seconds=5.0)
    monkeypatch.setattr(group, "broadcast", lambda tensor: time.sleep(10 * HANGS))
    for server in servers:
        monkeypatch.setattr(server, "_receive", lambda place, info, timeout: None)
    with pytest.raises(EngineError, match="/update_weights: the trainer's side did not finish within 5 s; restart the servers"):
        broadcast.send(WEIGHTS.items(), 1, hashed=False)
    proof("a side of the broadcast that never comes")


def test_a_failure_of_this_side_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    group, _, broadcast = bench()

    def fails(tensor: Tensor) -> None:
        raise RuntimeError("NCCL: unhandled system error")

    monkeypatch.setattr(group, "broadcast", fails)
    with pytest.raises(EngineError, match="/update_weights: the trainer's side: RuntimeError: NCCL: unhandled system error"):
        broadcast.send(WEIGHTS.items(), 1, hashed=False)

    def gathered() -> Iterator[tuple[str, Tensor]]:
        yield "a", WEIGHTS["a"]
        raise ValueError("no memory for b")

    _, _, broadcast = bench()
    with pytest.raises(ValueError, match="no memory for b"):
        broadcast.send(gathered(), 1, hashed=False)
    assert broadcast.broken  # the servers are in the middle of an update


def test_who_cannot_join_is_told() -> None:
    def opened(**facts: Any) -> None:
        group = Group(2)
        servers: Any = [GroupServer("http://one", group, (1, 2), **facts)]
        Broadcast(servers, "127.0.0.1", group.connect, HANGS)

    with pytest.raises(EngineError, match=r"http://one takes no weights over NCCL: start it with --weight-transfer-config"):
        opened(transfer=None)
    with pytest.raises(EngineError, match=r"http://one runs on a CPU: engine.transfer nccl needs GPUs on both sides"):
        opened(cuda=False)
    group = Group(2)
    absent: Any = GroupServer("http://one", group, (1, 2))
    route = "/init_weight_transfer_engine"
    absent.failing[route] = ServerLost("http://one", f"failed at {route} with 500: x")
    with pytest.raises(EngineError, match=r"joining a group of 3 at 127.0.0.1:\d+: the vLLM server http://one failed at /init"):
        Broadcast([absent], "127.0.0.1", group.connect, HANGS)


def test_the_address_that_servers_reach() -> None:
    assert own_address(["http://127.0.0.1:8000"]) == "127.0.0.1"
    with pytest.raises(EngineError, match=r"no route to http://no.such.host.invalid:1 over IPv4"):
        own_address(["http://no.such.host.invalid:1"])


# --- the engine --------------------------------------------------------------------------------------------------------------


OnServers = tuple[Group, list[GroupServer], ServerEngine]


@pytest.fixture
def on_servers(monkeypatch: pytest.MonkeyPatch) -> OnServers:
    group, servers, broadcast = bench()
    engine = ServerEngine(pool_of(monkeypatch, servers, broadcast, in_flight=True))
    group.log.clear()
    return group, servers, engine


def test_a_sync_pauses_sends_forgets_labels_and_resumes(on_servers: OnServers) -> None:
    group, _, engine = on_servers
    receipt = engine.sync(WEIGHTS.items(), 3)
    check_receipt({name: fingerprint(tensor, False) for name, tensor in WEIGHTS.items()}, receipt, 3, engine.weight_version)
    told = [entry if isinstance(entry, str) else entry[0] for entry in of(group.log, "http://one")]
    update = ["rlgen_listen", "/start_weight_update", "/update_weights", "/finish_weight_update", "rlgen_heard"]
    assert told == ["pause", "set_label", *update, "reset_cache", "set_label", "resume"]
    assert of(group.log, "http://two")[-2] == ("set_label", "3")
    engine.close()
    assert group.closed


def test_a_failed_broadcast_keeps_the_version_and_asks_no_server_more(on_servers: OnServers) -> None:
    group, servers, engine = on_servers
    engine.sync(WEIGHTS.items(), 3)
    group.log.clear()
    servers[0].failing["/update_weights"] = ServerLost("http://one", "died")
    with pytest.raises(EngineError, match="http://one died; restart the servers"):
        engine.sync(WEIGHTS.items(), 4)
    assert engine.weight_version == 3 and not any("resume" in entry for entry in group.log)


def test_the_group_is_made_anew_without_a_lost_server(on_servers: OnServers) -> None:
    group, _, engine = on_servers
    engine.sync(WEIGHTS.items(), 1)
    engine._keeper.lose(ServerLost("http://two", "died"), {})
    group.joined, group.lines = threading.Barrier(3), group.lines[:2]
    group.log.clear()
    receipt = engine.sync(WEIGHTS.items(), 2)
    check_receipt({name: fingerprint(tensor, False) for name, tensor in WEIGHTS.items()}, receipt, 2, engine.weight_version)
    assert [entry[3] for entry in group.log if entry[0] == "trainer joins"] == [3]
    assert of(group.log, "http://two") == ["/shutdown_weight_transfer_engine"], "nothing else is asked of it"


def test_the_last_server_joins_the_group_again_after_a_restart(on_servers: OnServers) -> None:
    group, _, engine = on_servers
    engine.sync(WEIGHTS.items(), 1)
    engine._keeper.lose(ServerLost("http://two", "died"), {})
    engine._keeper._absent["http://two"].ready.set()
    group.log.clear()
    assert engine.sync(WEIGHTS.items(), 2).received.keys() == WEIGHTS.keys()
    assert [entry[3] for entry in group.log if entry[0] == "trainer joins"] == [5] and not group.closed


def test_with_none_left_no_server_can_be_brought_back(on_servers: OnServers, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, engine = on_servers

    async def each(servers: Sequence[Any], *_: Any, **__: Any) -> None:
        raise ServerLost(servers[0].url, "closed the connection: it died")

    monkeypatch.setattr(client, "each", each)
    engine.sync(WEIGHTS.items(), 1)
    with pytest.raises(EngineError, match=r"it died. engine.transfer nccl keeps no copy of the weights"):
        engine.generate([request([1], 1)], Sampling(max_tokens=2, temperature=1.0, stop_ids=(1,)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused_before_a_server_is_started(recipe_file: Path, tmp_path: Path) -> None:
    recipe = load_recipe(recipe_file, ["engine={kind: server, launch: true, transfer: nccl, devices: '1'}"]).recipe
    with pytest.raises(SetupError, match=r"engine.transfer nccl needs GPUs on both sides; set it to files"):
        build_engine(recipe.engine_needs, "no/such/model", Processes.alone(), tmp_path, print)
    assert not list(tmp_path.glob("*.log"))


# --- the workers -------------------------------------------------------------------------------------------------------------


class Workers:
    """The worker of vLLM in this process, with its own transfer engine. The group, and some functions of CUDA, are made up."""

    def __init__(self, engine: ColocatedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self._llm = engine._llm
        self._line: queue.Queue[Tensor] = queue.Queue()
        receive = SimpleNamespace(broadcast=lambda tensor, src: tensor.copy_(self._line.get(timeout=HANGS)))
        receive.destroy = lambda: None
        packing = {"model_update_group": receive, "packed": True, "packed_num_buffers": 1}
        self.call(lambda worker: vars(worker.weight_transfer_engine).update(packing))
        packed_tensor = importlib.import_module("vllm.distributed.weight_transfer.packed_tensor")
        monkeypatch.setattr(packed_tensor, "_get_streams", lambda device, number: (SimpleNamespace(synchronize=lambda: None),))
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
        monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)

    def call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        (answer,) = self._llm.collective_rpc(lambda worker: method(worker, *arguments))
        return answer

    def update(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        self.call(Worker.rlgen_listen, True)
        self.call(lambda worker: worker.start_weight_update())
        for chunk in (list(tensors.items())[:5], list(tensors.items())[5:]):
            self._line.put(bucket_bytes([tensor for _, tensor in chunk]))
            names, shapes = [name for name, _ in chunk], [list(tensor.shape) for _, tensor in chunk]
            info = {"names": names, "dtype_names": ["float32"] * len(chunk), "shapes": shapes}
            self.call(lambda worker, info: worker.update_weights(info), info)
        self.call(lambda worker: worker.finish_weight_update())
        heard: dict[str, Any] = self.call(Worker.rlgen_heard)
        return heard


@pytest.mark.vllm
@pytest.mark.skipif(torch.cuda.is_available(), reason="its group is in Python, and on the CPU")
@pytest.mark.slow
def test_a_worker_hears_what_vllm_loads_and_samples_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = changed(tiny_model("qwen3"))
    sent = {name: tensor.detach().clone() for name, tensor in checkpoint_tensors(model)}
    nccl_backend = {"weight_transfer_config": {"backend": "nccl"}}
    with closing(open_vllm("qwen3", max_model_len=256, extra=nccl_backend)) as engine:
        workers = Workers(engine, monkeypatch)
        assert workers.call(Worker.rlgen_facts)["transfer"] == "nccl"
        received = {name: fingerprint(tensor, True) for name, tensor in sent.items()}
        assert workers.update(sent) == {"received": received, "not_loaded": []}
        assert "without rlgen_listen" in workers.call(Worker.rlgen_heard)["error"]
        engine._llm.reset_prefix_cache()
        asked = request([10, 20, 30, 40], 5)
        (answer,) = engine.generate([asked], Sampling(max_tokens=8, temperature=1.0, stop_ids=(257,)))
        gaps = [gap(Policy(one, torch.float32, True), [answered(asked, answer)]) for one in (model, tiny_model("qwen3"))]
        assert gaps[0] < 1e-5 and gaps[1] > 0.1  # a tied head that stayed old would be off by nats
        workers.call(Worker.rlgen_listen, True)  # a trainer that ended here
        few = {name: tensor for name, tensor in sent.items() if name != "model.layers.1.mlp.down_proj.weight"}
        told = workers.update(few)
        assert list(told["received"]) == list(few) and told["not_loaded"] == ["model.layers.1.mlp.down_proj.weight"]
