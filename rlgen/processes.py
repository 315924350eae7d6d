"""The processes of a run, and how they stay together.

Three rules keep them from waiting for each other for ever. Every process makes the same calls in the same order: what decides
the order, such as a verdict or a request to stop, is gathered first. Work that may fail in one process is done inside
`together`, so that its error is every process's error. And whoever waits does so for `timeout` seconds at most.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from threading import Event
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from rlgen.errors import ProcessError, RlgenError, SentinelError

T = TypeVar("T")
PATIENCE = 2.0  # seconds that a process looks for another one's last words
HANGING = 8.0  # seconds that a process has to end when the others do
COUNT, FIRST = "failures", "first_failure"  # keys of the store
# What torch's backends say when a process has gone away or does not answer.
LOST = ("Connection closed", "Connection reset", "Connection refused", "Broken pipe", "Timed out", "timeout", "Socket", "NCCL")


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """All processes of a run, seen from one of them. Where there is one only, every call is that call alone."""

    rank: int
    world: int
    device: torch.device  # of this process
    timeout: float  # seconds that one waits for another
    group: dist.ProcessGroup | None  # for Python objects, on the CPU; tensors of the model have torch's default group
    store: dist.Store | None  # outlives a process that fails

    @classmethod
    def alone(cls) -> "Processes":
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        return cls(rank=0, world=1, device=device, timeout=0.0, group=None, store=None)

    @classmethod
    def open(cls, timeout: float) -> "Processes":
        """Joins those that the launcher started: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT say which.

        Raises:
            ProcessError: they do not all come within `timeout` seconds, or there is no GPU for this one.
        """
        rank, world, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        on_gpu = torch.cuda.is_available()
        if on_gpu and local >= torch.cuda.device_count():
            raise ProcessError(
                f"process {rank} is number {local} of its machine, which has {torch.cuda.device_count()} GPUs: start one process"
                " for each GPU"
            )
        device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(device)
        if os.environ.get("LOCAL_WORLD_SIZE") == str(world):  # all on this machine: nobody beyond it need reach them
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        within = timedelta(seconds=timeout)
        try:
            shared, _, _ = next(dist.rendezvous("env://", timeout=within))
            # A name of our own: a program that was launched around rlgen may use the same store, as did an earlier attempt.
            store = dist.PrefixStore(f"rlgen/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", shared)
            dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=world, timeout=within)
            group = dist.new_group(backend="gloo", timeout=within)
            store.set(f"process_{rank}", json.dumps([socket.gethostname(), os.getpid(), born(psutil.Process())]))
        except (RuntimeError, ValueError, KeyError) as error:
            raise ProcessError(f"process {rank} of {world} did not find the others within {timeout:g} s: {error}") from error
        return cls(rank=rank, world=world, device=device, timeout=timeout, group=group, store=store)

    @property
    def is_main(self) -> bool:
        """The one that writes and prints."""
        return self.rank == 0

    def gather(self, items: Sequence[T]) -> list[T]:
        """The items of all processes, in order of rank. They are pickled.

        Raises:
            ProcessError: the processes have come here from different places: they no longer make the same calls.
        """
        if self.world == 1:
            return list(items)
        sent: list[Any] = [None] * self.world
        dist.all_gather_object(sent, (caller(), list(items)), group=self.group)
        if len({place for place, _ in sent}) > 1:
            ways = ", ".join(f"process {rank} at {place}" for rank, (place, _) in enumerate(sent))
            raise ProcessError(
                f"the processes have gone different ways ({ways}): something decides by rank, or differs from machine to machine."
                " Nothing more was trained; if all run the same rlgen on the same recipe, this is a bug in rlgen"
            )
        return [item for _, of_rank in sent for item in of_rank]

    def together(self, work: Callable[[], T], talks: bool = False, patient: bool = False) -> list[T]:
        """Runs `work` in every process: all results in order of rank, or in every process the first one's error.

        Args:
            talks: `work` waits for other processes itself, who would wait in vain for one that failed. Its error then ends this
                process at once, and so the others. A SentinelError is raised by comparing, when all waiting is over.
            patient: it may take longer than `timeout`: the others hear in between that it goes on.
        """
        if self.world == 1:
            return [work()]
        own: Exception | None = None
        outcome: tuple[Any, RlgenError | None]
        try:
            with self._heard_of() if patient else nullcontext():
                try:
                    outcome = work(), None
                except Exception as error:  # whatever it is, the others wait to hear of it
                    if talks and not isinstance(error, SentinelError):
                        raise
                    own, outcome = error, (None, sendable(error, self.rank))
            outcomes = self.gather([outcome])
        except RuntimeError:
            if own is not None:  # the others have gone: the reason is worth more than that
                raise own from None
            raise
        for rank, (_, failure) in enumerate(outcomes):
            if failure is not None:
                if rank == self.rank and own is not None and not isinstance(own, RlgenError):
                    raise own  # a bug: its traceback is here
                raise failure from own
        results: list[Any] = [value for value, _ in outcomes]
        return results

    def agreed(self, work: Callable[[], T], talks: bool = False, patient: bool = False) -> T:
        """As `together`, but each process keeps its own result: nothing but errors is sent."""
        kept: list[T] = []
        self.together(lambda: kept.append(work()), talks, patient)
        return kept[0]

    def on_main(self, work: Callable[[], T]) -> T:
        """The main process does it; every process has the result, or the error."""
        box = [self.agreed(lambda: work() if self.is_main else None)]
        if self.world > 1:  # gathered, each process would hold as many as there are processes: a journal is large
            dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]  # type: ignore[return-value]

    def patiently(self, work: Callable[[], T]) -> T:
        """As `on_main`, for work that may take longer than `timeout`: the others hear in between that it goes on."""
        if self.world == 1:
            return work()
        aside = ThreadPoolExecutor(max_workers=1)
        try:
            working = aside.submit(work) if self.is_main else None
            done = False
            while not done:
                if working is not None:
                    wait([working], timeout=self.timeout / 4)
                done = self.any(working is not None and working.done())
            return self.on_main(lambda: working.result() if working is not None else None)  # type: ignore[return-value]
        finally:
            aside.shutdown(wait=False)  # who stops at once does not wait for it

    @contextmanager
    def _heard_of(self) -> Iterator[None]:
        """Inside the block each process works, in the thread it is in; it ends when all have done so."""
        ready = Event()

        def tell() -> None:
            while self.any(not ready.wait(self.timeout / 4)):
                pass

        aside = ThreadPoolExecutor(max_workers=1)
        try:
            telling = aside.submit(tell)
            try:
                yield
            finally:
                ready.set()
            telling.result()
        finally:
            aside.shutdown(wait=False)  # who stops at once does not wait for it

    def main_first(self, work: Callable[[], T]) -> T:
        """Every process does it, the main one before the others: it fills caches and folders that they find."""
        if self.world == 1:
            return work()
        first = self.agreed(lambda: work() if self.is_main else None)
        rest = self.agreed(lambda: None if self.is_main else work())
        return first if self.is_main else rest  # type: ignore[return-value]

    def any(self, flag: bool) -> bool:
        """Whether it is true in one of them."""
        return any(self.gather([flag]))

    def sum_(self, tensors: Iterable[Tensor]) -> None:
        """Adds up each tensor over all processes, in place and with the same bits everywhere."""
        if self.world > 1:
            for sum_of_one in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                sum_of_one.wait()

    @contextmanager
    def said_once(self) -> Iterator[None]:
        """An error that leaves the block ends this process; of several processes one prints it (`RlgenError.told`)."""
        try:
            yield
        except BaseException as error:
            raise self.last_words(error) from error.__cause__

    def last_words(self, error: BaseException) -> BaseException:
        """What this process ends with, for an error that ended its work: of several processes one prints it.

        A process that another one has left has an error of the network. The reason is what the first one to fail left in the
        store; one that was killed left nothing. One that hangs is killed: it may be deaf to signals, and its launcher patient.
        """
        if self.store is None or getattr(error, "told", False) or getattr(error, "said", False):
            return error
        try:
            self.store.set(f"ended_{self.rank}", "")
            if lost(error):
                first = self._first_failure()
                if first is not None:
                    return told_by(first["rank"], first["message"], first["exit_code"])
                self._end_the_silent()
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
        except RuntimeError:  # the store went with the process that kept it
            pass
        return error

    def _first_failure(self) -> dict[str, Any] | None:
        assert self.store is not None
        deadline = time.monotonic() + PATIENCE
        while not self.store.check([FIRST]):
            if time.monotonic() > deadline:
                return None
            time.sleep(0.05)
        first: dict[str, Any] = json.loads(self.store.get(FIRST))
        return first

    def _end_the_silent(self) -> None:
        """Kills the processes of this machine that neither end nor say anything. Whatever they are at is lost already."""
        assert self.store is not None
        deadline = time.monotonic() + HANGING
        for rank in set(range(self.world)) - {self.rank}:
            process = self._process(rank)
            while process is not None and not self.store.check([f"ended_{rank}"]) and alive(process):
                if time.monotonic() > deadline:
                    process.kill()  # psutil has made sure that it is still the same one
                    process = None
                time.sleep(0.1)

    def _process(self, rank: int) -> psutil.Process | None:
        """None: it is on another machine, or gone."""
        if self.store is None or not self.store.check([f"process_{rank}"]):
            return None
        host, pid, was_born = json.loads(self.store.get(f"process_{rank}"))
        try:
            process = psutil.Process(pid) if host == socket.gethostname() else None
            return process if process is not None and born(process) == was_born else None
        except psutil.NoSuchProcess:
            return None

    def speaks_last(self) -> bool:
        """Whether this one writes how the run ended: the main process, or another one of its machine when that is gone."""
        if self.is_main or self.store is None:
            return self.is_main
        try:
            if not self.store.check(["process_0"]) or json.loads(self.store.get("process_0"))[0] != socket.gethostname():
                return False
            main = self._process(0)
            return main is None or not alive(main)
        except RuntimeError:  # the store went with the process that kept it
            return False

    def close(self) -> None:
        """After the last call. vLLM may have closed torch's groups with its engine."""
        if dist.is_initialized():
            dist.destroy_process_group()


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Where a process sits among the engines. With tensor parallelism several share one: each must ask it the same."""

    engine: int
    engines: int
    shared: bool  # with another process
    speaks: bool  # this process hands on what the engine answered: the first of those that share it

    @classmethod
    def of(cls, processes: Processes, size: int) -> "Seat":
        """Raises ProcessError if `size` processes an engine do not come out even."""
        if processes.world % size:
            raise ProcessError(
                f"engine.tensor_parallel_size {size} needs a multiple of {size} processes, but {processes.world} run: start"
                f" them with `torchrun --nproc-per-node {size}`, or lower it"
            )
        rank, engines = processes.rank, processes.world // size
        return cls(engine=rank // size, engines=engines, shared=size > 1, speaks=rank % size == 0)

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """This engine's part of the items: neighbours, in order, as many as for any other engine or one more."""
        return items[len(items) * self.engine // self.engines : len(items) * (self.engine + 1) // self.engines]


def caller() -> str:
    """The line outside of this file that called: "trainers/loop.py:75"."""
    frame = sys._getframe()
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return f"{'/'.join(frame.f_code.co_filename.split('/')[-2:])}:{frame.f_lineno}"


def born(process: psutil.Process) -> float:
    """Seconds after its machine's start: psutil's time of day changes whenever the clock is set, as in a long run it may be."""
    return round(process.create_time() - psutil.boot_time(), 2)


def alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def told_by(rank: int, message: str, exit_code: int) -> ProcessError:
    """What a process ends with when another one prints the reason."""
    error = ProcessError(f"process {rank} failed: {message}")
    error.exit_code, error.told = exit_code, True
    return error


def sendable(error: Exception, rank: int) -> RlgenError:
    """The error as the other processes raise it; it says where it is from."""
    if not isinstance(error, RlgenError):
        return told_by(rank, f"{type(error).__name__}: {error}", 70)
    if rank:
        error.args = (f"process {rank}: {error}", *error.args[1:])
    return error


def lost(error: BaseException) -> bool:
    """Whether an error says that another process is gone, itself or by what it came from."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, dist.DistError) or (isinstance(seen, RuntimeError) and any(word in str(seen) for word in LOST)):
            return True
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return False
