"""A small disk, and what fills it."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, size: str) -> Iterator[Path]:
    """A disk of "256k", say, in a new folder."""
    place = folder / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", place], capture_output=True).returncode:
        pytest.skip("only root can mount a small disk")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def fill(disk: Path, left: int = 0) -> int:
    """Bytes that are taken up, so that `left` are free."""
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize - left
    with (disk / "ballast").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free)
    return free
