"""Cache of computed tables: Arrow files, keyed by a digest of everything that decides their content.

A file is named KIND-KEY-SHA256.arrow, with the digest of its own bytes. It is written under a temporary name and renamed, so that
several runs may write the same one at the same time; it is used only if its bytes match the digest. The files are in the folder
`rlgen` beside the files of `datasets` (HF_DATASETS_CACHE), which may be deleted while no run is active.

Why not `datasets.map`: it recognises a function by its pickle, which code that the function imports does not change, and it reads
cached files without checking their bytes.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import datasets
import pyarrow

from rlgen.errors import SetupError

BATCH = 2000  # rows that are read, tokenised and written at a time
HEX = 32  # characters of a digest in a name
LIBRARIES = ("datasets", "jinja2", "pyarrow", "tokenizers", "transformers")
MAX_BYTES = 100 * 2**30  # total size of all files; beyond it the least recently opened ones are deleted
DAY = 24 * 3600.0
FACTS = b"facts"

Write = Callable[[pyarrow.RecordBatch], None]
Make = Callable[[Write], Mapping[str, Any]]


class Cached(NamedTuple):
    """A table and facts gathered while it was made: Cached(table=..., facts={"counts": {"read": 1000000, ...}})"""

    table: pyarrow.Table  # mapped from a file, or in memory
    facts: Mapping[str, Any]


def cache_key(parts: Mapping[str, Any]) -> str:
    """Returns the key of a table: a digest of `parts`, of the source code of this folder, and of the versions of `LIBRARIES`."""
    code = [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(Path(__file__).parent.glob("*.py"))]
    decides = {"parts": parts, "code": code, "libraries": {name: version(name) for name in LIBRARIES}}
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:HEX]


def cached(kind: str, key: str | None, schema: pyarrow.Schema, make: Make) -> Cached:
    """Returns the table of `key`, which `make` writes if no intact file has it. Raises SetupError: the folder is not writable.

    Args:
        kind: "rows" or "prompts": the first part of the file's name.
        key: None: the table is small, or its key cannot be determined; it is made in memory and not stored.
        make: writes batches of `schema` and returns facts that can be stored as JSON.
    """
    if key is None:
        sink = pyarrow.BufferOutputStream()
        fill(sink, schema, make)
        return opened(pyarrow.BufferReader(sink.getvalue()))
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "rlgen"
    found = find_table(folder, kind, key)
    if found is not None:
        return found
    aside = folder / f"{kind}-{key}-{uuid4().hex}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with aside.open("xb") as file:
            fill(file, schema, make)
        whole = folder / f"{kind}-{key}-{digest_of(aside)}.arrow"
        aside.replace(whole)
        prune(folder, whole)
        return opened(pyarrow.memory_map(str(whole)))
    except OSError as error:
        raise SetupError(
            f"{folder}: the cache of the data cannot be written: {error}; free space, or set HF_DATASETS_CACHE to another folder"
        ) from error
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)


def fill(sink: Any, schema: pyarrow.Schema, make: Make) -> None:
    """Writes the table. The facts are only known at the end, so they are stored in the metadata of an empty last batch."""
    with pyarrow.ipc.new_file(sink, schema) as writer:
        facts = make(writer.write_batch)
        last = pyarrow.RecordBatch.from_pylist([], schema=schema)
        writer.write_batch(last, custom_metadata={FACTS: json.dumps(facts).encode()})


def opened(source: Any) -> Cached:
    """Opens a table without copying its bytes, and reads its facts."""
    reader = pyarrow.ipc.open_file(source)
    _, metadata = reader.get_batch_with_custom_metadata(reader.num_record_batches - 1)
    return Cached(reader.read_all(), json.loads(metadata[FACTS]))


def find_table(folder: Path, kind: str, key: str) -> Cached | None:
    """Returns the table from a file whose digest matches its bytes, else None; deletes other files of the same key."""
    for path in sorted(folder.glob(f"{kind}-{key}-*.arrow")):
        with suppress(FileNotFoundError, PermissionError):  # deleted by another run; owned by another user
            if path.stem.rpartition("-")[2] == digest_of(path):
                with suppress(PermissionError):
                    os.utime(path)  # marks it as recently opened, since file systems may not record reads
                return opened(pyarrow.memory_map(str(path)))
            path.unlink()
    return None


def digest_of(path: Path) -> str:
    """Returns the digest of a file's bytes. Reads instead of mapping it, so that it does not count as memory of this process."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:HEX]


def prune(folder: Path, newest: Path) -> None:
    """Deletes unfinished files of killed runs, and least recently opened files beyond MAX_BYTES; keeps files of the last day."""
    files = []
    for path in folder.iterdir():
        with suppress(OSError):
            status = path.stat()
            files.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in files)
    for opened_at, size, path in sorted(files):
        old = opened_at < time.time() - DAY and path != newest
        if old and (path.suffix == ".part" or (path.suffix == ".arrow" and total > MAX_BYTES)):
            with suppress(OSError):
                path.unlink()
                total -= size
