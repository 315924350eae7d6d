"""Weights travel in the engine's dtype, in one copy, to all servers at once, and arrive as if the engine had rounded them."""

import threading
from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import open_vllm, tiny_model
from helpers.engines import FakeServer, changed, engine_info, pool_of
from helpers.samples import request
from helpers.waiting import HANGS
from safetensors.torch import save_file
from torch import Tensor

from rlgen.engines import transfer
from rlgen.engines.base import EngineCapabilities, EngineInfo, SyncReport, cast_for, module_of
from rlgen.engines.fleet import ServerPool
from rlgen.engines.http import Server
from rlgen.engines.transfer import FileTransfer
from rlgen.engines.transformers import TransformersEngine
from rlgen.errors import EngineError
from rlgen.models.weights import checkpoint_tensors, own_tensors
from rlgen.processes import Processes
from rlgen.sentinel.sync import send_weights
from rlgen.types import Sampling

NARROW = engine_info("bfloat16")
FAMILIES = ["qwen3", "phi3-untied", "gpt2-tied", "mixtral-tied", "glm4_moe-untied"]


def on_disk(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("language_model.model.layers.3.mlp.gate.weight", "layers.3.mlp.gate"),
        ("model.language_model.layers.3.mlp.gate.e_score_correction_bias", "layers.3.mlp.gate"),
        ("transformer.h.10.attn.c_attn.weight", "h.10.attn.c_attn"),
        ("backbone.layers.3.A_log", "layers.3"),
        ("model.embed_tokens.weight", "embed_tokens"),
        ("lm_head.weight", "lm_head"),
    ],
)
def test_module_of(name: str, module: str) -> None:
    assert module_of(name) == module


def test_what_is_rounded() -> None:
    wide, vector, whole = torch.tensor([[1.001]]), torch.tensor([1.001]), torch.tensor([[7]])
    weights = {
        "model.layers.0.up.weight": wide,
        "model.layers.0.norm.weight": vector,
        "model.layers.0.gate.weight": wide,
        "model.layers.1.gate.weight": wide,
        "model.count": whole,
        "lm_head.weight": wide.bfloat16(),
    }
    facts = replace(NARROW, wider=("language_model.model.layers.0.gate.e_score_correction_bias",))
    cast = dict(cast_for(facts, weights.items()))
    assert [(name, tensor.dtype, tensor.item()) for name, tensor in cast.items()] == [
        ("model.layers.0.up.weight", torch.bfloat16, 1.0),
        ("model.layers.0.norm.weight", torch.float32, vector.item()),
        ("model.layers.0.gate.weight", torch.float32, wide.item()),
        ("model.layers.1.gate.weight", torch.bfloat16, 1.0),
        ("model.count", torch.int64, 7),
        ("lm_head.weight", torch.bfloat16, 1.0),
    ]
    assert all(
        tensor is weights[name] for name, tensor in cast_for(engine_info(), weights.items())
    )  # nothing is widened, or copied


@pytest.mark.parametrize("name", FAMILIES)
def test_the_engine_gets_the_weights_that_it_would_have_rounded_to(name: str) -> None:
    model = changed(tiny_model(name))
    engines = [TransformersEngine(model=tiny_model(name).bfloat16(), fp32_head=True, max_num_seqs=8) for _ in range(2)]
    engines[0].sync(checkpoint_tensors(model), 1)
    arrived: dict[str, Tensor] = {}
    sync = engines[1].sync

    def seen(weights: Iterator[tuple[str, Tensor]], version: int, hashed: bool = False) -> SyncReport:
        return sync(((key, arrived.setdefault(key, tensor)) for key, tensor in weights), version, hashed)

    engines[1].sync = seen  # type: ignore[method-assign, assignment]
    send_weights(engines[1], model, 1, Processes.alone(), hashed=True)
    rounded, cast = (own_tensors(engine._model) for engine in engines)
    assert all(torch.equal(rounded[key], cast[key]) for key in rounded)
    assert {tensor.dtype for tensor in arrived.values() if tensor.dim() > 1} == {torch.bfloat16}


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_vllm_computes_what_it_computed_from_wider_weights(name: str) -> None:
    model, sampling = changed(tiny_model(name)), Sampling(max_tokens=16, temperature=1.0, stop_ids=(257, 259))
    requests = [request([10, 20, 30 + place], place) for place in range(8)]
    with closing(open_vllm(name, dtype="bfloat16", max_model_len=80, max_num_seqs=16)) as engine:
        engine.sync(checkpoint_tensors(model), 1)
        rounded = engine.generate(requests, sampling)
        send_weights(engine, tiny_model(name), 0, Processes.alone())
        before = engine.generate(requests, sampling)
        send_weights(engine, model, 1, Processes.alone(), hashed=True)
        assert engine.generate(requests, sampling) == rounded
        assert [answer.logp.tolist() for answer in before] != [answer.logp.tolist() for answer in rounded]


def test_a_sync_of_a_bfloat16_engine_writes_half_the_bytes(tmp_path: Path) -> None:
    model = changed(tiny_model("qwen3"))
    with closing(FileTransfer(str(tmp_path))) as outbox:
        wide = on_disk(outbox.write(checkpoint_tensors(model), 1))
        narrow = on_disk(outbox.write(cast_for(NARROW, checkpoint_tensors(model)), 2))
    assert wide > 3_000_000
    assert 0.5 < narrow / wide <= 0.52


def test_one_copy_of_the_weights_lies_in_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []

    def counted(part: dict[str, Tensor], file: Path) -> None:
        save_file(part, file)
        held.append(on_disk(tmp_path))

    monkeypatch.setattr(transfer, "save_file", counted)
    monkeypatch.setattr(transfer, "FILE_BYTES", 1 << 18)
    model = changed(tiny_model("qwen3"))
    with closing(FileTransfer(str(tmp_path))) as outbox:
        first = outbox.current = outbox.write(checkpoint_tensors(model), 1)
        whole, files = on_disk(tmp_path), len(held)
        assert files > 5 and outbox.current == first
        second = outbox.current = outbox.write(checkpoint_tensors(model), 2)
        assert len(held) == 2 * files and max(held) == whole == on_disk(tmp_path)
        assert not first.exists() and outbox.current == second


class Loading(FakeServer):
    """A server that loads only while another one does."""

    def __init__(self, url: str, meeting: threading.Barrier) -> None:
        super().__init__(url)
        self._meeting = meeting

    def load(self, folder: str, version: int, hashed: bool) -> SyncReport:
        assert (Path(folder) / "manifest.json").exists()
        self._meeting.wait(HANGS)
        self.note("load")
        return SyncReport(version=version, received={"w": "float32[2]"}, not_loaded=())


def test_all_servers_load_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = threading.Barrier(3)
    servers = [Loading(f"http://{number}", meeting) for number in range(3)]
    with closing(pool_of(monkeypatch, servers, FileTransfer(None))) as pool:
        receipt = pool.sync([("w", torch.ones(2))], 1)
        assert receipt.received == {"w": "float32[2]"} and pool.held.version == 1
        # What was computed with the old weights is forgotten after the load.
        assert [server.log for server in servers] == [[("set_label", ""), "load", "reset_cache", ("set_label", "1")]] * 3


@pytest.mark.parametrize("keeps_cache", [False, True])
def test_running_requests_stop_for_a_load_and_go_on(monkeypatch: pytest.MonkeyPatch, keeps_cache: bool) -> None:
    server = Loading("http://0", threading.Barrier(1))
    with closing(pool_of(monkeypatch, [server], FileTransfer(None), in_flight=True, keeps_cache=keeps_cache)) as pool:
        for version in (1, 2, 3):
            pool.sync([("w", torch.ones(2))], version)
            # Nothing is kept that the weights of nobody or of another run have computed.
            keeps = keeps_cache and version == 2
            loads = [("set_label", ""), "load", *["reset_cache"] * (not keeps), ("set_label", str(version))]
            assert server.log == [("pause", "keeps_cache") if keeps else "pause", *loads, "resume"]
            server.log.clear()
            if version == 2:
                server.labels.append("other.7")


@pytest.mark.parametrize("lacks", ["experts", "arrays"])  # an answer in JSON has no experts
@pytest.mark.parametrize("experts", [False, True])
def test_servers_return_experts_where_the_run_wants_them(monkeypatch: pytest.MonkeyPatch, experts: bool, lacks: str) -> None:
    servers: list[Any] = [FakeServer(url) for url in ("http://0", "http://1")]
    servers[1].arrays = lacks != "arrays"

    def examined(server: FakeServer, shape: object) -> EngineInfo:
        return engine_info(experts=server.url == "http://0" or lacks != "experts")

    monkeypatch.setattr(ServerPool, "_examined", staticmethod(examined))
    given: dict[str, Any] = {"servers": servers, "processes": {}, "shape": {}, "row_tokens": 0, "restarts": 2, "carrier": None}
    with (
        pytest.raises(EngineError, match=r"http://1 does not return the experts .* model\.route_replay: true")
        if experts
        else nullcontext()
    ):
        ServerPool(**given, say=print, abilities=EngineCapabilities(experts=experts))


class Refusing(FakeServer):
    """A server whose workers refuse the second weights, with what they answered."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        super().__init__("http://127.0.0.1:9")
        self._real, self._answers = Server(self.url, "token", 1.0), list(answers)

    def load(self, folder: str, version: int, hashed: bool) -> SyncReport:
        loaded = {"version": version, "received": {}, "not_loaded": []}
        answers = [loaded] if version == 1 else self._answers
        self._real.call = lambda *_: {"results": answers}  # type: ignore[method-assign]
        return self._real.load(folder, version, hashed)


@pytest.mark.parametrize(
    ("answers", "kept"),
    [
        ([{"error": "cut off", "intact": True}] * 2, True),
        ([{"error": "cut off", "intact": True}, {"version": 2, "received": {}, "not_loaded": []}], False),
        ([{"error": "out of memory", "intact": False}], False),
    ],
)
def test_weights_that_are_refused_leave_the_label_of_those_that_are_kept(
    monkeypatch: pytest.MonkeyPatch, answers: list[dict[str, Any]], kept: bool
) -> None:
    server = Refusing(*answers)
    with closing(pool_of(monkeypatch, [server], FileTransfer(None))) as pool:
        pool.sync([("w", torch.ones(2))], 1)
        before = server.label()
        with pytest.raises(EngineError, match=answers[0]["error"]):
            pool.sync([("w", torch.ones(2))], 2)
        assert before.endswith(".1") and server.label() == (before if kept else "loading") and pool.held.version == 1


def test_what_cannot_be_written_leaves_nothing_to_bring_a_server_back_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(part: dict[str, Tensor], file: Path) -> None:
        raise OSError(28, "No space left on device")

    with closing(FileTransfer(str(tmp_path))) as outbox:
        outbox.current = outbox.write([("w", torch.ones(2))], 1)
        monkeypatch.setattr(transfer, "save_file", full)
        with pytest.raises(EngineError, match=r"No space left on device; set engine\.transfer_dir to a folder with more space"):
            outbox.write([("w", torch.ones(2))], 2)
        assert outbox.current is None and on_disk(tmp_path) == 0
