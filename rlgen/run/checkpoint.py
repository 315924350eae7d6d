"""Checkpoints: `step_000020/` is a folder that `from_pretrained` opens, with the trainer's state under `state/`.

    config.json, model.safetensors, tokenizer files     the policy, in float32: the weights that are trained
    adapter_config.json, adapter_model.safetensors      instead of the first two, where an adapter is what is trained
    state/optimizer.safetensors                         moments and step counts by parameter name; or, of sharded weights,
    state/optimizer/                                    the same by torch.distributed.checkpoint, each process its shard
    state/random.safetensors                            random states of the main process
    state/random_1.safetensors                          and of the others
    state/state.json                                    step, data position, schedule
    manifest.json                                       what all this is of, and the hash of each file; written last

The weights are whole in every checkpoint: they pass whole through each weight sync too, and a folder that opens everywhere is
what a checkpoint is for. The optimizer's state, twice as large, stays in shards. Either form is read by any number of
processes, with sharded weights or whole ones.

A folder is written under another name, flushed, hashed, and renamed when it is complete. Before a run goes on from one, every
byte is compared with its hash. Nothing here is a pickle.
"""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import rlgen
from rlgen.errors import CheckpointError, DivergedError, Fault, SentinelError
from rlgen.files import appears, flush, read_json, unwritable, write_json
from rlgen.models.lora import is_adapted, load_adapter, save_adapter
from rlgen.models.weights import base_digest, non_finite
from rlgen.processes import Processes
from rlgen.run.manifest import differences, read_manifest, seal
from rlgen.run.shelf import WRITING, Choice, Shelf
from rlgen.run.state import (
    is_sharded,
    load_optimizer,
    load_shards,
    load_weights,
    model_facts,
    optimizer_tensors,
    random_tensors,
    save_shards,
    save_weights,
    seed_random,
    set_random,
    stored_tensors,
)


@dataclass(frozen=True, slots=True)
class TrainerState:
    """Where a run stands. TrainerState(step=20, position=160, weight_version=20, schedule={...})"""

    step: int  # steps done
    position: int  # prompts taken from the data's order, over all epochs
    weight_version: int
    schedule: dict[str, Any]
    nonfinite: int = 0  # steps in a row, up to this one, without an update because a number was not finite


class Checkpoints:
    """The checkpoints of one run; the newest `keep` stay. All processes save and load together; the main one writes.

    Args:
        base: digest of the frozen weights under an adapter, which no checkpoint holds: they must stay what they are.
        trainer: kind of the trainer, kept with each.
    """

    def __init__(
        self, folder: Path, keep: int, processes: Processes, base: str | None = None, trainer: str | None = None
    ) -> None:
        self.shelf = Shelf(folder)
        self.keep = keep
        self.processes = processes
        self.base = base
        self.trainer = trainer

    def oldest(self) -> int:
        """The step of the first checkpoint that is kept; 0: there is none."""
        return min(self.shelf.steps(), default=0)

    def has(self, step: int) -> bool:
        """Whether a complete checkpoint of `step` is there."""
        return self.shelf.has(step)

    def choose(self, step: int | None = None) -> Choice:
        """What a run goes on from: the newest good checkpoint, or that of `step`. Reads every byte; in the main process alone.

        Raises:
            UsageError: there is none of `step`.
            CheckpointError: none is good, or it is of another format, or holds numbers that are not finite. That is no damage:
                to go on from an older one is the user's decision.
        """
        self.shelf.sweep()
        choice = self.shelf.choose(step)
        if choice.path is not None and (name := non_finite(stored_tensors(choice.path))):
            raise CheckpointError(
                f"{choice.path}: {name} has values that are not finite: the run had diverged when it was saved; go on from an"
                f" earlier one with --resume-step, of {', '.join(map(str, self.shelf.steps()))}"
            )
        return choice

    def save(
        self,
        step: int,
        position: int,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        optimizer: Optimizer,
        schedule: LRScheduler,
        nonfinite: int = 0,
    ) -> Path:
        """Writes the checkpoint of `step`, then drops the oldest.

        Raises:
            CheckpointError: it could not be written; the older ones are untouched.
            DivergedError: a value is not finite; nothing is written.
            SentinelError: the base of an adapter has changed; nothing is written.
        """
        base = same_base(model, self.base) if is_adapted(model) else ""
        moments = optimizer_tensors(model, optimizer)
        self.processes.agreed(lambda: refuse_non_finite(model, moments))
        final, aside = self.shelf.path(step), self.shelf.folder / f"{WRITING}{step:06d}"
        facts = {
            "step": step,
            "time": time.time(),
            "rlgen": rlgen.__version__,
            "trainer": self.trainer,
            "processes": self.processes.world,
            "model": model_facts(model),
        }
        draws = self.processes.gather([random_tensors()])

        @written_as(final)
        def begin() -> None:
            shutil.rmtree(aside, ignore_errors=True)
            (aside / "state").mkdir(parents=True)

        @written_as(final)
        def weights() -> None:
            if is_adapted(model):
                if self.processes.is_main:
                    save_adapter(model, aside, base)
            else:
                save_weights(model, aside, self.processes.is_main)

        @written_as(final)
        def finish() -> None:
            tokenizer.save_pretrained(aside)
            if not is_sharded(model):
                save_file(moments, aside / "state" / "optimizer.safetensors")
            for shard in (aside / "state" / "optimizer" / name for name in shards):
                if not appears(shard):  # sealed without it, this would pass for whole, and older ones would go for it
                    raise CheckpointError(f"{shard}, of another process, is not seen: is run.dir on shared storage?")
            for rank, draw in enumerate(draws):
                save_file(draw, aside / "state" / random_name(rank))
            state = TrainerState(step, position, step, schedule.state_dict(), nonfinite)
            write_json(aside / "state" / "state.json", asdict(state))
            seal(aside, facts)
            if final.exists():  # damaged: a complete one is not saved again
                self.shelf.set_aside(final)
            aside.rename(final)
            flush(final.parent)
            self.shelf.rotate(self.keep)

        try:
            self.processes.on_main(begin)
            self.processes.agreed(weights, patient=True)  # the main process writes all of them
            shards: list[str] = []
            if is_sharded(model):
                with written_as(final):  # fails in all processes if it does in one
                    save_shards(moments, aside / "state" / "optimizer")
                own = (aside / "state" / "optimizer").glob(f"shard-{self.processes.rank + 1:05d}-*")
                shards = self.processes.gather([path.name for path in own])
            self.processes.patiently(finish)
        except CheckpointError:
            if self.processes.is_main:  # the space is needed for what is said about it
                shutil.rmtree(aside, ignore_errors=True)
            raise
        return final

    @staticmethod
    def load(
        path: Path, model: PreTrainedModel, optimizer: Optimizer, schedule: LRScheduler, processes: Processes
    ) -> TrainerState:
        """Puts weights, optimizer, schedule and random states of `path` in place. `choose` has compared its bytes.

        Raises:
            CheckpointError: it is damaged, or of another model or version of rlgen.
        """
        return processes.agreed(lambda: load_parts(path, model, optimizer, schedule, processes.rank))


def load_parts(path: Path, model: PreTrainedModel, optimizer: Optimizer, schedule: LRScheduler, rank: int) -> TrainerState:
    """Raises CheckpointError."""
    try:
        check_fit(path, model, None)
        state = TrainerState(**read_json(path / "state" / "state.json"))
        if is_adapted(model):
            load_adapter(path, model, base_digest(model))
        else:
            load_weights(path, model)
        if (path / "state" / "optimizer").is_dir():
            load_shards(path / "state" / "optimizer", model, optimizer)
        else:
            load_optimizer(load_file(path / "state" / "optimizer.safetensors"), model, optimizer)
        schedule.load_state_dict(state.schedule)
        # A schedule changes the rate when it steps, and does not step here.
        for group, rate in zip(optimizer.param_groups, schedule.get_last_lr(), strict=True):
            group["lr"] = rate
        if (path / "state" / random_name(rank)).exists():
            set_random(load_file(path / "state" / random_name(rank)))
        else:  # this process is one more than there were
            seed_random(f"{state.step}/{rank}")
    except (OSError, ValueError, KeyError, TypeError, AssertionError, SafetensorError, CheckpointException) as error:
        # What torch says may advise to unpickle; its type is enough.
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}); `rlgen checkpoints verify` says what is wrong, --resume-step"
            " goes on from another one"
        ) from error
    return state


def check_fit(path: Path, model: PreTrainedModel, trainer: str | None) -> None:
    """Whether the checkpoint at `path` is of this model and trainer. `trainer` None: of any.

    Raises:
        CheckpointError: it is not; names what differs.
    """
    appears(path / "manifest.json")  # to a process on another machine, perhaps late
    manifest = read_manifest(path)
    if trainer is not None and manifest.trainer != trainer:
        raise CheckpointError(f"{path} is a checkpoint of another trainer: trainer.kind was {manifest.trainer} and is {trainer}")
    before, now = ({**facts} for facts in (manifest.model, model_facts(model)))
    was, lora = before.pop("lora"), now.pop("lora")
    if was is None and lora is not None:
        raise CheckpointError(f"{path} holds no adapter: it is a checkpoint of a run without model.lora, which is set now")
    if was is not None and lora is None:
        raise CheckpointError(f"{path} holds an adapter only: it is a checkpoint of a run with model.lora, which is unset now")
    if was is not None and (other := [f"model.lora.{text}" for text in differences(was, lora)]):
        raise CheckpointError(f"{path} is a checkpoint of another adapter: {'; '.join(other)}")
    if other := differences(before, now):
        raise CheckpointError(f"{path} is a checkpoint of another model: {'; '.join(other)}")


def refuse_non_finite(model: PreTrainedModel, moments: dict[str, Any]) -> None:
    """Raises DivergedError: a run that went on would go on from nothing, and good checkpoints would go for it."""
    if name := non_finite([*model.named_parameters(), *moments.items()]):
        raise DivergedError(f"{name} has values that are not finite; nothing was saved, the last checkpoint stands")


@contextmanager
def written_as(path: Path) -> Iterator[None]:
    """Raises CheckpointError for what goes wrong while `path` is written."""
    try:
        yield
    except (OSError, SafetensorError, CheckpointException) as error:
        raise unwritable(path, error) from error


def random_name(rank: int) -> str:
    return f"random_{rank}.safetensors" if rank else "random.safetensors"


def saved_processes(path: Path) -> int:
    """How many processes wrote the checkpoint at `path`."""
    return read_manifest(path).processes


def same_base(model: PreTrainedModel, before: str | None) -> str:
    """The digest of the frozen weights under an adapter.

    Raises:
        SentinelError: it is not what it was `before`.
    """
    now = base_digest(model)
    if before is not None and now != before:
        raise SentinelError(
            Fault.BASE_CHANGED,
            f"the frozen weights under the adapter are not those that the run began with (SHA-256 {before[:12]}, now {now[:12]}):"
            " something writes into them, and the adapter would be worth nothing on the model as it was; nothing was saved",
        )
    return now
