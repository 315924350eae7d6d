"""One engine for all processes of a run."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

from torch import Tensor

from rlgen.engines.base import Facts, Finished, Pending, Receipt
from rlgen.engines.server import ServerEngine
from rlgen.processes import Processes
from rlgen.types import Completion, Request, Sampling


class SharedEngine:
    """The main process talks to the servers; every process asks the same, and is told what they answered.

    Args:
        open_engine: called in the main process alone.

    Raises:
        RlgenError: as `open_engine` raises, in every process.
    """

    def __init__(self, processes: Processes, open_engine: Callable[[], ServerEngine]) -> None:
        self._processes = processes
        self._engine: ServerEngine | None = None

        def start() -> tuple[Facts, int]:
            self._engine = open_engine()
            return self._engine.facts(), self._engine.weight_version

        self._facts, self._version = processes.patiently(start)

    @property
    def weight_version(self) -> int:
        return self._version

    def facts(self) -> Facts:
        return self._facts

    def generate(self, requests: Sequence[Request], sampling: Sampling, finished: Finished | None = None) -> list[Completion]:
        return self._processes.patiently(lambda: self._engine.generate(requests, sampling, finished) if self._engine else [])

    def submit(self, requests: Sequence[Request], sampling: Sampling, finished: Finished | None = None) -> Pending:
        future = self._engine.submit(requests, sampling, finished) if self._engine else None
        return SharedAnswers(self._processes, future)

    def prefill_logp(self, rows: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[tuple[float, ...]]:
        return self._processes.patiently(lambda: self._engine.prefill_logp(rows) if self._engine else [])

    def sync(self, weights: Iterable[tuple[str, Tensor]], version: int, hashed: bool = False) -> Receipt:
        def send() -> Receipt | None:
            try:
                return self._engine.sync(weights, version, hashed) if self._engine else None
            finally:
                # Sharded tensors are put together by all processes at once: none may stop before the last one.
                for _ in weights:
                    pass

        if self._engine is None:
            for _ in weights:
                pass
        receipt = self._processes.patiently(send)
        assert receipt is not None  # the main process has an engine
        self._version = version
        return receipt

    def sleep(self) -> None:
        pass

    def close(self) -> None:
        if self._engine:
            self._engine.close()


class SharedAnswers:
    """What the main process waits for, in every process."""

    def __init__(self, processes: Processes, future: "Future[list[Completion]] | None") -> None:
        self._processes, self._future = processes, future

    def result(self) -> list[Completion]:
        return self._processes.patiently(lambda: self._future.result() if self._future else [])

    def exception(self) -> BaseException | None:
        """Waits, in the main process alone."""
        return self._future.exception() if self._future else None
