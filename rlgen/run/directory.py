"""`DIR/NAME/`: one run, and never another's.

recipe.yaml      verbatim            status.json    state, step, process
resolved.yaml    every value         metrics.jsonl  one object a step
provenance.json  versions, hashes    rollouts/      step_000012.jsonl, one object a sample
nonfinite/       step_000012.jsonl, batches that were not trained on because a number was not finite
journal/         what was sampled and scored since the last checkpoint, see rollout/journal.py
logs/            of this attempt and, under attempt_K, of those before
checkpoints/     step_000020/
"""

import errno
import fcntl
import json
import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlgen.errors import CheckpointError, UsageError
from rlgen.files import (
    FOLDER_MODE,
    appears,
    append_text,
    open_plain,
    read_json,
    unwritable,
    write_json,
    write_text,
    written,
)
from rlgen.redact import printable_json
from rlgen.run.launch import launched_by

LOCK = ".lock"
HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)  # what flock says of a lock that another process holds
RESERVE = 1 << 14  # bytes that are given up for the last words of a run on a full disk
PATIENCE = 1.0  # seconds that a start waits for the lock: `rlgen status` holds it while it looks, a killed run until it is gone


class RunDirectory:
    """Paths and records of one run. Holds a lock on the directory as long as it is open.

    Of several processes the main one opens it and writes; the others join.
    """

    def __init__(self, path: Path, lock: int | None) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.rollouts = path / "rollouts"
        self.nonfinite = path / "nonfinite"
        self.failed_rewards = path / "failed_rewards"
        self.journal = path / "journal"
        self.logs = path / "logs"
        self.metrics = path / "metrics.jsonl"
        self.status_file = path / "status.json"
        self.provenance = path / "provenance.json"
        self.resolved = path / "resolved.yaml"
        self.save_now = path / "save_now"
        self._reserve = path / ".reserve"
        self._lock = lock
        self._health: Sequence[str] = ()

    @classmethod
    def create(cls, path: Path, recipe_text: str, resolved: str) -> "RunDirectory":
        """A new run. Where a start failed before anything was sampled, it takes that one's place, and keeps its logs.

        Raises:
            UsageError: the directory is taken.
            CheckpointError: it cannot be written.
        """
        with written(path):
            path.mkdir(parents=True, exist_ok=True)
        directory = cls(path, _lock(path))
        try:
            if not _untouched(path):
                raise UsageError(
                    f"{path} already holds a run; go on with --resume, take another name with --set run.name=… or --run-dir, or"
                    " delete what it holds with --clean"
                )
            write_text(directory.resolved, resolved)
            write_text(path / "recipe.yaml", recipe_text)
            directory._prepare()
            with written(path):
                if any(directory.logs.iterdir()):
                    directory.cut(0)
        except BaseException:
            directory.close()
            raise
        return directory

    @classmethod
    def reopen(cls, path: Path) -> "RunDirectory":
        """An earlier run, to go on with.

        Raises:
            UsageError: there is none, or it is running.
            CheckpointError: it cannot be written.
        """
        if not (path / "resolved.yaml").is_file():
            raise UsageError(f"{path} holds no run to resume; leave --resume out to start one")
        directory = cls(path, _lock(path))
        try:
            directory._prepare()
        except BaseException:
            directory.close()
            raise
        return directory

    @classmethod
    def join(cls, path: Path) -> "RunDirectory":
        """What the main process has opened, for one that only reads, and writes its own log.

        Raises:
            UsageError: this process does not see it.
        """
        if not appears(path / "resolved.yaml"):
            raise UsageError(f"{path} is not seen by every process; set run.dir to a folder that all machines share")
        return cls(path, None)

    @staticmethod
    def look(path: Path) -> dict[str, Any]:
        """What the run at `path` says of itself; {}: nothing, or no run is there."""
        file = path / "status.json"
        return read_json(file) if file.is_file() else {}

    @staticmethod
    def attempts(path: Path) -> list[dict[str, Any]]:
        """What `provenance.json` of the run at `path` says of each attempt that has begun to train, the last one last."""
        file = path / "provenance.json"
        return read_json(file) if file.is_file() else []

    @staticmethod
    def clean(path: Path) -> None:
        """Deletes what the run in `path` left, and nothing else: links are removed, never followed. The folder and its lock stay.

        Raises:
            UsageError: `path` is a link, holds no run of rlgen, is in use, or is the home directory or above.
            CheckpointError: something cannot be deleted.
        """
        if not path.exists() and not path.is_symlink():
            return
        why = _not_to_be_cleaned(path)
        if why:
            raise UsageError(f"--clean: {path} {why}; nothing was deleted")
        lock = _lock(path)
        try:
            with written(path):
                # First what --resume looks for, last what --clean does: half a deletion can be ended, and not be trained on.
                turn = {"resolved.yaml": 0, "status.json": 2}
                names = sorted((found.name for found in path.iterdir()), key=lambda name: turn.get(name, 1))
                # With its file the lock would go: what another start makes meanwhile would be deleted, too.
                for found in (path / name for name in names if name != LOCK):
                    if found.is_dir() and not found.is_symlink():
                        shutil.rmtree(found)
                    else:
                        found.unlink()
        finally:
            os.close(lock)

    def _prepare(self) -> None:
        """Folders and reserve; and what killed writes left is removed."""
        with written(self.path):
            mode = self.path.stat().st_mode
            if mode & 0o007:  # others could plant files
                self.path.chmod(mode & FOLDER_MODE)
            for folder in (self.checkpoints, self.rollouts, self.logs):
                folder.mkdir(exist_ok=True)
            for name in ("recipe.yaml", "resolved.yaml", "status.json", "provenance.json", "metrics.jsonl", ".reserve"):
                for left in self.path.glob(f".{name}.*"):
                    left.unlink()
        if not self._reserve.exists():
            write_text(self._reserve, "." * RESERVE)

    def cut(self, step: int) -> None:
        """Moves metrics, rollouts and logs of the attempts before to `logs/attempt_K`, except what belongs to steps 1 to `step`.

        They were trained into weights that no longer exist. A run that is resumed trains the later steps again, on the same
        samples as far as the journal has them, and writes them again. Failed rewards stay: with their samples they are taken from
        the journal, and do not fail again.
        """
        before = [path.name.removeprefix("attempt_") for path in self.logs.glob("attempt_*")]
        attempt = self.logs / f"attempt_{max([int(number) for number in before if number.isdecimal()], default=0) + 1}"
        attempt.mkdir()
        for folder in (self.path, self.rollouts, self.nonfinite, self.failed_rewards):
            for left in folder.glob(".?*.?*.[0-9]*"):  # half-written by a process that was killed, see `write_text`
                left.unlink()
        for log in [path for path in self.logs.iterdir() if path.is_file()]:
            log.rename(attempt / log.name)
        if self.metrics.exists():
            # A crash may have cut the last line within a character: rewards have the names of functions in any script.
            lines = self.metrics.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
            steps = [_step_of(line) for line in lines]
            belongs = [of is not None and of <= step for of in steps]
            if not all(belongs):
                write_text(
                    attempt / "metrics.jsonl", "".join(line for line, keep in zip(lines, belongs, strict=True) if not keep)
                )
                write_text(self.metrics, "".join(line for line, keep in zip(lines, belongs, strict=True) if keep))
        for folder in (self.rollouts, self.nonfinite):
            for file in list(folder.iterdir()) if folder.exists() else ():
                number = file.stem.removeprefix("step_")
                if not number.isdecimal() or int(number) > step:
                    (attempt / folder.name).mkdir(exist_ok=True)
                    shutil.move(file, attempt / folder.name / file.name)

    def write_metrics(self, record: dict[str, Any]) -> None:
        """Appends one step; on disk when this returns."""
        append_text(self.metrics, json_line(record))

    def read_metrics(self) -> list[dict[str, Any]]:
        """One object a step."""
        if not self.metrics.exists():
            return []
        return [json.loads(line) for line in self.metrics.read_text(encoding="utf-8").splitlines()]

    def write_rollouts(self, step: int, records: list[dict[str, Any]]) -> None:
        """One object a sample."""
        write_text(self.rollouts / f"step_{step:06d}.jsonl", "".join(map(json_line, records)))

    def write_nonfinite(self, step: int, records: list[dict[str, Any]]) -> Path:
        """A batch that was not trained on: what was not finite, then one object a sample."""
        path = self.nonfinite / f"step_{step:06d}.jsonl"
        with written(self.nonfinite):
            self.nonfinite.mkdir(exist_ok=True)
        write_text(path, "".join(map(json_line, records)))
        return path

    def write_status(
        self,
        state: str,
        step: int,
        steps: int,
        exit_code: int | None = None,
        message: str = "",
        health: Sequence[str] | None = None,
    ) -> None:
        """`state` is starting, running, done, stopped or failed.

        Args:
            health: rules that are broken, in words; None: those that were told last.

        Raises:
            CheckpointError: the disk is full, and so it was before.
        """
        self._health = self._health if health is None else health
        status = {
            "state": state,
            "step": step,
            "steps": steps,
            "exit_code": exit_code,
            "message": message,
            "health": list(self._health),
            "pid": os.getpid(),
            "launcher": launched_by(),
            "time": time.time(),
        }
        try:
            write_json(self.status_file, status)
        except CheckpointError:
            if exit_code is None or not self._reserve.exists():
                raise
            self._reserve.unlink()  # the last words of a run
            write_json(self.status_file, status)

    def asked_to_save(self) -> bool:
        """Whether someone has touched `save_now`, which is then gone. It is not opened: a link goes as a link."""
        try:
            self.save_now.unlink()
        except OSError:  # it is not there, as always but once
            return False
        return True

    def status(self) -> dict[str, Any]:
        return self.look(self.path)

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _lock(path: Path) -> int:
    """The kernel frees the lock when its process dies, however it dies."""
    try:
        file = open_plain(path / LOCK, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise unwritable(path / LOCK, error) from error
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except OSError as error:
            if error.errno not in HELD:  # the file system has no locks, or not now
                os.close(file)
                raise unwritable(path / LOCK, error) from error
            if time.monotonic() > deadline:
                os.close(file)
                raise UsageError(f"{path} is in use by a running rlgen; wait for it, or take another name") from error
        time.sleep(0.02)


def _not_to_be_cleaned(path: Path) -> str | None:
    """Why the contents of `path` must not be deleted."""
    if path.is_symlink():
        return "is a link"
    if not path.is_dir():
        return "is no folder"
    place = path.resolve()
    if any(kept.resolve().is_relative_to(place) for kept in (Path.home(), Path.cwd())):
        return "is the home directory, the working directory, or holds one of them"
    return None if _own_status(path) is not None else "holds no status.json of a run of rlgen"


def _own_status(path: Path) -> dict[str, Any] | None:
    """What the run at `path` says of itself; None: no run of rlgen says it."""
    try:
        status: dict[str, Any] = read_json(path / "status.json")
        return status if {"state", "step", "steps", "exit_code", "pid"} <= status.keys() else None
    except (OSError, ValueError, AttributeError, CheckpointError):
        return None


def json_line(record: dict[str, Any]) -> str:
    """JSON knows no NaN and no infinity: None stands for them."""
    try:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    except ValueError:
        text = json.dumps(finite(record), ensure_ascii=False, allow_nan=False)
    return printable_json(text) + "\n"


def finite(value: Any) -> Any:
    """The same with None for every number that is not finite."""
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _untouched(path: Path) -> bool:
    """Whether nothing is there but what a dry run leaves, or a start that ended before anything was sampled.

    Such a start may have been killed, or failed on its data, model or rewards: then it left a status and logs.
    """
    status = _own_status(path)
    plain = ["recipe.yaml", "resolved.yaml"]
    if status is not None and status["step"] == 0:
        plain += ["status.json", "logs"]
    empty = ("checkpoints", "rollouts", "logs")
    return all(
        found.name.startswith(".") or found.name in plain or (found.name in empty and not any(found.iterdir()))
        for found in path.iterdir()
    )


def _step_of(line: str) -> int | None:
    """The step of a line of metrics; None for a line that was cut off by a crash."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None
