"""Computes a step of a run again, without an engine: `rlgen replay`.

    start    the newest good checkpoint before the step, or the weights that the run began with
    path     the steps between are trained again, on the samples and rewards that the run has recorded
    step     computed with the run's own settings, and, if some are changed, from the same weights with these too

The samples go through the code of training itself (`trainers/train_batch.py`, `trainers/update.py`). Nothing is sampled,
scored or written. A step of several processes is computed by as many, which a launcher starts: only then sums are in the same
order.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlgen.algorithms.base import Algorithm
from rlgen.algorithms.registry import build_algorithm
from rlgen.errors import DamagedCheckpoint, UsageError
from rlgen.metrics import Metric
from rlgen.models.load import locate
from rlgen.processes import Processes
from rlgen.recipe import Recipe
from rlgen.recipe.sizes import FOLLOWING, is_written
from rlgen.rollout.journal import from_journal, is_recorded
from rlgen.rollout.read import from_rollouts, processes_of
from rlgen.rollout.samples import Samples
from rlgen.rollout.table import RowTable
from rlgen.run.checkpoint_folder import CheckpointFolder, ChosenCheckpoint
from rlgen.run.directory import without_nonfinite
from rlgen.run.manifest import check_files
from rlgen.run.provenance import provenance
from rlgen.setup.change import Change, changed_state, compare_settings
from rlgen.setup.data import Data, open_data
from rlgen.setup.policy import open_policies
from rlgen.setup.settings import TrainSettings
from rlgen.setup.train_state import TrainState, build_learning, open_train_state, restore
from rlgen.setup.trainer_and_engine import TRIED, sampling_of
from rlgen.trainers.collect import Collected, silent_groups
from rlgen.trainers.loop import Learning
from rlgen.types import Position

Say = Callable[[str], None]
Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What a run has recorded about itself."""

    path: Path
    recipe: Recipe  # with every size
    attempts: Sequence[Record]  # provenance.json
    steps: Mapping[int, Record]  # metrics.jsonl, by step

    @classmethod
    def of(cls, path: Path, recipe: Recipe, attempts: Sequence[Record], metrics: Sequence[Record]) -> "Past":
        """Reads the data if `resolved.yaml` lacks sizes that follow from it."""
        whole = all(is_written(recipe, key) for key in FOLLOWING)
        return cls(
            path=path,
            recipe=recipe if whole else open_data(recipe).recipe,
            attempts=attempts,
            steps={record[Metric.STEP]: record for record in metrics},
        )

    def attempt_of(self, step: int) -> Record:
        return next((one for one in reversed(self.attempts) if one.get("from_step", 0) < step), {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A step that was computed again. `metrics` has the keys of metrics.jsonl that an update measures."""

    step: int
    start: int  # step of the checkpoint; 0: the weights that the run began with
    metrics: Record  # with the settings of the run
    differences: Mapping[str, tuple[Any, Any]]  # from metrics.jsonl: recorded and replayed value, by key
    first_off: int | None  # the first step on the path whose numbers differ from metrics.jsonl
    other: Sequence[str]  # what is not as it was when the run trained: "threads 4, now 2"
    change: Change | None  # None: no settings were changed


def replay(past: Past, step: int, changed: Recipe | None, say: Say, processes: Processes) -> Replay:
    """Computes a step again. torch uses as many threads as it did in the run: the order of its sums depends on their number.

    Args:
        changed: the recipe with other settings, to compute the step with them too; see `setup.change.with_changes`.
        say: receives messages about what takes time, or is not as it should be.
        processes: one, or as many as the run had.
    """
    start = processes.on_main(lambda: start_of(past, step))
    if changed is not None and processes.world > 1 and past.recipe.processes.strategy == "fsdp":
        raise UsageError("--set needs one process if weights are sharded; start `rlgen replay` without a launcher")
    for notice in start.notices:
        say(notice)
    torch.set_num_threads(past.attempt_of(step).get("threads", torch.get_num_threads()))
    recorder = Recorder(past=past, say=say)
    samples = processes.run_all(lambda: recorder.samples(step, processes))
    prompts = processes.gather(list(islice(samples.prompt_ids, TRIED)))
    settings = TrainSettings.of(past.recipe, locate(past.recipe.model.path), prompts)
    algorithms = [build_algorithm(one.trainer) for one in (past.recipe, changed) if one is not None]
    state, at = open_at(past, settings, algorithms, start, processes, say)
    if samples.experts and (why := state.policy.replay_routes()):
        raise UsageError(f"step {step} was trained with the experts of the engine, but {why}")
    weights, first_off = {reward.label: reward.weight for reward in past.recipe.rewards}, None
    sampling = sampling_of(past.recipe.rollout, past.recipe.structured_regex, (), None)
    own = build_learning(state, sampling, processes, weights, None)
    if at.step + 1 < step:
        say(f"training {ranges(range(at.step + 1, step))} again, on what the run has recorded")
    for before in range(at.step + 1, step):
        got = recorder.collected(before, at, own)
        metrics = without_nonfinite(own(got, before).metrics)
        state.schedule.step()
        first_off = first_off or (before if differences(past.steps.get(before, {}), metrics) else None)
        at = Position(before, at.prompts + got.prompts)
    got, change = recorder.collected(step, at, own), None
    if changed is None:
        metrics = without_nonfinite(own(got, step).metrics)
    else:
        other_settings = TrainSettings.of(changed, settings.location, settings.prompts)
        other_state = changed_state(state, other_settings, algorithms[1], step)
        other = build_learning(other_state, sampling, processes, weights, None)
        metrics, change = compare_settings(own, other, got, step, changed.optim.offload)
    return Replay(
        step=step,
        start=start.step,
        metrics=metrics,
        differences=differences(past.steps[step], metrics),
        first_off=first_off,
        other=others(past, step, processes),
        change=change,
    )


def start_of(past: Past, step: int) -> ChosenCheckpoint:
    """Returns the newest good checkpoint before `step`; `path` is None for the weights that the run began with."""
    if step not in past.steps:
        raise UsageError(f"--step {step}: {past.path} has no such step in metrics.jsonl, which has {ranges(past.steps)}")
    notices: list[str] = []
    chosen = ChosenCheckpoint()
    saved = CheckpointFolder(past.path / "checkpoints").steps()
    for number in sorted((one for one in saved if one < step), reverse=True):
        try:
            check_files(saved[number], hashes=True)
            chosen = ChosenCheckpoint(number, saved[number])
            break
        except DamagedCheckpoint as error:
            notices.append(f"DAMAGED CHECKPOINT: {error}; an earlier one is used")
    if missing := [one for one in range(chosen.step + 1, step + 1) if not is_recorded(past.path, one)]:
        where = f"the checkpoint of step {chosen.step}" if chosen.step else "the start of the run"
        raise UsageError(
            f"--step {step}: a replay starts from {where}, but the samples of {ranges(missing)} are no longer recorded"
            f" (rollouts.every, rollouts.keep); steps that can be replayed: {ranges(replayable(past))}"
        )
    return replace(chosen, notices=tuple(notices))


def replayable(past: Past) -> list[int]:
    """Returns the steps whose samples are recorded, with those of all steps since the checkpoint before them."""
    saved, found, unbroken = set(CheckpointFolder(past.path / "checkpoints").steps()), [], True
    for step in range(1, max(past.steps, default=0) + 1):
        unbroken = (unbroken or step - 1 in saved) and is_recorded(past.path, step)
        found += [step] if unbroken and step in past.steps else []
    return found


def open_at(
    past: Past, settings: TrainSettings, algorithms: Sequence[Algorithm], start: ChosenCheckpoint, processes: Processes, say: Say
) -> tuple[TrainState, Position]:
    """Opens policy, optimizer and schedule as they were after `start`; with a reference if one of `algorithms` needs it."""
    needing = next((one for one in algorithms if one.reference != "none"), algorithms[0])
    policies = open_policies(settings, needing, start.path, processes, None, say)
    began_with = past.attempts[0].get("weights") if past.attempts else None
    if (start.path is None or needing.reference != "none") and began_with not in (None, policies.weights):
        needed = "the step is computed from them" if start.path is None else "they are the reference"
        raise UsageError(
            f"the weights in model.path {settings.location} have changed since the run began (digest {began_with}, now"
            f" {policies.weights}), and {needed}: bring them back"
            + ("" if start.path else ", or replay a step after a checkpoint")
        )
    state = replace(open_train_state(settings, needing, policies), algorithm=algorithms[0])
    return state, restore(state, start.path, processes)


@dataclass(kw_only=True)
class Recorder:
    """Reads what each step has learned from. Opens the data only if the answers of a step are in the journal alone."""

    past: Past
    say: Say

    def collected(self, step: int, at: Position, own: Learning) -> Collected:
        """Returns the samples of a step as training collected them."""
        recipe = self.past.recipe
        samples = own.update.processes.run_all(lambda: self.with_images(self.samples(step, own.update.processes), step))
        table = RowTable.gather(samples, own.update.processes)
        table = table.take(np.lexsort((table.sample_index, table.group_id)))  # of `refill`, prompt by prompt as it was collected
        replaced = np.zeros(len(table), dtype=bool)
        groups, first = np.unique(table.group_id), 0
        wanted, left = recipe.rollout.prompts_per_step, recipe.rollout.dynamic_sampling
        while wanted and left:
            silent = silent_groups(
                table.take(np.isin(table.group_id, groups[first : first + wanted])), own.update.algorithm, own.builder.weights
            )
            replaced |= np.isin(table.group_id, silent)
            first, wanted, left = first + wanted, len(silent), left - 1
        used = self.past.attempt_of(step).get("data", {}).get("used", 1)
        return Collected(
            table=replace(table, replaced=replaced),
            samples=samples,
            dropped=0,
            counts=None,
            prompts=max(recipe.rollout.prompts_per_step, len(groups)),  # fewer groups: all samples of some were too old
            epoch=at.prompts / used,
        )

    @cached_property
    def data(self) -> Data:
        return open_data(self.past.recipe)

    def samples(self, step: int, processes: Processes) -> Samples:
        """Returns the samples of a step, from its rollouts or else from the journal; of several processes, those of this one."""
        if processes.world > 1:
            return self.part(step, processes)
        recipe = self.past.recipe
        tokens = self.past.steps.get(step, {}).get(Metric.TOKENS_GENERATED)
        if (samples := from_rollouts(self.past.path, step)) is None or not is_whole(samples, tokens):
            labels = [reward.label for reward in recipe.rewards]
            sampling = sampling_of(recipe.rollout, recipe.structured_regex, self.data.stop_ids, None)
            oldest, prompt_of = step - 1 - recipe.oldest_sample, self.data.prompts.at
            samples = from_journal(self.past.path, step, labels, prompt_of, sampling, recipe.run.seed, oldest, self.say)
        if not is_whole(samples, tokens):
            raise UsageError(
                f"step {step}: neither rollouts nor journal in {self.past.path} hold all that was sampled"
                f" ({samples.sampled_tokens.sum()} of {tokens} tokens): a file is missing or damaged, or the data has"
                " changed; bring it back, or replay a step after a later checkpoint"
            )
        return samples

    def with_images(self, samples: Samples, step: int) -> Samples:
        """Returns the samples with the images of their prompts, which are in the data alone."""
        if self.past.recipe.data.columns.images is None:
            return samples
        prompts = self.data.prompts
        if (was := self.past.attempt_of(step).get("prompt_ids")) not in (None, prompts.digest):
            raise UsageError(
                f"step {step}: its prompts or their images have changed since it was trained (digest {was}, now"
                f" {prompts.digest}): bring them back"
            )
        of_group = {group: prompts.at(group).images for group in set(samples.group_id.tolist())}
        return replace(samples, images=tuple(of_group[group] for group in samples.group_id.tolist()))

    def part(self, step: int, processes: Processes) -> Samples:
        had = processes_of(self.past.path, step)
        if had and had != processes.world:
            start = f"start {had} with {torchrun(had)}" if had > 1 else "start `rlgen replay` without a launcher"
            raise UsageError(
                f"step {step} was trained by {had} process{'es' if had > 1 else ''}, but {processes.world} run: {start}"
            )
        samples = from_rollouts(self.past.path, step, processes.rank)
        if samples is None:
            raise UsageError(
                f"step {step}: several processes need its complete rollouts, which {self.past.path} lacks; start"
                " `rlgen replay` without a launcher, or replay a step after a later checkpoint"
            )
        return samples


def is_whole(samples: Samples, tokens: int | None) -> bool:
    return tokens is None or int(samples.sampled_tokens.sum()) == tokens


def differences(recorded: Record, metrics: Record) -> dict[str, tuple[Any, Any]]:
    """Returns (recorded, replayed) of each key of both whose values differ in any bit."""
    return {key: (recorded[key], value) for key, value in metrics.items() if key in recorded and recorded[key] != value}


def others(past: Past, step: int, processes: Processes) -> list[str]:
    """Returns what is not as it was when the step was trained, and may change the last bits of a sum."""
    then, now = past.attempt_of(step), provenance()
    pairs = [(key, then.get(key), now[key]) for key in ("rlgen", "processor", "threads", "gpus")]
    pairs += [(key, then.get("packages", {}).get(key), now["packages"].get(key)) for key in ("torch", "transformers")]
    found = [f"{key} {was}, now {is_}" for key, was, is_ in pairs if was is not None and was != is_]
    had = processes_of(past.path, step)
    return found + ([f"{had} processes, now {processes.world}: {torchrun(had)}"] if had and had != processes.world else [])


def torchrun(processes: int) -> str:
    return f"`torchrun --nproc-per-node {processes} -m rlgen replay …`"


def ranges(steps: Sequence[int] | Mapping[int, Any]) -> str:
    """Returns steps in words: `steps 1 to 20`, `step 3, steps 5 to 9`, or `none`."""
    # Steps in a row are all as far from their places.
    parts = [[step for _, step in row] for _, row in groupby(enumerate(sorted(steps)), lambda at: at[1] - at[0])]
    return ", ".join(f"steps {part[0]} to {part[-1]}" if part[1:] else f"step {part[0]}" for part in parts) or "none"
