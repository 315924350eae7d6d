"""What commands print, on any kind of standard output: a terminal, a file on a full disk, a reader that has gone away."""

import sys

from rlgen.redact import printable


def prepare() -> None:
    """Characters that an old code page lacks are written as escapes, instead of ending the program."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def echo(text: str, err: bool = False, nl: bool = True, exact: bool = False) -> None:
    """Prints. A reader that has gone away (`| head -1`), or a full disk, does not end what a command does.

    Args:
        exact: for programs: control characters stay, unless it is a terminal that would obey them.
    """
    import typer

    stream = sys.stderr if err else sys.stdout
    shown = text if exact and stream is not None and not stream.isatty() else printable(text)
    try:
        typer.echo(shown, err=err, nl=nl)
    except OSError:
        from rlgen.run.console import hush

        hush(stream)
