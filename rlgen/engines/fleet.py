"""Manages the vLLM servers of a run, which all hold the same weights: sends weights, restarts lost servers.

Every process of a run sends its own requests; only the main process manages the servers. Another process that finds a server lost
writes that to the store of the process group and waits. A thread of the main process polls the store, whatever the main thread is
doing, recovers the server and writes the result. The keys, prefixed with the name of the pool's run:

    asked            how many recoveries were requested
    lost/N           the Nth request: {"url", "what", "before"}
    recovered/N      its result: {} or {"message", "exit_code"}
    brought_back     how often each server has been recovered, by URL
    stopped          present when the main process no longer manages the servers
"""

import json
import secrets
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rlgen.engines.base import EngineInfo, SyncReport, Weights
from rlgen.engines.http import Server, WeightsKept
from rlgen.engines.launch import ServerProcess
from rlgen.engines.nccl import Broadcast
from rlgen.engines.transfer import FileTransfer
from rlgen.errors import EngineError, RlgenError, ServerLost
from rlgen.processes import Processes

STALE = -1  # weight version before the first sync of this run
POLL = 0.1  # seconds between two reads of the store
LOADING = "loading"  # label of weights that are being replaced


@dataclass(frozen=True, slots=True, kw_only=True)
class SentWeights:
    """The weights that all servers were sent last, labelled `RUN.VERSION`. SentWeights(run="5f0c2b7a", version=3, syncs=4)"""

    run: str
    version: int
    syncs: int  # number of syncs so far


class ServerPool:
    """One or several servers, all with the same weights.

    Every completion carries the label of the weights that sampled it. A label of another run, or none, means that the server was
    restarted or used by another run: it is sent the current weights again.

    Args:
        processes: of the servers that this run started, by URL; others cannot be restarted from here.
        shape: of the model that is trained, see `model_shape`.
        in_flight: whether a sync pauses running requests instead of waiting for them.
        merges: whether an adapter is sent alone, and each server merges it.
        restarts: how often servers may be restarted or sent their weights again, all servers together.
        carrier: sends weights to the servers. A broadcast keeps no copy of them, so with it no server can be recovered.
        say: receives a line for each recovery.

    Raises EngineError if a server cannot be reached, refuses, or lacks what training needs.
    """

    def __init__(
        self,
        *,
        servers: Sequence[Server],
        processes: Mapping[str, ServerProcess],
        shape: Mapping[str, Any],
        in_flight: bool,
        merges: bool = False,
        restarts: int,
        carrier: FileTransfer | Broadcast,
        say: Callable[[str], None],
    ) -> None:
        self.servers, self._processes = tuple(servers), processes
        self.in_flight, self.merges = in_flight, merges
        self._restarts, self._carrier, self._say = restarts, carrier, say
        self.held = SentWeights(run=secrets.token_hex(4), version=STALE, syncs=0)
        self._recovering = threading.RLock()
        self._counting = threading.Lock()
        self._brought_back: Counter[str] = Counter()
        self._stopped = threading.Event()
        first, *others = facts = [self._examined(server, shape) for server in self.servers]
        for server, other in zip(self.servers[1:], others, strict=True):
            if any(getattr(other, name) != getattr(first, name) for name in ("settings", "stop_ids", "quantization")):
                raise EngineError(
                    f"{server.url} and {self.servers[0].url} have different settings, {other} and {first}; start both with the"
                    " same recipe"
                )
        # Servers that were started with different plans count as one engine, whose plan is all of theirs.
        self.facts = replace(first, plan=" ".join(sorted({one.plan for one in facts})))

    @staticmethod
    def _examined(server: Server, shape: Mapping[str, Any]) -> EngineInfo:
        """Returns the facts of a server. Raises EngineError if a route is missing, or its model has another shape."""
        server.require()
        server.look()
        server.resume()  # a trainer that died while it sent weights may have left it paused
        facts, theirs = server.facts()
        differs = [f"{name} is {theirs.get(name)} there, {shape[name]} here" for name in shape if theirs.get(name) != shape[name]]
        if differs:
            raise EngineError(
                f"{server.url} serves another model, {facts.model}: {', '.join(differs)}; start it with this recipe's model"
            )
        return facts

    @property
    def brought_back(self) -> Counter[str]:
        """Returns how often each server has been recovered, by URL."""
        return self._brought_back.copy()

    def sync(self, weights: Weights, version: int, hashed: bool = False) -> SyncReport:
        """Sends all weights to all servers, as `Engine.sync`.

        If the servers' receipts differ, returns one that differs, for the caller to report.
        """
        with self._recovering:
            if isinstance(self._carrier, FileTransfer):
                receipts = self._deliver(self._carrier, weights, version, hashed)
            else:
                with self._replacing(self.servers, version):
                    receipts = self._carrier.send(weights, version, hashed)
            self.held = replace(self.held, version=version, syncs=self.held.syncs + 1)
        for receipt in receipts[1:]:
            if receipt.received != receipts[0].received or receipt.not_loaded:
                return receipt  # the sender compares it with what it sent
        return receipts[0]

    def _deliver(self, files: FileTransfer, weights: Weights, version: int, hashed: bool) -> list[SyncReport]:
        """Sends weights by files to all servers at the same time; restarts servers that have died."""

        def give(server: Server) -> SyncReport:
            try:
                return self._load(server, folder, version, hashed)
            except ServerLost as lost:
                self._restart(lost)
                return self._load(server, folder, version, hashed)

        with ThreadPoolExecutor(len(self.servers), thread_name_prefix="rlgen-loading") as each:
            folder = files.write(weights, version)  # no server is recovered meanwhile: the previous weights are gone
            receipts = list(each.map(give, self.servers))
        files.current = folder
        return receipts

    def _load(self, server: Server, folder: Path, version: int, hashed: bool) -> SyncReport:
        """Makes one server load the weights in `folder`.

        Raises WeightsKept if the files cannot be loaded; the server keeps its weights and their label.
        """
        before = server.label()
        with self._replacing([server], version):
            try:
                return server.load(str(folder), version, hashed)
            except WeightsKept:
                server.set_label(before)
                raise

    @contextmanager
    def _replacing(self, servers: Sequence[Server], version: int) -> Iterator[None]:
        """Pauses servers while they load in the block. Then empties their prefix caches and gives them the new label."""
        paused = servers if self.in_flight else ()
        try:
            for server in paused:
                server.pause()
            for server in servers:
                server.set_label(LOADING)  # label of no run: completions sampled during the load are refused
            yield
            for server in servers:
                server.reset_cache()
                server.set_label(f"{self.held.run}.{version}")
        finally:
            # After a failed broadcast the servers do not respond; a second error would hide the first.
            if not (isinstance(self._carrier, Broadcast) and self._carrier.broken):
                for server in paused:
                    server.resume()

    def recover(self, lost: ServerLost, before: Mapping[str, int]) -> None:
        """Sends a server the current weights again, after a restart if it does not answer.

        Does nothing if it was recovered more often than `before` the failed request was sent: another thread has done it. Raises
        EngineError if the server cannot be restarted from here, or the limit engine.restarts is reached.
        """
        if isinstance(self._carrier, Broadcast):
            raise EngineError(
                f"{lost}. engine.transfer nccl keeps no copy of the weights to send again; resume the run with --resume"
            ) from lost
        with self._recovering:
            if self._brought_back[lost.url] > before.get(lost.url, 0):
                return
            if self._stopped.is_set() or self._carrier.current is None:
                raise lost
            server = next(server for server in self.servers if server.url == lost.url)
            if self._has_other_weights(server):
                self._count(lost)
            else:
                self._restart(lost)
            self._load(server, self._carrier.current, self.held.version, hashed=False)
            self._say(
                f"engine: {server.url} has the weights of version {self.held.version} again; its open requests are sent again"
            )

    def _has_other_weights(self, server: Server) -> bool:
        """Returns whether a server answers but has other weights: it then needs the weights but no restart."""
        try:
            return not server.label().startswith(f"{self.held.run}.")
        except ServerLost:
            return False

    def _restart(self, lost: ServerLost) -> None:
        """Restarts a server. Raises ServerLost if it was started elsewhere, EngineError if the limit is reached."""
        if lost.url not in self._processes:
            raise ServerLost(lost.url, f"{lost.what}. Start it with `rlgen serve`, then resume the run with --resume") from lost
        self._count(lost)
        self._say(f"engine: {lost}; starting it again")
        self._processes[lost.url].restart()

    def _count(self, lost: ServerLost) -> None:
        """Counts one recovery. Raises EngineError if the limit engine.restarts is reached."""
        with self._counting:  # several servers may be restarted at the same time
            if (total := self._brought_back.total()) >= self._restarts:
                raise EngineError(f"{lost}. Servers were recovered {total} times, as often as engine.restarts allows") from lost
            self._brought_back[lost.url] += 1

    def stop(self) -> None:
        """Ends the servers that were started here, and every recovery in progress."""
        self._stopped.set()
        if isinstance(self._carrier, Broadcast):
            self._carrier.close()  # before the servers end
        for process in self._processes.values():
            process.stop()

    def close(self) -> None:
        """Removes the weight files. Must be called after all sampling and recovery has ended."""
        if isinstance(self._carrier, FileTransfer):
            self._carrier.close()


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

        def start() -> tuple[tuple[Server, ...], EngineInfo, SentWeights, bool, bool]:
            pool = self._pool = open_pool()
            return pool.servers, pool.facts, pool.held, pool.in_flight, pool.merges

        servers, self.facts, self.held, self.in_flight, self.merges = processes.on_main(start, keepalive=True)
        self._store = dist.PrefixStore(f"servers/{self.held.run}", processes.store)
        turn = processes.rank % len(servers)  # spreads processes with few requests over the servers
        self.servers = servers[turn:] + servers[:turn]
        try:
            if self._pool is not None:
                self._write("brought_back", {})
            processes.run_all(self._reach)
        except BaseException:
            self.stop()
            self.close()
            raise
        if self._pool is not None:
            threading.Thread(target=self._listen, args=(self._pool,), name="rlgen-servers", daemon=True).start()

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
        return self._pool.brought_back if self._pool is not None else self._read("brought_back")

    def recover(self, lost: ServerLost, before: Mapping[str, int]) -> None:
        """Recovers a server as `ServerPool.recover`; outside the main process, asks it to and waits for the result."""
        if self._pool is not None:
            self._bring_back(self._pool, lost, before)
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
                self._write("brought_back", pool.brought_back)

    def _listen(self, pool: ServerPool) -> None:
        """Serves the recovery requests of the other processes, until the servers are stopped. Runs in a thread."""
        number = 1
        with suppress(RuntimeError):  # the store is gone, and so are the other processes
            while not self._stopped.wait(POLL):
                if not self._store.check([f"lost/{number}"]):
                    continue
                asked, result = self._read(f"lost/{number}"), {}
                try:
                    self._bring_back(pool, ServerLost(asked["url"], asked["what"]), asked["before"])
                except RlgenError as error:
                    result = {"message": str(error), "exit_code": error.exit_code}
                except Exception as error:  # a bug: the waiting process must get an answer
                    result = {"message": f"{type(error).__name__}: {error}", "exit_code": RlgenError.exit_code}
                self._write(f"recovered/{number}", result)
                number += 1

    def sync(self, weights: Weights, version: int, hashed: bool) -> SyncReport:
        """Sends all weights from the main process and returns its receipt in every process. Called by all at the same time."""
        pool = self._pool

        def send() -> tuple[SyncReport, SentWeights] | None:
            if pool is None:
                return None
            try:
                return pool.sync(weights, version, hashed), pool.held
            finally:
                self._write("brought_back", pool.brought_back)
                # Sharded tensors are gathered by all processes at once: each must iterate over all of them.
                for _ in weights:
                    pass

        if pool is None:
            for _ in weights:
                pass
        sent = self._processes.on_main(send, keepalive=True)
        assert sent is not None  # the main process has a pool
        receipt, self.held = sent
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
