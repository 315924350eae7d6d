"""Saves and loads checkpoints. `step_000020/` is a folder that `from_pretrained` opens, with the trainer's state under `state/`.

    config.json, model.safetensors, tokenizer files     the policy, in float32: the weights that are trained
    adapter_config.json, adapter_model.safetensors      instead of the first two, if an adapter is trained
    state/optimizer.safetensors                         moments and step counts by parameter name
    state/weights/, state/optimizer/                    with sharded weights, instead of model.safetensors and
                                                        optimizer.safetensors: each process's shards, by
                                                        torch.distributed.checkpoint
    state/random.safetensors                            random states of the main process
    state/random_1.safetensors                          random states of rank 1, and so on
    state/state.json                                    step, data position, schedule
    manifest.json                                       facts about the model, and the hash of each file; written last

No process gathers sharded weights to save them: `whole_checkpoint` puts them together later, for tools that open a model. Runs
of before have the weights unsharded and the optimizer's state in shards. A checkpoint can be loaded by any number of processes,
with or without sharded weights, whichever way it was written. Why not torch.distributed.checkpoint for unsharded states, too:
`from_pretrained` and other tools open safetensors.

In each process a thread copies to the CPU what the process saves, while the loop samples. Only the next update waits for that.
The thread then writes the copies, one checkpoint at a time. The folder is written under a temporary name, flushed, hashed, and
renamed when it is complete. Each process hashes what it has written. Before a run resumes from a checkpoint, every byte is
compared with its hash, by each process a share of the files. No file here is a pickle.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from rlgen.errors import CheckpointError, DamagedCheckpoint, UsageError
from rlgen.files import appears, read_json
from rlgen.models.load import WEIGHT_SHARDS, without_values
from rlgen.models.lora import is_adapted, load_adapter
from rlgen.models.weights import base_digest, non_finite, own_tensors
from rlgen.processes import Processes
from rlgen.run.checkpoint_folder import CheckpointFolder, ChosenCheckpoint
from rlgen.run.clock import PhaseClock
from rlgen.run.manifest import NAME, changed_facts, check_files, read_manifest
from rlgen.run.state import (
    OPTIMIZER_SHARDS,
    load_model_weights,
    load_optimizer,
    load_shards,
    model_facts,
    random_tensors,
    read_shards,
    seed_random,
    set_random,
    stored_tensors,
    whole_shards,
)
from rlgen.run.writing import Writer, random_name
from rlgen.types import Position

LOOK = 0.1  # seconds between two looks whether all processes have written their part


def little_space(folder: Path, model: PreTrainedModel) -> str | None:
    """Returns a warning if the disk has less space than two checkpoints need, each of the weights and two moments; else None."""
    size = 3 * sum(weight.numel() * weight.element_size() for weight in model.parameters() if weight.requires_grad)
    free = shutil.disk_usage(folder).free
    if free >= 2 * size:
        return None
    return (
        f"{folder} has {free / 1e9:.1f} GB of free space, and a checkpoint takes about {size / 1e9:.1f} GB. A save needs that"
        " much before it removes an old checkpoint: free space, or set run.dir to another disk"
    )


@dataclass(slots=True)
class Checkpoints:
    """Saves and loads the checkpoints of one run, and keeps the newest `keep`.

    All processes save and load together; the main process writes the manifest and renames the folder.
    """

    root: Path
    keep: int
    processes: Processes
    base: str | None = None  # digest of the frozen weights under an adapter: no checkpoint has them, so they must not change
    trainer: str | None = None  # kind of the trainer, stored in each manifest
    held: str | None = None  # digest of this process's shards of the frozen weights; None: they are not sharded
    pinned: int | None = None  # step of the checkpoint that is not removed, which changes in the course of a run; None: none
    tokenizer: PreTrainedTokenizerBase | None = None
    processor: ProcessorMixin | None = None  # of a model that reads images
    room: dict[str, Tensor] = field(default_factory=dict)  # see `copied`
    _writer: Writer | None = None  # of the save that is going on
    _longest: float = 0.0  # seconds

    def __post_init__(self) -> None:
        # The loop keeps using its own while a thread saves these.
        self.tokenizer, self.processor = deepcopy(self.tokenizer), deepcopy(self.processor)

    @property
    def folder(self) -> CheckpointFolder:
        return CheckpointFolder(self.root)

    def oldest(self) -> int:
        """Returns the step of the oldest checkpoint that is kept; 0 if there is none.

        One that stays only because it is pinned does not count: a run hardly resumes from it.
        """
        steps = list(self.folder.steps())
        extra = self.pinned is not None and sum(step > self.pinned for step in steps) >= self.keep
        return min((step for step in steps if not (extra and step == self.pinned)), default=0)

    def choose(self, step: int | None = None) -> ChosenCheckpoint:
        """Returns the newest undamaged checkpoint, or that of `step`, to resume from. Deletes unfinished saves first.

        Compares every byte of it with its SHA-256: each process reads a share of the files. The step is 0 if there is no
        checkpoint at all and `step` is None. Raises UsageError if there is none of `step`, and DamagedCheckpoint if that one, or
        all, are damaged; CheckpointError if it has values that are not finite. That is no damage: whether to resume from an
        older checkpoint is the user's decision.
        """
        self.processes.on_main(self.folder.sweep, keepalive=True)
        found = self.processes.on_main(self.folder.steps)
        if step is not None and step not in found:
            there = ", ".join(map(str, found)) or "none"
            raise UsageError(f"--resume-step {step}: {self.root} has no checkpoint of that step; there are: {there}")
        damaged: list[str] = []
        for number in [step] if step is not None else reversed(found):
            try:
                self.processes.run_all(partial(self._compare, found[number]), keepalive=True)
            except DamagedCheckpoint as error:
                damaged.append(str(error))
                continue
            self.processes.run_all(partial(self._check_finite, number, found), keepalive=True)
            later = tuple(path for other, path in found.items() if other > number)
            notices = tuple(f"DAMAGED CHECKPOINT: {text}; resuming from step {number} instead" for text in damaged)
            return ChosenCheckpoint(step=number, path=found[number], later=later, notices=notices)
        if damaged:
            raise DamagedCheckpoint(
                "no good checkpoint to resume from: " + "; ".join(damaged) + ". Restore the files, name another checkpoint with"
                " --resume-step, or start again with --clean"
            )
        return ChosenCheckpoint()

    def _compare(self, path: Path) -> None:
        """Compares this process's share of the files of a checkpoint with their hashes. Raises as `check_files`."""
        if not self.processes.is_main:  # to which a network file system may show it earlier
            appears(path / NAME)
        check_files(path, True, self.processes.rank, self.processes.world)

    def _check_finite(self, step: int, found: Mapping[int, Path]) -> None:
        if name := non_finite(stored_tensors(found[step], self.processes.rank, self.processes.world)):
            earlier = ", ".join(str(one) for one in found if one < step)
            advice = f"resume from an earlier checkpoint with --resume-step: {earlier}" if earlier else "start again with --clean"
            raise CheckpointError(
                f"{found[step]}: {name} has values that are not finite: the run had diverged when it was saved; {advice}"
            )

    def save(
        self,
        at: Position,
        model: PreTrainedModel,
        optimizer: Optimizer,
        schedule: LRScheduler,
        settle: Callable[[], None] = lambda: None,
    ) -> Path:
        """Starts to save in a thread, and returns the final path. `complete` tells when it is written.

        The thread copies the weights and the optimizer's state first. The next step of `optimizer` waits for that; nothing else
        may change them until then. Waits first until the save before is complete, and raises its error.

        Args:
            settle: called in the main process, in the writing thread, before the checkpoint is complete. It must return only when
                everything that the checkpoint relies on is on disk.
        """
        self.complete(wait=True)  # only one checkpoint is written at a time
        writer = Writer(
            checkpoints=self,
            model=model,
            at=at,
            schedule=deepcopy(schedule.state_dict()),
            optimizer=optimizer,
            settle=settle,
            clock=PhaseClock(),
        )

        def begin() -> dict[str, Tensor]:
            if self.processes.is_main:
                self.folder.begin(at.step)
            return random_tensors()

        try:
            writer.draws = self.processes.gather_all(begin)  # the loop waits for this exchange only
            writer.start()
        except BaseException:  # without its thread nothing would ever end the save, and an update would wait for it
            writer.hook.remove()
            raise
        self._writer = writer
        return writer.final

    def complete(self, wait: bool) -> bool:
        """Returns whether a save has been completed since the last call. All processes must call this together.

        `wait` blocks until the save is complete, however long that takes. Raises CheckpointError if it could not be written,
        DivergedError if a value is not finite, SentinelError if the base of an adapter has changed. Older ones are intact.
        """
        writer = self._writer
        if writer is None:
            return False
        while True:
            ends = self.processes.gather([(writer.ended.is_set(), writer.error is not None)])
            failed = any(error for _, error in ends)
            if failed or all(ended for ended, _ in ends):
                break
            if not wait:
                return False
            writer.wait(LOOK)
        if failed and writer.error is None:
            writer.give_up()  # it may wait for the part of the process that has failed
        try:
            self.processes.run_all(writer.result, keepalive=True)
        finally:
            if writer.ended.is_set():
                self._writer = None
                writer.hook.remove()
        self._longest = max(self._longest, writer.elapsed)
        return True

    def took(self) -> tuple[float, float | None]:
        """Returns the seconds of the longest save so far, 0 if none is complete, and of the one that is going on, or None."""
        return self._longest, None if self._writer is None else self._writer.elapsed

    def give_up(self) -> None:
        """Abandons the save that is going on, for a process that is told to exit at once."""
        if self._writer is not None:
            self._writer.give_up()

    def close(self) -> str | None:
        """Waits for the save that is going on after the loop has failed, and returns why that save failed, if it did.

        Only the main process waits for the parts of other processes; those finish as soon as their own part is written.
        """
        writer, self._writer = self._writer, None
        if writer is None:
            return None
        writer.leaving.set()
        try:
            writer.result()
        except Exception as error:
            return f"the checkpoint of step {writer.at.step} was not written: {error}"
        return None


def load_checkpoint(
    path: Path, model: PreTrainedModel, optimizer: Optimizer, schedule: LRScheduler, rank: int = 0, base: str | None = None
) -> Position:
    """Loads weights, optimizer, schedule and random states from `path`, whose bytes `choose` has compared with their hashes.

    `base` is the digest of the frozen weights under an adapter, which is computed if it is None. Raises CheckpointError if the
    checkpoint is damaged, or of another model or version of rlgen. Uses no collectives.
    """
    try:
        check_fit(path, model, None)
        state = read_json(path / "state" / "state.json")
        at = Position(state["step"], state["position"], state.get("nonfinite", 0))
        if is_adapted(model):
            load_adapter(path, model, base or base_digest(model))
        elif (path / WEIGHT_SHARDS).is_dir():
            read_shards(path / WEIGHT_SHARDS, own_tensors(model))
        else:
            load_model_weights(path, model)
        if (path / OPTIMIZER_SHARDS).is_dir():
            load_shards(path / OPTIMIZER_SHARDS, model, optimizer)
        else:
            load_optimizer(load_file(path / "state" / "optimizer.safetensors"), model, optimizer)
        # A list has an entry for each group of parameters, all alike. Weights that are divided otherwise are in other groups.
        stored, groups = state["schedule"], len(optimizer.param_groups)
        schedule.load_state_dict({key: one[:1] * groups if isinstance(one, list) else one for key, one in stored.items()})
        # load_state_dict does not set the learning rate of the optimizer: a schedule does that only when it steps.
        for group, rate in zip(optimizer.param_groups, schedule.get_last_lr(), strict=True):
            group["lr"] = rate
        if (path / "state" / random_name(rank)).exists():
            set_random(load_file(path / "state" / random_name(rank)))
        else:  # the checkpoint was written by fewer processes
            seed_random(f"{at.step}/{rank}")
    except (OSError, ValueError, KeyError, TypeError, AssertionError, SafetensorError, CheckpointException) as error:
        # torch's message may advise to unpickle, so only its type is shown.
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}); `rlgen checkpoints verify` says what is wrong, and --resume-step"
            " resumes from another checkpoint"
        ) from error
    return at


def check_fit(path: Path, model: PreTrainedModel, trainer: str | None) -> None:
    """Checks that the checkpoint at `path` is of this model and, unless it is None, of this kind of trainer."""
    appears(path / "manifest.json")  # a network file system may show the file late to other machines
    manifest = read_manifest(path)
    if trainer is not None and manifest.trainer != trainer:
        raise CheckpointError(f"{path} is a checkpoint of another trainer: trainer.kind was {manifest.trainer} and is {trainer}")
    before, now = ({**facts} for facts in (manifest.model, model_facts(model)))
    was, lora = before.pop("lora"), now.pop("lora")
    if was is None and lora is not None:
        raise CheckpointError(f"{path} holds no adapter: it is a checkpoint of a run without model.lora, which is set now")
    if was is not None and lora is None:
        raise CheckpointError(f"{path} holds an adapter only: it is a checkpoint of a run with model.lora, which is unset now")
    if was is not None and (other := [f"model.lora.{text}" for text in changed_facts(was, lora)]):
        raise CheckpointError(f"{path} is a checkpoint of another adapter: {'; '.join(other)}")
    if other := changed_facts(before, now):
        raise CheckpointError(f"{path} is a checkpoint of another model: {'; '.join(other)}")


@contextmanager
def whole_checkpoint(checkpoint: Path, folder: Path) -> Iterator[Path]:
    """Yields a folder that `from_pretrained` opens: `checkpoint`, or, if its weights are in shards, `folder` with all of them.

    `folder` is then written, and removed after the block. Holds the whole model in memory. Compares no hashes.
    """
    if not (checkpoint / WEIGHT_SHARDS).is_dir():
        yield checkpoint
        return
    try:
        without_values(str(checkpoint), None).save_pretrained(folder, state_dict=whole_shards(checkpoint / WEIGHT_SHARDS))
        shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("state", NAME), dirs_exist_ok=True)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
