"""Sends weights to servers from GPU to GPU, with vLLM's own transfer engine over NCCL.

The trainer is rank 0 of a process group; each worker of each server is another rank. A sync makes these calls, each to all
servers at once; each broadcast carries the bytes of as many tensors as fit into BUCKET_BYTES:

    rlgen_listen, /start_weight_update, (/update_weights while this side broadcasts), ..., /finish_weight_update, rlgen_heard

Two NCCL ranks cannot share a GPU. vLLM can share memory of one GPU between processes (IPC), but over HTTP only with pickled
handles and VLLM_ALLOW_INSECURE_SERIALIZATION=1, with which anyone who can reach the server can run code there: rlgen never sets
that.

The group has no token and no encryption: use it only in networks that you trust.
"""

import contextlib
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial
from itertools import accumulate
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from rlgen.engines.base import SyncReport, Weights
from rlgen.engines.http import ANSWER_SECONDS, Server, report_of
from rlgen.engines.launch import claim
from rlgen.engines.transfer import buckets
from rlgen.engines.vllm_weights import NcclEndpoint
from rlgen.errors import EngineError
from rlgen.recipe.rules import is_loopback

BUCKET_BYTES = 1 << 28  # sent at a time; a larger tensor is sent alone
TRAINER = "the trainer's side"
RESTART = "restart the servers, then resume the run: the process group is broken, and servers may still wait in it"
NEEDS_GPU = "engine.transfer nccl needs GPUs on both sides; set it to files"


class Broadcast:
    """The sender of weights to several servers at once over NCCL.

    Args:
        host: an address of this machine that the servers can reach.
        connect: joins as rank 0, given host, port and number of ranks; waits until all have joined.
        timeout: seconds that each phase of a sync may take.

    Raises EngineError if a server cannot receive weights over NCCL, or a rank did not join.
    """

    def __init__(
        self, servers: Sequence[Server], host: str, connect: Callable[[str, int, int], NcclEndpoint], timeout: float
    ) -> None:
        self._host, self._connect, self._timeout = host, connect, timeout
        self._endpoint: NcclEndpoint | None = None
        self._servers: tuple[Server, ...] = ()
        self.join(servers)

    def join(self, servers: Sequence[Server]) -> None:
        """Makes a group with these servers, if they are others than before. Call it when some were lost or have come back.

        Raises EngineError if a server cannot receive weights over NCCL, or a rank did not join.
        """
        if tuple(servers) == self._servers:
            return
        self.close()
        self._servers, host = tuple(servers), self._host
        *offsets, world = accumulate(map(workers_of, servers), initial=1)  # the trainer is rank 0
        port = claim(host, 0)
        # vLLM cuts what it receives into buffers of this size: one for each bucket.
        packing = {"packed": True, "packed_buffer_size_bytes": BUCKET_BYTES, "packed_num_buffers": 1}
        common = {"master_address": host, "master_port": port, "world_size": world, **packing}
        first_rank = dict(zip([server.url for server in servers], offsets, strict=True))

        def join(server: Server) -> None:
            info = {**common, "rank_offset": first_rank[server.url]}
            server.call("POST", "/init_weight_transfer_engine", {"init_info": info}, self._timeout)

        phase = f"joining a group of {world} at {host}:{port}"
        self._endpoint = self._together(phase, join, partial(self._connect, host, port, world))[TRAINER]

    @property
    def broken(self) -> bool:
        """Returns whether the group is closed, after an error or after `close`: it cannot send any more."""
        return self._endpoint is None

    def send(self, weights: Weights, version: int, hashed: bool) -> list[SyncReport]:
        """Sends all weights and returns one receipt per server. The caller empties the servers' prefix caches.

        Raises EngineError if a phase failed or timed out; the group is then closed and cannot send any more.
        """
        if self._endpoint is None:
            raise EngineError(f"engine.transfer nccl: an earlier sync failed; {RESTART}")
        try:
            self._together("rlgen_listen", lambda server: server.rpc("rlgen_listen", self._timeout, hashed=hashed))
            self._post_to_all("/start_weight_update")
            for bucket in buckets(((name, self._endpoint.ready(tensor)) for name, tensor in weights), BUCKET_BYTES):
                self._send_bucket(self._endpoint, bucket)
            self._post_to_all("/finish_weight_update")
            heard = self._together("rlgen_heard", lambda server: server.rpc("rlgen_heard", self._timeout))
        except BaseException:
            self._leave()
            raise
        return [report_of(server.url, heard[server.url], version) for server in self._servers]

    def _send_bucket(self, endpoint: NcclEndpoint, bucket: Mapping[str, Tensor]) -> None:
        """Posts to all servers while this rank broadcasts: each side waits for the other."""
        # The widest dtypes come first, so that each tensor begins at a multiple of its element's size.
        names = sorted(bucket, key=lambda name: -bucket[name].itemsize)
        tensors = [bucket[name] for name in names]
        info = {
            "names": names,
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
            "shapes": [list(tensor.shape) for tensor in tensors],
        }
        self._post_to_all("/update_weights", {"update_info": info}, lambda: endpoint.broadcast(bucket_bytes(tensors)))

    def _post_to_all(self, route: str, body: Any = None, ours: Callable[[], Any] | None = None) -> None:
        self._together(route, lambda server: server.call("POST", route, body, self._timeout), ours)

    def _together(self, phase: str, call: Callable[[Server], Any], ours: Callable[[], Any] | None = None) -> dict[str, Any]:
        """Calls `call` with every server, and `ours`, at the same time. Returns the results by URL, that of `ours` by TRAINER.

        When one fails, the others are not waited for, because they may never end. Raises EngineError if a call failed, or the
        timeout passed.
        """
        calls = {server.url: partial(call, server) for server in self._servers} | ({TRAINER: ours} if ours else {})
        futures = {who: in_thread(call) for who, call in calls.items()}
        # One second longer than the HTTP timeout, whose error says more.
        done, pending = wait(futures.values(), timeout=self._timeout + 1, return_when=FIRST_EXCEPTION)
        for who, future in futures.items():
            if future in done and (error := future.exception()):
                words = str(error) if who in str(error) else f"{who}: {type(error).__name__}: {error}"
                raise EngineError(f"engine.transfer nccl, {phase}: {words}; {RESTART}") from error
        if pending:
            late = " and ".join(who for who, future in futures.items() if future in pending)
            raise EngineError(f"engine.transfer nccl, {phase}: {late} did not finish within {self._timeout:.0f} s; {RESTART}")
        return {who: future.result() for who, future in futures.items()}

    def close(self) -> None:
        """Leaves the group and tells the servers to leave it. A second call does nothing."""
        if self.broken:
            return
        self._leave()
        for server in self._servers:
            with contextlib.suppress(EngineError):  # dead, or without this route: leaves when it joins the next group
                server.call("POST", "/shutdown_weight_transfer_engine")
        self._servers = ()

    def _leave(self) -> None:
        """Closes this rank's endpoint, in a thread with a timeout because it may hang."""
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            wait([in_thread(endpoint.close)], timeout=min(ANSWER_SECONDS, self._timeout))


def in_thread(call: Callable[[], Any]) -> "Future[Any]":
    """Runs `call` in a daemon thread: one that hangs does not keep the process from ending, as a thread pool would."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="rlgen-nccl", daemon=True).start()
    return future


def bucket_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the bytes of contiguous tensors one after the other, as vLLM's workers unpack them."""
    return torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])


def workers_of(server: Server) -> int:
    """Returns the number of workers of `server`. Raises EngineError unless all can receive weights over NCCL."""
    told = server.rpc("rlgen_facts", ANSWER_SECONDS)
    if not told[0]["cuda"]:
        raise EngineError(f"{server.url} runs on a CPU: {NEEDS_GPU}")
    if told[0].get("transfer") != "nccl":
        flag = """--weight-transfer-config '{"backend": "nccl"}'"""
        raise EngineError(f"{server.url} takes no weights over NCCL: start it with {flag}, or by `rlgen serve` with this recipe")
    return len(told)


def own_address(urls: Sequence[str]) -> str:
    """Returns an address of this machine that all of `urls` can reach: that of the route to another machine, if there is one.

    Raises EngineError if there is no route to a server over IPv4.
    """
    found = []
    for url in urls:
        place = urlsplit(url)
        # Connecting a datagram socket sends nothing; it only looks up the route. vLLM's rendezvous supports only IPv4.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((place.hostname, place.port or 80))
            except OSError as error:
                raise EngineError(f"engine.transfer nccl: there is no route to {url} over IPv4: {error}") from error
            found.append(str(probe.getsockname()[0]))
    return next((address for address in found if not is_loopback(address)), found[0])
