"""The process between all that rewards print and the log: it leaves secrets out, also those that programs print.

It is no part of the trainer, whose pace it would cost, nor of a worker, which may hang or be killed. It ends when the last
process has ended that could still print.
"""

import os
from contextlib import suppress

from rlgen.redact import redacted

BLOCK = 1 << 16  # bytes that are read at once, and of a line that does not end


def main(longest: int) -> None:
    """Copies standard input to standard output.

    Args:
        longest: bytes of a log; beyond, it starts anew. 0: standard output is no log.
    """
    rest = b""
    while data := os.read(0, BLOCK):
        whole, end, rest = (rest + data).rpartition(b"\n")
        if len(rest) > BLOCK:
            whole, end, rest = whole + end, rest, b""
        put(whole + end, longest)
    put(rest, longest)


def put(text: bytes, longest: int) -> None:
    unsaid = redacted(text.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
    with suppress(OSError):  # a full disk costs what is printed; who prints must not wait
        if longest and unsaid and os.fstat(1).st_size > longest:
            os.ftruncate(1, 0)  # it is open for appending
            os.write(1, b"(more than %d MiB were printed; what came before is left out)\n" % (longest >> 20))
        while unsaid:
            unsaid = unsaid[os.write(1, unsaid) :]
