"""Writes weights to files for servers: one folder per version, in shared memory or on a file system that both sides can read.

DIR/rlgen-HOST-PID-xxxxxxxx/v12-3/model-00000.safetensors ...    each at most FILE_BYTES, or one tensor
DIR/rlgen-HOST-PID-xxxxxxxx/v12-3/manifest.json                  written last: version, bytes of each file, number of tensors
"""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rlgen.engines import guard
from rlgen.engines.base import Weights
from rlgen.errors import EngineError

SHARED_MEMORY = "/dev/shm"
FILE_BYTES = 1 << 26  # twice as much is held in memory: one file is written while the tensors of the next are gathered
HOST = socket.gethostname()
CLOSING_SECONDS = 5.0  # timeout for the guard to notice that the folder is gone


class FileTransfer:
    """The folder of one trainer's weight files. It keeps the current weights, so that a restarted server can load them.

    It holds one copy of the weights and never two: it may be in shared memory.

    Args:
        parent: a folder with the same path on the servers; None: shared memory, for servers on this machine.

    Raises EngineError if `parent` is not a folder.
    """

    def __init__(self, parent: str | None) -> None:
        place = Path(parent or SHARED_MEMORY)
        if not place.is_dir():
            raise EngineError(f"engine.transfer_dir: {place} is not a folder; set it to one that trainer and servers share")
        sweep_weights(place)
        self._place = Path(tempfile.mkdtemp(prefix=f"rlgen-{HOST}-{os.getpid()}-", dir=place))
        try:
            self._lock: int | None = guard.locked(str(self._place))  # held until this process ends
        except OSError:  # a file system without locks: `sweep_weights` then uses the process id in the name
            self._lock = None
        command = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), str(self._place)]
        self._guard = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        self._written = 0
        self.current: Path | None = None

    def write(self, weights: Weights, version: int) -> Path:
        """Writes `weights` to a new folder in place of the current one, and returns it: `current`, once it is loaded.

        Raises EngineError if the files cannot be written, for example because the disk is full.
        """
        if self.current is not None:
            shutil.rmtree(self.current, ignore_errors=True)
            self.current = None
        self._written += 1
        folder = self._place / f"v{version}-{self._written}"
        files: dict[str, dict[str, int]] = {}
        tensors = 0

        def save(number: int, bucket: dict[str, Tensor]) -> None:
            name = f"model-{number:05}.safetensors"
            save_file(bucket, folder / name)
            files[name] = {"bytes": (folder / name).stat().st_size}

        try:
            folder.mkdir()
            with ThreadPoolExecutor(1, thread_name_prefix="rlgen-writing") as writer:
                saving: Future[None] | None = None
                # A contiguous copy: safetensors refuses tensors that share memory.
                copies = ((name, tensor.detach().cpu().contiguous().clone()) for name, tensor in weights)
                for number, bucket in enumerate(buckets(copies, FILE_BYTES)):
                    if saving is not None:
                        saving.result()
                    saving, tensors = writer.submit(save, number, bucket), tensors + len(bucket)
                if saving is not None:
                    saving.result()
            manifest = {"version": version, "files": files, "tensors": tensors}
            (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
        except (OSError, SafetensorError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise EngineError(
                f"weights cannot be written to {folder}: {error}; set engine.transfer_dir to a folder with more space"
            ) from error
        return folder

    def close(self) -> None:
        """Removes the folder and waits for its guard, for CLOSING_SECONDS at most."""
        shutil.rmtree(self._place, ignore_errors=True)
        with contextlib.suppress(subprocess.TimeoutExpired):  # files still open, as on NFS, are removed when this process ends
            self._guard.wait(CLOSING_SECONDS)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def buckets(weights: Weights, most: int) -> Iterator[dict[str, Tensor]]:
    """Yields `weights` in buckets of at most `most` bytes; a larger tensor is a bucket of its own."""
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights:
        if bucket and size + tensor.nbytes > most:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor
        size += tensor.nbytes
    if bucket:
        yield bucket


def sweep_weights(place: Path) -> None:
    """Removes the folders of trainers of this machine that were killed together with their guards."""
    for left in place.iterdir():
        ours = re.fullmatch(rf"rlgen-{re.escape(HOST)}-(\d+)-[a-z0-9_]{{8}}", left.name)
        # A trainer in a container may share this folder but have its own process ids: then its lock counts.
        if ours and not psutil.pid_exists(int(ours[1])) and not guard.is_locked(str(left)):
            shutil.rmtree(left, ignore_errors=True)
