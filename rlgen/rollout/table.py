"""Table of a step's samples that every process holds: a few numbers per row. Tokens stay in the process that sampled them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlgen.algorithms.base import Scores
from rlgen.processes import Processes
from rlgen.types import Samples

CAUSES = ("error", "timeout", "died", "memory")  # why rewards fail


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTable:
    """One row per sample of the step, in the same order in every process: by rank, and within a rank by the order of prompts."""

    labels: tuple[str, ...]  # [K] names of the rewards
    holder: NDArray[np.int64]  # [B] rank of the process that sampled the row and has its tokens
    place: NDArray[np.int64]  # [B] index among that process's samples
    group_id: NDArray[np.int64]  # [B] the prompt's position
    sample_index: NDArray[np.int64]  # [B] within the group
    prompt_tokens: NDArray[np.int64]  # [B]
    completion_tokens: NDArray[np.int64]  # [B]
    sampled_tokens: NDArray[np.int64]  # [B] of the completion: the loss is over these
    turns: NDArray[np.int64]  # [B] of the model
    weight_version: NDArray[np.int64]  # [B] the oldest weights that sampled a token of the row
    newest_version: NDArray[np.int64]  # [B] the newest ones
    truncated: NDArray[np.bool_]  # [B] ended by the token limit
    rewards: NDArray[np.float64]  # [B, K], NaN: does not apply, or failed
    reward: NDArray[np.float64]  # [B], NaN: not scorable
    causes: NDArray[np.int8]  # [B, K] why a reward failed: an index into `CAUSES`; -1: it did not fail
    replaced: NDArray[np.bool_]  # [B] of a group without signal, which other prompts replaced (`rollout.refill`)

    @classmethod
    def gather(cls, samples: Samples, processes: Processes, first: int = 0) -> "RowTable":
        """Gathers the rows of all processes. This is a collective.

        Args:
            samples: of this process.
            first: index of the first of them among all samples that this process holds.
        """
        count, labels = len(samples), samples.labels
        rows = np.zeros(
            count,
            dtype=[
                *(("holder", "i4"), ("place", "i4"), ("group_id", "i8"), ("sample_index", "i4"), ("prompt_tokens", "i4")),
                *(("completion_tokens", "i4"), ("sampled_tokens", "i4"), ("turns", "i4"), ("weight_version", "i4")),
                *(("newest_version", "i4"), ("truncated", "?")),
                *(("rewards", "f8", (len(labels),)), ("reward", "f8"), ("causes", "i1", (len(labels),))),
            ],
        )
        rows["holder"], rows["place"] = processes.rank, np.arange(first, first + count)
        rows["group_id"], rows["sample_index"] = samples.group_id, samples.sample_index
        rows["prompt_tokens"], rows["completion_tokens"] = samples.prompt_ids.lengths, samples.completion_ids.lengths
        rows["sampled_tokens"], rows["weight_version"] = samples.sampled_tokens, samples.weight_version
        rows["turns"], rows["newest_version"] = samples.turns, samples.newest_version
        rows["truncated"], rows["rewards"], rows["reward"] = samples.truncated, samples.rewards, samples.reward
        rows["causes"] = -1
        for row, errors in enumerate(samples.reward_errors):
            for label, text in errors.items():
                rows["causes"][row, labels.index(label)] = CAUSES.index(text.partition(":")[0])
        every = processes.gather_rows(rows)
        columns = {name: np.ascontiguousarray(every[name]) for name in every.dtype.names or ()}
        for name, column in columns.items():
            if column.dtype == np.int32:
                columns[name] = column.astype(np.int64)
        return cls(labels=labels, replaced=np.zeros(len(every), dtype=bool), **columns)

    @classmethod
    def join(cls, tables: Sequence["RowTable"]) -> "RowTable":
        """Concatenates tables of the same rewards, in their order."""
        columns = [one.name for one in fields(cls) if one.name != "labels"]
        return cls(
            labels=tables[0].labels,
            **{name: np.concatenate([getattr(table, name) for table in tables]) for name in columns},
        )

    def __len__(self) -> int:
        return len(self.group_id)

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> "RowTable":
        """Returns the rows at these indices, or where a boolean mask is true."""
        columns = [one.name for one in fields(self) if one.name != "labels"]
        return replace(self, **{name: getattr(self, name)[rows] for name in columns})

    def scores(self, weights: Mapping[str, float], kl: Tensor | None = None) -> Scores:
        """Returns the rewards and groups of the rows as tensors, for an algorithm.

        Args:
            weights: of the rewards, by label.
            kl: [B] KL of each completion to the reference.
        """
        columns = np.where(self.failed[:, None], np.nan, self.rewards)[:, [self.labels.index(label) for label in weights]]
        return Scores(
            rewards=torch.from_numpy(self.reward),
            columns=torch.from_numpy(columns),
            column_weights=torch.tensor(list(weights.values()), dtype=torch.float64),
            group_ids=torch.from_numpy(self.group_id),
            sample_index=torch.from_numpy(self.sample_index),
            truncated=torch.from_numpy(self.truncated),
            kl=kl,
        )

    @property
    def failed(self) -> NDArray[np.bool_]:
        """Returns [B], whether a reward that the row should have is unknown."""
        return ((self.causes >= 0) & np.isnan(self.rewards)).any(axis=1)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Returns [B], tokens of prompt and completion."""
        return self.prompt_tokens + self.completion_tokens
