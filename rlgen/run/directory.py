"""`DIR/NAME/`: one run, and never another's.

recipe.yaml      verbatim            status.json    state, step, process
resolved.yaml    every value         metrics.jsonl  one object a step
provenance.json  versions, hashes    rollouts/      step_000012.jsonl, one object a sample
logs/            of this attempt and, under attempt_K, of those before
checkpoints/     step_000020/
"""

import fcntl
import json
import os
import shutil
import time
from pathlib import Path
from typing import IO, Any

from rlgen.errors import UsageError
from rlgen.redact import printable_json
from rlgen.run.files import read_json, write_json, write_text


class RunDirectory:
    """Paths and records of one run. Holds a lock on the directory as long as it is open.

    Of several processes the main one opens it and writes; the others join.
    """

    def __init__(self, path: Path, lock: IO[str] | None) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.rollouts = path / "rollouts"
        self.logs = path / "logs"
        self.metrics = path / "metrics.jsonl"
        self.status_file = path / "status.json"
        self.provenance = path / "provenance.json"
        self.resolved = path / "resolved.yaml"
        self._lock = lock

    @classmethod
    def create(cls, path: Path, recipe_text: str, resolved: str) -> "RunDirectory":
        """A new run.

        Raises:
            UsageError: the directory is taken.
        """
        if path.exists() and any(path.iterdir()):
            raise UsageError(
                f"{path} already holds a run; go on with --resume, or take another name with --set run.name=… or --run-dir"
            )
        path.mkdir(parents=True, exist_ok=True)
        directory = cls(path, _lock(path))
        for folder in (directory.checkpoints, directory.rollouts, directory.logs):
            folder.mkdir()
        write_text(path / "recipe.yaml", recipe_text)
        write_text(directory.resolved, resolved)
        return directory

    @classmethod
    def reopen(cls, path: Path) -> "RunDirectory":
        """An earlier run, to go on with.

        Raises:
            UsageError: there is none, or it is running.
        """
        if not (path / "resolved.yaml").is_file():
            raise UsageError(f"{path} holds no run to resume; leave --resume out to start one")
        return cls(path, _lock(path))

    @classmethod
    def join(cls, path: Path) -> "RunDirectory":
        """What the main process has opened, for one that only reads, and writes its own log.

        Raises:
            UsageError: this process does not see it.
        """
        if not (path / "resolved.yaml").is_file():
            raise UsageError(f"{path} is not seen by every process; set run.dir to a folder that all machines share")
        return cls(path, None)

    def cut(self, step: int) -> None:
        """Moves metrics, rollouts and logs of the attempts before to `logs/attempt_K`, except what belongs to steps 1 to `step`.

        A run that is resumed from a checkpoint samples the later steps anew; their first samples were trained into weights
        that no longer exist.
        """
        attempt = self.logs / f"attempt_{len(list(self.logs.glob('attempt_*'))) + 1}"
        attempt.mkdir()
        for log in [path for path in self.logs.iterdir() if path.is_file()]:
            log.rename(attempt / log.name)
        if self.metrics.exists():
            lines = self.metrics.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if _step_of(line) is not None and (_step_of(line) or 0) <= step]
            if len(kept) < len(lines):
                write_text(attempt / "metrics.jsonl", "".join(line for line in lines if line not in kept))
                write_text(self.metrics, "".join(kept))
        for file in self.rollouts.iterdir():
            if file.name.startswith(".") or int(file.stem.removeprefix("step_")) > step:
                (attempt / "rollouts").mkdir(exist_ok=True)
                shutil.move(file, attempt / "rollouts" / file.name)

    def write_metrics(self, record: dict[str, Any]) -> None:
        """Appends one step; on disk when this returns."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def write_rollouts(self, step: int, records: list[dict[str, Any]]) -> None:
        """One object a sample."""
        lines = "".join(printable_json(json.dumps(record, ensure_ascii=False)) + "\n" for record in records)
        write_text(self.rollouts / f"step_{step:06d}.jsonl", lines)

    def write_status(self, state: str, step: int, steps: int, exit_code: int | None = None, message: str = "") -> None:
        """`state` is starting, running, done, stopped or failed."""
        write_json(
            self.status_file,
            {
                "state": state,
                "step": step,
                "steps": steps,
                "exit_code": exit_code,
                "message": message,
                "pid": os.getpid(),
                "time": time.time(),
            },
        )

    def status(self) -> dict[str, Any]:
        return read_json(self.status_file) if self.status_file.exists() else {}

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()


def _lock(path: Path) -> IO[str]:
    """The kernel frees the lock when its process dies, however it dies."""
    file = (path / ".lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise UsageError(f"{path} is in use by a running rlgen; wait for it, or take another name") from error
    return file


def _step_of(line: str) -> int | None:
    """The step of a line of metrics; None for a line that was cut off by a crash."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None
