"""Writes self-contained pages: styles, scripts and data are in one file, which requests nothing from the network.

What a model, a data set or a person wrote is data and never markup: it stands in the page as JSON or base64, and the scripts put
it on the screen as text nodes. The browser enforces both. Only scripts and styles of the hashes in the page's policy run, nothing
is fetched, and assignments that would parse a text as markup raise an error (trusted types).
"""

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlgen.files import write_text

ASSETS = Path(__file__).parent / "assets"


def write_page(path: Path, title: str, scripts: Sequence[str], facts: Any, parts: Mapping[str, str]) -> None:
    """Writes a page. Raises CheckpointError if that fails.

    Args:
        scripts: names of the scripts in `assets`, in the order in which they run.
        facts: the data that the page shows at once, as JSON can hold it.
        parts: packed data by id, which scripts unpack when they need them.
    """
    style = (ASSETS / "page.css").read_text(encoding="utf-8")
    script = "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in scripts)
    islands = [f'<script type="application/json" id="facts">{island(facts)}</script>']
    islands += [f'<script type="text/plain" id="{name}">{content}</script>' for name, content in parts.items()]
    policy = (
        f"default-src 'none'; script-src {digest(script)}; style-src {digest(style)}; img-src data:; base-uri 'none';"
        " form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    page = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{html.escape(title)}</title>
<style>{style}</style>
</head>
<body>
<noscript>This page needs JavaScript: allow it here. All scripts are in the page.</noscript>
<main id="page"></main>
{chr(10).join(islands)}
<script>{script}</script>
</body>
</html>
"""
    write_text(path, page)


def island(value: Any) -> str:
    r"""Returns JSON that may stand in a `<script>`: `<`, `>` and `&` are written as escapes, and so is all that is not ASCII."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def digest(text: str) -> str:
    """Returns the hash of an inline script or style as a Content-Security-Policy names it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
