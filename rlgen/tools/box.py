"""Runs the calls of a model in worker processes, several at the same time. Whatever a tool does, the answer is a text."""

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Literal

from rlgen.errors import RlgenError
from rlgen.recipe.models import EnvironmentRecipe, ScoringRecipe, ToolRecipe
from rlgen.tools.load import ToolSource
from rlgen.worker_pool.failures import Failed, redact_and_shorten
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


Done = Callable[[Sequence[ToolAnswer] | RlgenError], None]
Answered = Callable[[dict[str, Any] | Failed | RlgenError], None]


class Calls:
    """Calls in worker processes. A thread hands over each answer; after an error that ends the run, each call gets that error."""

    def __init__(self, pools: Sequence[Pool], name: str) -> None:
        self.pools, self._stream = pools, CallStream(pools)
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
        answers = [ToolAnswer(no_such_tool(call.name, names), "unknown") for call in calls]
        known = [place for place, call in enumerate(calls) if call.name in names]
        missing, lock = set(known), threading.Lock()

        def answered(place: int, value: dict[str, Any] | Failed | RlgenError) -> None:
            with lock:
                if not missing:  # an error has ended the turn already
                    return
                if isinstance(value, RlgenError):
                    missing.clear()
                else:
                    answers[place] = tool_answer(value)
                    missing.remove(place)
                if missing:
                    return
            done(value if isinstance(value, RlgenError) else answers)

        if not known:
            done(answers)
        for place in known:
            which = names.index(calls[place].name)
            longest = CHARACTERS * self.entries[which].max_output_tokens
            self.calls.add(0, which, {"arguments": dict(calls[place].arguments)}, longest, partial(answered, place))

    def close(self) -> None:
        self.calls.close()


def tool_answer(value: dict[str, Any] | Failed) -> ToolAnswer:
    """Returns the answer that the model reads, from the outcome of a call."""
    if not isinstance(value, Failed):
        return ToolAnswer(value["text"], left_out=value["characters"] - len(value["text"]))
    if value.cause in ("timeout", "died"):
        log.warning("tool: %s", value.message)
    text = {
        "arguments": f"the arguments do not fit: {value.message}",
        "timeout": "no answer in time",
        "died": "the tool's process ended",
    }.get(value.cause, value.message)
    return ToolAnswer(f"Error: {text}", value.cause)


def open_tools(entries: Sequence[ToolRecipe], scoring: ScoringRecipe, output: Path | None = None) -> ToolBox:
    """Starts a worker that imports the tools. Raises ToolError if a function is not there, its import fails or does not end, or
    it cannot be described to a model.
    """
    pool = Pool([ToolSource(one.use, one.timeout, one.label, one.args) for one in entries], limits_of(scoring), output)
    try:
        facts = pool.facts()
        schemas = tuple(fact.schema for fact in facts if fact.schema is not None)
        digest = answers_digest(entries, schemas, [fact.sha256 for fact in facts])
        return ToolBox(tuple(entries), schemas, digest, Calls([pool], "tool answers"))
    except BaseException:
        pool.close()
        raise


def schemas_of(entries: Sequence[ToolRecipe], scoring: ScoringRecipe) -> tuple[dict[str, Any], ...]:
    """Returns the schemas of tools, without keeping a process."""
    if not entries:
        return ()
    with closing(open_tools(entries, scoring)) as box:
        return box.schemas


def answers_digest(entries: Sequence[ToolRecipe | EnvironmentRecipe], *decides: Any) -> str:
    """Returns a digest of entries of a recipe, whose files may be moved to another folder, and of what else decides answers."""
    written = [{**entry.model_dump(mode="json"), "use": Path(entry.use).name} for entry in entries]
    return hashlib.sha256(json.dumps([written, *decides], sort_keys=True).encode()).hexdigest()[:16]


def no_such_tool(name: str, names: Sequence[str]) -> str:
    close = get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"
    return f"Error: there is no tool {redact_and_shorten(name, 80)}; {hint}"
