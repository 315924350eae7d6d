"""Two real servers that a recipe launches: started together, each answers its share, and each is restarted on its own."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import open_vllm, tiny_model
from helpers.before import before
from helpers.engines import changed, kill
from helpers.recipes import SHORT, recipe_for
from helpers.samples import request
from helpers.waiting import HANGS

from rlgen.engines.fleet import ServerPool
from rlgen.engines.launch import ServerPlan, new_token, start_servers
from rlgen.engines.open import build_engine, server_plans
from rlgen.engines.server import ServerEngine
from rlgen.errors import EngineError, SetupError
from rlgen.models.load import locate
from rlgen.models.weights import checkpoint_tensors
from rlgen.processes import Processes
from rlgen.recipe.engines import EngineNeeds
from rlgen.types import Sampling

pytestmark = pytest.mark.vllm
SAMPLING = Sampling(max_tokens=48, temperature=1.0, stop_ids=(257,))
REQUESTS = [request(range(3, 5 + place % 7), seed=1000 + place) for place in range(16)]


def needs(**engine: Any) -> EngineNeeds:
    settings = {"kind": "server", "launch": True, "servers": 2, "max_model_len": 256, "start_timeout": HANGS, **engine}
    return recipe_for("tiny:qwen3", engine=settings, **SHORT).engine_needs


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerEngine, ServerPool, list[str], Path]]:
    logs = tmp_path_factory.mktemp("servers")
    said: list[str] = []
    engine = build_engine(needs(), locate("tiny:qwen3"), Processes.alone(), logs, said.append)
    assert isinstance(engine, ServerEngine) and isinstance(engine._keeper, ServerPool)
    yield engine, engine._keeper, said, logs
    engine.close()


def processes_of(pool: ServerPool) -> list[list[psutil.Process]]:
    return [process.processes() for process in pool._processes.values()]


@pytest.mark.slow
@pytest.mark.fault(51)
def test_each_answers_its_share_and_comes_back_on_its_own(two: Any, proof: Callable[[str], None]) -> None:
    engine, fleet, said, logs = two
    urls = [server.url for server in fleet.servers]
    assert len(set(urls)) == 2 and sorted(path.name for path in logs.iterdir()) == ["server0.log", "server1.log"]
    first = processes_of(fleet)
    assert not {one.pid for one in first[0]} & {one.pid for one in first[1]}
    model = changed(tiny_model("qwen3"))
    engine.sync(checkpoint_tensors(model), 1)
    asked: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        before(ServerEngine, "_version_of", lambda engine, label, url: asked.update([url]), patch.setattr)
        answers = engine.generate(REQUESTS, SAMPLING)
    assert {url: count >= len(REQUESTS) // 4 for url, count in asked.items()} == dict.fromkeys(urls, True)
    with closing(open_vllm("qwen3", max_model_len=256, max_num_seqs=16)) as alone:
        alone.sync(checkpoint_tensors(model), 1)
        assert answers == alone.generate(REQUESTS, SAMPLING)  # whoever answers, it is the same answer

    kill(first[1])
    assert engine.generate(REQUESTS, SAMPLING) == answers  # the other one alone
    assert fleet.brought_back == {urls[1]: 1} and urls[1] in said[0] and "it is started again" in said[0]
    assert [server.url for server in fleet.servers] == [urls[0]]
    absent = fleet._absent[urls[1]]
    assert absent is not None and absent.ready.wait(HANGS)
    engine.sync(checkpoint_tensors(model), 2)
    assert {server.url for server in fleet.servers} == set(urls) and "takes part from now on" in said[1]
    again = engine.generate(REQUESTS, SAMPLING)
    assert [one.token_ids.tolist() for one in again] == [one.token_ids.tolist() for one in answers]
    after = processes_of(fleet)
    assert [one.pid for one in after[0]] == [one.pid for one in first[0]]  # nobody touched the other one
    assert not {one.pid for one in after[1]} & {one.pid for one in first[1]}
    proof(f"SIGKILL to all processes of one of two real servers, {urls[1]}; the answers are those of vLLM in this process")


@pytest.mark.slow
def test_a_launch_of_which_one_does_not_start_leaves_none(tmp_path: Path) -> None:
    """As when one port is taken, or one GPU has no memory: it is named, and the others are ended at once."""
    good = server_plans(needs(servers=1), locate("tiny:qwen3"))[0]
    wrong = server_plans(needs(servers=1, extra={"no_such_argument": 1}), locate("tiny:qwen3"))[0]
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with pytest.raises(EngineError, match=r"this vLLM has no argument --no-such-argument.*server1\.log"):
        start_servers([good, wrong], new_token(), [tmp_path / "server0.log", tmp_path / "server1.log"], HANGS)
    assert not [one for one in psutil.Process().children(recursive=True) if one.pid not in before and one.status() != "zombie"]


def test_servers_of_one_launch_never_meet_at_a_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that was found free is nobody's until its server listens there: the next one may be offered the same."""
    offered = iter([4711, 4711, 4711, 4712, 4712, 4713])
    started: list[int] = []
    monkeypatch.setattr("rlgen.engines.launch.claim", lambda host, port: port or next(offered))
    monkeypatch.setattr("rlgen.engines.launch.wait_all_ready", lambda servers, timeout: 0.0)
    monkeypatch.setattr(ServerPlan, "command", lambda plan: started.append(plan.port) or ["-c", "pass"])
    servers = start_servers(server_plans(needs(servers=3), "m"), "t", [tmp_path / str(n) for n in range(3)], 1.0)
    for server in servers:
        server.stop()
    assert started == [4711, 4712, 4713] == [server.plan.port for server in servers]


def test_servers_that_would_share_a_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SetupError, match=r"engine\.servers 2: all servers would use .* 4 GPUs, such as \[0, 1, 2, 3\]"):
        server_plans(needs(servers=2, tensor_parallel_size=2), "m")
    assert len(server_plans(needs(servers=1), "m")) == 1 and len(server_plans(needs(servers=2, devices=[0, 1]), "m")) == 2
