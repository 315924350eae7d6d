"""Prints the pages of `rlgen/docs/`, which are shipped with the package: `rlgen docs`."""

import re
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

import rlgen
from rlgen.cli.output import echo
from rlgen.errors import UsageError

PAGES = Path(rlgen.__file__).parent / "docs"
COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)  # markers of generated tables


def docs_command(
    page: Annotated[str | None, Argument(help="Name of a page; without it, the pages are listed.")] = None,
    search: Annotated[
        str | None, Option("--search", metavar="WORD", help="List the lines that contain WORD, of PAGE or of all pages.")
    ] = None,
) -> None:
    """Print a page of the documentation, or list the pages."""
    if search is not None:
        names = page_names() if page is None else [page]
        lines = [(name, line.strip()) for name in names for line in page_text(name).splitlines()]
        held = [f"{name}: {line}" for name, line in lines if search.strip().lower() in line.lower()]
        if not held:
            raise UsageError(f"no page has `{search}`; `rlgen docs` lists the pages")
        echo("\n".join(held))
        return
    if page is None:
        width = max(map(len, page_names()))
        echo("\n".join(f"{name:<{width}}  {summary(page_text(name))}" for name in page_names()))
    elif not sys.stdout.isatty():
        echo(page_text(page), nl=False, exact=True)
    else:
        from rich.console import Console
        from rich.markdown import Markdown

        Console().print(Markdown(page_text(page)))


def page_names() -> list[str]:
    return sorted(path.stem for path in PAGES.glob("*.md"))


def page_text(page: str) -> str:
    """Returns a page without its HTML comments. Raises UsageError if there is no such page."""
    names = page_names()
    if page not in names:
        close = get_close_matches(page[:100], names, n=1, cutoff=0.5)
        hint = f"did you mean `{close[0]}`?" if close else f"there are {', '.join(names)}"
        raise UsageError(f"there is no page `{page}`; {hint}; `rlgen docs --search {page[:100]}` searches all pages")
    return COMMENT.sub("", (PAGES / f"{page}.md").read_text(encoding="utf-8"))


def summary(text: str) -> str:
    """Returns the line under the title of a page."""
    return text.splitlines()[2]
