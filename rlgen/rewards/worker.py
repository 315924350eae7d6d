"""The process that runs reward functions. It is killed when a call takes too long, and it dies with the trainer.

The user's code is imported here and nowhere else: it may hang, hold the interpreter's lock, allocate, print, exit or crash,
and the trainer loses one call. What comes in is pickled, by the trainer; what goes out is one JSON object a line, so that
nothing that the user's code made is ever unpickled. This module imports little, so that a new worker is there at once.

    {"facts": [...]}                              after the imports, or {"refused": "why"}
    {"done": 3, "values": [1.0], "seconds": 0.1}  or with "cause", "message" and "traceback" instead of values
    {"began": 3}                                  of an async call: its time counts from here

Of calls that run one after the other the present one stands in shared memory, with its beginning. So results can be sent
together while calls are quick, and yet the trainer knows which call has hung or crashed, and for how long.
"""

import ctypes
import faulthandler
import hashlib
import importlib
import importlib.util
import inspect
import io
import json
import math
import os
import pickle
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from mmap import mmap
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from rlgen.errors import RewardError, redacted
from rlgen.rewards.builtin import BUILTIN

Cause = Literal["error", "timeout", "died", "memory"]
CONCURRENT = 64  # calls of async rewards under way at once
LONGEST_MESSAGE, LONGEST_TRACEBACK, LONGEST_LINE = 2000, 8000, 1 << 16
PR_SET_PDEATHSIG = 1
NO_CALL = -1
FILE_MODULE = "rlgen_reward_"  # and a hash: the name of a file of the user's as a module
TOGETHER = 0.005  # seconds for which results are kept back, to be sent together


class Present(ctypes.Structure):
    """The call that a worker is at, in memory that it shares with the trainer.

    Each field is one store of eight bytes (`struct` writes zeros first), and `since` is written first and read last: whoever is
    interrupted in between has an old call begin late, and never a new one before its time.
    """

    _fields_ = (("since", ctypes.c_double), ("call", ctypes.c_int64))  # time.monotonic: one clock for all of a machine
    since: float
    call: int

    def begin(self, call: int) -> None:
        self.since = time.monotonic()
        self.call = call

    def read(self) -> tuple[int, float]:
        """The call, and when it began."""
        while True:
            call, since = self.call, self.since
            if call == self.call:
                return call, since


@dataclass(frozen=True, slots=True)
class Source:
    """What a worker loads: a reward's `use`, and the seconds that a call of it may take."""

    use: str
    timeout: float


@dataclass(frozen=True, slots=True)
class Facts:
    """What the trainer knows of a function that it never imports."""

    parameters: tuple[tuple[str, str, bool], ...]  # name, kind as `inspect` says it, whether it must be filled
    is_async: bool
    file: str | None  # source of the function: errors name its line there
    sha256: str | None  # of the user's code


@dataclass(frozen=True, slots=True)
class Chunk:
    """Calls that one worker is asked for: one after the other, or async ones side by side."""

    calls: "tuple[Call, ...]"
    side_by_side: bool


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a reward."""

    id: int
    reward: int  # index
    arguments: dict[str, Any]
    of_group: int | None  # how many values it returns, in a list; None: a single one


@dataclass(frozen=True, slots=True)
class Loaded:
    """A function, ready to be called."""

    function: Callable[..., Any]
    facts: Facts
    timeout: float


def load(source: Source) -> Loaded:
    """Imports the function behind `use`.

    Raises:
        RewardError: there is no such module or function, its import fails, or it cannot be called by name.
    """
    function, sha256 = find(source.use)
    try:
        parameters = inspect.signature(function).parameters.values()
        file = inspect.getsourcefile(inspect.unwrap(function))
    except (TypeError, ValueError) as error:
        raise RewardError(f"rewards: {source.use} is not a function that can be called by name: {error}") from error
    facts = Facts(
        parameters=tuple((p.name, p.kind.name, p.default is p.empty) for p in parameters),
        is_async=inspect.iscoroutinefunction(function),
        file=file,
        sha256=sha256,
    )
    return Loaded(function, facts, source.timeout)


def find(use: str) -> tuple[Callable[..., Any], str | None]:
    """The function behind `use`, and the hash of its code if it is the user's.

    Raises:
        RewardError: there is no such module or function.
    """
    if use in BUILTIN:
        return BUILTIN[use], None
    source, _, name = use.rpartition(":")
    written: str | None = None
    if source.endswith(".py"):
        path = Path(source)
        if not path.is_file():
            raise RewardError(f"rewards: {path} does not exist; a path in a recipe starts at the recipe's folder")
        written, name_of_module = source, FILE_MODULE + file_hash(path)[:16]
        module = run_module(source, lambda: load_file(path, name_of_module))
    else:
        module = run_module(source, lambda: importlib.import_module(source))
        written = inspect.getsourcefile(module) if module.__file__ else None
    function = vars(module).get(name)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        close = get_close_matches(name, functions, n=1)
        hint = f"did you mean `{close[0]}`?" if close else f"there are {', '.join(functions) or 'none'}"
        raise RewardError(f"rewards: {source} has no function `{name}`; {hint}")
    return function, None if written is None else code_hash(Path(written))


def code_hash(file: Path) -> str:
    """SHA-256 of a reward's file; where modules of its folder have been imported by now, of its hash and theirs.

    What is installed there is left out. What a function imports only when it is called is not seen.
    """
    import sysconfig

    folder = file.resolve().parent
    installed = [Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "purelib", "platlib")]
    imported = {
        Path(path).resolve()
        for name, module in list(sys.modules.items())
        if not f"{name}.".startswith(("rlgen.", FILE_MODULE))
        and isinstance(module, ModuleType)
        and isinstance(path := vars(module).get("__file__"), str)
    }
    beside = {path for path in imported if path.is_relative_to(folder) and not any(map(path.is_relative_to, installed))}
    hashes = [file_hash(path) for path in (file, *sorted(beside - {file.resolve()})) if path.is_file()]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def file_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def load_file(path: Path, name: str) -> ModuleType:
    if name in sys.modules:  # two rewards of one file
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # a file whose name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # as for any module: dataclasses and pickles look it up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def run_module(source: str, load_it: Callable[[], ModuleType]) -> ModuleType:
    """Imports the user's code; whatever it raises is located there."""
    try:
        return load_it()
    except BaseException as error:
        raise RewardError(f"rewards: {source} cannot be imported: {told(error)} {user_line(error, source)}") from error


def user_line(error: BaseException, file: str | None) -> str:
    """ "(rewards.py:12)": the innermost line of the user's own file, else the innermost of all."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"({error.filename}:{error.lineno})"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    own = [f for f in frames if f.filename == file] or frames
    return f"({own[-1].filename}:{own[-1].lineno})" if own else ""


def told(error: BaseException) -> str:
    """The one place where the text of an exception of the user's code becomes a message: without secrets, short, printable."""
    try:
        text = str(error)
    except Exception:  # its own __str__ fails
        text = "(no text)"
    return shortened(f"{type(error).__name__}: {text}" if text else type(error).__name__, LONGEST_MESSAGE)


def shortened(text: str, longest: int) -> str:
    text = redacted(text).encode("utf-8", "replace").decode()
    return text if len(text) <= longest else f"{text[: longest // 2]} … {text[-longest // 2 :]}"


@dataclass(frozen=True, slots=True)
class Failed:
    """A call that gave no reward, in words."""

    cause: Cause
    message: str
    traceback: str = ""


def failure_of(error: BaseException, file: str | None) -> Failed:
    """What the user's code raised, and where."""
    cause: Cause = "memory" if isinstance(error, MemoryError) else "error"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename != __file__]
    text = "".join(["Traceback (most recent call last):\n", *traceback.format_list(own), told(error)])
    return Failed(cause, f"{told(error)} {user_line(error, file)}".rstrip(), shortened(text, LONGEST_TRACEBACK))


def values_of(answer: Any, of_group: int | None) -> list[float | None] | Failed:
    """The values of one call: one, or `of_group` many."""
    if of_group is None:
        values: Any = [answer]
    elif not isinstance(answer, Sequence) or isinstance(answer, str) or len(answer) != of_group:
        return Failed("error", f"returned {shown(answer)}, not a list of {of_group} rewards")
    else:
        values = answer
    numbers = [None if value is None else as_number(value) for value in values]
    for value, number in zip(values, numbers, strict=True):
        if number is not None and not math.isfinite(number):
            return Failed("error", f"returned {shown(value)}; a reward is a finite number, or None: does not apply")
    return numbers


def as_number(value: Any) -> float:
    """NaN for what is no number."""
    try:
        return math.nan if isinstance(value, str) else float(value)
    except Exception:  # the user's own types raise what they like
        return math.nan


def shown(value: Any) -> str:
    try:
        return shortened(repr(value), 80)
    except Exception:
        return f"a {type(value).__name__}"


@dataclass(slots=True)
class Speaker:
    """The way to the trainer. A child that the user's code forked comes here too, and ends."""

    line: socket.socket
    present: Present
    pid: int
    unsent: list[str] = field(default_factory=list)
    sent: float = 0.0

    def say(self, **record: Any) -> None:
        """Sends a record with what was kept back."""
        self.unsent.append(json.dumps(record))
        self.flush()

    def flush(self) -> None:
        if os.getpid() != self.pid:
            os._exit(0)
        self.line.sendall("".join(f"{line}\n" for line in self.unsent).encode())
        self.unsent.clear()
        self.sent = time.monotonic()

    def answer(self, call: int, outcome: list[float | None] | Failed, start: float) -> None:
        record: dict[str, Any] = {"done": call, "seconds": time.perf_counter() - start}
        if isinstance(outcome, Failed):
            record |= {"cause": outcome.cause, "message": outcome.message, "traceback": outcome.traceback}
        else:
            record["values"] = outcome
        self.unsent.append(json.dumps(record))
        if time.monotonic() - self.sent > TOGETHER:
            self.flush()


def one_by_one(chunk: Chunk, loaded: Sequence[Loaded], speaker: Speaker) -> None:
    """Calls functions that are not async."""
    speaker.sent = time.monotonic()
    for call in chunk.calls:
        speaker.present.begin(call.id)
        one, start = loaded[call.reward], time.perf_counter()
        outcome: list[float | None] | Failed
        try:
            outcome = values_of(one.function(**call.arguments), call.of_group)
        except BaseException as error:  # the user's code raises whatever it likes; that is no reward of 0
            outcome = failure_of(error, one.facts.file)
        speaker.answer(call.id, outcome, start)
    speaker.present.begin(NO_CALL)
    speaker.flush()


async def side_by_side(chunk: Chunk, loaded: Sequence[Loaded], speaker: Speaker) -> None:
    """Calls async functions, at most CONCURRENT at once. Their deadline is kept here; a loop that is stuck is killed."""
    import asyncio

    limit = asyncio.Semaphore(CONCURRENT)

    async def run(call: Call) -> None:
        one = loaded[call.reward]
        async with limit:
            speaker.say(began=call.id)
            start = time.perf_counter()
            outcome: list[float | None] | Failed
            clock, where = asyncio.timeout(one.timeout), ""
            try:
                async with clock:
                    answer = await one.function(**call.arguments)
                outcome = values_of(answer, call.of_group)
            except BaseException as error:
                where = user_line(error.__cause__ or error, one.facts.file)
                outcome = failure_of(error, one.facts.file)
            if clock.expired():  # also where the function caught it and went on
                outcome = Failed("timeout", f"no answer within {one.timeout:g} s {where}".rstrip())
            speaker.answer(call.id, outcome, start)
            speaker.flush()

    await asyncio.gather(*map(run, chunk.calls))


def serve(line: socket.socket, present: Present) -> None:
    """Answers chunks until the trainer closes the line."""
    requests = line.makefile("rb")
    speaker = Speaker(line, present, os.getpid())
    sources: list[Source] = pickle.load(requests)
    try:
        loaded = [load(source) for source in sources]
    except RewardError as error:
        speaker.say(refused=str(error))
        return
    parts = ("parameters", "is_async", "file", "sha256")
    speaker.say(facts=[{part: getattr(one.facts, part) for part in parts} for one in loaded])
    runner: Any = None
    while True:
        try:
            chunk: Chunk = pickle.load(requests)
        except EOFError:
            break
        if chunk.side_by_side:
            if runner is None:
                import asyncio

                runner = asyncio.Runner()  # for all steps: clients of the user's live in its loop
            runner.run(side_by_side(chunk, loaded, speaker))
        else:
            one_by_one(chunk, loaded, speaker)
    if runner is not None:
        runner.close()


class Printed(io.TextIOBase):
    """What the user's code prints, line by line, without the secrets that it has put into this process's environment either."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = ""

    def write(self, text: str) -> int:
        whole, _, self._rest = (self._rest + text).rpartition("\n")
        if whole or text.endswith("\n"):
            self._put(f"{whole}\n")
        if len(self._rest) > LONGEST_LINE:
            self.flush()
        return len(text)

    def flush(self) -> None:
        rest, self._rest = self._rest, ""
        self._put(rest)

    def fileno(self) -> int:
        return self._descriptor

    def _put(self, text: str) -> None:
        unsaid = "\n".join(map(redacted, text.split("\n"))).encode("utf-8", "backslashreplace")
        with suppress(OSError):  # a full disk costs what is printed, not the reward
            while unsaid:
                unsaid = unsaid[os.write(self._descriptor, unsaid) :]


def main(line: int, present: int, stack: int, parent: int, memory: int) -> None:
    """The process. `line`, `present` and `stack` are open files: the socket to the trainer, the memory that both share, and where
    the process writes its position when it hangs or crashes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Not the address space: libraries reserve of it what they never use.
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    for descriptor in (line, present, stack):
        os.set_inheritable(descriptor, False)
    # Both write without the interpreter's lock, which the call may hold.
    faulthandler.enable(stack, all_threads=False)
    faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
    sys.stdout, sys.stderr = Printed(1), Printed(2)
    serve(socket.socket(fileno=line), Present.from_buffer(mmap(present, ctypes.sizeof(Present))))
