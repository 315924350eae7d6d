"""Describes calls that gave no answer: the cause, in messages that hold no secret."""

import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlgen.errors import redacted

Cause = Literal["error", "arguments", "timeout", "died", "memory"]
LONGEST_MESSAGE, LONGEST_TRACEBACK = 2000, 8000  # characters
WORKER = str(Path(__file__).with_name("worker.py"))  # the file that calls functions: tracebacks leave it out


def user_line(error: BaseException, file: str | None) -> str:
    """Returns "(rewards.py:12)": the innermost line of the user's own file in the traceback, else the innermost line of all."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"({error.filename}:{error.lineno})"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    own = [f for f in frames if f.filename == file] or frames
    return f"({own[-1].filename}:{own[-1].lineno})" if own else ""


def described(error: BaseException) -> str:
    """Returns the type and text of an exception that user code raised: redacted, shortened, printable."""
    try:
        text = str(error)
    except Exception:  # its own __str__ fails
        text = "(no text)"
    return redact_and_shorten(f"{type(error).__name__}: {text}" if text else type(error).__name__, LONGEST_MESSAGE)


def redact_and_shorten(text: str, longest: int) -> str:
    """Removes secrets and unencodable characters from a text, and its middle beyond `longest` characters."""
    text = redacted(text).encode("utf-8", "replace").decode()
    return text if len(text) <= longest else f"{text[: longest // 2]} … {text[-longest // 2 :]}"


def short_repr(value: object) -> str:
    """Returns the repr of a value in about 80 characters; the type's name if its repr fails."""
    try:
        return redact_and_shorten(repr(value), 80)
    except Exception:
        return f"a {type(value).__name__}"


@dataclass(frozen=True, slots=True)
class Failed:
    """The reason why a call gave no answer."""

    cause: Cause
    message: str
    traceback: str = ""


def failure_of(error: BaseException, file: str | None) -> Failed:
    cause: Cause = "memory" if isinstance(error, MemoryError) else "error"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename != WORKER]
    text = "".join(["Traceback (most recent call last):\n", *traceback.format_list(own), described(error)])
    return Failed(cause, f"{described(error)} {user_line(error, file)}".rstrip(), redact_and_shorten(text, LONGEST_TRACEBACK))
