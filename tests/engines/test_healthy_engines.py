"""Engines that are well, on a busy machine and beside others: nothing of theirs is taken for lost."""

import asyncio
import os
import shutil
import time

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
