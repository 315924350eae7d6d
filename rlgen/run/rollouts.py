"""Writes and reads `rollouts/step_000012.parquet`, the samples of a step. Each is written once, in a thread beside the loop.

One process writes one file. Several processes write a folder of that name with one file each, which pyarrow, pandas and DuckDB
read as one table. A file is written under a temporary name, flushed and renamed: under its final name it is complete.
"""

import json
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from rlgen.errors import CheckpointError
from rlgen.files import flush_to_disk, remove_path, written
from rlgen.rollout.frames import columns_digest
from rlgen.rollout.parquet import FIXED, OF_TURNS, DataColumns, Rollout, Stamp, parts_of, write_part
from rlgen.rollout.read import rollout_steps
from rlgen.rollout.sample import last_turn
from rlgen.rollout.samples import Samples
from rlgen.types import Ids, Prompt, Sample, whole_conversation

WAITING = 2  # steps that may be queued for the disk before `write` blocks
DECODED = 256  # completions that are decoded in one call


@dataclass(slots=True, kw_only=True)
class RolloutWriter:
    """Writes the rows of this process in its own thread. Errors of the thread are raised by `write` and `wait`."""

    folder: Path
    rank: int
    world: int
    prompt_at: Callable[[int], Prompt]  # the prompt at a position of the data's order
    tokenizer: PreTrainedTokenizerBase
    stop_ids: Sequence[int]
    every: int = 1  # steps between two that are written; 0: only those that are written with `always`
    keep: int | None = None  # number of newest steps that are kept; None: all
    # Rollouts of steps after the step that it returns are never deleted: a resumed run may need them.
    needed: Callable[[], int] = lambda: 0
    stamp: Callable[[Rollout], Stamp] = lambda rollout: {}  # metadata of a step's file, which the journal reads on a resume
    on_disk: Callable[[int, Path], None] = lambda step, path: None  # called in the thread when all processes have written a step
    turns: bool = False  # completions are conversations of several turns, whose messages are written too
    columns: DataColumns | None = None
    failure: CheckpointError | None = None
    pending: deque["Future[None]"] = field(default_factory=deque)
    unfinished: list[int] = field(default_factory=list)  # steps that this process has written and others had not yet
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="rollouts"))

    def write(self, rollout: Rollout, always: bool = False) -> None:
        """Queues the rows of a step for the thread, with `always` even if `every` would leave it out.

        Blocks only while `WAITING` earlier steps are not on disk yet. Raises CheckpointError if one could not be written.
        """
        self.wait(WAITING - 1)
        if always or (self.every and rollout.step % self.every == 0):
            self.pending.append(self.thread.submit(self._write, rollout, self.stamp(rollout)))

    def close(self) -> None:
        """Writes what is queued, and ends the thread. Does not raise its errors: whoever needs the rollouts calls `wait`."""
        self.thread.shutdown()
        with suppress(CheckpointError):
            self._tell()

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}.parquet"

    def wait(self, left: int = 0) -> None:
        """Blocks until at most `left` steps of this process are not on disk. Raises the thread's first CheckpointError."""
        while self.pending and (len(self.pending) > left or self.pending[0].done()):
            try:
                self.pending.popleft().result()
            except CheckpointError as error:
                self.failure = self.failure or error
        if self.failure is not None:
            raise self.failure

    def _write(self, rollout: Rollout, stamp: Stamp) -> None:
        path = self.path(rollout.step)
        part = path if self.world == 1 else path / f"part-{self.rank:05d}.parquet"
        with written(part):
            part.parent.mkdir(parents=True, exist_ok=True)
        rollout = rollout.in_order()
        texts, digests = self.texts(rollout.samples)
        write_part(part, rollout, texts, {**stamp, "columns": digests, **({"turns": True} if self.turns else {})})
        with written(part):
            flush_to_disk(part.parent)
        self.unfinished.append(rollout.step)
        self._tell()
        if self.rank == 0 and self.keep is not None:
            self._rotate(self.keep)

    def _tell(self) -> None:
        """Calls `on_disk` for the steps that all processes have written by now.

        Steps that other processes finish later are reported at the next step of this process, or in `close`.
        """
        for step in [step for step in self.unfinished if len(parts_of(self.path(step))) == self.world]:
            self.unfinished.remove(step)
            self.on_disk(step, self.path(step))

    def _rotate(self, keep: int) -> None:
        """Deletes all but the newest `keep` steps, except those that a run resumed from a checkpoint may take samples from."""
        needed = self.needed()
        for path in [self.path(step) for step in rollout_steps(self.folder)[:-keep] if step <= needed]:
            with written(path):
                remove_path(path)

    def texts(self, samples: Samples) -> tuple[dict[str, pa.Array], dict[str, str]]:
        """Returns the columns of text and of the data set, one value per row, and a digest of the data set's columns by group."""
        if self.columns is None:
            self.columns = DataColumns.of(self.prompt_at, FIXED | OF_TURNS if self.turns else FIXED)
        places = {group: place for place, (group, _) in enumerate(groupby(samples.group_id.tolist()))}
        prompts = [self.prompt_at(group) for group in places]
        row_of = pa.array(np.fromiter((places[group] for group in samples.group_id.tolist()), dtype=np.int64))
        ids = [last_turn(row.completion_ids, row.spans, row.messages, self.stop_ids) for row in samples]
        completions = [text for start in range(0, len(ids), DECODED) for text in self._decoded(ids[start : start + DECODED])]
        texts = {
            "prompt": pa.array([sound(prompt.text) for prompt in prompts], pa.string()).take(row_of),
            "completion": pa.array([sound(text) for text in completions], pa.string()),
            **(self._of_turns(samples, completions) if self.turns else {}),
            **{name: column.take(row_of) for name, column in self.columns.arrays([prompt.columns for prompt in prompts]).items()},
        }
        return texts, {str(prompt.position): columns_digest(prompt) for prompt in prompts}

    @staticmethod
    def _of_turns(samples: Samples, completions: Sequence[str]) -> dict[str, pa.Array]:
        """Returns the columns `OF_TURNS`: all messages after the prompt, as JSON, and what the replies counted."""
        before, counts = samples.messages or ("",) * len(samples), samples.counts or ({},) * len(samples)
        messages = [json.dumps(whole_conversation(*row)) for row in zip(before, completions, strict=True)]
        return {
            "messages": pa.array(messages, pa.string()),
            "tool_counts": pa.array([list(one.items()) for one in counts], pa.map_(pa.string(), pa.int64())),
        }

    def text_of(self, sample: Sample) -> str:
        """Returns the text of the last turn of a completion, without the stop token that ended it."""
        return self._decoded([last_turn(sample.completion_ids, sample.spans, sample.messages, self.stop_ids)])[0]

    def _decoded(self, ids: Sequence[Ids]) -> list[str]:
        return self.tokenizer.batch_decode([one.tolist() for one in ids], skip_special_tokens=True)


def sound(text: str) -> str:
    """Returns text that UTF-8 can encode: replaces lone surrogates, which JSON permits, with question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")
