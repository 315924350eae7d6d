"""Prints what commands say, on any standard output: a terminal, a file on a full disk, or a closed pipe. Checks `--out`."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from rlgen.errors import UsageError
from rlgen.redact import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def prepare() -> None:
    """Makes the output streams write characters that their encoding lacks as escapes, instead of raising an error. A stream that
    the shell has closed (`>&-`), which Python leaves as None, becomes one that discards what it is given.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", errors="backslashreplace"))  # noqa: SIM115  # as long as the process lives
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def echo(text: str, err: bool = False, nl: bool = True, exact: bool = False) -> None:
    """Prints a text. A closed pipe (`| head -1`) or a full disk does not end the command. With `exact`, for output that programs
    read, control characters are kept, unless the stream is a terminal, which would obey them.
    """
    import typer

    stream = sys.stderr if err else sys.stdout
    with hushed(stream):
        typer.echo(text if exact and not stream.isatty() else printable(text), err=err, nl=nl)


def check_file(out: Path) -> None:
    """Raises UsageError if `--out` cannot name a file. Call it before the work whose result goes there."""
    if not os.path.isdir(out.parent):
        raise UsageError(f"--out: there is no folder {out.parent}; make it, or name another")
    if os.path.isdir(out):
        raise UsageError(f"--out: {out} is a folder; name a file")


@contextmanager
def hushed(stream: TextIO) -> Iterator[None]:
    """Runs a block that writes to a stream. If it cannot be written, what is still to be written to it is discarded."""
    try:
        yield
    except OSError:
        from rlgen.run.console import hush

        hush(stream)


def plain_table(left: Sequence[str], right: Sequence[str] = (), width: int | None = None) -> "Table":
    """Returns a table without lines: columns with these heads, those of `right` with numbers, of at least `width` characters.
    A text that does not fit is folded.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for head in left:
        table.add_column(Text(printable(head)), overflow="fold")
    for head in right:
        table.add_column(head, justify="right", min_width=width)
    return table


@contextmanager
def page_for_terminal(whole_lines: bool) -> "Iterator[Console]":
    """Yields a console of the width and colours of standard output, and prints what it was given when the block ends. With
    `whole_lines` only a terminal wraps lines; other programs get them whole.

    Text that others wrote must have passed through `printable` before. A terminal shows the page through the user's pager, as git
    does: it ends at once if the text fits the screen.
    """
    from rich.console import Console

    page = Console(highlight=False)
    page.soft_wrap = whole_lines and not page.is_terminal
    with page.capture() as shown:
        yield page
    pager: list[str] = []
    with suppress(ValueError):  # a quotation mark is not closed
        pager = shlex.split(os.environ.get("PAGER", "less"))
    if sys.stdout.isatty() and pager and shutil.which(pager[0]):
        with suppress(OSError):
            subprocess.run(pager, input=shown.get().encode(errors="backslashreplace"), env={"LESS": "FRX", **os.environ})
        return
    with hushed(sys.stdout):
        sys.stdout.write(shown.get())
