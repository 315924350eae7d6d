"""Files that are whole or not there."""

import json
import os
from pathlib import Path
from typing import Any

from rlgen.redact import printable_json


def write_text(path: Path, text: str) -> None:
    """Writes aside, flushes, renames: a reader, or a run after a power cut, never sees half a file."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def write_json(path: Path, value: Any) -> None:
    write_text(path, printable_json(json.dumps(value, indent=2, ensure_ascii=False)) + "\n")


def flush_tree(folder: Path) -> None:
    """Waits until everything in `folder` is on disk."""
    for path in (*folder.rglob("*"), folder):
        flush(path)


def flush(path: Path) -> None:
    """Waits until a file, or the list of a folder's files, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
