"""Manages the vLLM servers of a run, which all hold the same weights: sends weights, loses and adopts servers.

While others are left, a lost server costs only its unfinished requests, which go to the others (`rlgen.engines.client`). A thread
starts it again, or waits until it answers. At the next sync it gets the new weights and is one of the servers again, and so is
every server that was added to the file or DNS name of `engine.url`. If none is left, the calls wait for the first that is back.
"""

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rlgen.engines.base import EngineCapabilities, EngineInfo, SyncReport, Weights
from rlgen.engines.http import Server, WeightsKept
from rlgen.engines.launch import ServerProcess
from rlgen.engines.nccl import Broadcast
from rlgen.engines.transfer import FileTransfer
from rlgen.errors import EngineError, RlgenError, ServerLost

STALE = -1  # weight version before the first sync of this run
EVERY = 0.5  # seconds between two looks at a server that does not answer
LOADING = "loading"  # label of weights that are being replaced


@dataclass(frozen=True, slots=True, kw_only=True)
class SentWeights:
    """The weights that all servers were sent last, labelled `RUN.VERSION`. SentWeights(run="5f0c2b7a", version=3, syncs=4)"""

    run: str
    version: int
    syncs: int  # number of syncs so far


class Absent:
    """A server that is lost, or new: a thread calls `revive` and then waits until it passes its health check."""

    def __init__(self, server: Server, stopped: threading.Event, revive: Callable[[], None] | None = None) -> None:
        self.server = server
        self.ready, self.forgotten = threading.Event(), threading.Event()
        self._stopped, self._revive = stopped, revive
        threading.Thread(target=self._run, name="rlgen-absent", daemon=True).start()

    def _run(self) -> None:
        with suppress(RlgenError):  # it does not start: it will not be ready
            if self._revive is not None:
                self._revive()
            while not (self._stopped.is_set() or self.forgotten.wait(EVERY)):
                if self.server.health() in (200, 401):  # that it refuses the token, it tells when it is to be adopted
                    self.ready.set()
                    return


class ServerPool:
    """One or several servers, all with the same weights.

    Every completion carries the label of the weights that sampled it. A label of another run, or none, means that the server was
    restarted or used by another run: it is lost until it has the current weights again.

    Args:
        processes: of the servers that this run started, by URL; others cannot be restarted from here.
        shape: of the model that is trained, see `model_shape`.
        row_tokens: longest prompt and completion together.
        abilities: of the engine. With `in_flight` a sync pauses running requests instead of waiting for them.
        restarts: how often servers may be restarted or sent their weights again, all servers together.
        carrier: sends weights to the servers. A broadcast keeps no copy of them: with none left, no server can be recovered.
        say: receives a line for each server that is lost, recovered or adopted.
        found: returns the servers that there are now, by any process; None: always those of `servers`.
        patience: seconds to wait for a server when none is left, and this run has started none.

    Raises EngineError if a server cannot be reached, refuses, or lacks what training needs.
    """

    def __init__(
        self,
        *,
        servers: Sequence[Server],
        processes: Mapping[str, ServerProcess],
        shape: Mapping[str, Any],
        row_tokens: int,
        abilities: EngineCapabilities,
        restarts: int,
        carrier: FileTransfer | Broadcast,
        say: Callable[[str], None],
        found: Callable[[], Sequence[Server]] | None = None,
        patience: float = 0.0,
    ) -> None:
        self.servers, self._processes = tuple(servers), processes  # `servers`: those that are present
        self.abilities = abilities
        self._shape, self._row_tokens, self._restarts, self._carrier, self._say = shape, row_tokens, restarts, carrier, say
        self._found, self._patience = found, patience
        self.held = SentWeights(run=secrets.token_hex(4), version=STALE, syncs=0)
        self._absent: dict[str, Absent | None] = {}  # None: stays away
        self._recovering = threading.RLock()  # weights are being sent
        self._changing = threading.RLock()  # of `servers`, `_absent` and `_brought_back`: held for an instant
        self._brought_back: Counter[str] = Counter()
        self._stopped = threading.Event()
        first, *_ = facts = [self._examined(server, shape) for server in self.servers]
        for server, its_facts in zip(self.servers, facts, strict=True):
            self._same(server, its_facts, first)
        # Servers that were started with different plans count as one engine, whose plan is all of theirs.
        self.facts = replace(first, plan=" ".join(sorted({one.plan for one in facts})))

    def _same(self, server: Server, facts: EngineInfo, first: EngineInfo) -> None:
        if self.abilities.experts and not (facts.experts and server.arrays):  # JSON answers have none
            raise EngineError(
                f"{server.url} does not return the experts of a token; start it by `rlgen serve`, with model.route_replay: true"
            )
        if facts.max_model_len is not None and facts.max_model_len < self._row_tokens:  # vLLM would cut completions off there
            raise EngineError(
                f"{server.url} has rows of {facts.max_model_len} tokens at most (max_model_len), but a prompt and its completion"
                f" take up to {self._row_tokens}; start it with this recipe, or set engine.max_model_len to"
                f" {facts.max_model_len} here"
            )
        if any(getattr(facts, name) != getattr(first, name) for name in ("settings", "stop_ids", "quantization", "wider")):
            raise EngineError(
                f"{server.url} and {self.servers[0].url} have different settings, {facts} and {first}; start both with the"
                " same recipe"
            )

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
        with self._changing:
            return self._brought_back.copy()

    def sync(self, weights: Weights, version: int, hashed: bool = False) -> SyncReport:
        """Adopts servers that are back or new, and sends all weights to all servers, as `Engine.sync`.

        If the servers' receipts differ, returns one that differs, for the caller to report.
        """
        with self._recovering:
            self._adopt()
            if isinstance(self._carrier, FileTransfer):
                receipts = self._deliver(self._carrier, weights, version, hashed)
            else:
                self._carrier.join(self.servers)
                with self._replacing(self.servers, version):
                    receipts = self._carrier.send(weights, version, hashed)
            self.held = replace(self.held, version=version, syncs=self.held.syncs + 1)
        first, *others = receipts
        return next((other for other in others if other.received != first.received or other.not_loaded), first)

    def _adopt(self) -> None:
        """Makes servers present that are back or new, and forgets those that are gone from where servers are found."""
        if self._found is not None:
            there = {server.url: server for server in self._found()}
            for url, server in there.items():
                if url not in self._absent and all(url != one.url for one in self.servers):
                    self._absent[url] = Absent(server, self._stopped)
            with self._changing:  # with none there, those that still answer stay
                self.servers = tuple(server for server in self.servers if server.url in there) or self.servers
            for url in self._absent.keys() - there.keys():
                if (gone := self._absent.pop(url)) is not None:
                    gone.forgotten.set()
        for url, absent in list(self._absent.items()):
            if absent is not None and absent.ready.is_set():
                del self._absent[url]
                self._welcome(absent.server)

    def _welcome(self, server: Server) -> None:
        """Makes a server present if it can be used. It has no weights of this run yet."""
        try:
            self._same(server, self._examined(server, self._shape), self.facts)
        except EngineError as error:
            self._say(f"engine: {error}. It is left out")
            self._absent[server.url] = Absent(server, self._stopped) if isinstance(error, ServerLost) else None
            return
        if isinstance(self._carrier, Broadcast):
            self._carrier.close()  # it was restarted: it has left the group, whose servers may be the same as before
        with self._changing:
            self.servers = (*self.servers, server)
        self._say(f"engine: {server.url} takes part from now on, as one of {len(self.servers)} servers")

    def _deliver(self, files: FileTransfer, weights: Weights, version: int, hashed: bool) -> list[SyncReport]:
        """Sends weights by files to all servers at the same time; those that are lost meanwhile are left out, if one is not."""

        def give(server: Server) -> SyncReport | ServerLost:
            try:
                return self._load(server, folder, version, hashed)
            except ServerLost as lost:
                return lost

        servers = self.servers
        with ThreadPoolExecutor(len(servers), thread_name_prefix="rlgen-loading") as each:
            folder = files.write(weights, version)  # no server is recovered meanwhile: the previous weights are gone
            ends = dict(zip((server.url for server in servers), each.map(give, servers), strict=True))

        def lost() -> dict[str, ServerLost]:
            return {url: end for url, end in ends.items() if isinstance(end, ServerLost)}

        before = self.brought_back
        while len(lost()) == len(ends):  # none is left
            ends |= {server.url: give(server) for server in self._back(lost()[self.servers[0].url])}
        for end in lost().values():
            self.lose(end, before)
        files.current = folder
        return [end for end in ends.values() if isinstance(end, SyncReport)]

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
        """Pauses servers while they load in the block. Then empties their caches, unless kept, and gives them the new label.

        What other weights than this run's computed is never kept: a server that was restarted or taken over is sent the same
        version again, and so gets requests with the same `cache_salt`.
        """
        keeps = self.abilities.keeps_cache
        kept = [server for server in servers if keeps and server.label().startswith(f"{self.held.run}.")]
        paused = servers if self.abilities.in_flight else ()
        try:
            for server in paused:
                server.pause(server in kept)
            for server in servers:
                server.set_label(LOADING)  # label of no run: completions sampled during the load are refused
            yield
            for server in servers:
                if server not in kept:
                    server.reset_cache()
                server.set_label(f"{self.held.run}.{version}")
        finally:
            # After a failed broadcast the servers do not respond; a second error would hide the first.
            if not (isinstance(self._carrier, Broadcast) and self._carrier.broken):
                for server in paused:
                    server.resume()

    def lose(self, lost: ServerLost, before: Mapping[str, int]) -> None:
        """Leaves a server out until a sync after it is back. Keeps it if it is the only one; returns at once.

        Does nothing if it was recovered more often than `before` the failed request was sent: another thread has done it.
        """
        with self._changing:
            server = next((one for one in self.servers if one.url == lost.url), None)
            if server is None or len(self.servers) == 1 or self._brought_back[lost.url] > before.get(lost.url, 0):
                return
            try:
                self._count(lost)
                process = self._processes.get(lost.url)
                words = "it takes part again when it answers" if process is None else "it is started again"
                absent = Absent(server, self._stopped, None if process is None else partial(self._restart, process, server, lost))
            except EngineError:
                words = f"it stays away, for servers were recovered {self._restarts} times (engine.restarts)"
                absent = None
            self.servers = tuple(one for one in self.servers if one is not server)
            self._absent[server.url] = absent
        self._say(f"engine: {lost}; {words}, and meanwhile {len(self.servers)} other servers answer its requests")

    def _restart(self, process: ServerProcess, server: Server, lost: ServerLost) -> None:
        """Restarts a server that this run has started, unless it only has other weights."""
        if not self._has_other_weights(server):
            try:
                process.restart()
            except RlgenError as error:
                self._say(f"engine: {lost.url} was not started again, and stays away: {error}")
                raise

    def recover(self, lost: ServerLost, before: Mapping[str, int]) -> None:
        """Returns when there is a server with the current weights, for a call that has lost all of its servers, `lost` at last.

        If no other is present, sends this one the current weights again, after a restart if it does not answer. Raises
        EngineError if no server can be recovered, or the limit engine.restarts is reached.
        """
        with self._recovering:
            self.lose(lost, before)
            if self._brought_back[lost.url] > before.get(lost.url, 0) or all(one.url != lost.url for one in self.servers):
                return
            if isinstance(self._carrier, Broadcast):
                raise EngineError(
                    f"{lost}. engine.transfer nccl keeps no copy of the weights to send again; resume the run with --resume"
                ) from lost
            if self._stopped.is_set() or self._carrier.current is None:
                raise lost
            back = self.servers
            if self._has_other_weights(back[0]):
                self._count(lost)
            else:
                back = self._back(lost)
            for server in back:
                try:
                    self._load(server, self._carrier.current, self.held.version, hashed=False)
                except ServerLost as again:
                    if len(self.servers) == 1:
                        raise
                    self.lose(again, self.brought_back)
                else:
                    what = f"has the weights of version {self.held.version} again; its open requests are sent again"
                    self._say(f"engine: {server.url} {what}")

    def _has_other_weights(self, server: Server) -> bool:
        """Returns whether a server answers but has other weights: it then needs the weights but no restart."""
        try:
            return not server.label().startswith(f"{self.held.run}.")
        except ServerLost:
            return False

    def _back(self, lost: ServerLost) -> tuple[Server, ...]:
        """Returns servers that are back, when none is left: `lost` after a restart, or else the first that answer. They need the
        current weights.

        Raises ServerLost if none does within `patience`, EngineError if the limit of restarts is reached.
        """
        server = next(one for one in self.servers if one.url == lost.url)
        if process := self._processes.get(lost.url):
            self._count(lost)
            self._say(f"engine: {lost}; starting it again")
            process.restart()
            return (server,)
        if self._patience:
            self._count(lost)
            self._say(f"engine: {lost}; none is left, so the run waits up to {self._patience:.0f} s for a server")
            with self._changing:
                gone, self.servers = self.servers, ()
            self._absent |= {one.url: Absent(one, self._stopped) for one in gone}
            until = time.monotonic() + self._patience
            while time.monotonic() < until and not self._stopped.wait(EVERY):
                self._adopt()
                if self.servers:
                    return self.servers
            self.servers = gone
        raise ServerLost(lost.url, f"{lost.what}. Start it with `rlgen serve`, then resume the run with --resume") from lost

    def _count(self, lost: ServerLost) -> None:
        """Counts one recovery. Raises EngineError if the limit engine.restarts is reached."""
        with self._changing:  # several servers may be restarted at the same time
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
