"""Packages that only a few slow tests need. They are not in .venv: each start of a program would look through them."""

import fcntl
import subprocess
import sys
from pathlib import Path


def installed(name: str, *arguments: str) -> Path:
    """Returns a folder of the cache with the packages that pip installs for these arguments, which `name` stands for."""
    folder = Path.home() / ".cache" / "rlgen" / name
    done = folder / ".done"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker may install it now
        if not done.exists():
            subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--target", str(folder), *arguments], check=True)
            done.touch()
    return folder
