"""Creates, locks, reads and writes the directory `DIR/NAME/` of one run, which no other run shares.

recipe.yaml      verbatim            status.json    state, step, process
resolved.yaml    every value         metrics.jsonl  one object a step
provenance.json  versions, hashes    rollouts/      step_000012.parquet, one row a sample
evals/           step_000012.parquet, the samples of the evaluation after that step
nonfinite/       step_000012.json, which numbers were not finite in a step whose update was skipped
sinks/           ids of the run in trackers, and their files, if the recipe has sinks
journal/         what was sampled and scored since the last checkpoint, see rollout/journal.py
judge/           what judges have said, so that they are not asked again, see rewards/answers.py
failed_rewards/  calls of rewards that failed, with the message
save_now         made by somebody who wants a checkpoint after the step that is going on
logs/            of this attempt; those of earlier attempts are under attempt_K
checkpoints/     step_000020/
"""

import errno
import fcntl
import json
import math
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rlgen.errors import CheckpointError, RlgenError, Stopped, UsageError
from rlgen.files import (
    FOLDER_MODE,
    appears,
    append_bytes,
    open_plain,
    read_bytes,
    read_json,
    remove_path,
    unwritable,
    write_json,
    write_text,
    written,
)
from rlgen.metrics import RENAMED, Metric
from rlgen.redact import printable_json
from rlgen.run.checkpoint_folder import CheckpointFolder
from rlgen.run.launch import launched_by

LOCK = ".lock"
HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)  # error numbers of flock if another process holds the lock
RESERVE = 1 << 14  # bytes of a file that is deleted on a full disk, to have room for the last status of a run
PATIENCE = 1.0  # seconds to wait for the lock: `rlgen status` holds it briefly, and a killed run until its process has exited


class RunDirectory:
    """Paths and records of one run. Holds a lock on the directory until it is closed.

    The main process opens it with `create` or `reopen` and writes; other processes use `join`, without a lock.
    """

    def __init__(self, path: Path, lock: int | None) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.rollouts = path / "rollouts"
        self.evals = path / "evals"
        self.nonfinite = path / "nonfinite"
        self.failed_rewards = path / "failed_rewards"
        self.journal = path / "journal"
        self.judge = path / "judge"
        self.logs = path / "logs"
        self.metrics = path / "metrics.jsonl"
        self.status_file = path / "status.json"
        self.provenance = path / "provenance.json"
        self.resolved = path / "resolved.yaml"
        self.save_now = path / "save_now"
        self.made: Sequence[Path] = ()  # folders that `create` made: `path`, and those above it
        self._reserve = path / ".reserve"
        self._lock = lock
        self._health: Sequence[str] = ()

    @classmethod
    def create(cls, path: Path, recipe_text: str, resolved: str) -> "RunDirectory":
        """Creates the directory of a new run. Reuses that of a start that failed before anything was sampled, and keeps its logs.

        Raises UsageError if it holds another run, or is in use.
        """
        made = [folder for folder in (path, *path.parents) if not folder.exists()]
        with written(path):
            path.mkdir(parents=True, exist_ok=True)
        with cls._locked(path) as directory:
            directory.made = made
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
        return directory

    @classmethod
    def reopen(cls, path: Path) -> "RunDirectory":
        """Opens the directory of an earlier run, to resume it. Raises UsageError if there is none, or it is running."""
        if not (path / "resolved.yaml").is_file():
            raise UsageError(f"{path} holds no run to resume; leave --resume out to start one")
        with cls._locked(path) as directory:
            directory._prepare()
        return directory

    @classmethod
    @contextmanager
    def _locked(cls, path: Path) -> Iterator["RunDirectory"]:
        """Locks the directory, and frees it again if the block fails."""
        directory = cls(path, _lock(path))
        try:
            yield directory
        except BaseException:
            directory.close()
            raise

    @classmethod
    def join(cls, path: Path) -> "RunDirectory":
        """Opens the directory that the main process has opened, for a process that only reads it and writes its own log."""
        if not appears(path / "resolved.yaml"):
            raise UsageError(f"{path} is not visible to every process; set run.dir to a folder that all machines share")
        return cls(path, None)

    @staticmethod
    def look(path: Path) -> dict[str, Any]:
        """Returns the contents of status.json of the run at `path`; {} if there is none, and words for one that is damaged."""
        file = path / "status.json"
        found = _content(file, dict)
        said = f"{file} is damaged; --resume goes on from the last checkpoint, and writes it again"
        return {"state": "unknown", "message": said} if found is None else found

    @staticmethod
    def attempts(path: Path) -> list[dict[str, Any]]:
        """Returns the entries of provenance.json of the run at `path`: one for each attempt that began to train, oldest first.
        Raises CheckpointError if the file is damaged.
        """
        file = path / "provenance.json"
        if (found := _content(file, list)) is None:
            raise CheckpointError(f"{file} is damaged; bring it back, or delete it: --resume then cannot check data and rewards")
        return found

    @staticmethod
    def clean(path: Path) -> None:
        """Deletes the contents of `path`, a folder that holds a run, but keeps the folder and its lock file.

        Removes links without following them. Does nothing if `path` does not exist. Raises UsageError, and deletes nothing, if
        `path` is a link, holds no run of rlgen, is in use, or is the home directory or above.
        """
        if not path.exists() and not path.is_symlink():
            return
        if why := _not_to_be_cleaned(path):
            raise UsageError(f"--clean: {path} {why}; nothing was deleted")
        lock = _lock(path)
        try:
            with written(path):
                # resolved.yaml goes first: half a deletion cannot be resumed. status.json goes last: --clean can be repeated.
                turn = {"resolved.yaml": 0, "status.json": 2}
                names = sorted((found.name for found in path.iterdir()), key=lambda name: turn.get(name, 1))
                # The lock file stays: without it another run could start here, and its files would be deleted, too.
                for found in (path / name for name in names if name != LOCK):
                    remove_path(found)
        finally:
            os.close(lock)

    def _prepare(self) -> None:
        """Creates the folders and the reserve file, and removes the temporary files of writes that were killed."""
        with written(self.path):
            mode = self.path.stat().st_mode
            if mode & 0o007:  # other users could place files here
                self.path.chmod(mode & FOLDER_MODE)
            for folder in (self.checkpoints, self.rollouts, self.logs):
                folder.mkdir(exist_ok=True)
            for name in ("recipe.yaml", "resolved.yaml", "status.json", "provenance.json", "metrics.jsonl", ".reserve"):
                for left in self.path.glob(f".{name}.*"):
                    left.unlink()
        if not self._reserve.exists():
            write_text(self._reserve, "." * RESERVE)

    def cut(self, step: int) -> None:
        """Moves the logs of earlier attempts and the metrics of steps after `step` to `logs/attempt_K`.

        Rollouts of steps after `step` become part of the journal; reports of skipped updates of these steps move to
        `logs/attempt_K`, too. These steps were trained into weights that no longer exist. The resumed run trains them again, on
        the same samples as far as the journal has them, and writes their records again. Failed rewards stay: their samples are
        taken from the journal with their rewards, so that they do not fail again.
        """
        before = [path.name.removeprefix("attempt_") for path in self.logs.glob("attempt_*")]
        attempt = self.logs / f"attempt_{max([int(number) for number in before if number.isdecimal()], default=0) + 1}"
        attempt.mkdir()
        samples = [folder for top in (self.rollouts, self.evals) for folder in (top, *top.glob("step_*/"))]
        for folder in (self.path, *samples, self.nonfinite, self.failed_rewards):
            for left in folder.glob(".?*.?*.[0-9]*"):  # half-written by a process that was killed, see `write_text`
                left.unlink()
        for log in [path for path in self.logs.iterdir() if path.is_file()]:
            log.rename(attempt / log.name)
        kept: set[int] = set()
        if self.metrics.exists():
            # A crash may have cut the last line within a multi-byte character: reward names can be in any script.
            lines = self.metrics.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
            steps = [(line, _step_of(line)) for line in lines]
            belong = [(line, of) for line, of in steps if of is not None and of <= step]
            kept = {of for _, of in belong}
            if len(belong) < len(steps):
                write_text(attempt / "metrics.jsonl", "".join(line for line, of in steps if of is None or of > step))
                write_text(self.metrics, "".join(line for line, _ in belong))
        for folder in (self.rollouts, self.nonfinite, self.evals):
            for file in list(folder.iterdir()) if folder.exists() else ():
                number = file.stem.removeprefix("step_")
                if folder == self.rollouts and file.suffix == ".parquet" and number.isdecimal():
                    if int(number) > step:
                        self._to_journal(file)
                # The evaluation before step 1 is repeated if its record is not there.
                elif not number.isdecimal() or int(number) > step or (folder == self.evals and int(number) not in kept):
                    (attempt / folder.name).mkdir(exist_ok=True)
                    shutil.move(file, attempt / folder.name / file.name)

    def _to_journal(self, rollouts: Path) -> None:
        """Moves the rollouts of a step to the journal, beside those of an earlier attempt: either may be incomplete."""
        self.journal.mkdir(exist_ok=True)
        place, again = self.journal / rollouts.name, 0
        while place.exists():
            again += 1
            place = self.journal / f"{rollouts.stem}.{again}.parquet"
        rollouts.rename(place)

    def write_metrics(self, record: dict[str, Any]) -> None:
        """Appends the metrics of one step. They are on disk when this returns."""
        append_bytes(self.metrics, json_line(record).encode())

    def read_metrics(self) -> list[dict[str, Any]]:
        return read_records(self.metrics)

    def write_nonfinite(self, step: int, verdict: dict[str, Any]) -> Path:
        """Writes which numbers were not finite in a step whose update was skipped, and returns the path of the file."""
        path = self.nonfinite / f"step_{step:06d}.json"
        with written(self.nonfinite):
            self.nonfinite.mkdir(exist_ok=True)
        write_text(path, json_line(verdict))
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
        """Writes status.json. `state` is starting, running, done, stopped or failed.

        If the disk is full and `exit_code` is given, deletes the reserve file first, so that the last status of a run can be
        written. `health`: rules that are broken, in words; None: those of the last call.
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
            self._reserve.unlink()
            write_json(self.status_file, status)

    def asked_to_save(self) -> bool:
        """Returns whether the file `save_now` exists, and deletes it without opening it: of a link only the link is removed."""
        with suppress(OSError):  # usually it is not there
            self.save_now.unlink()
            return True
        return False

    def status(self) -> dict[str, Any]:
        return self.look(self.path)

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def in_use(path: Path) -> bool:
    """Returns whether a process holds the run's lock. Takes the lock only to test it."""
    try:
        with (path / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _lock(path: Path) -> int:
    """Locks the directory and returns the descriptor of the lock file.

    Waits up to `PATIENCE` seconds for another process to free the lock. The kernel frees it when a process dies in any way.
    """
    try:
        file = open_plain(path / LOCK, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise unwritable(path / LOCK, error) from error
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file).st_nlink:
                return file
            os.close(file)
            raise UsageError(f"{path} was removed just now, by another start that failed; start again")
        except OSError as error:
            if error.errno not in HELD:  # the file system does not support locks, or cannot lock now
                os.close(file)
                raise unwritable(path / LOCK, error) from error
            if time.monotonic() > deadline:
                os.close(file)
                raise UsageError(f"{path} is in use by a running rlgen; wait for it, or take another name") from error
        time.sleep(0.02)


def _not_to_be_cleaned(path: Path) -> str | None:
    """Returns the reason why the contents of `path` must not be deleted; None if they may be."""
    if path.is_symlink():
        return "is a link"
    if not path.is_dir():
        return "is not a folder"
    place = path.resolve()
    if any(kept.resolve().is_relative_to(place) for kept in (Path.home(), Path.cwd())):
        return "is the home directory, the working directory, or holds one of them"
    return None if _own_status(path) is not None else "holds no status.json of a run of rlgen; if it may go, remove it yourself"


def _content(file: Path, kind: type) -> Any:
    """Returns what a JSON file holds; an empty `kind` if there is no file, and None if it is damaged, or not of this kind."""
    with suppress(ValueError):
        content = read_json(file) if file.is_file() else kind()
        return content if isinstance(content, kind) else None


def _own_status(path: Path) -> dict[str, Any] | None:
    """Returns the contents of status.json at `path`; None if it is missing, unreadable or not written by rlgen."""
    try:
        status = _content(path / "status.json", dict)
        return status if status and {"state", "step", "steps", "exit_code", "pid"} <= status.keys() else None
    except (OSError, CheckpointError):
        return None


def ended_as(error: BaseException | None) -> tuple[str, int]:
    """Returns the state of a run that ended with this error, as status.json has it, and its exit code. None: it is done."""
    if error is None:
        return "done", 0
    code = error.exit_code if isinstance(error, RlgenError) else 130 if isinstance(error, KeyboardInterrupt) else 70
    return "stopped" if isinstance(error, Stopped) else "failed", code


def json_line(record: dict[str, Any]) -> str:
    """Returns `record` as one line of JSON, with null for NaN and infinity, which JSON does not have."""
    return printable_json(json.dumps(without_nonfinite(record), ensure_ascii=False, allow_nan=False)) + "\n"


def without_nonfinite(value: Any) -> Any:
    """Returns a copy of `value` in which every float that is not finite is None."""
    if isinstance(value, Mapping):
        return {key: without_nonfinite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_nonfinite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _untouched(path: Path) -> bool:
    """Returns whether `path` holds nothing but the files of a dry run, or of a start that ended before anything was sampled.

    Such a start was killed, or failed on its data, model or rewards, and left a status and logs.
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


def read_records(file: Path) -> list[dict[str, Any]]:
    """Returns the objects of a file with one JSON object a line, by step; lines that are not complete, or name no step, are left
    out. Metrics of earlier versions have their names of today.
    """
    found: list[dict[str, Any]] = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else ():
        with suppress(ValueError, AttributeError):  # the run is being written, or was killed while writing
            record = {RENAMED.get(key, key): value for key, value in json.loads(line).items()}
            found += [record] if isinstance(record.get("step"), int) else []
    return sorted(found, key=lambda record: record["step"])


def _step_of(line: str) -> int | None:
    """Returns the step of a line of metrics.jsonl; None if the line was cut off by a crash."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None


class Best:
    """The step from 1 on whose evaluation has the highest mean reward so far; of equal ones the first."""

    def __init__(self, records: Iterable[Mapping[str, Any]] = ()) -> None:
        self.step: int | None = None  # None: nothing was evaluated after a step
        self.reward = -math.inf
        for record in records:
            self.look(record[Metric.STEP], record)

    def look(self, step: int, metrics: Mapping[str, Any]) -> None:
        reward = metrics.get(Metric.EVAL_REWARD_MEAN)
        if step and reward is not None and reward > self.reward:
            self.step, self.reward = step, reward


def pinned_step(run: Path) -> int | None:
    """Returns the step of the checkpoint that a run pins as its best; None: its recipe pins none, or nothing was evaluated."""
    import yaml

    recipe = yaml.safe_load(read_bytes(resolved)) if (resolved := run / "resolved.yaml").is_file() else None
    held = recipe.get("eval") if isinstance(recipe, dict) else None
    return best_saved(run).step if isinstance(held, dict) and held.get("best") else None


def best_saved(run: Path) -> Best:
    """Returns the best of the steps that have a checkpoint. One that was best while the recipe pinned none may have none."""
    saved = CheckpointFolder(run / "checkpoints").steps()
    return Best(record for record in read_records(run / "metrics.jsonl") if record[Metric.STEP] in saved)
