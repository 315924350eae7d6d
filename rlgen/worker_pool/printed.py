"""Copies what functions of the user print to the log, and removes secrets, including those in the output of programs that they
start.

It runs in a process of its own: in the trainer it would slow down training, and a worker may hang or be killed. It ends when the
last process that could still print has ended.
"""

import os
from contextlib import suppress
from select import select

from rlgen.redact import redacted

MOMENT = 0.005  # seconds
BLOCK = 1 << 16  # bytes read at a time, and most bytes of a line that are held back
HELD = 1 << 13  # bytes of a longer line that are held back: a secret may have begun in them


def copy_output(longest: int) -> None:
    """Copies standard input to standard output, a log of at most `longest` bytes; 0: it is no file. A longer log is emptied."""
    rest = b""
    while data := read_block():
        whole, end, rest = (rest + data).rpartition(b"\n")
        if len(rest) > BLOCK:
            at = between_secrets(rest)
            whole, end, rest = whole + end, rest[:at], rest[at:]
        write_redacted(whole + end, longest)
    write_redacted(rest, longest)


def read_block() -> bytes:
    """Returns what is printed now and in the next moment, about a block at most: single lines would each cost a removal."""
    data = os.read(0, BLOCK)
    while data and len(data) < BLOCK and select([0], [], [], MOMENT)[0]:
        if not (more := os.read(0, BLOCK)):
            break
        data += more
    return data


def write_redacted(text: bytes, longest: int) -> None:
    """Writes a text without its secrets. Empties the log first if it is longer than `longest` bytes."""
    left = unsaid(text)
    with suppress(OSError):  # a full disk loses the output: the process that prints must not wait
        if longest and left and os.fstat(1).st_size > longest:
            os.ftruncate(1, 0)  # the file is open in append mode, so that writes go to the new end
            os.write(1, b"(more than %d MiB were printed; what came before is left out)\n" % (longest >> 20))
        while left:
            left = left[os.write(1, left) :]


def between_secrets(line: bytes) -> int:
    """Returns where to cut a line that goes on: `HELD` bytes before its end, or earlier if that cut divides a secret."""
    whole = unsaid(line)
    cuts = range(len(line) - HELD, 0, -97)
    return next((at for at in cuts if unsaid(line[:at]) + unsaid(line[at:]) == whole), len(line) - HELD)


def unsaid(text: bytes) -> bytes:
    return redacted(text.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
