"""Leads conversations with an environment, many at once, in worker processes. All calls of one go to the process that holds its
state, and none waits for another conversation.
"""

import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from rlgen.errors import RlgenError
from rlgen.recipe.models import EnvironmentRecipe, ScoringRecipe
from rlgen.tools.box import CHARACTERS
from rlgen.tools.environment import EnvironmentSource
from rlgen.worker_pool.failures import Failed
from rlgen.worker_pool.pool import CLOSED, Pool, limits_of
from rlgen.worker_pool.stream import CallOutcome, CallStream
from rlgen.worker_pool.worker import WorkerCall

Done = Callable[[dict[str, Any] | Failed | RlgenError], None]


@dataclass(slots=True, eq=False)
class EnvPool:
    """The processes of an environment. A thread takes their answers."""

    settings: EnvironmentRecipe
    digest: str  # of everything that decides what it answers: its code, arguments, limits
    pools: Sequence[Pool]  # of one process each; conversation i is in pool i modulo their number
    _open: dict[int, Done] = field(default_factory=dict)  # by id of a call
    _calls: "count[int]" = field(default_factory=count)
    _talks: "count[int]" = field(default_factory=count)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _error: RlgenError | None = None
    _streams: list[CallStream] = field(init=False)
    _thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        """Starts the thread."""
        came: SimpleQueue[CallOutcome | Exception] = SimpleQueue()
        self._streams = [pool.open(came) for pool in self.pools]
        self._thread = threading.Thread(target=self._take, name="environment answers", daemon=True)
        self._thread.start()

    def first(self, begin: dict[str, Any], done: Done) -> None:
        """Asks what `reset` returns for a row, and returns. `done` gets {"text": ...}, or why there is none, from another thread.

        Args:
            begin: what `reset` may take, by name.
        """
        self._call(next(self._talks), {"begin": begin}, done)

    def demonstrate(self, begin: dict[str, Any], done: Done) -> None:
        """Asks for a good first message and the answer to it. `done` gets {"said": ..., "text": ...}, or why there is none, such
        as that the environment has no method `demonstrate`.
        """
        self._call(next(self._talks), {"begin": begin, "demonstrate": True}, done)

    def number(self) -> int:
        """Returns the number of a conversation that is about to begin."""
        return next(self._talks)

    def begin(self, talk: int, begin: dict[str, Any], expected: str | None, message: str, done: Done) -> None:
        """Begins a conversation with the model's first message. `done` gets the answer, as in `step`.

        Args:
            talk: as `number` returned it.
            expected: the text that `first` returned.
        """
        self._call(talk, {"begin": begin, "expected": expected, "message": message}, done)

    def step(self, talk: int, message: str, done: Done) -> None:
        """Passes a message on, and returns. `done` gets {"text": ..., "characters": ..., "reward": ..., "done": ...} from another
        thread; or why there is no answer, after which the conversation has ended; or an error that ends the run: the code has
        changed, or no process starts.
        """
        self._call(talk, {"message": message}, done)

    def end(self, talk: int) -> None:
        """Abandons a conversation that is not done."""
        self._call(talk, {}, lambda answer: None)

    def close(self) -> None:
        """Ends the processes. Calls that run are not answered any more."""
        for pool in self.pools:
            pool.close()
        self._thread.join()

    def _call(self, talk: int, given: dict[str, Any], done: Done) -> None:
        with self._lock:
            error = self._error
            call = WorkerCall(next(self._calls), 0, {"talk": talk, **given}, CHARACTERS * self.settings.max_output_tokens)
            if error is None:
                self._open[call.id] = done
        if error is not None:
            done(error)
        else:
            self._streams[talk % len(self._streams)].add([call])

    def _take(self) -> None:
        """Runs the thread: hands over each answer, until the pools are closed or fail."""
        while True:
            try:
                outcome = self._streams[0].take()
            except RuntimeError as closed:
                if str(closed) != CLOSED:
                    raise
                return
            except RlgenError as error:
                with self._lock:
                    self._error = error
                    waiting = list(self._open.values())
                    self._open.clear()
                for done in waiting:
                    done(error)
                return
            with self._lock:
                done = self._open.pop(outcome.id)
            done(outcome.value)


def open_arena(settings: EnvironmentRecipe, scoring: ScoringRecipe, output: Path | None = None) -> EnvPool:
    """Starts the processes of an environment, which import it.

    Args:
        scoring: settings of the processes, which are those of the rewards.
        output: file for what it prints; None: standard error.

    Raises:
        ToolError: the class is not there or lacks a method, or its import fails or does not end.
    """
    limits = limits_of(scoring)
    source = EnvironmentSource(settings.use, settings.timeout, settings.args)
    pools = [Pool([source], replace(limits, workers=1), output) for _ in range(limits.workers)]
    try:
        for pool in pools:
            pool.start()  # all of them import at the same time
        found = [pool.facts()[0] for pool in pools]
        decides = json.dumps([settings.model_dump(mode="json"), found[0].sha256], sort_keys=True)
        return EnvPool(settings, hashlib.sha256(decides.encode()).hexdigest()[:16], pools)
    except BaseException:
        for pool in pools:
            pool.close()
        raise
