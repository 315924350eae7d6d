"""Engines that are well, on a busy machine and beside others: nothing of theirs is taken for lost."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import psutil
import pytest
from conftest import ROOT
from helpers.before import before
from helpers.waiting import HANGS

from rlgen.engines import client, transfer
from rlgen.engines.client import OpenRequests
from rlgen.engines.http import Server
from rlgen.engines.transfer import FileTransfer
from rlgen.engines.vllm_compat import process_kept_as_is
from rlgen.errors import ServerLost


class Probed(Server):
    """Its probes take some seconds, and fail or not."""

    def __init__(self, healthy: bool, timeout: float, takes: float = 0.0) -> None:
        super().__init__("http://127.0.0.1:1", "token", timeout)
        self.well, self.takes, self.probes = healthy, takes, 0

    async def is_healthy(self, session: Any) -> bool:
        self.probes += 1
        if self.takes:
            await asyncio.sleep(self.takes)
        return self.well

    async def has_begun(self, probe: int) -> None:
        while self.probes < probe:
            await asyncio.sleep(0.01)

    async def ask(self, session: Any, method: str, route: str, body: bytes | None, timeout: float | None = None) -> Any:
        """A request that is answered when the probe has begun whose number it says."""
        await self.has_begun(int(body or b"0"))
        return 200, b""

    async def asked(self, *probes: int) -> None:
        async def ask(line: OpenRequests, place: int) -> None:
            await line.post("/any", str(probes[place]).encode())

        await client.each([self], 9, range(len(probes)), ask, lost=pytest.fail)


NEVER = 10**9


def test_a_server_that_answers_while_it_is_probed_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PROBE_SECONDS", 0.1)
    third = client.MISSED_PROBES
    asyncio.run(Probed(healthy=False, timeout=HANGS, takes=0.1).asked(third, third))  # answered while the third probe fails
    with pytest.raises(ServerLost, match="it fails its health check"):
        asyncio.run(Probed(healthy=False, timeout=HANGS, takes=0.1).asked(NEVER))


def test_a_server_is_not_blamed_for_the_time_in_which_all_processes_were_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by itself, as it does while a process is stopped."""
    monkeypatch.setattr(client, "PROBE_SECONDS", 0.1)

    class Loop(asyncio.SelectorEventLoop):
        stopped = 0.0

        def time(self) -> float:
            return super().time() + self.stopped

    async def stop(server: Probed, loop: Loop) -> None:
        await server.has_begun(2)  # the request is under way
        loop.stopped += 5 * HANGS

    async def stopped(server: Probed) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.gather(server.asked(4), stop(server, loop))

    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(stopped(Probed(healthy=True, timeout=HANGS)))
    with pytest.raises(ServerLost, match="still passes its health check"):
        asyncio.run(Probed(healthy=True, timeout=0.5).asked(NEVER))


def test_the_environment_never_loses_what_the_process_came_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads read it, also those of C."""
    monkeypatch.setenv("RLGEN_CHANGED", "before")
    came_with, removed = dict(os.environ), list[str]()
    before(os, "unsetenv", lambda name: removed.append(os.fsdecode(name)), monkeypatch.setattr)
    with process_kept_as_is():
        os.environ["RLGEN_CHANGED"] = "inside"
        os.environ["RLGEN_NEW"] = "inside"
    assert dict(os.environ) == came_with
    assert "RLGEN_NEW" in removed
    assert not came_with.keys() & set(removed)


def test_weights_of_a_trainer_in_another_container_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the host's name and its shared memory, but numbers of processes of its own."""
    with closing(FileTransfer(None)) as theirs:
        with monkeypatch.context() as there:
            there.setattr(psutil, "pid_exists", lambda pid: False)
            FileTransfer(None).close()
        assert theirs._place.is_dir()


def test_a_folder_that_cannot_be_removed_does_not_keep_the_run_from_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "CLOSING_SECONDS", 0.5)
    outbox, remove = FileTransfer(None), shutil.rmtree
    with monkeypatch.context() as open_elsewhere:
        open_elsewhere.setattr(shutil, "rmtree", lambda *_, **__: None)
        outbox.close()
    assert outbox._guard.poll() is None  # it removes the folder when this process is gone
    remove(outbox._place)
    outbox._guard.wait(HANGS)


class Answering(BaseHTTPRequestHandler):
    """A server that answers each request with its prompt, after a moment."""

    def do_POST(self) -> None:
        ids = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["token_ids"]
        time.sleep(0.2)
        choice = {"token_ids": ids, "finish_reason": "stop", "weight_versions": [], "logprobs": None}
        self.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n" + json.dumps({"choices": [choice], "prompt_token_ids": ids}).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.slow
def test_more_samples_than_files_may_be_open() -> None:
    """A server that cannot be connected to would be restarted."""
    asks = """
        import resource, sys
        sys.path.insert(0, sys.argv[3])
        from answers import engine_on
        from rlgen.engines.http import Server, connections
        from rlgen.types import Request, Sampling, ids_of
        resource.setrlimit(resource.RLIMIT_NOFILE, (32, 64))
        requests = [Request(prompt_ids=ids_of((place,)), seed=0) for place in range(200)]
        engine = engine_on([Server(sys.argv[1], "token", float(sys.argv[2]))])
        answers = engine.generate(requests, Sampling(temperature=1.0, max_tokens=1, stop_ids=()))
        right = [answer.token_ids.tolist() for answer in answers] == [[place] for place in range(200)]
        print(connections(), resource.getrlimit(resource.RLIMIT_NOFILE), right)
    """
    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        server.socket.listen(256)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        command = [sys.executable, "-c", textwrap.dedent(asks), url, str(HANGS), str(ROOT / "scripts")]
        asked = subprocess.run(command, capture_output=True, text=True, timeout=HANGS)
        server.shutdown()
    assert asked.stdout == "32 (64, 64) True\n", asked.stderr[-2000:]
