"""Shares the vLLM servers among the processes of a run: every process sends its own requests, only the main process manages them.

A process that finds a server lost writes that to the store of the process group and waits. A thread of the main process polls the
store, whatever the main thread is doing, recovers the server and writes the result. The keys are prefixed with the name of the
fleet's run, so that one launch may open several fleets:

    asked            how many recoveries were requested
    lost/N           the Nth request: {"url", "what", "before"}
    recovered/N      its result: {} or {"message", "exit_code"}
    brought_back     how often each server has been recovered, by URL
    stopped          present when the main process no longer manages the servers
"""

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rlgen.engines.base import EngineInfo, SyncReport
from rlgen.engines.fleet import Held, ServerPool
from rlgen.engines.http import Server
from rlgen.errors import EngineError, RlgenError, ServerLost
from rlgen.processes import Processes

POLL = 0.1  # seconds between two reads of the store


class SharedServerPool:
    """The servers as each process of a run sees them: managed in the main process, through the store from the others.

    `open_fleet` is called only in the main process. If that fails, or a process cannot reach a server, every process raises.
    """

    def __init__(self, processes: Processes, open_fleet: Callable[[], ServerPool]) -> None:
        assert processes.store is not None  # there are several processes
        self._processes = processes
        self._fleet: ServerPool | None = None
        self._stopped = threading.Event()
        self._failure: RlgenError | None = None  # of the first failed recovery, in the main process
        self._failing = threading.Lock()

        def start() -> tuple[tuple[Server, ...], EngineInfo, Held, bool, bool]:
            fleet = self._fleet = open_fleet()
            return fleet.servers, fleet.facts, fleet.held, fleet.in_flight, fleet.merges

        servers, self.facts, self.held, self.in_flight, self.merges = processes.on_main(start, keepalive=True)
        self._store = dist.PrefixStore(f"servers/{self.held.run}", processes.store)
        turn = processes.rank % len(servers)  # spreads processes with few requests over the servers
        self.servers = servers[turn:] + servers[:turn]
        try:
            if self._fleet is not None:
                self._write("brought_back", {})
            processes.run_all(self._reach)
        except BaseException:
            self.stop()
            self.close()
            raise
        if self._fleet is not None:
            threading.Thread(target=self._listen, args=(self._fleet,), name="rlgen-servers", daemon=True).start()

    def _reach(self) -> None:
        """Checks that this process can reach every server. Raises EngineError if it cannot."""
        for server in self.servers:
            try:
                server.look()
            except ServerLost as lost:
                raise EngineError(
                    f"{lost}. This is process {self._processes.rank} on {socket.gethostname()}, and every process sends"
                    " requests to the servers itself; set engine.host (or engine.url) to an address that all machines can reach"
                ) from lost

    # None of these calls waits for another process.

    def _write(self, key: str, value: Mapping[str, Any]) -> None:
        self._store.set(key, json.dumps(value))

    def _read(self, key: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._store.get(key))
        return found

    @property
    def brought_back(self) -> Mapping[str, int]:
        return self._fleet.brought_back if self._fleet is not None else self._read("brought_back")

    def recover(self, lost: ServerLost, before: Mapping[str, int]) -> None:
        """Recovers a server as `ServerPool.recover`; outside the main process, asks it to and waits for the result."""
        if self._fleet is not None:
            self._bring_back(self._fleet, lost, before)
            return
        number = self._store.add("asked", 1)
        self._write(f"lost/{number}", {"url": lost.url, "what": lost.what, "before": dict(before)})
        while not self._store.check([f"recovered/{number}"]):
            if self._stopped.wait(POLL) or self._store.check(["stopped"]):
                raise lost
        if failed := self._read(f"recovered/{number}"):
            error = EngineError(failed["message"])
            error.exit_code = failed["exit_code"]
            raise error from lost

    def _bring_back(self, fleet: ServerPool, lost: ServerLost, before: Mapping[str, int]) -> None:
        """Recovers a server in the main process and publishes the counts of recoveries.

        Raises RlgenError if the recovery failed. Later calls raise the same error without trying again.
        """
        with self._failing:
            if self._failure is not None:
                raise self._failure
            try:
                fleet.recover(lost, before)
            except RlgenError as error:
                self._failure = error
                raise
            finally:
                self._write("brought_back", fleet.brought_back)

    def _listen(self, fleet: ServerPool) -> None:
        """Serves the recovery requests of the other processes, until the servers are stopped. Runs in a thread."""
        number = 1
        with contextlib.suppress(RuntimeError):  # the store is gone, and so are the other processes
            while not self._stopped.wait(POLL):
                if not self._store.check([f"lost/{number}"]):
                    continue
                asked, result = self._read(f"lost/{number}"), {}
                try:
                    self._bring_back(fleet, ServerLost(asked["url"], asked["what"]), asked["before"])
                except RlgenError as error:
                    result = {"message": str(error), "exit_code": error.exit_code}
                except Exception as error:  # a bug: the waiting process must get an answer
                    result = {"message": f"{type(error).__name__}: {error}", "exit_code": RlgenError.exit_code}
                self._write(f"recovered/{number}", result)
                number += 1

    def sync(self, weights: Iterable[tuple[str, Tensor]], version: int, hashed: bool) -> SyncReport:
        """Sends all weights from the main process and returns its receipt in every process. Called by all at the same time."""
        fleet = self._fleet

        def send() -> tuple[SyncReport, Held] | None:
            if fleet is None:
                return None
            try:
                return fleet.sync(weights, version, hashed), fleet.held
            finally:
                self._write("brought_back", fleet.brought_back)
                # Sharded tensors are gathered by all processes at once: each must iterate over all of them.
                for _ in weights:
                    pass

        if fleet is None:
            for _ in weights:
                pass
        sent = self._processes.on_main(send, keepalive=True)
        assert sent is not None  # the main process has a fleet
        receipt, self.held = sent
        return receipt

    def stop(self) -> None:
        self._stopped.set()
        if self._fleet is not None:
            with contextlib.suppress(RuntimeError):  # the store is gone, and so are the other processes
                self._write("stopped", {})
            self._fleet.stop()

    def close(self) -> None:
        if self._fleet is not None:
            self._fleet.close()
