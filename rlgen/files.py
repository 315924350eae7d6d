"""Files of a run: whole or not there, closed to strangers, never opened through a link.

Everything that a run writes about itself goes through here, so that a full disk is one error everywhere.
"""

import errno
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO, TextIOWrapper
from pathlib import Path
from typing import Any

from rlgen.errors import CheckpointError
from rlgen.redact import printable_json

MODE, FOLDER_MODE = 0o640, 0o750  # the most that others may


@contextmanager
def private_files() -> Iterator[None]:
    """Inside the block new files have `MODE` at most and new folders `FOLDER_MODE`, whatever library makes them."""
    before = os.umask(0o777 & ~FOLDER_MODE)
    os.umask(before | (0o777 & ~FOLDER_MODE))
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Raises CheckpointError for what goes wrong in the block, where `path` is written."""
    try:
        yield
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path: Path, error: BaseException) -> CheckpointError:
    """What a user is told of a file or folder that could not be written."""
    if isinstance(error, OSError) and error.errno == errno.ELOOP:
        return CheckpointError(f"{path} is a link, and rlgen opens none where it keeps its own files; remove it")
    return CheckpointError(f"{path} cannot be written: {error}; free space or change run.dir")


def open_plain(path: Path, flags: int) -> int:
    """A descriptor of a file that is no link. Raises OSError."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, MODE)


def open_log(path: Path) -> FileIO:
    """The end of a file, unbuffered, for programs to write to. Raises CheckpointError, also for a link."""
    with written(path):
        return os.fdopen(open_plain(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab", buffering=0)


def write_text(path: Path, text: str) -> None:
    """Writes aside, flushes, renames: a reader, or a run after a power cut, never sees half a file.

    Raises:
        CheckpointError: the disk is full, or takes no files; what was there before stays.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with written(path):
        try:
            aside.unlink(missing_ok=True)  # of a process that was killed, and had the same number
            with os.fdopen(open_plain(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
        except OSError:
            aside.unlink(missing_ok=True)
            raise


def append_text(path: Path, text: str, flushed: bool = True) -> None:
    """Adds to the end.

    Args:
        flushed: it is on disk when this returns; else in the hands of the system, and survives this process but no power cut.

    Raises:
        CheckpointError: the disk is full, or takes no files; the file is as it was before.
    """
    with written(path):
        file = open_plain(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            before = os.fstat(file).st_size
            try:
                rest = text.encode()
                while rest:
                    rest = rest[os.write(file, rest) :]
                if flushed:
                    os.fsync(file)
            except OSError:
                os.ftruncate(file, before)
                raise
        finally:
            os.close(file)


def write_json(path: Path, value: Any) -> None:
    write_text(path, printable_json(json.dumps(value, indent=2, ensure_ascii=False)) + "\n")


def read_text(path: Path) -> str:
    """As `read_bytes`."""
    return read_bytes(path).decode("utf-8")


def read_bytes(path: Path) -> bytes:
    """Raises CheckpointError for a link, OSError for what is not there."""
    try:
        file = open_plain(path, os.O_RDONLY)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise unwritable(path, error) from error
        raise
    with os.fdopen(file, "rb") as opened:
        return opened.read()


def read_json(path: Path) -> Any:
    return json.loads(read_text(path))


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


def appears(path: Path, seconds: float = 10.0) -> bool:
    """Whether a file that another machine has written is there, at once or soon: shared storage shows it late."""
    deadline = time.monotonic() + seconds
    while not path.is_file():
        if time.monotonic() > deadline:
            return False
        os.scandir(path.parent).close() if path.parent.is_dir() else None  # makes NFS look again
        time.sleep(0.05)
    return True


class LogFile(logging.FileHandler):
    """A log that is no link. A disk that is full costs its lines, not the run, which says so where it writes results."""

    def _open(self) -> TextIOWrapper:
        return TextIOWrapper(open_log(Path(self.baseFilename)), encoding="utf-8", write_through=True)

    def handleError(self, record: logging.LogRecord) -> None:
        """Nothing: the standard one prints a traceback for each line."""
