"""Copies what functions of the user print to the log, and removes secrets, including those in the output of programs that they
start.

It runs in a process of its own: in the trainer it would slow down training, and a worker may hang or be killed. It ends when the
last process that could still print has ended.
"""

import os
from contextlib import suppress

from rlgen.redact import redacted

BLOCK = 1 << 16  # bytes read at a time, and most bytes of a line that are held back


def main(longest: int) -> None:
    """Copies standard input to standard output until the input ends.

    Args:
        longest: most bytes of the log; a longer one is emptied. 0: standard output is not a log file.
    """
    rest = b""
    while data := os.read(0, BLOCK):
        whole, end, rest = (rest + data).rpartition(b"\n")
        if len(rest) > BLOCK:
            whole, end, rest = whole + end, rest, b""
        put(whole + end, longest)
    put(rest, longest)


def put(text: bytes, longest: int) -> None:
    """Writes a text without its secrets. Empties the log first if it is longer than `longest` bytes."""
    unsaid = redacted(text.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
    with suppress(OSError):  # a full disk loses the output: the process that prints must not wait
        if longest and unsaid and os.fstat(1).st_size > longest:
            os.ftruncate(1, 0)  # the file is open in append mode, so that writes go to the new end
            os.write(1, b"(more than %d MiB were printed; what came before is left out)\n" % (longest >> 20))
        while unsaid:
            unsaid = unsaid[os.write(1, unsaid) :]
