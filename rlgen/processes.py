"""The process group of a run: collectives that time out, and the report of the first error.

Three rules keep the processes from deadlocking. Every rank makes the same calls in the same order: a value that decides the
order, such as a verdict or a request to stop, is gathered first. Work that may fail in one process runs inside `gather_all`, so
that its error is raised in every process. Every wait for another process ends after `timeout` seconds at most.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from threading import Event
from typing import Any, Literal, TypeVar

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from rlgen.errors import ProcessError, RlgenError, SentinelError

T = TypeVar("T")
PATIENCE = 2.0  # seconds that a process waits for another one's failure record in the store
HANGING = 8.0  # seconds that a process has to end after another one has ended, before it is killed
COUNT, FIRST = "failures", "first_failure"  # keys in the store
# Fragments of the messages of torch's backends when a process has gone away or does not answer.
LOST = ("Connection closed", "Connection reset", "Connection refused", "Broken pipe", "Timed out", "timeout", "Socket", "NCCL")


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """The process group of a run, seen from one rank. With one process, every method runs its work locally and sends nothing."""

    rank: int
    world: int
    device: torch.device  # of this process
    timeout: float  # seconds that one process waits for another
    group: dist.ProcessGroup | None  # gloo, for Python objects on the CPU; tensors of the model use torch's default group
    store: dist.Store | None  # stays readable after a process fails, but not after the launcher has ended
    peers: tuple[tuple[str, int, float], ...] = ()  # host, process id and start of each process, by rank

    @classmethod
    def alone(cls) -> "Processes":
        """Returns the group of a run with a single process, on GPU 0 if there is one."""
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        return cls(rank=0, world=1, device=device, timeout=0.0, group=None, store=None)

    @classmethod
    def open(cls, timeout: float) -> "Processes":
        """Joins the launcher's processes, as RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT describe them.

        Raises ProcessError if not all processes joined within `timeout` seconds, or there is no GPU for this one.
        """
        rank, world, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        on_gpu = torch.cuda.is_available()
        device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
        if on_gpu and local >= torch.cuda.device_count():
            raise ProcessError(
                f"process {rank} is number {local} of its machine, which has {torch.cuda.device_count()} GPUs: start one process"
                " for each GPU"
            )
        if on_gpu:
            torch.cuda.set_device(device)
        if os.environ.get("LOCAL_WORLD_SIZE") == str(world):  # all on this machine: no other one needs to reach them
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        within = timedelta(seconds=timeout)
        try:
            shared, _, _ = next(dist.rendezvous("env://", timeout=within))
            # An own prefix: the program that launched rlgen, or an earlier attempt, may have used the same store.
            store = dist.PrefixStore(f"rlgen/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", shared)
            dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=world, timeout=within)
            group = dist.new_group(backend="gloo", timeout=within)
            opened = cls(rank=rank, world=world, device=device, timeout=timeout, group=group, store=store)
            return replace(opened, peers=tuple(opened.gather([(socket.gethostname(), os.getpid(), born(psutil.Process()))])))
        except (RuntimeError, ValueError, KeyError) as error:
            first, *_ = str(error).splitlines() or [""]  # torch adds a stack of its C++ code
            raise ProcessError(
                f"process {rank} of {world} did not find the others within {timeout:g} s: {first}. If no launcher started this"
                " process, run `unset RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT` first"
            ) from error

    @property
    def is_main(self) -> bool:
        """Whether this process has rank 0, which writes files and prints."""
        return self.rank == 0

    def gather(self, items: Sequence[T]) -> list[T]:
        """Returns the items of all processes, in order of rank. The items are sent pickled.

        Raises ProcessError if the processes called this from different lines of code, so that they no longer make the same calls.
        """
        if self.world == 1:
            return list(items)
        sent: list[Any] = [None] * self.world
        dist.all_gather_object(sent, (caller(), list(items)), group=self.group)
        if len({place for place, _ in sent}) > 1:
            ways = ", ".join(f"process {rank} at {place}" for rank, (place, _) in enumerate(sent))
            raise ProcessError(
                f"the processes execute different code ({ways}): something depends on the rank or differs between machines."
                " Nothing more was trained; if all run the same rlgen on the same recipe, this is a bug in rlgen"
            )
        return [item for _, of_rank in sent for item in of_rank]

    def exchange(self, parts: Sequence[bytes]) -> list[bytes]:
        """Sends `parts[rank]` to each other process and returns what each sent to this one, in order of rank (all-to-all)."""
        if self.world == 1:
            return list(parts)
        # [sender, receiver]; `gather` is cheap here, and it checks that all processes come to this line.
        sizes = np.array(self.gather([[len(part) for part in parts]])).reshape(self.world, self.world)
        np.fill_diagonal(sizes, 0)
        others = [b"" if rank == self.rank else part for rank, part in enumerate(parts)]
        sent = torch.frombuffer(bytearray(b"".join(others)) or bytearray(1), dtype=torch.uint8)[: sizes[self.rank].sum()]
        received = torch.empty(int(sizes[:, self.rank].sum()), dtype=torch.uint8)
        dist.all_to_all_single(received, sent, sizes[:, self.rank].tolist(), sizes[self.rank].tolist(), group=self.group)
        ends = sizes[:, self.rank].cumsum()
        found = [received[end - size : end].numpy().tobytes() for end, size in zip(ends, sizes[:, self.rank], strict=True)]
        found[self.rank] = parts[self.rank]
        return found

    def gather_all(self, work: Callable[[], T], has_collectives: bool = False, keepalive: bool = False) -> list[T]:
        """Runs `work` in every process and returns all results in order of rank; raises the first rank's error in every process.

        Args:
            has_collectives: `work` itself waits for other processes, which would wait in vain for one that failed. An error then
                leaves this process at once without a gather, and the other processes fail on the lost connection. A SentinelError
                is still gathered: it is raised by a comparison after all waiting is over.
            keepalive: `work` may take longer than `timeout`: while it runs, the processes exchange keep-alive messages.
        """
        if self.world == 1:
            return [work()]
        own: Exception | None = None
        outcome: tuple[Any, RlgenError | None]
        try:
            with self._heard_of() if keepalive else nullcontext():
                try:
                    outcome = work(), None
                except Exception as error:  # of any class: the other processes wait for the outcome
                    if has_collectives and not isinstance(error, SentinelError):
                        raise
                    own, outcome = error, (None, sendable(error, self.rank))
            outcomes = self.gather([outcome])
        except RuntimeError:
            if own is not None:  # the other processes have ended: this process's own error explains more than the lost connection
                raise own from None
            raise
        for rank, (_, failure) in enumerate(outcomes):
            if failure is not None:
                if rank == self.rank and own is not None and not isinstance(own, RlgenError):
                    raise own  # a bug: only this process has its traceback
                raise failure from own
        results: list[Any] = [value for value, _ in outcomes]
        return results

    def run_all(self, work: Callable[[], T], has_collectives: bool = False, keepalive: bool = False) -> T:
        """Runs `work` in every process as `gather_all` does, but returns only this process's result: only errors are sent."""
        kept: list[T] = []
        self.gather_all(lambda: kept.append(work()), has_collectives, keepalive)
        return kept[0]

    def on_main(self, work: Callable[[], T], keepalive: bool = False) -> T:
        """Runs `work` in the main process and returns its result, or raises its error, in every process."""
        box = [self.run_all(lambda: work() if self.is_main else None, keepalive=keepalive)]
        if self.world > 1:  # a gather would give each process `world` copies, and a journal is large
            dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]  # type: ignore[return-value]

    @contextmanager
    def _heard_of(self) -> Iterator[None]:
        """Exchanges keep-alive messages, four in each `timeout`, from a thread while the block runs in the calling one.

        The block is left only when the blocks of all processes have ended.
        """
        ready = Event()

        def tell() -> None:
            while self.any(not ready.wait(self.timeout / 4)):
                pass

        aside = ThreadPoolExecutor(max_workers=1)
        telling = aside.submit(tell)
        aside.shutdown(wait=False)  # a process that must stop at once does not wait for the thread
        try:
            yield
        finally:
            ready.set()
        telling.result()

    def has_gone(self, rank: int) -> bool:
        """Returns whether process `rank` has ended; always False for a process on another machine, which cannot be checked."""
        here = bool(self.peers) and self.peers[rank][0] == socket.gethostname()
        return here and ((process := self._process(rank)) is None or not alive(process))

    def main_first(self, work: Callable[[], T]) -> T:
        """Runs `work` in every process, in the main process first: it fills caches and folders that the others then find."""
        first = self.run_all(lambda: work() if self.is_main else None)
        rest = self.run_all(lambda: None if self.is_main else work())
        return first if self.is_main else rest  # type: ignore[return-value]

    def any(self, flag: bool) -> bool:
        return any(self.gather([flag]))

    def sum_(self, tensors: Iterable[Tensor]) -> None:
        """Sums each tensor over all processes with an all-reduce, in place; the result has the same bits in every process."""
        if self.world > 1:
            for sum_of_one in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                sum_of_one.wait()

    def total(self, values: Tensor, op: Literal["sum", "min", "max"] = "sum") -> Tensor:
        """Returns the elementwise sum, minimum or maximum of a tensor over all processes; the same bits in every process.

        The all-reduce runs on a copy on the CPU; the result is on the device of `values`.
        """
        if self.world == 1:
            return values
        result = values.detach().cpu().clone()
        ops = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
        dist.all_reduce(result, op=ops[op], group=self.group)
        return result.to(values.device)

    @contextmanager
    def reporting_once(self) -> Iterator[None]:
        """Marks an error that leaves the block, or raises another one in its place, so that only one process prints the reason.

        A process whose peer has ended sees only a network error. The real reason is the message that the first failing process
        wrote to the store; a killed process wrote none. A process of this machine that neither ends nor reports is killed: it may
        ignore signals, and its launcher may wait for it for a long time.
        """
        try:
            yield
        except BaseException as error:
            raise self._marked_once(error) from error.__cause__

    def _marked_once(self, error: BaseException) -> BaseException:
        if self.store is None or getattr(error, "told", False) or getattr(error, "said", False):
            return error
        try:
            self.store.set(f"ended_{self.rank}", "")
            if lost(error):
                first = self._first_failure()
                if first is not None:
                    return told_by(first["rank"], first["message"], first["exit_code"])
                self._kill_unresponsive()
                ended = ProcessError(
                    f"another process was killed or did not answer for {self.timeout:g} s (processes.timeout);"
                    " logs/ has what each wrote last"
                )
                ended.__cause__ = error
                error = ended
            if self.store.add(COUNT, 1) == 1:
                code = error.exit_code if isinstance(error, RlgenError) else 70
                said = {"rank": self.rank, "message": str(error) or type(error).__name__, "exit_code": code}
                self.store.set(FIRST, json.dumps(said))
                error.said = True  # type: ignore[attr-defined]
            else:
                error.told = True  # type: ignore[attr-defined]
        except RuntimeError:  # the store is gone with the process that hosted it
            pass
        return error

    def _first_failure(self) -> dict[str, Any] | None:
        """Returns the record of the first failure, or None if none appears within PATIENCE seconds."""
        assert self.store is not None
        deadline = time.monotonic() + PATIENCE
        while not self.store.check([FIRST]):
            if time.monotonic() > deadline:
                return None
            time.sleep(0.05)
        first: dict[str, Any] = json.loads(self.store.get(FIRST))
        return first

    def _kill_unresponsive(self) -> None:
        """Kills the processes of this machine that neither end nor write to the store within HANGING seconds."""
        assert self.store is not None
        deadline = time.monotonic() + HANGING
        for rank in set(range(self.world)) - {self.rank}:
            process = self._process(rank)
            while process is not None and not self.store.check([f"ended_{rank}"]) and alive(process):
                if time.monotonic() > deadline:
                    process.kill()  # psutil checks that the id still belongs to the same process
                    process = None
                time.sleep(0.1)

    def _process(self, rank: int) -> psutil.Process | None:
        """Returns a process of this machine; None if it is on another one or has ended."""
        host, pid, was_born = self.peers[rank]
        try:
            process = psutil.Process(pid) if host == socket.gethostname() else None
            return process if process is not None and born(process) == was_born else None
        except psutil.NoSuchProcess:
            return None

    def reports_end(self) -> bool:
        """Returns whether this process records how the run ended: the main one or, if that has ended, any on its machine."""
        return self.is_main or self.has_gone(0)

    def close(self) -> None:
        """Closes torch's process groups, after the last call. vLLM may have closed them already together with its engine."""
        if dist.is_initialized():
            dist.destroy_process_group()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShare:
    """The engine that a process uses. With tensor parallelism several processes share one, and send it the same requests."""

    engine: int
    engines: int  # of the run
    shared: bool  # whether another process uses the same engine
    first: bool  # this process passes on the engine's completions: true for the first of those that share the engine

    @classmethod
    def of(cls, processes: Processes, size: int) -> "EngineShare":
        """Returns the assignment of this process, with `size` processes for each engine."""
        if processes.world % size:
            raise ProcessError(
                f"engine.tensor_parallel_size {size} needs a multiple of {size} processes, but {processes.world} run: start"
                f" them with `torchrun --nproc-per-node {size}`, or lower it"
            )
        rank, engines = processes.rank, processes.world // size
        return cls(engine=rank // size, engines=engines, shared=size > 1, first=rank % size == 0)

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """Returns this engine's contiguous slice of the items; the slice sizes of any two engines differ by at most one."""
        return items[len(items) * self.engine // self.engines : len(items) * (self.engine + 1) // self.engines]


def cores() -> int:
    """Returns the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def caller() -> str:
    """Returns the innermost line outside this file on the call stack, such as "trainers/loop.py:75"."""
    frame = sys._getframe()
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return f"{'/'.join(frame.f_code.co_filename.split('/')[-2:])}:{frame.f_lineno}"


def born(process: psutil.Process) -> float:
    """Returns when a process started, in seconds after its machine's boot.

    psutil's time of day changes whenever the clock is set, which can happen in a long run.
    """
    return round(process.create_time() - psutil.boot_time(), 2)


def alive(process: psutil.Process) -> bool:
    """Returns whether a process runs; a zombie counts as ended."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def told_by(rank: int, message: str, exit_code: int) -> ProcessError:
    """Returns the error of a process when another one prints the reason."""
    error = ProcessError(f"process {rank} failed: {message}")
    error.exit_code, error.told = exit_code, True
    return error


def sendable(error: Exception, rank: int) -> RlgenError:
    """Returns the error as the other processes raise it, with the rank it comes from in its message."""
    if not isinstance(error, RlgenError):
        return told_by(rank, f"{type(error).__name__}: {error}", 70)
    if rank:
        error.args = (f"process {rank}: {error}", *error.args[1:])
    return error


def lost(error: BaseException) -> bool:
    """Returns whether an error, or one in its chain of causes, says that another process is gone."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, dist.DistError) or (isinstance(seen, RuntimeError) and any(word in str(seen) for word in LOST)):
            return True
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return False
