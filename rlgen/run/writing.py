"""Writes a checkpoint in a thread beside the loop. Uses no collectives, so that it never blocks the loop's.

Each process writes its part and then a list of its files, `part_1.json`. When all lists are there, the main process writes the
manifest and renames the folder. A folder without its final name is no checkpoint. Nothing here needs torchrun's store, which may
end before the last save does.
"""

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import InitVar, asdict, dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

import rlgen
from rlgen.errors import CheckpointError, DivergedError, Fault, SentinelError
from rlgen.files import appears, flush_to_disk, read_json, write_json, written
from rlgen.models.load import WEIGHT_SHARDS
from rlgen.models.lora import is_adapted, save_adapter
from rlgen.models.weights import non_finite, own_tensors, tensors_digest
from rlgen.processes import Processes
from rlgen.run.clock import PhaseClock
from rlgen.run.manifest import File, hashed, seal
from rlgen.run.state import OPTIMIZER_SHARDS, copied, model_facts, optimizer_tensors, save_shards, trained_tensors, written_here
from rlgen.types import Position

if TYPE_CHECKING:
    from rlgen.run.checkpoint import Checkpoints

UNWRITTEN = OSError, SafetensorError, CheckpointException  # raised where a file cannot be written
LOOKS = 0.02  # seconds between two looks for the list of another process


class GivenUpError(Exception):
    """Raised in the writing thread when the checkpoint that is being written is no longer wanted."""


@dataclass(slots=True, kw_only=True)
class Writer:
    """Writes what one process has of one checkpoint, in a thread beside the loop, and stores how that ended.

    `schedule` and `draws` are copies of what the loop goes on to change. The thread replaces `weights` and `moments` by copies
    while the loop samples. The next step of `optimizer` waits until it has.

    The thread asks the model for no tensor: while the loop computes, modules have whole or rounded weights in the place of their
    own, and FSDP2 takes the whole ones away from them when it is asked for a `state_dict`.
    """

    checkpoints: "Checkpoints"
    model: PreTrainedModel  # read for its configuration only
    at: Position
    schedule: Mapping[str, Any]
    draws: list[dict[str, Tensor]] = field(default_factory=list)  # random states by rank
    optimizer: InitVar[Optimizer]
    settle: Callable[[], None]  # returns when everything that the checkpoint relies on is on disk
    clock: PhaseClock  # runs since the save began
    taken: float = field(default_factory=time.time)  # when the snapshot was taken
    weights: dict[str, Tensor] = field(init=False)  # unsharded, in the main process; or its shards, in each
    moments: dict[str, Tensor] = field(init=False)  # the same
    frozen: dict[str, Tensor] = field(init=False)  # the base under an adapter
    facts: dict[str, Any] = field(init=False)  # about the model
    adapted: bool = field(init=False)  # the weights are those of an adapter
    sharded: bool = field(init=False)  # each process writes shards of the weights and of the optimizer's state
    error: BaseException | None = None
    seconds: float | None = None  # from the start of `clock` to the end of the thread; None: it is running
    ended: Event = field(default_factory=Event)  # of the thread
    hook: RemovableHandle = field(init=False)  # by which the optimizer's steps wait
    leaving: Event = field(default_factory=Event)  # set when the loop has failed: other processes may be gone
    _given_up: Event = field(default_factory=Event)
    _copied: Event = field(default_factory=Event)  # or given up

    def __post_init__(self, optimizer: Optimizer) -> None:
        self.hook = optimizer.register_step_pre_hook(lambda *_: self.wait_copied())
        self.weights = written_here(trained_tensors(self.model), self.processes.is_main)
        self.moments = written_here(optimizer_tensors(self.model, optimizer), self.processes.is_main)
        self.adapted = is_adapted(self.model)
        self.frozen = own_tensors(self.model) if self.adapted else {}
        self.facts = model_facts(self.model)
        self.sharded = not self.adapted and any(isinstance(parameter, DTensor) for parameter in self.model.parameters())

    def start(self) -> None:
        """Starts the thread. A process that has nothing to write has ended at once."""
        if self.processes.is_main or self.of_all:
            Thread(target=self._run, name=f"save-{self.at.step}").start()
        else:
            self._copied.set()
            self.ended.set()

    def wait_copied(self) -> None:
        """Waits until the thread no longer reads what an update changes."""
        self._copied.wait()

    def _run(self) -> None:
        try:
            self.weights = copied(self.weights, self.checkpoints.room)
            self.moments = copied(self.moments, self.checkpoints.room)
            self._copied.set()
            if self.processes.is_main:
                self._write()
            else:
                self._write_for_main()
        except BaseException as error:
            self.error = error
        finally:
            self._copied.set()
            self.seconds = self.clock.seconds
            self.ended.set()

    @property
    def processes(self) -> Processes:
        return self.checkpoints.processes

    @property
    def final(self) -> Path:
        return self.checkpoints.folder.path(self.at.step)

    @property
    def aside(self) -> Path:
        return self.checkpoints.folder.unfinished(self.at.step)

    @property
    def of_all(self) -> bool:
        """Returns whether every process writes a part; otherwise the main process writes alone."""
        return self.processes.world > 1 and (self.sharded or self.adapted)

    @property
    def elapsed(self) -> float:
        """Returns the seconds since the save began; once it has ended, the seconds that it took."""
        return self.clock.seconds if self.seconds is None else self.seconds

    def wait(self, seconds: float | None = None) -> None:
        """Waits for the thread to end, at most `seconds`. KeyboardInterrupt ends the wait and abandons the save."""
        try:
            self.ended.wait(seconds)
        except KeyboardInterrupt:
            self.give_up()
            raise

    def result(self) -> None:
        """Waits for the thread to end, and raises its error. That the save was given up is none."""
        self.wait()
        if self.error is not None and not isinstance(self.error, GivenUpError):
            raise self.error

    def give_up(self) -> None:
        """Stops the writing at the next file. What is written by then has its temporary name, or is a complete checkpoint."""
        self._given_up.set()

    def _goes_on(self) -> None:
        if self._given_up.is_set():
            raise GivenUpError

    def _write(self) -> None:
        """Writes the part of the main process, waits for the others, and completes the checkpoint.

        Deletes the temporary folder on an error.
        """
        try:
            base = self._checked()
            shards = self._write_files(base)
            for rank in range(1, self.processes.world if self.of_all else 1):
                shards |= self._part_of(rank)
            self.settle()
            self._goes_on()
            self._complete(shards)
        except Exception:  # frees disk space for the status and the log
            shutil.rmtree(self.aside, ignore_errors=True)
            raise

    def _write_for_main(self) -> None:
        self._checked()
        with written(self.final, UNWRITTEN):
            shards = self._write_shards()
            part = {name: asdict(file) for name, file in shards.items()}
            write_json(self.aside / f"part_{self.processes.rank}.json", part)

    def _write_shards(self) -> dict[str, File]:
        """Writes the shards of this process, and returns size and hash of each file; {} if nothing is sharded."""
        names: list[str] = []
        for folder, tensors in ((WEIGHT_SHARDS, self.weights), (OPTIMIZER_SHARDS, self.moments)) if self.sharded else ():
            names += [f"{folder}/{name}" for name in save_shards(tensors, self.aside / folder, self.processes.rank)]
            self._goes_on()
        return hashed(self.aside, names)

    def _checked(self) -> str:
        """Checks that what this process writes is finite, and that the frozen weights under an adapter are unchanged.

        A checkpoint that fails here could never be resumed from. Returns the digest of an adapter's base; "" without an adapter.
        """
        if name := non_finite([*self.weights.items(), *self.moments.items()]):
            raise DivergedError(f"{name} has values that are not finite; nothing was saved, and the last checkpoint is intact")
        if not self.adapted:
            return ""
        now, held = tensors_digest(self.frozen, gather=False), self.checkpoints.held or self.checkpoints.base
        if held is not None and now != held:
            raise SentinelError(
                Fault.BASE_CHANGED,
                f"the frozen weights under the adapter are not those that the run began with (SHA-256 {held[:12]}, now"
                f" {now[:12]}): something writes into them, and the adapter would be useless on the original model; nothing was"
                " saved",
            )
        return self.checkpoints.base or now

    def _write_files(self, base: str) -> dict[str, File]:
        """Writes the files of the main process, and returns those that are shards."""
        state = self.aside / "state"
        with written(self.final, UNWRITTEN):
            if self.adapted:
                save_adapter(self.model, self.weights, self.aside, base)
            else:
                self.model.save_pretrained(self.aside, state_dict={} if self.sharded else dict(self.weights))
            self._goes_on()
            shards = self._write_shards()
            if not self.sharded:
                save_file(self.moments, state / "optimizer.safetensors")
            self._goes_on()
            if self.checkpoints.processor is not None:
                self.checkpoints.processor.save_pretrained(self.aside)
            if self.checkpoints.tokenizer is not None:  # after the processor: the recipe may set another chat template
                self.checkpoints.tokenizer.save_pretrained(self.aside)
            for rank, draw in enumerate(self.draws):
                save_file(draw, state / random_name(rank))
            at = self.at
            progress = {"step": at.step, "position": at.prompts, "weight_version": at.step}  # the version is the step
            write_json(state / "state.json", {**progress, "schedule": self.schedule, "nonfinite": at.nonfinite})
        return shards

    def _part_of(self, rank: int) -> dict[str, File]:
        """Waits until another process has written its part, and returns its shards.

        While the loop runs, `Checkpoints.complete` notices a process that fails, and this wait is given up. After the loop has
        failed only this wait does: it ends when the process is gone, or after `processes.timeout` seconds.
        """
        left, part = None, self.aside / f"part_{rank}.json"  # exists only until the checkpoint is complete
        while not appears(part, LOOKS):
            self._goes_on()
            if self.leaving.is_set():
                left = left or time.monotonic() + self.processes.timeout
                if (self.processes.has_gone(rank) and not appears(part)) or time.monotonic() > left:
                    raise CheckpointError(f"{self.final} is not complete: process {rank} has ended before its part was written")
        with written(self.final, UNWRITTEN):
            shards = {name: File(**file) for name, file in read_json(part).items()}
            part.unlink()
        return shards

    def _complete(self, shards: dict[str, File]) -> None:
        """Writes the manifest, renames the folder to its final name, and removes the oldest checkpoints."""
        with written(self.final, UNWRITTEN):
            for shard in (self.aside / name for name in shards):
                if not appears(shard):  # with a manifest that lacks it, this would count as complete
                    raise CheckpointError(f"{shard} of another process is not visible here; set run.dir to shared storage")
            facts = {
                "step": self.at.step,
                "time": self.taken,
                "rlgen": rlgen.__version__,
                "trainer": self.checkpoints.trainer,
                "processes": self.processes.world,
                "model": self.facts,
            }
            seal(self.aside, facts, known=shards)
            self._goes_on()
            if self.final.exists():  # it is damaged: a step with a complete checkpoint is not saved again
                self.checkpoints.folder.set_aside(self.final)
            self.aside.rename(self.final)
            flush_to_disk(self.final.parent)
            self.checkpoints.folder.rotate(self.checkpoints.keep, self.checkpoints.pinned)


def random_name(rank: int) -> str:
    return f"random_{rank}.safetensors" if rank else "random.safetensors"
