"""A fleet of stand-ins for servers, which are killed, stopped, cut off from the network, and slow: no answer is lost or wrong."""

import dataclasses
import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from helpers.before import before
from helpers.engines import Told, engine_info
from helpers.samples import request
from helpers.torchrun import ENVIRONMENT, launch, well
from helpers.waiting import HANGS, until
from stand_in_server import completion
from torch.distributed import HashStore

from rlgen.engines.base import EngineCapabilities
from rlgen.engines.fleet import Absent, SentWeights, ServerPool
from rlgen.engines.found import addresses
from rlgen.engines.http import Server
from rlgen.engines.launch import claim
from rlgen.engines.server import ServerEngine
from rlgen.engines.shared_fleet import SharedServerPool
from rlgen.engines.transfer import FileTransfer
from rlgen.errors import EngineError, ServerLost
from rlgen.files import read_json
from rlgen.recipe.engines import ServerEngineRecipe
from rlgen.types import Completion, Sampling

SHORT = 0.8  # seconds without an answer, where servers hang or are cut off
SAMPLING = Sampling(max_tokens=3, temperature=1.0, stop_ids=())
ROUTE = "/rlgen/sample"
FACTS = json.dumps(dataclasses.asdict(engine_info()) | {"shape": {}})


class StandIn:
    """A server in a process of its own, in a network of its own where the machine allows one."""

    def __init__(self, number: int, apart: bool = True) -> None:
        self.number, self.space, self.host = number, f"rlgen{number}", "127.0.0.1"
        self.away: str | None = None  # what is wrong with it
        self.own_network = apart and self._network()
        self.port = claim("127.0.0.1", 0)
        self.start()

    def _network(self) -> bool:
        if shutil.which("ip") is None or self._ip("netns", "add", self.space):
            return False
        self._ip("link", "add", self.space, "type", "veth", "peer", "name", "eth0", "netns", self.space)
        self._ip("addr", "add", f"10.99.{self.number}.1/30", "dev", self.space)
        self._ip("link", "set", self.space, "up")
        self._ip("-n", self.space, "addr", "add", f"10.99.{self.number}.2/30", "dev", "eth0")
        failed = self._ip("-n", self.space, "link", "set", "eth0", "up")
        self.host = self.host if failed else f"10.99.{self.number}.2"
        return not failed

    @staticmethod
    def _ip(*words: str) -> int:
        return subprocess.run(["ip", *words], capture_output=True).returncode

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def server(self, timeout: float = HANGS) -> Server:
        return Server(self.url, "token", timeout)

    def start(self) -> None:
        inside = ["ip", "netns", "exec", self.space] if self.own_network else []
        program = Path(__file__).with_name("stand_in_server.py")
        command = [*inside, sys.executable, str(program), self.host, str(self.port), FACTS]
        self.process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)

    def ready(self) -> None:
        assert self.process.stdout is not None and self.process.stdout.readline()

    def fail(self, how: str) -> None:
        self.away = how
        if how == "killed":
            self.process.kill()
            self.process.wait()
        elif how == "stopped":
            self.process.send_signal(signal.SIGSTOP)
        elif how == "cut off":
            self._ip("-n", self.space, "link", "set", "eth0", "down")
        else:
            self.server().call("POST", "/slow", {"seconds": 0.1})

    def mend(self) -> None:
        how, self.away = self.away, None
        if how == "killed":
            self.start()
            self.ready()
        elif how == "stopped":
            self.process.send_signal(signal.SIGCONT)
        elif how == "cut off":
            self._ip("-n", self.space, "link", "set", "eth0", "up")
            until(self.reachable)  # the kernel remembers for a second that nobody was there
        elif how is not None:
            self.server().call("POST", "/slow", {"seconds": 0.0})

    def reachable(self) -> bool:
        with suppress(OSError), socket.create_connection((self.host, self.port), SHORT):
            return True
        return False

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.own_network:
            self._ip("netns", "del", self.space)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[StandIn]]:
    standing = [StandIn(number) for number in range(8)]
    for one in standing:
        one.ready()
    yield standing
    for one in standing:
        one.end()


@pytest.fixture
def fleet(made: list[StandIn]) -> Iterator[list[StandIn]]:
    yield made
    for one in made:
        one.mend()


@pytest.fixture
def said() -> list[str]:
    return []


def pool_on(fleet: Sequence[StandIn], said: list[str], timeout: float = HANGS, **more: Any) -> ServerPool:
    servers = [one.server(timeout) for one in fleet]
    settings = {"servers": servers, "processes": {}, "shape": {}, "row_tokens": 640, "abilities": EngineCapabilities()}
    others = {"restarts": 1000, "carrier": FileTransfer(None), "say": said.append, "patience": HANGS}
    return ServerPool(**settings | others | more)


@contextmanager
def engine_on(fleet: Sequence[StandIn], said: list[str], **more: Any) -> Iterator[ServerEngine]:
    """An engine that has sent version 1."""
    with closing(ServerEngine(pool_on(fleet, said, **more))) as engine:
        engine.sync([], 1)
        yield engine


def requests(step: int) -> list[Any]:
    """Four completions of each of 16 prompts."""
    return [request((3, 4 + prompt), seed=step * 1000 + prompt * 10 + place) for prompt in range(16) for place in range(4)]


class Asked:
    """The requests that each server was sent, and the servers that each prompt was sent to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at: Counter[str] = Counter()
        self.of_prompt: dict[str, set[str]] = {}
        before(Server, "ask", self.count, monkeypatch.setattr)

    def count(self, server: Server, session: Any, method: str, route: str, body: Any, *_: Any) -> None:
        if route == ROUTE and body is not None:
            self.at[server.url] += 1
            self.of_prompt.setdefault(str(json.loads(body)["token_ids"]), set()).add(server.url)


def right(answers: Sequence[Completion], step: int, version: int) -> None:
    for asked, answer in zip(requests(step), answers, strict=True):
        assert answer.token_ids.tolist() == completion(asked.seed, version) and answer.weight_version == version
        assert answer.prompt_ids.tolist() == asked.prompt_ids.tolist()


def steps(fleet: list[StandIn], said: list[str], monkeypatch: pytest.MonkeyPatch, count: int) -> Counter[str]:
    """Trains `count` steps, with up to five servers away at a time. Returns how often what was done to them."""
    chance, done, asked = random.Random(7), Counter[str](), Asked(monkeypatch)
    kinds = ["killed", "stopped", "slow"] + ["cut off"] * all(one.own_network for one in fleet)
    engine = ServerEngine(pool_on(fleet, said, SHORT))
    for step in range(1, count + 1):
        engine.sync([], step)
        for one in fleet:
            if one.away is not None and chance.random() < 0.4:
                one.mend()
        well = [one for one in fleet if one.away is None]
        more = well[: max(0, len(well) - 3)] if chance.random() < 0.5 else []
        faults = [(one, chance.choice(kinds)) for one in chance.sample(more, min(len(more), chance.randint(0, 3)))]
        done.update(kind for _, kind in faults)
        asked.at.clear()
        came: list[int] = []
        begun = len(said)

        def arrived(place: int, answer: Completion, came: list[int] = came, faults: Any = faults) -> None:
            came.append(place)
            while len(came) >= 8 and faults:
                one, kind = faults.pop()
                threading.Thread(target=one.fail, args=(kind,)).start() if kind == "slow" else one.fail(kind)

        right(engine.generate(requests(step), SAMPLING, arrived), step, step)
        assert sorted(came) == list(range(64)), "each is answered once"
        lost = [url for url in asked.at if any(url in line and "is lost" not in line for line in said[begun:])]
        assert sum(asked.at.values()) <= 64 + sum(asked.at[url] for url in lost), "only what the lost ones had is asked again"
        until(lambda faults=faults: not faults)

    def all_are_back() -> bool:
        engine.sync([], count + 1)
        return len(engine._keeper.servers) == len(fleet)

    for one in fleet:
        one.mend()
    until(all_are_back)
    engine.close()
    return done


def test_servers_are_lost_and_come_back(fleet: list[StandIn], said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    done = steps(fleet, said, monkeypatch, 8)
    assert done["killed"] and done["stopped"] and any("takes part from now on" in line for line in said)


@pytest.mark.slow
def test_200_steps(fleet: list[StandIn], said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    done = steps(fleet, said, monkeypatch, 200)
    print(done, len(said))
    assert min(done[kind] for kind in ("killed", "stopped", "slow")) >= 20


@pytest.mark.slow
def test_two_processes_lose_a_server_together(tmp_path: Path) -> None:
    well(launch(Path(__file__).with_name("fleet_worker.py"), tmp_path, timeout=HANGS))
    main, other = read_json(tmp_path / "found.json")
    assert main["counts"] == other["counts"] == [3, 2, 3]
    assert "2 other servers answer its requests" in main["said"][0] and "takes part from now on" in main["said"][1]


def test_a_process_asks_each_server_on_the_route_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after the main process has told it which servers are left: one of rlgen, and another one, which answers in JSON."""
    monkeypatch.setattr(Server, "look", lambda server: None)
    servers = [Server(url, "token", HANGS) for url in ("http://a", "http://b")]
    servers[1].arrays = True
    store, pool = HashStore(), SimpleNamespace(servers=servers, brought_back={"http://b": 1})
    opened = (servers, engine_info(), SentWeights(run="r", version=1, syncs=1), EngineCapabilities())
    processes: Any = SimpleNamespace(rank=0, store=store, on_main=lambda *_, **__: opened, run_all=lambda call: call())
    shared, its = (SharedServerPool(processes, cast(Any, None)) for _ in range(2))
    its._pool = cast(Any, pool)
    its._publish()
    its._write("recovered/1", {})
    shared.recover(ServerLost("http://b", "died"), {})
    assert {server.url: server.arrays for server in shared.servers} == {"http://a": False, "http://b": True}


def test_completions_of_a_prompt_go_to_one_server(fleet: list[StandIn], said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_on(fleet, said) as engine:
        asked = Asked(monkeypatch)
        right(engine.generate(requests(1), SAMPLING), 1, 1)
        assert len(asked.of_prompt) == 16 and all(len(urls) == 1 for urls in asked.of_prompt.values())
        assert sorted(asked.at.values()) == [8] * 8, "two prompts each"
        # A single prompt is spread: else seven servers would be idle.
        asked.at.clear()
        engine.generate([request((3, 4), seed=place) for place in range(64)], SAMPLING)
        assert sorted(asked.at.values()) == [8] * 8


def test_with_none_left_the_call_waits_for_the_first_that_is_back(fleet: list[StandIn], said: list[str]) -> None:
    two = fleet[:2]

    def say(line: str) -> None:
        said.append(line)
        if "none is left" in line and len(said) == 2:  # the second of them is lost, too
            two[1].mend()

    with engine_on(two, said, say=say) as engine:
        for one in two:
            one.fail("killed")
        right(engine.generate(requests(1), SAMPLING), 1, 1)
        assert any("none is left, so the run waits up to" in line for line in said)
        assert [server.url for server in engine._keeper.servers] == [two[1].url]
        two[1].fail("killed")
        engine._keeper._patience = 0.6
        with pytest.raises(ServerLost, match=r"cannot be reached.*rlgen serve") as raised:
            engine.generate(requests(2), SAMPLING)
        assert raised.value.exit_code == 6
        two[1].mend()


def test_a_sync_goes_on_without_a_server_that_dies_in_it(fleet: list[StandIn], said: list[str]) -> None:
    with engine_on(fleet[:3], said) as engine:
        fleet[1].fail("killed")
        assert engine.sync([], 2).version == 2 and len(engine._keeper.servers) == 2
        right(engine.generate(requests(2), SAMPLING), 2, 2)
        fleet[1].mend()
        until(lambda: engine._keeper._absent[fleet[1].url].ready.is_set())
        engine.sync([], 3)
        assert len(engine._keeper.servers) == 3
        right(engine.generate(requests(3), SAMPLING), 3, 3)


def test_none_is_forgotten_after_a_sync_that_all_have_missed(fleet: list[StandIn], said: list[str]) -> None:
    """Those that are back have the weights of that sync, also one that kept older weights of this run."""
    three = fleet[:3]

    def say(line: str) -> None:
        said.append(line)
        for one in three if "none is left" in line else ():
            one.mend()

    with engine_on(three, said, timeout=SHORT, say=say) as engine:
        for version in (2, 4):
            for one in three:
                one.fail("stopped")
            engine.sync([], version)
            right(engine.generate(requests(version), SAMPLING), version, version)
            until(lambda version=version: engine.sync([], version + 1) and len(engine._keeper.servers) == 3)
            right(engine.generate(requests(version + 1), SAMPLING), version + 1, version + 1)
        for one in three[::2]:
            one.fail("stopped")
        engine.sync([], 6)
        three[1].fail("killed")
        right(engine.generate(requests(6), SAMPLING), 6, 6)
        assert said[-1].endswith("has the weights of version 6 again; its open requests are sent again")


def test_one_that_is_lost_too_often_stays_away(fleet: list[StandIn], said: list[str]) -> None:
    with engine_on(fleet[:2], said, restarts=0) as engine:
        fleet[0].fail("killed")
        right(engine.generate(requests(1), SAMPLING), 1, 1)
        assert "it stays away, for servers were recovered 0 times (engine.restarts)" in said[0]
        fleet[0].mend()
        engine.sync([], 2)
        assert len(engine._keeper.servers) == 1


def settings_of(url: str) -> ServerEngineRecipe:
    return ServerEngineRecipe(kind="server", url=url)


def test_servers_join_and_leave_by_a_file(fleet: list[StandIn], said: list[str], tmp_path: Path) -> None:
    file = tmp_path / "servers.txt"
    file.write_text(f"{fleet[0].url}\n")
    settings = settings_of(f"file://{file}")
    assert addresses(settings) == [fleet[0].url]
    with engine_on(fleet[:1], said, found=lambda: [Server(url, "token", HANGS) for url in addresses(settings)]) as engine:
        file.write_text(f"{fleet[1].url}\n{fleet[2].url}\n{fleet[0].url}\n")
        engine.sync([], 2)  # looks at them
        until(lambda: all(one is not None and one.ready.is_set() for one in engine._keeper._absent.values()))
        engine.sync([], 3)
        assert len(engine._keeper.servers) == 3
        file.write_text(f"{fleet[2].url}\n")
        engine.sync([], 4)
        assert [server.url for server in engine._keeper.servers] == [fleet[2].url]
        right(engine.generate(requests(4), SAMPLING), 4, 4)
        file.unlink()
        engine.sync([], 5)  # it may be written at this moment
        right(engine.generate(requests(5), SAMPLING), 5, 5)


def test_a_server_that_comes_back_with_another_token_is_left_out_and_said(fleet: list[StandIn], said: list[str]) -> None:
    with engine_on(fleet[:2], said) as engine:
        pool = engine._keeper
        back = Told(fleet[1].url, "token", HANGS)
        back.status = 401
        pool.servers = pool.servers[:1]
        pool._absent[back.url] = Absent(back, pool._stopped)
        until(pool._absent[back.url].ready.is_set)
        engine.sync([], 2)
        assert f"{back.url} refuses rlgen's token" in said[-1] and said[-1].endswith("It is left out")
        assert len(pool.servers) == 1


def test_a_server_with_other_settings_is_left_out(fleet: list[StandIn], said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ServerEngine(pool_on(fleet[:2], said))
    engine.sync([], 1)
    fleet[0].fail("killed")
    right(engine.generate(requests(1), SAMPLING), 1, 1)
    fleet[0].mend()
    until(lambda: engine._keeper._absent[fleet[0].url].ready.is_set())

    def other(server: Server, shape: Any) -> Any:
        raise EngineError(f"{server.url} serves another model")

    monkeypatch.setattr(ServerPool, "_examined", staticmethod(other))
    engine.sync([], 2)
    assert "serves another model. It is left out" in said[-1] and len(engine._keeper.servers) == 1
    with suppress(ServerLost):
        engine.close()
