"""Runs the calls of a model in worker processes, several at the same time. Whatever a tool does, the answer is a text."""

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import count
from pathlib import Path
from typing import Any, Literal

from rlgen.errors import RlgenError
from rlgen.recipe.models import ScoringRecipe, ToolRecipe
from rlgen.tools.load import ToolSource
from rlgen.worker_pool.failures import Failed
from rlgen.worker_pool.pool import CLOSED, Pool, limits_of
from rlgen.worker_pool.stream import CallOutcome, CallStream
from rlgen.worker_pool.worker import WorkerCall

# Why a call has no answer of the tool; "" if it has one.
Why = Literal["", "unknown", "arguments", "error", "memory", "timeout", "died"]
CHARACTERS = 16  # most characters of a token: a longer answer than this for each token is cut in the worker already
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model wrote. ToolCall(name="calculator", arguments={"expression": "3*4"})"""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """The answer to a call, as the model reads it. ToolAnswer(text="12", why="", left_out=0)"""

    text: str
    why: Why = ""
    left_out: int = 0  # characters that were cut off in the worker

    @property
    def failed(self) -> bool:
        """Returns whether the tool gave no answer."""
        return bool(self.why)


Done = Callable[[Sequence[ToolAnswer] | RlgenError], None]


@dataclass(slots=True, eq=False)
class Batch:
    """The calls of one turn, which are answered together."""

    done: Done
    answers: list[ToolAnswer | None]
    missing: int


@dataclass(slots=True, eq=False)
class ToolBox:
    """All tools of a recipe, and the processes that run them. A thread takes their answers."""

    entries: tuple[ToolRecipe, ...]
    schemas: tuple[dict[str, Any], ...]  # in the recipe's order, as chat templates take them
    digest: str  # of everything that decides what they answer: their code, schemas, limits
    pool: Pool
    _open: dict[int, tuple[Batch, int]] = field(default_factory=dict)  # by id of a call: its batch, and its place in it
    _ids: "count[int]" = field(default_factory=count)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _error: RlgenError | None = None
    _stream: CallStream = field(init=False)
    _thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        """Starts the thread."""
        self._stream = self.pool.open()
        self._thread = threading.Thread(target=self._take, name="tool answers", daemon=True)
        self._thread.start()

    def call(self, calls: Sequence[ToolCall], done: Done) -> None:
        """Starts calls, which run at the same time, and returns. `done` gets their answers, in their order, once all are there,
        from another thread; or an error, after which no call is possible: a tool's code has changed, or no process starts.
        """
        batch = Batch(done, [None] * len(calls), len(calls))
        names = [entry.label for entry in self.entries]
        sent: list[WorkerCall] = []
        with self._lock:
            error = self._error
            for place, call in enumerate(calls):
                if call.name not in names:
                    batch.answers[place] = ToolAnswer(no_such_tool(call.name, names), "unknown")
                    batch.missing -= 1
                    continue
                which = names.index(call.name)
                longest = CHARACTERS * self.entries[which].max_output_tokens
                sent.append(WorkerCall(next(self._ids), which, {"arguments": dict(call.arguments)}, longest))
                self._open[sent[-1].id] = batch, place
        if error is not None:
            done(error)
        elif sent:
            self._stream.add(sent)
        else:
            self._finish(batch)

    def close(self) -> None:
        """Ends the processes. Calls that run are not answered any more."""
        self.pool.close()
        self._thread.join()

    def _take(self) -> None:
        """Runs the thread: hands over each answer, until the pool is closed or fails."""
        while True:
            try:
                outcome: CallOutcome = self._stream.take()
            except RuntimeError as closed:
                if str(closed) != CLOSED:
                    raise
                return
            except RlgenError as error:
                with self._lock:
                    self._error = error
                    batches = {id(batch): batch for batch, _ in self._open.values()}
                    self._open.clear()
                for batch in batches.values():
                    batch.done(error)
                return
            with self._lock:
                batch, place = self._open.pop(outcome.id)
                batch.answers[place] = self._told(outcome.value)
                batch.missing -= 1
            if not batch.missing:
                self._finish(batch)

    def _finish(self, batch: Batch) -> None:
        """Hands over the answers of a batch that are all there."""
        batch.done([answer for answer in batch.answers if answer is not None])

    def _told(self, value: dict[str, Any] | Failed) -> ToolAnswer:
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

    Args:
        scoring: settings of the processes, which are those of the rewards.
        output: file for what the tools print; None: standard error.

    Raises:
        ToolError: a function is not there, its import fails or does not end, or it cannot be described to a model.
    """
    pool = pool_of(entries, scoring, output)
    try:
        facts = pool.facts()
        schemas = tuple(fact.schema for fact in facts if fact.schema is not None)
        settings = [entry.model_dump(mode="json") for entry in entries]
        decides = json.dumps([settings, schemas, [fact.sha256 for fact in facts]], sort_keys=True)
        return ToolBox(tuple(entries), schemas, hashlib.sha256(decides.encode()).hexdigest()[:16], pool)
    except BaseException:
        pool.close()
        raise


def schemas_of(entries: Sequence[ToolRecipe], scoring: ScoringRecipe) -> tuple[dict[str, Any], ...]:
    """Returns the schemas of tools, without keeping a process. Raises ToolError as `open_tools`."""
    if not entries:
        return ()
    pool = pool_of(entries, scoring, None)
    try:
        return tuple(fact.schema for fact in pool.facts() if fact.schema is not None)
    finally:
        pool.close()


def pool_of(entries: Sequence[ToolRecipe], scoring: ScoringRecipe, output: Path | None) -> Pool:
    """Returns the processes of tools, none of which is started yet."""
    return Pool([ToolSource(one.use, one.label, one.timeout, one.args) for one in entries], limits_of(scoring), output)


def no_such_tool(name: str, names: Sequence[str]) -> str:
    """Returns the answer to a call of a tool that does not exist."""
    close = get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"
    return f"Error: there is no tool {name[:80]}; {hint}"
