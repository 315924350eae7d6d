"""Prints what commands say, on any standard output: a terminal, a file on a full disk, or a closed pipe."""

import os
import shlex
import shutil
import subprocess
import sys
from contextlib import suppress

from rlgen.redact import printable


def prepare() -> None:
    """Makes the output streams write characters that their encoding lacks as escapes, instead of raising an error."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def echo(text: str, err: bool = False, nl: bool = True, exact: bool = False) -> None:
    """Prints a text. A closed pipe (`| head -1`) or a full disk does not end the command.

    Args:
        exact: for output that programs read: control characters are kept, unless the stream is a terminal, which would obey them.
    """
    import typer

    stream = sys.stderr if err else sys.stdout
    shown = text if exact and stream is not None and not stream.isatty() else printable(text)
    try:
        typer.echo(shown, err=err, nl=nl)
    except OSError:
        from rlgen.run.console import hush

        hush(stream)


def echo_styled(text: str) -> None:
    """Prints text that holds colours of our own. Its author escapes what others wrote with `printable`, part by part.

    A terminal shows it through the user's pager, as git does: it ends at once if the text fits the screen.
    """
    pager = shlex.split(os.environ.get("PAGER", "less"))
    if sys.stdout.isatty() and pager and shutil.which(pager[0]):
        with suppress(OSError):
            subprocess.run(pager, input=text.encode(errors="backslashreplace"), env={"LESS": "FRX", **os.environ})
        return
    try:
        sys.stdout.write(text)
    except OSError:
        from rlgen.run.console import hush

        hush(sys.stdout)
