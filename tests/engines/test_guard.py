"""Whoever is killed, nothing of a server is left: the guard removes it, or, if that is killed too, whoever starts the next one.

The server is a stand-in that has what a server has: shared memory, a socket that listens, files in its folder.
"""

import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, plan_of
from helpers.engines import kill, server_plan
from helpers.living import gone, listening, tree
from helpers.waiting import HANGS, until

from rlgen.engines import guard, launch
from rlgen.engines.launch import claim
from rlgen.engines.transfer import FileTransfer
from rlgen.errors import EngineError

pytestmark = pytest.mark.slow

Proof = Callable[[str], None]
PLAN = server_plan(plan_of("qwen3", model="tiny", max_model_len=256, max_num_seqs=8, kv_cache_gib=0.1))
OWNER = """
import pickle, sys, torch
from pathlib import Path
from rlgen.engines.launch import ServerPlan, ServerProcess
from rlgen.engines.transfer import FileTransfer
ServerPlan.command = lambda plan: [sys.executable, "-c", sys.argv[2]]
outbox = FileTransfer(None)
outbox.current = outbox.write([("w", torch.ones(2))], 1)
server = ServerProcess(pickle.loads(bytes.fromhex(sys.argv[3])), "token", Path(sys.argv[1]) / "log", 200)
print(outbox.current.parent, server._folder, flush=True)
sys.stdin.read()
"""
SERVER = """
import os, socket, time
from multiprocessing.shared_memory import SharedMemory
shared = SharedMemory(create=True, size=64)
listening = socket.create_server(("127.0.0.1", 0))
with open(os.environ["TMPDIR"] + "/names", "w") as file:
    print("/dev/shm/" + shared.name, listening.getsockname()[1], flush=True, file=file)
time.sleep(100_000)
"""
# Asked to end, it ends when there is a file, or is killed by its guard.
SLOW = SERVER.replace(
    "time.sleep",
    """
def end(*_):
    while not os.path.exists(os.environ["TMPDIR"] + "/end"):
        time.sleep(0.05)
    os._exit(0)

import signal
signal.signal(signal.SIGTERM, end)
time.sleep""",
)


class Family:
    """An owner with its weights, its guard, and a server."""

    def __init__(self, place: Path, server: str) -> None:
        command = [sys.executable, "-c", OWNER, str(place), server, pickle.dumps(PLAN).hex()]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": "/tmp"}
        self.owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        self.outbox, self.folder = map(Path, self.owner.stdout.readline().split())
        noted = self.folder / "shared"
        until(lambda: noted.exists() and "psm_" in noted.read_text())
        shared, port = (self.folder / "names").read_text().split()
        self.shared, self.port = Path(shared), int(port)
        self.processes = psutil.Process(self.owner.pid).children(recursive=True)
        self.guard = next(process for process in self.processes if str(self.folder) in process.cmdline())
        self.server = self.guard.children()[0]
        self.watcher = next(process for process in self.processes if str(self.outbox) in process.cmdline())

    def left(self) -> list[str]:
        """What never goes; nothing as soon as that is so."""
        end = time.monotonic() + HANGS
        while (found := self.now()) and time.monotonic() < end:
            time.sleep(0.1)
        return found

    def now(self) -> list[str]:
        self.owner.poll()
        living = [f"process {p.pid}" for p in self.processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        files = [str(path) for path in (self.outbox, self.folder, self.shared) if path.exists()]
        ports = [f"port {c.laddr.port}" for c in psutil.net_connections("tcp") if c.laddr and c.laddr.port == self.port]
        return living + files + ports


@pytest.fixture
def family(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Family]:
    opened = Family(tmp_path, getattr(request, "param", SERVER))
    assert len(opened.now()) >= 3 + 3 + 1
    yield opened
    opened.owner.kill()
    opened.owner.wait()
    kill(opened.processes)


@pytest.mark.fault(78)
def test_the_owner_is_killed(family: Family, proof: Proof) -> None:
    family.owner.kill()
    family.owner.wait()
    assert family.left() == []
    proof("SIGKILL to the trainer: server, port, shared memory and weights are gone")


@pytest.mark.fault(78)
def test_a_trainer_of_somebody_elses_server_is_killed(proof: Proof) -> None:
    """No server ends with it: its weights, as large as the model, are removed all the same."""
    words = (
        "import sys; from rlgen.engines.transfer import FileTransfer as T; print(T(None)._place, flush=True); sys.stdin.read()"
    )
    owner = subprocess.Popen([sys.executable, "-c", words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    weights = Path(owner.stdout.readline().strip())
    (watcher,) = psutil.Process(owner.pid).children()
    assert weights.is_dir() and watcher.is_running()
    owner.kill()
    owner.wait()
    assert psutil.wait_procs([watcher], timeout=HANGS)[1] == [] and not weights.exists()
    proof("SIGKILL to a trainer that has only its weights in shared memory")


@pytest.mark.fault(78)
@pytest.mark.parametrize("family", [SLOW], indirect=True)
def test_the_next_owner_waits_for_the_port_of_one_that_was_killed(
    family: Family, monkeypatch: pytest.MonkeyPatch, proof: Proof
) -> None:
    """As a run does that was killed and is resumed at once, on the port that its recipe names."""
    looked, is_left_behind = [], launch.is_left_behind

    def looks(port: int) -> bool:
        looked.append(is_left_behind(port))
        if len(looked) == 4:
            (family.folder / "end").touch()
        return looked[-1]

    monkeypatch.setattr(launch, "STOP_SECONDS", HANGS)
    monkeypatch.setattr(launch, "is_left_behind", looks)
    with pytest.raises(EngineError, match=f"no server can listen on 127.0.0.1 port {family.port}"):
        claim("127.0.0.1", family.port)
    assert looked == [False], "it has an owner"
    family.owner.kill()
    family.owner.wait()
    assert claim("127.0.0.1", family.port) == family.port
    assert looked[1:4] == [True] * 3 and not looked[-1]
    proof(f"SIGKILL to the trainer; its server had the port while the next one looked {len(looked) - 2} times")


@pytest.mark.fault(78)
def test_the_server_is_killed(family: Family, proof: Proof) -> None:
    family.server.kill()
    until(lambda: family.guard.status() == psutil.STATUS_ZOMBIE)  # its owner has not asked yet
    # The trainer lives, and its weights are for the next server.
    until(lambda: family.now() == [f"process {family.watcher.pid}", str(family.outbox)])
    proof("SIGKILL to the server: guard, port and shared memory are gone")


@pytest.mark.fault(78)
def test_all_are_killed_and_the_next_start_removes_what_is_left(family: Family, tmp_path: Path, proof: Proof) -> None:
    own, unknown = SharedMemory(create=True, size=64), Path("/tmp") / f"rlgen-{os.getpid():08d}"
    unknown.mkdir()
    try:
        guard.sweep("/tmp")
        assert family.folder.exists(), "in use"
        for number in (signal.SIGSTOP, signal.SIGKILL):  # at once: none of them sees another die
            for process in [family.owner, *family.processes]:
                os.kill(process.pid, number)
        psutil.wait_procs(family.processes, timeout=HANGS)
        # Nobody lived to remove them. Another test may have, which has just started a server: whoever does sweeps.
        assert {*family.now()} <= {str(family.outbox), str(family.folder), str(family.shared)}
        proof("SIGKILL to trainer, guard, server and its tracker at once: files were left")
        guard.sweep("/tmp")
        FileTransfer(None).close()
        assert family.now() == []
        assert unknown.exists() and Path(f"/dev/shm/{own.name}").exists(), "never what is somebody else's"
    finally:
        unknown.rmdir()
        own.close()
        own.unlink()


@pytest.mark.fault(78)
def test_the_guard_is_killed(family: Family, proof: Proof) -> None:
    """The server is asked to stop by the kernel; its owner removes the rest when it notices."""
    family.guard.kill()
    assert psutil.wait_procs([family.server], timeout=HANGS)[1] == []
    family.owner.kill()
    family.owner.wait()
    guard.sweep("/tmp")
    FileTransfer(None).close()
    assert family.left() == []
    proof("SIGKILL to the guard")


OWNER_OF_TWO = """
import sys
from pathlib import Path
from test_guard import PLAN
from dataclasses import replace
from rlgen.engines.launch import ServerProcess, wait_all_ready
from rlgen.models.tiny import build_tiny
plan = replace(PLAN, engine=replace(PLAN.engine, model=str(build_tiny("qwen3")), tensor_parallel_size=2))
server = ServerProcess(plan, "token", Path(sys.argv[1]), 200)
wait_all_ready([server], 200)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.fault(78)
@pytest.mark.vllm
def test_when_its_owner_is_killed_nothing_is_left(tmp_path: Path, proof: Proof) -> None:
    long = tmp_path / ("long" * 20)
    long.mkdir()
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/engines")])
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER_OF_TWO, str(tmp_path / "log")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(long)},  # too long for the path of a socket
    )  # fmt: skip
    assert owner.stdout.readline() == "ready\n", (tmp_path / "log").read_text()[-3000:]
    family = tree(owner.pid)
    names = {process.name() for process in family}
    assert {"VLLM::EngineCore", "VLLM::Worker_TP0", "VLLM::Worker_TP1"} <= names
    assert set(listening(family)) == {"127.0.0.1"}
    maps = [line for process in family for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines()]
    inodes = {int(line.split()[4]) for line in maps if " /dev/shm/" in line}
    shared = [file.path for file in os.scandir("/dev/shm") if file.inode() in inodes]
    for kind in ("psm_", "sem.mp-", "vllm_dist_"):
        assert any(path.startswith(f"/dev/shm/{kind}") for path in shared)
    (folder,) = {text for process in family for text in process.cmdline() if re.fullmatch(r"/tmp/rlgen-\w+", text)}
    assert os.listdir(folder)
    owner.kill()
    owner.wait()
    assert gone(family, 20)
    assert not any(map(os.path.exists, shared))
    assert not os.path.exists(folder)
    proof("SIGKILL to the owner of a real vLLM server of two workers")
