"""The servers of a run as each of several processes sees them.

Every process of a run sends its own requests; only the main process manages the servers. Another process that finds a server lost
writes that to the store of the process group. A thread of the main process polls the store, whatever the main thread is doing,
leaves the server out or recovers it, and writes the result. The keys, prefixed with the name of the pool's run:

    asked            how many servers were found lost
    lost/N           the Nth of them: {"url", "what", "before", "waits": whether the process has no other server and waits}
    recovered/N      the result: {} or {"message", "exit_code"}
    state            {"brought_back": how often each has been recovered, "present": `Server.arrays`; both by URL}
    stopped          present when the main process no longer manages the servers
"""

import json
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from rlgen.engines.base import EngineCapabilities, EngineInfo, SyncReport, Weights
from rlgen.engines.fleet import SentWeights, ServerPool
from rlgen.engines.http import Server
from rlgen.errors import EngineError, RlgenError, ServerLost
from rlgen.processes import Processes

POLL = 0.1  # seconds between two reads of the store


class SharedServerPool:
    """The servers as each process of a run sees them: managed in the main process, through the store from the others.

    `open_pool` is called only in the main process. If that fails, or a process cannot reach a server, every process raises.
    """

    def __init__(self, processes: Processes, open_pool: Callable[[], ServerPool]) -> None:
        assert processes.store is not None  # there are several processes
        self._processes = processes
        self._pool: ServerPool | None = None
        self._stopped = threading.Event()
        self._failure: RlgenError | None = None  # of the first failed recovery, in the main process
        self._failing = threading.Lock()

        def start() -> tuple[tuple[Server, ...], EngineInfo, SentWeights, EngineCapabilities]:
            pool = self._pool = open_pool()
            return pool.servers, pool.facts, pool.held, pool.abilities

        servers, self.facts, self.held, self.abilities = processes.on_main(start, keepalive=True)
        self._store = dist.PrefixStore(f"servers/{self.held.run}", processes.store)
        self._use(servers)
        try:
            self._publish()
            processes.run_all(self._reach)
        except BaseException:
            self.stop()
            self.close()
            raise
        if self._pool is not None:
            threading.Thread(target=self._listen, args=(self._pool,), name="rlgen-servers", daemon=True).start()

    def _use(self, servers: Sequence[Server]) -> None:
        turn = self._processes.rank % len(servers)  # spreads processes with few requests over the servers
        self.servers = (*servers[turn:], *servers[:turn])

    def _publish(self) -> None:
        if self._pool is not None:
            there = {server.url: server.arrays for server in self._pool.servers}
            self._write("state", {"brought_back": self._pool.brought_back, "present": there})

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
        return dict(json.loads(self._store.get(key)))

    @property
    def brought_back(self) -> Mapping[str, int]:
        if self._pool is not None:
            return self._pool.brought_back
        return dict(self._read("state")["brought_back"])

    def lose(self, lost: ServerLost, before: Mapping[str, int]) -> None:
        """Leaves a server out as `ServerPool.lose`, in this process at once."""
        self.servers = tuple(server for server in self.servers if server.url != lost.url) or self.servers
        if self._pool is not None:
            self._pool.lose(lost, before)
            self._publish()
        else:
            self._ask(lost, before, waits=False)

    def _ask(self, lost: ServerLost, before: Mapping[str, int], waits: bool) -> int:
        number = self._store.add("asked", 1)
        self._write(f"lost/{number}", {"url": lost.url, "what": lost.what, "before": dict(before), "waits": waits})
        return number

    def recover(self, lost: ServerLost, before: Mapping[str, int]) -> None:
        """Does as `ServerPool.recover`; outside the main process, asks it to and waits for the result."""
        if self._pool is not None:
            self._bring_back(self._pool, lost, before)
            self._use(self._pool.servers)
            return
        number = self._ask(lost, before, waits=True)
        while not self._store.check([f"recovered/{number}"]):
            if self._stopped.wait(POLL) or self._store.check(["stopped"]):
                raise lost
        if failed := self._read(f"recovered/{number}"):
            error = EngineError(failed["message"])
            error.exit_code = failed["exit_code"]
            raise error from lost
        self._use([self.servers[0].like(url, arrays) for url, arrays in self._read("state")["present"].items()])

    def _bring_back(self, pool: ServerPool, lost: ServerLost, before: Mapping[str, int]) -> None:
        """Recovers a server in the main process and publishes the counts of recoveries.

        Raises RlgenError if the recovery failed. Later calls raise the same error without trying again.
        """
        with self._failing:
            if self._failure is not None:
                raise self._failure
            try:
                pool.recover(lost, before)
            except RlgenError as error:
                self._failure = error
                raise
            finally:
                self._publish()

    def _listen(self, pool: ServerPool) -> None:
        """Serves the recovery requests of the other processes, until the servers are stopped. Runs in a thread."""
        number = 1
        with suppress(RuntimeError):  # the store is gone, and so are the other processes
            while not self._stopped.wait(POLL):
                if not self._store.check([f"lost/{number}"]):
                    continue
                asked, result = self._read(f"lost/{number}"), {}
                lost = ServerLost(asked["url"], asked["what"])
                try:
                    if asked["waits"]:
                        self._bring_back(pool, lost, asked["before"])
                    else:
                        self.lose(lost, asked["before"])
                except RlgenError as error:
                    result = {"message": str(error), "exit_code": error.exit_code}
                except Exception as error:  # a bug: the waiting process must get an answer
                    result = {"message": f"{type(error).__name__}: {error}", "exit_code": RlgenError.exit_code}
                self._write(f"recovered/{number}", result)
                number += 1

    def sync(self, weights: Weights, version: int, hashed: bool) -> SyncReport:
        """Sends all weights from the main process and returns its receipt in every process. Called by all at the same time."""
        pool = self._pool

        def send() -> tuple[SyncReport, SentWeights, Sequence[Server]]:
            assert pool is not None  # this is the main process
            try:
                return pool.sync(weights, version, hashed), pool.held, pool.servers
            finally:
                self._publish()
                # Sharded tensors are gathered by all processes at once: each must iterate over all of them.
                for _ in weights:
                    pass

        if pool is None:
            for _ in weights:
                pass
        receipt, self.held, servers = self._processes.on_main(send, keepalive=True)
        self._use(servers)
        return receipt

    def stop(self) -> None:
        self._stopped.set()
        if self._pool is not None:
            with suppress(RuntimeError):  # the store is gone, and so are the other processes
                self._write("stopped", {})
            self._pool.stop()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
