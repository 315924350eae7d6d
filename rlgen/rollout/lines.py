"""JSON lines with checksums, for the few small records that a person may want to read."""

import json
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rlgen.files import append_text, read_bytes, written

Line = dict[str, Any]


def sealed(line: Line) -> str:
    """Returns one line of JSON whose last key, `crc32`, is the CRC-32 of the JSON without that key."""
    text = json.dumps(line)
    return f'{text[:-1]}, "crc32": {zlib.crc32(text.encode())}}}\n'


def sound_lines(path: Path, say: Callable[[str], None]) -> Iterator[Line]:
    """Reads the lines whose checksums match; ignores an incomplete last line, and reports the number of damaged ones by `say`."""
    *whole, last = read_bytes(path).split(b"\n")
    lines = [line for text in whole if (line := parsed(text)) is not None]
    if damaged := len(whole) - len(lines):
        say(f"journal: {damaged} lines of {path.name} are ignored: damaged, or of another version of rlgen")
    yield from lines
    if (line := parsed(last)) is not None:
        yield line


def parsed(text: bytes) -> Line | None:
    """Parses one line; returns None if `sealed` did not produce exactly these bytes."""
    try:
        line = json.loads(text)
        made = sealed({key: value for key, value in line.items() if key != "crc32"})
    except (ValueError, AttributeError, RecursionError):
        return None
    return line if made.encode() == text + b"\n" else None


def mend(path: Path) -> None:
    """Completes a last line without a line end, or truncates it if incomplete: its writer may have been killed.

    Raises CheckpointError.
    """
    with written(path):
        content = read_bytes(path)
        last = content[content.rfind(b"\n") + 1 :]
        if last and parsed(last) is None:
            os.truncate(path, len(content) - len(last))
        elif last:
            append_text(path, "\n", False)
