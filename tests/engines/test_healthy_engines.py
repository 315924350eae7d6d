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
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psutil
import pytest

from rlgen.engines import http, transfer
from rlgen.engines.http import Server
from rlgen.engines.transfer import Outbox
from rlgen.engines.vllm_compat import process_kept_as_is
from rlgen.errors import ServerLost


class Slow(Server):
    """Its probes take long, and fail or not."""

    def __init__(self, healthy: bool, timeout: float) -> None:
        super().__init__("http://127.0.0.1:1", "token", timeout)
        self.is_healthy = healthy

    async def _healthy(self) -> bool:
        await asyncio.sleep(0.1)
        return self.is_healthy

    def ask(self, *seconds: float) -> None:
        """Requests that are answered after so many seconds."""
        asyncio.run(self._together([asyncio.sleep(wait) for wait in seconds]))


def test_a_server_that_answers_while_it_is_probed_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "PROBE_SECONDS", 0.1)
    Slow(healthy=False, timeout=60.0).ask(0.55, 0.57)  # the third probe fails at 0.6
    with pytest.raises(ServerLost, match="does not answer its health probe"):
        Slow(healthy=False, timeout=60.0).ask(30.0)


def test_a_server_is_not_blamed_for_the_time_in_which_all_processes_were_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "PROBE_SECONDS", 0.1)

    async def stop() -> None:
        time.sleep(2.0)

    async def stopped() -> None:
        server = Slow(healthy=True, timeout=1.5)
        await server._together([asyncio.gather(asyncio.sleep(2.5), stop())])

    asyncio.run(stopped())
    with pytest.raises(ServerLost, match="still says that it is healthy"):
        Slow(healthy=True, timeout=0.5).ask(30.0)


def test_the_environment_never_loses_what_the_process_came_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads read it, also those of C."""
    monkeypatch.setenv("RLGEN_CHANGED", "before")
    before, removed, unset = dict(os.environ), [], os.unsetenv

    def taking_down(name: bytes) -> None:
        removed.append(os.fsdecode(name))
        unset(name)

    monkeypatch.setattr(os, "unsetenv", taking_down)
    with process_kept_as_is():
        os.environ["RLGEN_CHANGED"] = "inside"
        os.environ["RLGEN_NEW"] = "inside"
    assert dict(os.environ) == before
    assert "RLGEN_NEW" in removed
    assert not before.keys() & set(removed)


def test_weights_of_a_trainer_in_another_container_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the host's name and its shared memory, but numbers of processes of its own."""
    theirs = Outbox(None)
    try:
        with monkeypatch.context() as there:
            there.setattr(psutil, "pid_exists", lambda pid: False)
            Outbox(None).close()
        assert theirs._place.is_dir()
    finally:
        theirs.close()


def test_a_folder_that_cannot_be_removed_does_not_keep_the_run_from_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "CLOSING_SECONDS", 0.5)
    outbox, remove = Outbox(None), shutil.rmtree
    with monkeypatch.context() as open_elsewhere:
        open_elsewhere.setattr(shutil, "rmtree", lambda *_, **__: None)
        outbox.close()
    assert outbox._guard.poll() is None  # it removes the folder when this process is gone
    remove(outbox._place)
    outbox._guard.wait(5.0)


class Answering(BaseHTTPRequestHandler):
    """A server that answers each request with its prompt, after a moment."""

    def do_POST(self) -> None:
        ids = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["token_ids"]
        time.sleep(0.2)
        choice = {"token_ids": ids, "finish_reason": "stop", "weight_versions": []}
        self.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n" + json.dumps({"choices": [choice], "prompt_token_ids": ids}).encode())

    def log_message(self, *_: object) -> None:
        pass


def test_more_samples_than_files_may_be_open() -> None:
    """A server that cannot be connected to would be restarted."""
    asks = """
        import asyncio, resource, sys
        from rlgen.engines.http import Server, connections
        from rlgen.types import Request, Sampling
        resource.setrlimit(resource.RLIMIT_NOFILE, (32, 64))
        requests = {place: Request(prompt_ids=(place,), seed=0) for place in range(200)}
        sampling, came = Sampling(temperature=1.0, max_tokens=1, stop_ids=()), {}
        server = Server(sys.argv[1], "token", 60.0)
        asyncio.run(server.sample(requests, sampling, "salt", lambda label: 0, came.__setitem__, connections()))
        print(connections(), resource.getrlimit(resource.RLIMIT_NOFILE), all(came[k].token_ids == (k,) for k in requests))
    """
    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        server.socket.listen(256)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        asked = subprocess.run([sys.executable, "-c", textwrap.dedent(asks), url], capture_output=True, text=True, timeout=120)
        server.shutdown()
    assert asked.stdout == "32 (64, 64) True\n", asked.stderr[-2000:]
