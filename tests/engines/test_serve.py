"""A real vLLM server, started as a user starts it: what it says, takes, refuses, opens, and leaves behind."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from answers import engine_on
from conftest import RECIPE, ROOT, open_vllm, tiny_model
from helpers.engines import changed
from helpers.living import gone, listening, tree
from helpers.samples import request
from helpers.waiting import HANGS
from safetensors.torch import save_file
from torch import Tensor

from rlgen.engines.answer import ROUTE, read_answer
from rlgen.engines.base import fingerprint
from rlgen.engines.gate import Gate
from rlgen.engines.http import Server
from rlgen.engines.launch import claim
from rlgen.errors import EngineError, SetupError
from rlgen.models.tiny import build_tiny
from rlgen.models.weights import checkpoint_tensors
from rlgen.types import Completion, Sampling

Proof = Callable[[str], None]

pytestmark = pytest.mark.vllm

TOKEN = "a token of the tests"
# NCCL itself needs GPUs; files are taken all the same.
SERVED = RECIPE + 'engine: {kind: server, launch: true, transfer: nccl, devices: "0"}\n'


def outer_interface() -> str | None:
    """A network interface that others can reach."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.family.name == "AF_INET" and not a.address.startswith("127.") for a in addresses):
            return name
    return None


@dataclass(frozen=True, slots=True)
class Serving:
    """A running `rlgen serve`."""

    process: "subprocess.Popen[str]"
    client: httpx.Client
    lines: list[str]
    token_file: Path

    def rpc(self, method: str, **arguments: Any) -> dict[str, Any]:
        answer = self.client.post("/collective_rpc", json={"method": method, "kwargs": arguments})
        assert answer.status_code == 200, answer.text
        (result,) = answer.json()["results"]
        return result

    def sample(self, prompt: list[int]) -> tuple[list[int], list[float]]:
        """Eight tokens and their log-probs."""
        assert self.client.post("/reset_prefix_cache").status_code == 200
        params = {"temperature": 1.0, "max_tokens": 8, "seed": 5, "logprobs": 0}
        answer = self.client.post("/inference/v1/generate", json={"token_ids": prompt, "sampling_params": params})
        choice = answer.json()["choices"][0]
        return choice["token_ids"], [token["logprob"] for token in choice["logprobs"]["content"]]


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("serve")
    (folder / "r.yaml").write_text(SERVED)
    build_tiny("qwen3")
    # The name of an outer interface in the environment: gloo would listen there, were it not told otherwise.
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": outer_interface() or "lo", "RANK": "3", "WORLD_SIZE": "9"}
    environment.pop("RLGEN_SERVER_TOKEN", None)
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "rlgen", "serve", str(folder / "r.yaml"), "--port", "0"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=ROOT,
    )  # fmt: skip
    try:
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("ready"):
                break
        found = re.search(r"at (http://127\.0\.0\.1:\d+); RLGEN_SERVER_TOKEN=\$\(cat (\S+)\)", lines[-1])
        assert found, lines
        assert lines[-1].endswith(f'engine={{kind: server, url: "{found[1]}", transfer: "nccl"}}\'\n')
        token = Path(found[2]).read_text()
        headers = {"Authorization": f"Bearer {token}"}
        with httpx.Client(base_url=found[1], headers=headers, timeout=60, trust_env=False) as client:
            yield Serving(process, client, lines, Path(found[2]))
    finally:
        family = tree(process.pid) if process.poll() is None else []
        process.terminate()
        process.wait(30)
    assert gone(family, 10)


# --- what it says and takes --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_server_says_what_it_is(serving: Serving) -> None:
    facts = serving.rpc("rlgen_facts")
    assert facts["engine"].startswith("vllm 0.") and facts["model"] == str(build_tiny("qwen3"))
    settings = {"dtype": "float32", "head_dtype": "float32", "logprobs_mode": "processed_logprobs", "vocab_size": 260}
    assert facts["settings"] == settings and facts["revision"] is None
    assert (sorted(facts["stop_ids"]), facts["max_model_len"], facts["cache_block"]) == ([257, 259], 76, 128)
    assert (facts["cuda"], facts["transfer"]) == (torch.cuda.is_available(), "nccl")


def write(folder: Path, tensors: Mapping[str, Tensor], version: int) -> Path:
    """Weights as a trainer sends them, in two files."""
    folder.mkdir(exist_ok=True)
    names = sorted(tensors)
    for number, part in enumerate((names[:5], names[5:])):
        save_file({name: tensors[name] for name in part}, folder / f"{number}.safetensors")
    files = {file.name: {"bytes": file.stat().st_size} for file in folder.glob("*.safetensors")}
    manifest = {"version": version, "files": files, "tensors": len(tensors)}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def changed_tensors(seed: int) -> tuple[Any, dict[str, Tensor]]:
    model = changed(tiny_model("qwen3"), seed=seed)
    return model, {name: tensor.detach().clone() for name, tensor in checkpoint_tensors(model)}


def off_by(model: Any, prompt: list[int], completion: list[int], values: list[float]) -> float:
    """The largest difference of log-probs from those of the model."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    own = logits.log_softmax(-1)[range(len(completion)), completion]
    return (own - torch.tensor(values)).abs().max().item()


@pytest.mark.slow
def test_weights_that_are_loaded_are_those_it_samples_from(serving: Serving, tmp_path: Path) -> None:
    model, tensors = changed_tensors(1)
    receipt = serving.rpc("rlgen_load", path=str(write(tmp_path / "v1", tensors, 1)), version=1, hashed=True)
    assert receipt["version"] == 1 and receipt["not_loaded"] == []
    assert receipt["received"] == {name: fingerprint(tensor, hashed=True) for name, tensor in tensors.items()}
    prompt = [10, 20, 30, 40]
    ids, values = serving.sample(prompt)
    # embedding and head are tied: a head that stayed old would be off by nats
    assert off_by(model, prompt, ids, values) < 1e-5 and off_by(tiny_model("qwen3"), prompt, ids, values) > 0.1
    assert ":" not in "".join(serving.rpc("rlgen_load", path=str(tmp_path / "v1"), version=1, hashed=False)["received"].values())


@pytest.mark.slow
def test_what_is_not_whole_is_refused_before_anything_is_loaded(serving: Serving, tmp_path: Path) -> None:
    before = serving.sample([1, 2, 3])
    _, tensors = changed_tensors(2)

    def refused(name: str, words: str) -> None:
        told = serving.rpc("rlgen_load", path=str(tmp_path / name), version=2, hashed=False)
        assert told.keys() == {"error", "intact"} and told["intact"] is True and re.search(words, told["error"])

    def said(name: str, **changes: Any) -> None:
        file = tmp_path / name / "manifest.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    file = write(tmp_path / "cut", tensors, 2) / "1.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    refused("cut", r"1\.safetensors: .* were written")
    # as long as it should be, but without its end
    said("cut", files={file.name: {"bytes": file.stat().st_size} for file in (tmp_path / "cut").glob("*.safetensors")})
    refused("cut", "not a complete safetensors file")
    write(tmp_path / "lost", tensors, 2).joinpath("0.safetensors").unlink()
    refused("lost", r"0\.safetensors: no bytes")
    save_file({"x": torch.zeros(1)}, write(tmp_path / "more", tensors, 2) / "9.safetensors")
    refused("more", r"9\.safetensors")
    write(tmp_path / "old", tensors, 1)
    refused("old", "of version 1, not 2")
    write(tmp_path / "few", tensors, 2)
    said("few", tensors=len(tensors) + 1)
    refused("few", f"{len(tensors)} tensors, but {len(tensors) + 1} were written")
    (tmp_path / "few/manifest.json").write_text("{")
    refused("few", "no readable manifest")
    refused("nowhere", "no readable manifest")
    assert serving.sample([1, 2, 3]) == before


@pytest.mark.slow
def test_a_load_that_fails_half_way_says_so_and_the_next_one_heals_it(serving: Serving, tmp_path: Path) -> None:
    model, tensors = changed_tensors(3)
    wrong = {**tensors, "model.layers.1.mlp.up_proj.weight": torch.zeros(3, 3)}
    told = serving.rpc("rlgen_load", path=str(write(tmp_path / "wrong", wrong, 3)), version=3, hashed=False)
    assert told["intact"] is False and "wrong: " in told["error"]
    receipt = serving.rpc("rlgen_load", path=str(write(tmp_path / "right", tensors, 4)), version=4, hashed=False)
    assert receipt["not_loaded"] == []
    ids, values = serving.sample([7, 8])
    assert off_by(model, [7, 8], ids, values) < 1e-5


@pytest.mark.slow
def test_an_unknown_method_does_not_end_the_server(serving: Serving) -> None:
    # uvicorn closes a connection after such an answer, and the client would use it again
    headers = {"Connection": "close"}
    answer = serving.client.post("/collective_rpc", json={"method": "no_such_method"}, headers=headers)
    assert answer.status_code == 500
    serving.sample([1])


@pytest.mark.slow
def test_arrays_and_json_are_the_same_answers(serving: Serving) -> None:
    url, token = str(serving.client.base_url).rstrip("/"), serving.token_file.read_text()
    server, sampling = Server(url, token, 60.0), Sampling(max_tokens=10, temperature=1.0, stop_ids=tuple(range(230, 260)))
    requests = [request(range(3, 5 + place), seed=place) for place in range(12)]

    def sample(run: str) -> list[Completion]:
        server.set_label(f"{run}.7")
        return engine_on([server], run, version=7).generate(requests, sampling)

    as_json = sample("a")
    server.look()
    assert server.arrays
    as_arrays = sample("b")
    for asked, one, other in zip(requests, as_json, as_arrays, strict=True):
        assert one.prompt_ids.tolist() == other.prompt_ids.tolist() == asked.prompt_ids.tolist()
        assert list(one.token_ids) == list(other.token_ids) and list(one.logp) == list(other.logp), "to the last bit"
        assert one.finish_reason == other.finish_reason and one.cached_tokens == other.cached_tokens
        assert one.weight_version == other.weight_version == 7
    assert len({len(one.token_ids) for one in as_arrays}) > 3 and {one.finish_reason for one in as_arrays} == {"stop", "length"}


@pytest.mark.slow
def test_the_route_of_arrays_refuses_what_it_cannot_answer(serving: Serving) -> None:
    asked = {"token_ids": [3, 4], "sampling_params": {"max_tokens": 4, "logprobs": 0, "detokenize": False}, "cache_salt": "a"}
    wrong = [
        ({"token_ids": "none"}, "Expected `array`"),
        ({"sampling_params": {"max_tokens": 0, "logprobs": 0}}, "max_tokens must be at least 1"),
        ({"sampling_params": {"no_such": 1}}, "no_such"),
        ({"token_ids": [3] * 500}, "76"),
    ]
    for change, words in wrong:
        answer = serving.client.post(ROUTE, json={**asked, **change})
        assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text
    good = serving.client.post(ROUTE, json=asked)
    assert good.status_code == 200 and len(read_answer(good.content, True, "url", lambda label: 0).token_ids) >= 1


# --- what it refuses and opens -----------------------------------------------------------------------------------------------


@pytest.mark.fault(85, 86)
@pytest.mark.slow
def test_no_route_answers_without_the_token(serving: Serving, proof: Proof) -> None:
    paths = serving.client.get("/openapi.json").json()["paths"]
    routes = [(method, path) for path, methods in paths.items() for method in methods]
    routes += [("get", path) for path in ("/openapi.json", "/docs", "/redoc", "/metrics", "/metrics/", "/no/such/route")]
    routes += [("options", "/collective_rpc"), ("head", "/health"), ("post", ROUTE), ("get", ROUTE)]
    known = {"/health", "/ping", "/load", "/version", "/collective_rpc", "/pause", "/inference/v1/generate", "/weight_info"}
    assert known <= set(paths) and len(routes) > 30
    wrong = ["", "Bearer", "Bearer wrong", serving.client.headers["Authorization"] + "x", "Basic " + TOKEN]
    with httpx.Client(base_url=serving.client.base_url, timeout=10, trust_env=False) as stranger:
        for method, path in routes:
            path = re.sub(r"\{\w+\}", "x", path)
            for headers in ({}, *({"Authorization": text} for text in wrong)):
                answer = stranger.request(method, path, headers=headers)
                assert answer.status_code == 401, (method, path, headers, answer.text)
                assert answer.text in ('{"detail":""}', "")
        # two of them: whoever reads the first and whoever reads the last would differ
        right = serving.client.headers["Authorization"]
        assert stranger.get("/health", headers=[("Authorization", right), ("Authorization", "x")]).status_code == 401
        assert stranger.get("/health", headers={"Authorization": right}).status_code == 200
    log = Path(re.search(r"log: (\S+)", serving.lines[0])[1]).read_text()  # type: ignore[index]
    assert 1 <= len(re.findall(r"requests refused without the token", log)) <= 10
    proof(f"{len(routes)} routes asked with no token and with {len(wrong)} wrong ones: 401 each")


async def through(gate: Gate, scope: dict[str, Any]) -> list[Any]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing is read before the door is open")

    await gate(scope, receive, send)
    return sent


@pytest.mark.fault(85)
def test_the_gate_holds_for_websockets_and_needs_a_token(monkeypatch: pytest.MonkeyPatch, proof: Proof) -> None:
    proof("a server's gate made without a token, wherever it listens")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(scope["type"])

    monkeypatch.delenv("RLGEN_SERVER_TOKEN", raising=False)
    with pytest.raises(SetupError, match="RLGEN_SERVER_TOKEN is not set"):
        Gate(app)
    monkeypatch.setenv("RLGEN_SERVER_TOKEN", TOKEN)
    gate = Gate(app)
    refused = {"type": "websocket", "headers": [(b"authorization", b"Bearer no")], "path": "/v1/realtime"}
    assert asyncio.run(through(gate, refused)) == [{"type": "websocket.close", "code": 1008}]
    admitted = {**refused, "headers": [(b"authorization", f"Bearer {TOKEN}".encode())]}
    assert asyncio.run(through(gate, admitted)) == ["websocket"]
    assert asyncio.run(through(gate, {"type": "lifespan"})) == ["lifespan"]


@pytest.mark.fault(84)
@pytest.mark.slow
def test_nothing_listens_beyond_loopback(serving: Serving, proof: Proof) -> None:
    addresses = listening(tree(serving.process.pid))
    assert len(addresses) > 1 and set(addresses) == {"127.0.0.1"}
    proof(f"{len(addresses)} sockets of the server's processes listen, all on 127.0.0.1")


def test_an_engine_in_this_process_listens_on_loopback_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", outer_interface() or "lo")
    with closing(open_vllm("qwen3", max_num_seqs=4)):
        addresses = listening([psutil.Process()])
        assert addresses and set(addresses) == {"127.0.0.1"}


@pytest.mark.slow
def test_the_token_stands_in_no_command_line_and_in_a_file_for_its_owner(serving: Serving) -> None:
    token = serving.token_file.read_text()
    assert len(token) >= 32 and serving.token_file.stat().st_mode & 0o777 == 0o600
    assert not any(token in text for process in tree(serving.process.pid) for text in process.cmdline())
    assert not any(token in line for line in serving.lines)


# --- how it ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_server_that_dies_early_says_why(rlgen: Any, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(SERVED)
    done = rlgen("serve", tmp_path / "r.yaml", "--port", 0, "--set", "engine.extra={no_such_argument: 1}")
    assert done.returncode == 6
    assert "ended with exit code 2: this vLLM has no argument --no-such-argument=1; correct engine.extra" in done.stderr


@pytest.mark.slow
def test_a_port_that_is_taken_is_refused_at_once(serving: Serving) -> None:
    port = httpx.URL(serving.client.base_url).port
    with pytest.raises(EngineError, match=rf"no server can listen on 127\.0\.0\.1 port {port}"):
        claim("127.0.0.1", port)
    with pytest.raises(EngineError, match=r"no server can listen on 192\.0\.2\.77"):
        claim("192.0.2.77", 0)


@pytest.mark.slow
def test_asked_to_stop_it_leaves_nothing(serving: Serving) -> None:
    """The last test of the served model."""
    family = tree(serving.process.pid)
    assert len(family) >= 4  # rlgen serve, guard, HTTP server, engine
    serving.process.send_signal(signal.SIGINT)
    assert serving.process.wait(HANGS) == 0
    assert gone(family, 1) and not serving.token_file.exists()
