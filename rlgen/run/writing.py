"""Writes a checkpoint from a snapshot, in a thread beside the loop. Uses no collectives, so that it never blocks the loop's.

Each process writes its part and then a list of its files, `part_1.json`. When all lists are there, the main process writes the
manifest and renames the folder. A folder without its final name is no checkpoint. Nothing here needs torchrun's store, which may
end before the last save does.
"""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from rlgen.errors import CheckpointError, DivergedError, Fault, SentinelError
from rlgen.files import appears, flush, read_json, unwritable, write_json
from rlgen.models.lora import save_adapter
from rlgen.models.weights import base_digest, non_finite
from rlgen.processes import Processes
from rlgen.run.checkpoint_folder import CheckpointFolder
from rlgen.run.clock import Clock
from rlgen.run.manifest import seal
from rlgen.run.snapshot import Snapshot
from rlgen.run.state import save_shards

LOOKS = 0.02  # seconds between two looks for the list of another process


class GivenUpError(Exception):
    """Raised in the writing thread when the checkpoint that is being written is no longer wanted."""


class Writer:
    """Runs `write` in a thread, and stores how it ended. If `write` is None, the writer has ended from the start."""

    def __init__(self, step: int, clock: Clock, write: "Callable[[Writer], None] | None") -> None:
        self.step = step
        self.error: BaseException | None = None
        self.seconds: float | None = None  # from the start of `clock` to the end of the thread; None: it is running
        self.leaving = Event()  # set when the loop has failed: other processes may be gone
        self._given_up, self._ended, self._clock = Event(), Event(), clock
        if write is None:
            self._ended.set()
        else:
            Thread(target=self._run, args=(write,), name=f"save-{step}").start()

    def _run(self, write: "Callable[[Writer], None]") -> None:
        try:
            write(self)
        except BaseException as error:
            self.error = error
        finally:
            self.seconds = self._clock.seconds
            self._ended.set()

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    @property
    def elapsed(self) -> float:
        """Returns the seconds since the save began; once it has ended, the seconds that it took."""
        return self._clock.seconds if self.seconds is None else self.seconds

    def wait(self, seconds: float | None = None) -> None:
        """Waits for the thread to end, at most `seconds`. KeyboardInterrupt ends the wait and abandons the save."""
        try:
            self._ended.wait(seconds)
        except KeyboardInterrupt:
            self.give_up()
            raise

    def result(self) -> None:
        """Waits for the thread to end, and raises the error of `write`."""
        self.wait()
        if self.error is not None:
            raise self.error

    def give_up(self) -> None:
        """Stops the writing at the next file. What is written by then has its temporary name, or is a complete checkpoint."""
        self._given_up.set()

    def goes_on(self) -> None:
        """Raises GivenUpError if `give_up` was called."""
        if self._given_up.is_set():
            raise GivenUpError


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The work of one process on one checkpoint, after its snapshot is taken."""

    checkpoints: CheckpointFolder
    keep: int
    pinned: int | None  # step of a checkpoint that stays whatever its age
    processes: Processes
    model: PreTrainedModel  # read for tensor names and the frozen base of an adapter only, never for trained values
    tokenizer: PreTrainedTokenizerBase
    processor: ProcessorMixin | None  # of a model that reads images
    base: str | None  # digest of the base of an adapter at the beginning of the run
    held: str | None  # the same of what this process holds of it: its shards, or the whole
    snapshot: Snapshot
    settle: Callable[[], None]  # returns when everything that the checkpoint relies on is on disk

    @property
    def final(self) -> Path:
        return self.checkpoints.path(self.snapshot.at.step)

    @property
    def aside(self) -> Path:
        return self.checkpoints.unfinished(self.snapshot.at.step)

    @property
    def of_all(self) -> bool:
        """Returns whether every process writes a part; otherwise the main process writes alone."""
        return self.processes.world > 1 and (self.snapshot.sharded or self.snapshot.adapted)

    def write(self, writer: Writer) -> None:
        """Writes this process's part; in the main process, also waits for the other parts and completes the checkpoint.

        Deletes the temporary folder on an error. Errors are those of `_checked`, `_write_files`, `_part_of`, `_complete` and
        `settle`.
        """
        if not self.processes.is_main:
            self._write_for_main()
            return
        try:
            base = self._checked()
            shards = self._write_files(writer, base)
            for rank in range(1, self.processes.world if self.of_all else 1):
                shards += self._part_of(rank, writer)
            self.settle()
            writer.goes_on()
            self._complete(shards, writer)
        except Exception:  # frees disk space for the status and the log
            shutil.rmtree(self.aside, ignore_errors=True)
            raise

    def _write_for_main(self) -> None:
        """Writes the part of a process other than the main one, and the list of its files."""
        self._checked()
        shards: list[str] = []
        with written_as(self.final):
            if self.snapshot.sharded:
                shards = save_shards(self.snapshot.moments, self.aside / "state" / "optimizer", self.processes.rank)
            write_json(self._list_of(self.processes.rank), shards)

    def _list_of(self, rank: int) -> Path:
        """Returns the file that lists the shards of process `rank`; it exists only until the checkpoint is complete."""
        return self.aside / f"part_{rank}.json"

    def _checked(self) -> str:
        """Checks that what this process writes is finite, and returns the digest of an adapter's base; "" without an adapter.

        A checkpoint that fails here could never be resumed from.

        Raises:
            DivergedError: a value that this process writes is not finite.
            SentinelError: the base of an adapter has changed.
        """
        if name := non_finite([*self.snapshot.weights.items(), *self.snapshot.moments.items()]):
            raise DivergedError(f"{name} has values that are not finite; nothing was saved, and the last checkpoint is intact")
        if not self.snapshot.adapted:
            return ""
        now = same_base(self.model, self.held)
        return now if self.base is None else self.base

    def _write_files(self, writer: Writer, base: str) -> list[str]:
        """Writes all files of the main process, and returns the names of its optimizer shards; [] if the state is not sharded."""
        state, shards = self.aside / "state", []
        with written_as(self.final):
            if self.snapshot.adapted:
                save_adapter(self.model, self.snapshot.weights, self.aside, base)
            else:
                self.model.save_pretrained(self.aside, state_dict=dict(self.snapshot.weights))
            writer.goes_on()
            if self.snapshot.sharded:
                shards = save_shards(self.snapshot.moments, state / "optimizer", 0)
            else:
                save_file(self.snapshot.moments, state / "optimizer.safetensors")
            writer.goes_on()
            if self.processor is not None:
                self.processor.save_pretrained(self.aside)
            self.tokenizer.save_pretrained(self.aside)  # after the processor: the recipe may set another chat template
            for rank, draw in enumerate(self.snapshot.draws):
                save_file(draw, state / random_name(rank))
            write_json(state / "state.json", self.snapshot.progress)
        return shards

    def _part_of(self, rank: int, writer: Writer) -> list[str]:
        """Waits until another process has written its part, and returns the names of its shards.

        While the loop runs, `Checkpoints.complete` notices a process that fails, and this wait is given up. After the loop has
        failed only this wait does: it ends when the process is gone, or after `processes.timeout` seconds.

        Raises:
            CheckpointError: the other process has ended, or not answered in time, before its part was written.
            GivenUpError: the save is no longer wanted.
        """
        left, part = None, self._list_of(rank)
        while not appears(part, LOOKS):
            writer.goes_on()
            if writer.leaving.is_set():
                left = left or time.monotonic() + self.processes.timeout
                if (self.processes.has_gone(rank) and not appears(part)) or time.monotonic() > left:
                    raise CheckpointError(f"{self.final} is not complete: process {rank} has ended before its part was written")
        with written_as(self.final):
            shards = read_json(part)
            part.unlink()
        return list(shards)

    def _complete(self, shards: list[str], writer: Writer) -> None:
        """Writes the manifest, renames the folder to its final name, and removes the oldest checkpoints.

        Raises:
            CheckpointError: a shard of another process is not visible here, or something cannot be written.
            GivenUpError: the save is no longer wanted.
        """
        with written_as(self.final):
            for shard in (self.aside / "state" / "optimizer" / name for name in shards):
                if not appears(shard):  # with a manifest that lacks it, this would count as complete
                    raise CheckpointError(f"{shard} of another process is not visible here; set run.dir to shared storage")
            seal(self.aside, self.snapshot.facts)
            writer.goes_on()
            if self.final.exists():  # it is damaged: a step with a complete checkpoint is not saved again
                self.checkpoints.set_aside(self.final)
            self.aside.rename(self.final)
            flush(self.final.parent)
            self.checkpoints.rotate(self.keep, self.pinned)


@contextmanager
def written_as(path: Path) -> Iterator[None]:
    """Turns errors of writing `path` inside the block into CheckpointError."""
    try:
        yield
    except (OSError, SafetensorError, CheckpointException) as error:
        raise unwritable(path, error) from error


def random_name(rank: int) -> str:
    return f"random_{rank}.safetensors" if rank else "random.safetensors"


def same_base(model: PreTrainedModel, before: str | None) -> str:
    """Returns the digest of the frozen weights under an adapter; of sharded ones, of this process's shards.

    Raises:
        SentinelError: it differs from the digest `before`.
    """
    now = base_digest(model, gather=False)
    if before is not None and now != before:
        raise SentinelError(
            Fault.BASE_CHANGED,
            f"the frozen weights under the adapter are not those that the run began with (SHA-256 {before[:12]}, now {now[:12]}):"
            " something writes into them, and the adapter would be useless on the original model; nothing was saved",
        )
    return now
