"""Manages the vLLM servers of a run, which all hold the same weights: starts them, sends weights, restarts lost ones."""

import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from rlgen.engines.base import EngineInfo, SyncReport
from rlgen.engines.http import Server, WeightsKept
from rlgen.engines.launch import ServerProcess
from rlgen.engines.nccl import Broadcast
from rlgen.engines.transfer import FileTransfer
from rlgen.errors import EngineError, ServerLost

STALE = -1  # weight version before the first sync of this run
LOADING = "loading"  # label of weights that are being replaced


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The weights that all servers were sent last, labelled `RUN.VERSION`. Held(run="5f0c2b7a", version=3, syncs=4)"""

    run: str
    version: int
    syncs: int  # number of syncs so far


@dataclass(frozen=True, slots=True)
class Member:
    """One server of the fleet."""

    server: Server
    process: ServerProcess | None  # None: the server was started elsewhere and cannot be restarted from here


class ServerPool:
    """One or several servers, all with the same weights.

    Weights are labelled `RUN.VERSION`; every completion carries the label of the weights that sampled it. A label of another run,
    or none, means that the server was restarted or used by another run: it is sent the current weights again.

    Args:
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
        members: Sequence[Member],
        shape: Mapping[str, Any],
        in_flight: bool,
        merges: bool = False,
        restarts: int,
        carrier: FileTransfer | Broadcast,
        say: Callable[[str], None],
    ) -> None:
        self._members = tuple(members)
        self.servers = tuple(member.server for member in members)
        self.in_flight, self.merges = in_flight, merges
        self._restarts, self._carrier, self._say = restarts, carrier, say
        self.held = Held(run=secrets.token_hex(4), version=STALE, syncs=0)
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

    def sync(self, weights: Iterable[tuple[str, Tensor]], version: int, hashed: bool = False) -> SyncReport:
        """Sends all weights to all servers, as `Engine.sync`.

        If the servers' receipts differ, returns one that differs, for the caller to report.
        """
        with self._recovering:
            if isinstance(self._carrier, FileTransfer):
                receipts = self._deliver(self._carrier, weights, version, hashed)
            else:
                receipts = self._broadcast(self._carrier, weights, version, hashed)
            self.held = replace(self.held, version=version, syncs=self.held.syncs + 1)
        for receipt in receipts[1:]:
            if receipt.received != receipts[0].received or receipt.not_loaded:
                return receipt  # the sender compares it with what it sent
        return receipts[0]

    def _deliver(
        self, outbox: FileTransfer, weights: Iterable[tuple[str, Tensor]], version: int, hashed: bool
    ) -> list[SyncReport]:
        """Sends weights by files to all servers at the same time; restarts servers that have died."""

        def give(member: Member) -> SyncReport:
            try:
                return self._load(member, folder, version, hashed)
            except ServerLost as lost:
                self._restart(member, lost)
                return self._load(member, folder, version, hashed)

        with ThreadPoolExecutor(len(self._members), thread_name_prefix="rlgen-loading") as each:
            folder = outbox.write(weights, version)  # no server is recovered meanwhile: the previous weights are gone
            receipts = list(each.map(give, self._members))
        outbox.current = folder
        return receipts

    def _broadcast(
        self, broadcast: Broadcast, weights: Iterable[tuple[str, Tensor]], version: int, hashed: bool
    ) -> list[SyncReport]:
        """Sends weights over NCCL to all servers at once."""
        # After a failed broadcast the servers do not respond; a second error would hide the first.
        with self._replacing(self.servers, version, lambda: not broadcast.broken):
            return broadcast.send(weights, version, hashed)

    def _load(self, member: Member, folder: Path, version: int, hashed: bool) -> SyncReport:
        """Makes one server load the weights in `folder`.

        Raises WeightsKept if the files cannot be loaded; the server keeps its weights and their label.
        """
        server, before = member.server, member.server.label()
        with self._replacing([server], version):
            try:
                return server.load(str(folder), version, hashed)
            except WeightsKept:
                server.set_label(before)
                raise

    @contextmanager
    def _replacing(self, servers: Sequence[Server], version: int, alive: Callable[[], bool] = lambda: True) -> Iterator[None]:
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
            for server in paused if alive() else ():
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
            member = next(member for member in self._members if member.server.url == lost.url)
            if self._has_lost_its_weights(member):
                self._count(lost)
            else:
                self._restart(member, lost)
            self._load(member, self._carrier.current, self.held.version, hashed=False)
            self._say(
                f"engine: {member.server.url} has the weights of version {self.held.version} again; its open requests are sent"
                " again"
            )

    def _has_lost_its_weights(self, member: Member) -> bool:
        """Returns whether the server answers but has other weights: it then needs the weights but no restart."""
        try:
            return not member.server.label().startswith(f"{self.held.run}.")
        except ServerLost:
            return False

    def _restart(self, member: Member, lost: ServerLost) -> None:
        """Restarts a server. Raises ServerLost if it was started elsewhere, EngineError if the limit is reached."""
        if member.process is None:
            raise ServerLost(lost.url, f"{lost.what}. Start it with `rlgen serve`, then resume the run with --resume") from lost
        self._count(lost)
        self._say(f"engine: {lost}; starting it again")
        member.process.restart()

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
        for member in self._members:
            if member.process is not None:
                member.process.stop()

    def close(self) -> None:
        """Removes the weight files. Must be called after all sampling and recovery has ended."""
        if isinstance(self._carrier, FileTransfer):
            self._carrier.close()
