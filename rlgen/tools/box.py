"""Runs the calls of a model in worker processes, several at the same time. Whatever a tool does, the answer is a text."""

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Literal

from rlgen.errors import RlgenError
from rlgen.recipe.models import ScoringRecipe, ToolRecipe
from rlgen.tools.load import ToolSource
from rlgen.worker_pool.failures import Failed
from rlgen.worker_pool.pool import CLOSED, Pool, limits_of
from rlgen.worker_pool.stream import CallStream
from rlgen.worker_pool.worker import WorkerCall

# Why a call has no answer of the tool; "" if it has one.
Why = Literal["", "unknown", "arguments", "error", "memory", "timeout", "died"]
CHARACTERS = 16  # most characters of a token: a longer answer than this for each token is cut in the worker already
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model wrote."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """The answer to a call, as the model reads it."""

    text: str
    why: Why = ""
    left_out: int = 0  # characters that were cut off in the worker

    @property
    def failed(self) -> bool:
        return bool(self.why)


Done = Callable[[Sequence[ToolAnswer] | RlgenError], None]
Answered = Callable[[dict[str, Any] | Failed | RlgenError], None]


class Calls:
    """Calls in worker processes. A thread hands over each answer; after an error that ends the run, each call gets that error."""

    def __init__(self, pools: Sequence[Pool], name: str) -> None:
        self.pools, self._stream = pools, CallStream(pools)
        for pool in pools:
            pool.open(self._stream)
        self._open: dict[int, Answered] = {}  # by id of a call
        self._ids, self._lock = count(), threading.Lock()
        self._error: RlgenError | None = None
        self._thread = threading.Thread(target=self._take, name=name, daemon=True)
        self._thread.start()

    def add(self, which: int, function: int, given: dict[str, Any], longest: int, done: Answered) -> None:
        """Starts a call, and returns. `done` gets its answer from another thread.

        Args:
            which: number of the call; those of the same number, modulo the pools, go to the same pool.
            longest: characters of an answer, which is cut after them.
        """
        with self._lock:
            error, call = self._error, WorkerCall(next(self._ids), function, given, longest)
            if error is None:
                self._open[call.id] = done
        if error is not None:
            done(error)
        else:
            self.pools[which % len(self.pools)].add(self._stream, [call])

    def close(self) -> None:
        """Ends the processes. Calls that run are not answered any more."""
        for pool in self.pools:
            pool.close()
        self._thread.join()

    def _take(self) -> None:
        """Runs the thread, until the pools are closed or fail."""
        while True:
            try:
                outcome = self._stream.take()
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


@dataclass(slots=True, eq=False)
class Batch:
    """The calls of one turn, which are answered together."""

    done: Done
    answers: list[ToolAnswer]  # of a call that runs still: a place for it
    missing: int
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answered(self, place: int, value: dict[str, Any] | Failed | RlgenError) -> None:
        """Takes the answer of one call; hands over all with the last, or the first error instead."""
        with self.lock:
            if isinstance(value, RlgenError):
                ends, self.missing = self.missing > 0, 0
            else:
                self.answers[place] = told(value)
                self.missing -= 1
                ends = not self.missing
        if ends:
            self.done(value if isinstance(value, RlgenError) else self.answers)


@dataclass(slots=True, eq=False)
class ToolBox:
    """All tools of a recipe, and the processes that run them."""

    entries: tuple[ToolRecipe, ...]
    schemas: tuple[dict[str, Any], ...]  # in the recipe's order, as chat templates take them
    digest: str  # of everything that decides what they answer: their code, schemas, limits
    calls: Calls

    def call(self, calls: Sequence[ToolCall], done: Done) -> None:
        """Starts calls, which run at the same time, and returns. `done` gets their answers, in their order, once all are there,
        from another thread; or an error, after which no call is possible: a tool's code has changed, or no process starts.
        """
        names = [entry.label for entry in self.entries]
        known = [place for place, call in enumerate(calls) if call.name in names]
        batch = Batch(done, [ToolAnswer(no_such_tool(call.name, names), "unknown") for call in calls], len(known))
        if not known:
            done(batch.answers)
        for place in known:
            which = names.index(calls[place].name)
            longest = CHARACTERS * self.entries[which].max_output_tokens
            self.calls.add(0, which, {"arguments": dict(calls[place].arguments)}, longest, partial(batch.answered, place))

    def close(self) -> None:
        self.calls.close()


def told(value: dict[str, Any] | Failed) -> ToolAnswer:
    """Returns the answer that the model reads, from the outcome of a call."""
    if not isinstance(value, Failed):
        return ToolAnswer(value["text"], left_out=value["characters"] - len(value["text"]))
    if value.cause == "arguments":
        return ToolAnswer(f"Error: the arguments do not fit: {value.message}", "arguments")
    if value.cause in ("timeout", "died"):
        log.warning("tool: %s", value.message)
        text = "no answer in time" if value.cause == "timeout" else "the tool's process ended"
        return ToolAnswer(f"Error: {text}", value.cause)
    return ToolAnswer(f"Error: {value.message}", value.cause)


def open_tools(entries: Sequence[ToolRecipe], scoring: ScoringRecipe, output: Path | None = None) -> ToolBox:
    """Starts a worker that imports the tools.

    Raises:
        ToolError: a function is not there, its import fails or does not end, or it cannot be described to a model.
    """
    pool = pool_of(entries, scoring, output)
    try:
        facts = pool.facts()
        schemas = tuple(fact.schema for fact in facts if fact.schema is not None)
        settings = [entry.model_dump(mode="json") for entry in entries]
        decides = json.dumps([settings, schemas, [fact.sha256 for fact in facts]], sort_keys=True)
        digest = hashlib.sha256(decides.encode()).hexdigest()[:16]
        return ToolBox(tuple(entries), schemas, digest, Calls([pool], "tool answers"))
    except BaseException:
        pool.close()
        raise


def schemas_of(entries: Sequence[ToolRecipe], scoring: ScoringRecipe) -> tuple[dict[str, Any], ...]:
    """Returns the schemas of tools, without keeping a process."""
    if not entries:
        return ()
    pool = pool_of(entries, scoring, None)
    try:
        return tuple(fact.schema for fact in pool.facts() if fact.schema is not None)
    finally:
        pool.close()


def pool_of(entries: Sequence[ToolRecipe], scoring: ScoringRecipe, output: Path | None) -> Pool:
    return Pool([ToolSource(one.use, one.label, one.timeout, one.args) for one in entries], limits_of(scoring), output)


def no_such_tool(name: str, names: Sequence[str]) -> str:
    close = get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"
    return f"Error: there is no tool {name[:80]}; {hint}"
