"""Weights on their way to a server: one folder a version, in memory or on a file system that both sides see.

DIR/rlgen-HOST-PID-xxxxxxxx/v12-3/model-00000.safetensors ...    at most FILE_BYTES each
DIR/rlgen-HOST-PID-xxxxxxxx/v12-3/manifest.json                  written last: version, bytes of each file, number of tensors
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import psutil
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rlgen.engines import guard
from rlgen.errors import EngineError

SHARED_MEMORY = "/dev/shm"
FILE_BYTES = 2 << 30
HOST = socket.gethostname()


class Outbox:
    """The folder of one trainer. It holds the weights that the servers have now, so that a restarted one can be given them.

    Args:
        parent: a folder that the servers see under the same name; None: shared memory, for servers on this machine.
    """

    def __init__(self, parent: str | None) -> None:
        place = Path(parent or SHARED_MEMORY)
        if not place.is_dir():
            raise EngineError(f"engine.transfer_dir: {place} is no folder; name one that trainer and servers share")
        sweep(place)
        self._place = Path(tempfile.mkdtemp(prefix=f"rlgen-{HOST}-{os.getpid()}-", dir=place))
        command = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), str(self._place)]
        self._guard = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        self._written = 0
        self.current: Path | None = None

    def write(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Path:
        """The folder that now holds `weights`; it becomes `current` with `keep`.

        Raises:
            EngineError: there is no room.
        """
        self._written += 1
        folder = self._place / f"v{version}-{self._written}"
        files: dict[str, dict[str, int]] = {}
        part: dict[str, Tensor] = {}
        tensors = size = 0

        def flush() -> None:
            name = f"model-{len(files):05}.safetensors"
            save_file(part, folder / name)
            files[name] = {"bytes": (folder / name).stat().st_size}

        try:
            folder.mkdir()
            for name, tensor in weights:
                # Contiguous and its own: tensors that share memory are refused by safetensors.
                part[name] = tensor.detach().cpu().contiguous().clone()
                tensors, size = tensors + 1, size + part[name].nbytes
                if size >= FILE_BYTES:
                    flush()
                    part, size = {}, 0
            if part:
                flush()
            manifest = {"version": version, "files": files, "tensors": tensors}
            (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
        except (OSError, SafetensorError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise EngineError(
                f"weights cannot be written to {folder}: {error}; set engine.transfer_dir to a larger place"
            ) from error
        return folder

    def keep(self, folder: Path) -> None:
        """What the servers have now; the folder before goes."""
        if self.current is not None and self.current != folder:
            shutil.rmtree(self.current, ignore_errors=True)
        self.current = folder

    def close(self) -> None:
        shutil.rmtree(self._place, ignore_errors=True)
        self._guard.wait()


def sweep(place: Path) -> None:
    """Removes what trainers of this machine left that were killed with their guards."""
    for left in place.iterdir():
        ours = re.fullmatch(rf"rlgen-{re.escape(HOST)}-(\d+)-[a-z0-9_]{{8}}", left.name)
        if ours and not psutil.pid_exists(int(ours[1])):
            shutil.rmtree(left, ignore_errors=True)
