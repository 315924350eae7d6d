"""File operations for all that a run writes about itself: atomic, with restricted modes, through no symbolic links.

A full disk is the same CheckpointError everywhere.
"""

import errno
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO, TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO

from rlgen.errors import CheckpointError
from rlgen.redact import printable_json

MODE, FOLDER_MODE = 0o640, 0o750  # upper limits of the permissions
REMEDY = "free space or change run.dir"  # if a run's files cannot be written


@contextmanager
def private_files() -> Iterator[None]:
    """Limits new files to mode `MODE` and new folders to `FOLDER_MODE` inside the block, by the umask; libraries obey it, too.

    The owner can read them even if the umask says otherwise: a run must read its own files.
    """
    before = os.umask(0o777 & ~FOLDER_MODE)
    os.umask((before & 0o077) | (0o777 & ~FOLDER_MODE))
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def written(path: Path, errors: tuple[type[BaseException], ...] = (OSError,), remedy: str = REMEDY) -> Iterator[None]:
    """Converts an OSError of the block, in which `path` is written, to a CheckpointError. `errors`: those that are converted."""
    try:
        yield
    except errors as error:
        raise unwritable(path, error, remedy) from error


def unwritable(path: Path, error: BaseException, remedy: str = REMEDY) -> CheckpointError:
    if isinstance(error, OSError) and error.errno == errno.ELOOP:
        return CheckpointError(f"{path} is a link, and rlgen follows no links to its own files; remove it")
    return CheckpointError(f"{path} cannot be written: {error}; {remedy}")


def open_plain(path: Path, flags: int) -> int:
    """Opens a file that is not a symbolic link and returns its descriptor. Raises OSError."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, MODE)


def open_log(path: Path) -> FileIO:
    """Opens a file for unbuffered appending, for programs to write to. Raises CheckpointError, also for a symbolic link."""
    with written(path):
        return os.fdopen(open_plain(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab", buffering=0)


def write_text(path: Path, text: str) -> None:
    """Writes a text file atomically, as `whole_file`."""
    with whole_file(path) as file:
        file.write(text.encode())


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Yields a temporary file to write; flushes it and renames it to `path` when the block ends without an error.

    So no reader ever sees half a file, even after a power cut.
    What is no file, such as `/dev/null` or a pipe, is written to instead: a file in its place would remove it.

    Raises:
        CheckpointError: the disk is full or not writable; the earlier content of `path` stays.
    """
    if path.is_fifo() or path.is_char_device():
        with written(path), path.open("wb") as file:
            yield file
        return
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with written(path):
        try:
            aside.unlink(missing_ok=True)  # left by a killed process with the same process id
            with os.fdopen(open_plain(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise


def append_bytes(path: Path, content: bytes, flushed: bool = True) -> None:
    """Appends bytes to the end of a file, which is created if missing.

    Args:
        flushed: wait until the bytes are on disk; otherwise they survive the death of this process, but not a power cut.

    Raises:
        CheckpointError: the disk is full or not writable; the file is truncated to its earlier length.
    """
    with written(path):
        file = open_plain(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            before = os.fstat(file).st_size
            try:
                rest = memoryview(content)
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


def read_bytes(path: Path) -> bytes:
    """Reads a file. Raises CheckpointError for a symbolic link, and OSError if the file is missing or cannot be read."""
    try:
        file = open_plain(path, os.O_RDONLY)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise unwritable(path, error) from error
        raise
    with os.fdopen(file, "rb") as opened:
        return opened.read()


def read_json(path: Path) -> Any:
    return json.loads(read_bytes(path))


def flush_folder(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        flush_to_disk(path)


def flush_to_disk(path: Path) -> None:
    """Waits until a file, or the entries of a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_path(path: Path) -> None:
    """Removes a file, or a folder with its contents. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def appears(path: Path, seconds: float = 10.0) -> bool:
    """Returns whether a file exists, waiting up to `seconds` for it: network storage may show another machine's file late."""
    deadline = time.monotonic() + seconds
    while not path.is_file():
        if time.monotonic() > deadline:
            return False
        os.scandir(path.parent).close() if path.parent.is_dir() else None  # makes NFS refresh its directory cache
        time.sleep(0.05)
    return True


class LogFile(logging.FileHandler):
    """Refuses symbolic links, and loses lines on a full disk instead of ending the run; writing results reports the disk."""

    def _open(self) -> TextIOWrapper:
        return TextIOWrapper(open_log(Path(self.baseFilename)), encoding="utf-8", write_through=True)

    def handleError(self, record: logging.LogRecord) -> None:
        """The standard handler would print a traceback for each line."""
