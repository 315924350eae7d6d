"""Reads the samples and rewards of a step that a run has trained: from its rollouts, or from its journal.

The rollouts hold all of a step: ids, log-probs as float32, spans with weight versions, and rewards. The journal holds a step from
its first answer until its rollouts are on disk; a step that `rollouts.every` leaves out, until the oldest checkpoint is a later
one. It lacks the prompts, which are read from the data again. Nothing here writes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rlgen.rollout.frames import AnswerRecord, asked_digest, digest
from rlgen.rollout.journal import Journal, is_start, journal_step
from rlgen.rollout.parquet import parts_of, read_part
from rlgen.rollout.sample import sample_of, sample_seed
from rlgen.rollout.samples import Samples
from rlgen.types import Prompt, Sampling

Rewarded = Sequence[Mapping[str, Any]]  # of the samples of a group, as `given_rewards` returns them


def is_recorded(run: Path, step: int) -> bool:
    """Returns whether files of a step are there; whether they are complete shows only when they are read."""
    return bool(processes_of(run, step) or journal_of(run, step))


def rollouts_of(run: Path, step: int) -> Path:
    return run / "rollouts" / f"step_{step:06d}.parquet"


def journal_of(run: Path, step: int) -> list[str]:
    files = sorted((run / "journal").glob(f"*_{step:06d}.*"))
    return [file.name for file in files if journal_step(file) == step and not is_start(file)]


def processes_of(run: Path, step: int) -> int:
    """Returns how many processes have written the rollouts of a step; 0: they are not there."""
    return len(parts_of(rollouts_of(run, step)))


def from_rollouts(run: Path, step: int, rank: int | None = None) -> Samples | None:
    """Returns the samples of a step, ordered by group and by sample; None if its rollouts are missing or damaged.

    None, too, if the step was trained with experts of the engine (`model.route_replay`), which only the journal has.

    Args:
        rank: of the process whose samples are returned; None: those of all.
    """
    parts = [read_part(part) for part in parts_of(rollouts_of(run, step))[rank : None if rank is None else rank + 1]]
    found = [part[0] for part in parts if part is not None]
    if not found or len(found) < len(parts) or any(part[1].get("experts") for part in parts if part is not None):
        return None
    samples = Samples.join(found)
    return samples.take(np.lexsort((samples.sample_index, samples.group_id)))


def from_journal(
    run: Path,
    step: int,
    labels: Sequence[str],
    prompt_at: Callable[[int], Prompt],
    sampling: Sampling,
    run_seed: int,
    oldest: int,
    say: Callable[[str], None],
) -> Samples:
    """Returns the samples of a step whose answers and rewards are in the journal, ordered by group and by sample.

    Args:
        labels: names of the rewards.
        prompt_at: returns the prompt at a position of the data's order.
        oldest: weight version; samples of older weights were dropped.
        say: receives what is damaged.
    """
    journal = Journal(
        folder=run / "journal", rank=0, engine="", judge="", say=say, files={step: journal_of(run, step)}, closed=True
    )
    answers: dict[int, dict[int, AnswerRecord]] = {}  # the newest ones, by group id and sample index
    rewarded: dict[int, Rewarded] = {}  # the newest ones, by group id
    for record in journal.records(step):
        if isinstance(record, AnswerRecord):
            answers.setdefault(record.group_id, {})[record.sample_index] = record
        else:
            rewarded[record.group_id] = record.samples
    with_these, samples = digest(sampling), []
    for group_id in sorted(rewarded):
        prompt = prompt_at(group_id)
        every = [(one, one.completion(prompt.prompt_ids)) for _, one in sorted(answers.get(group_id, {}).items())]
        own = [(answer, completion) for answer, completion in every if completion.weight_version >= oldest]
        if len(own) != len(rewarded[group_id]):
            continue  # the caller sees that samples are missing
        for (answer, completion), given in zip(own, rewarded[group_id], strict=True):
            seed = sample_seed(run_seed, group_id, answer.sample_index)
            if answer.asked == asked_digest(prompt.prompt_ids, seed, with_these):  # else the data or the tokenizer have changed
                samples.append(replace(sample_of(prompt, answer.sample_index, seed, completion, text=""), **given))
    return Samples.of(samples, labels)
