"""vLLM on a server: started by rlgen, or elsewhere before."""

import asyncio
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from torch import Tensor

from rlgen.engines.base import Facts, Finished, Receipt
from rlgen.engines.http import Server, connections
from rlgen.engines.launch import ServerPlan, ServerProcess
from rlgen.engines.nccl import Broadcast
from rlgen.engines.transfer import Outbox
from rlgen.errors import EngineError, ServerLost
from rlgen.types import Completion, Request, Sampling

STALE = -1  # version of weights that did not come from this run
CLOSING_SECONDS = 0.2  # within which sampling ends when the engine is closed
LOADING = "loading"  # label of weights that are being replaced


class Supervisor:
    """Starts a server, and again when it has died.

    Raises:
        EngineError: it did not start.
    """

    def __init__(self, plan: ServerPlan, token: str, log: Path, start_timeout: float) -> None:
        self._token, self._log, self._start_timeout = token, log, start_timeout
        self._stopped = False
        self._start(plan)

    @property
    def url(self) -> str:
        return self._process.url

    def _start(self, plan: ServerPlan) -> None:
        self._process = ServerProcess.start(plan, self._token, self._log)
        try:
            if self._stopped:
                raise EngineError("the server was stopped while it was started")
            self._process.wait_ready(self._start_timeout)
        except BaseException:
            self._process.stop()
            raise

    def processes(self) -> list[psutil.Process]:
        return self._process.processes()

    def restart(self) -> None:
        """At the same place."""
        self._process.stop()
        self._start(self._process.plan)

    def stop(self) -> None:
        """For good, even if it is being started by another thread."""
        self._stopped = True
        self._process.stop()


@dataclass(frozen=True, slots=True)
class Member:
    """One of the servers, with who restarts it."""

    server: Server
    supervisor: Supervisor | None  # None: it was started elsewhere


class ServerEngine:
    """Samples from one or several servers that hold the same weights.

    Weights are labelled `RUN.VERSION`; every answer carries the label it was sampled by. A label of another run, or none, is
    that of a server that was restarted or taken over: it is given the present weights again, and asked again. A completion
    depends on its request and on the weights alone, so that what is asked again is answered as it would have been.

    Args:
        members: the servers.
        shape: of the model that is trained, see `model_shape`.
        in_flight: a sync pauses requests that are under way instead of waiting for them.
        restarts: how often servers may be brought back.
        carrier: takes weights to the servers. A broadcast keeps no copy of them: no server can be brought back then.
        say: receives a line for each recovery.

    Raises:
        EngineError: a server is not there, refuses, or lacks what training needs.
    """

    def __init__(
        self,
        *,
        members: Sequence[Member],
        shape: Mapping[str, Any],
        in_flight: bool,
        restarts: int,
        carrier: Outbox | Broadcast,
        say: Callable[[str], None],
    ) -> None:
        self._members = tuple(members)
        self._in_flight = in_flight
        self._restarts = restarts
        self._carrier = carrier
        self._say = say
        self._run = secrets.token_hex(4)
        self._version = STALE
        self._syncs = 0
        self._connections = max(1, connections() // len(self._members))  # to each server
        self._recovering = threading.RLock()
        self._background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rlgen-sampling")
        self._brought_back: Counter[str] = Counter()
        self._closed = threading.Event()
        facts = [self._examined(member.server, shape) for member in members]
        for member, other in zip(members[1:], facts[1:], strict=True):
            if (other.settings, other.stop_ids) != (facts[0].settings, facts[0].stop_ids):
                raise EngineError(f"{member.server.url} and {members[0].server.url} differ: {other} and {facts[0]}")
        self._facts = facts[0]

    @staticmethod
    def _examined(server: Server, shape: Mapping[str, Any]) -> Facts:
        """Facts of a server that has what training needs and serves a model of that shape."""
        server.require()
        server.resume()  # a trainer that died while it sent weights may have left it paused
        facts, theirs = server.facts()
        differs = [f"{name} is {theirs.get(name)} there, {shape[name]} here" for name in shape if theirs.get(name) != shape[name]]
        if differs:
            raise EngineError(f"{server.url} serves another model, {facts.model}: {', '.join(differs)}")
        return facts

    @property
    def weight_version(self) -> int:
        return self._version

    def facts(self) -> Facts:
        return self._facts

    def generate(self, requests: Sequence[Request], sampling: Sampling, finished: Finished | None = None) -> list[Completion]:
        waiting = dict(enumerate(requests))
        answers: dict[int, Completion] = {}

        def arrived(place: int, answer: Completion) -> None:
            answers[place] = answer
            del waiting[place]
            if finished:
                finished(place, answer)

        while waiting:
            before = self._brought_back.copy()
            try:
                asyncio.run(self._sample(dict(waiting), sampling, arrived))
            except ServerLost as lost:
                self._recover(lost, before)
        return [answers[place] for place in range(len(requests))]

    async def _sample(self, waiting: dict[int, Request], sampling: Sampling, arrived: Callable[[int, Completion], None]) -> None:
        """Deals the requests to the servers by place."""
        salt = f"{self._run}.{self._version}.{self._syncs}"
        calls = [
            asyncio.ensure_future(
                member.server.sample(
                    {place: request for place, request in waiting.items() if place % len(self._members) == turn},
                    sampling,
                    salt,
                    lambda label, url=member.server.url: self._version_of(label, url),  # type: ignore[misc]
                    arrived,
                    self._connections,
                )
            )
            for turn, member in enumerate(self._members)
        ]
        work: asyncio.Future[Any] = asyncio.gather(*calls)
        closed: asyncio.Future[Any] = asyncio.ensure_future(self._until_closed())
        try:
            await asyncio.wait({work, closed}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise EngineError("the engine was closed while it sampled")
            await work
        finally:
            for call in (*calls, closed):
                call.cancel()
            await asyncio.gather(*calls, work, closed, return_exceptions=True)

    async def _until_closed(self) -> None:
        while not self._closed.is_set():
            await asyncio.sleep(CLOSING_SECONDS)

    def submit(
        self, requests: Sequence[Request], sampling: Sampling, finished: Finished | None = None
    ) -> Future[list[Completion]]:
        """`generate`, while the caller does something else. One at a time."""
        return self._background.submit(self.generate, requests, sampling, finished)

    def prefill_logp(self, rows: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[tuple[float, ...]]:
        turns = len(self._members)

        async def of_all() -> list[list[tuple[float, ...]]]:
            return await asyncio.gather(*(m.server.prefill(rows[turn::turns]) for turn, m in enumerate(self._members)))

        found = asyncio.run(of_all())
        return [found[place % turns][place // turns] for place in range(len(rows))]

    def sync(self, weights: Iterable[tuple[str, Tensor]], version: int, hashed: bool = False) -> Receipt:
        if isinstance(self._carrier, Outbox):
            receipts = self._deliver(self._carrier, weights, version, hashed)
        else:
            receipts = self._broadcast(self._carrier, weights, version, hashed)
        for receipt in receipts[1:]:
            if receipt.received != receipts[0].received or receipt.not_loaded:
                return receipt  # what differs is found out by whoever sent the weights
        return receipts[0]

    def _deliver(self, outbox: Outbox, weights: Iterable[tuple[str, Tensor]], version: int, hashed: bool) -> list[Receipt]:
        """By files, to one server after the other; those that died are brought back."""
        folder = outbox.write(weights, version)
        with self._recovering:
            receipts = []
            for member in self._members:
                try:
                    receipts.append(self._load(member, folder, version, hashed))
                except ServerLost as lost:
                    self._restart(member, lost)
                    receipts.append(self._load(member, folder, version, hashed))
            outbox.keep(folder)
            self._synced(version)
        return receipts

    def _broadcast(
        self, broadcast: Broadcast, weights: Iterable[tuple[str, Tensor]], version: int, hashed: bool
    ) -> list[Receipt]:
        """Over NCCL, to all servers at once."""
        servers = [member.server for member in self._members]
        with self._recovering:
            try:
                for server in servers if self._in_flight else ():
                    server.pause()
                for server in servers:
                    server.set_label(LOADING)  # of no run: what is answered until all of it is there is refused
                receipts = broadcast.send(weights, version, hashed)
                for server in servers:
                    server.reset_cache()
                    server.set_label(f"{self._run}.{version}")
            finally:
                # After a broadcast that failed nobody answers: asking would hide why.
                for server in servers if self._in_flight and not broadcast.broken else ():
                    server.resume()
            self._synced(version)
        return receipts

    def _synced(self, version: int) -> None:
        self._version = version
        self._syncs += 1

    def _load(self, member: Member, folder: Path, version: int, hashed: bool) -> Receipt:
        server = member.server
        try:
            if self._in_flight:
                server.pause()
            server.set_label(LOADING)  # of no run: what is answered until all of it is there is refused
            receipt = server.load(str(folder), version, hashed)
            server.reset_cache()
            server.set_label(f"{self._run}.{version}")
        finally:
            if self._in_flight:
                server.resume()
        return receipt

    def _version_of(self, label: str, url: str) -> int:
        """Raises ServerLost if the weights are not of this run."""
        run, _, version = label.partition(".")
        if run != self._run:
            raise ServerLost(url, f"has weights {label!r}, not those of this run: it was restarted, or another run took it")
        return int(version)

    def _recover(self, lost: ServerLost, before: "Counter[str]") -> None:
        """Gives the server the weights of the present version again, after a new start if it needs one.

        Args:
            before: how often each server had been brought back when it was asked: another thread may have done it since.

        Raises:
            EngineError: nobody can start it, or servers have been brought back often enough.
        """
        if isinstance(self._carrier, Broadcast):
            raise EngineError(
                f"{lost}. With engine.transfer nccl there is no copy of the weights to bring it back with"
            ) from lost
        with self._recovering:
            if self._brought_back[lost.url] > before[lost.url]:
                return
            if self._closed.is_set() or self._carrier.current is None:
                raise lost
            member = next(member for member in self._members if member.server.url == lost.url)
            if self._has_lost_its_weights(member):
                self._count(lost)
            else:
                self._restart(member, lost)
            self._load(member, self._carrier.current, self._version, hashed=False)
            self._say(
                f"engine: {member.server.url} has the weights of version {self._version} again; what it owed is asked again"
            )

    def _has_lost_its_weights(self, member: Member) -> bool:
        """Whether it answers, but with other weights: then a new start is not what it needs."""
        try:
            return not member.server.label().startswith(f"{self._run}.")
        except ServerLost:
            return False

    def _restart(self, member: Member, lost: ServerLost) -> None:
        """Raises EngineError if nobody can."""
        if member.supervisor is None:
            raise ServerLost(lost.url, f"{lost.what}. Start it again with `rlgen serve`, and go on with --resume") from lost
        self._count(lost)
        self._say(f"engine: {lost}; starting it again")
        member.supervisor.restart()

    def _count(self, lost: ServerLost) -> None:
        """Raises EngineError if servers have been brought back often enough."""
        if self.recoveries >= self._restarts:
            raise EngineError(f"{lost}. Servers were brought back {self.recoveries} times already: engine.restarts") from lost
        self._brought_back[lost.url] += 1

    @property
    def recoveries(self) -> int:
        """How often servers have been brought back."""
        return self._brought_back.total()

    def sleep(self) -> None:
        pass

    def close(self) -> None:
        self._closed.set()  # what is being sampled ends
        if isinstance(self._carrier, Broadcast):
            self._carrier.close()  # before the other side goes
        for member in self._members:
            if member.supervisor is not None:
                member.supervisor.stop()
        self._background.shutdown(cancel_futures=True)
        if isinstance(self._carrier, Outbox):
            self._carrier.close()
