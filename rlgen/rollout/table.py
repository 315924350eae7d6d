"""Table of a step's samples that every process holds: a few numbers per row. Tokens stay in the process that sampled them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlgen.algorithms.base import Scores
from rlgen.processes import Processes
from rlgen.rollout.samples import Samples, columns_of

# Columns of `Samples` that the table has as they are.
OF_SAMPLES = (
    *("group_id", "sample_index", "sampled_tokens", "turns", "weight_version", "newest_version"),
    *("truncated", "rewards", "reward"),
)
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
    replaced: NDArray[np.bool_]  # [B] of a group without signal, which other prompts replaced (`rollout.dynamic_sampling`)

    @classmethod
    def gather(cls, samples: Samples, processes: Processes, first: int = 0) -> "RowTable":
        """Gathers the rows of all processes: a collective. `first`: index of the first of `samples` among all of this process."""
        count, labels = len(samples), samples.labels
        causes = np.full((count, len(labels)), -1, dtype=np.int8)
        for row, errors in enumerate(samples.reward_errors):
            for label, text in errors.items():
                causes[row, labels.index(label)] = CAUSES.index(text.partition(":")[0])
        own: dict[str, NDArray[Any]] = {
            "holder": np.full(count, processes.rank),
            "place": np.arange(first, first + count),
            "prompt_tokens": samples.prompt_ids.lengths,
            "completion_tokens": samples.completion_ids.lengths,
            "causes": causes,
            **{name: getattr(samples, name) for name in OF_SAMPLES},
        }
        rows = np.zeros(count, dtype=[(name, column.dtype, column.shape[1:]) for name, column in own.items()])
        for name, column in own.items():
            rows[name] = column
        every = np.concatenate(processes.gather([rows]))
        columns = {name: np.ascontiguousarray(every[name]) for name in own}
        return cls(labels=labels, replaced=np.zeros(len(every), dtype=bool), **columns)

    @classmethod
    def join(cls, tables: Sequence["RowTable"]) -> "RowTable":
        columns = {name: np.concatenate([getattr(table, name) for table in tables]) for name in columns_of(cls)}
        return cls(labels=tables[0].labels, **columns)

    def __len__(self) -> int:
        return len(self.group_id)

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> "RowTable":
        return replace(self, **{name: getattr(self, name)[rows] for name in columns_of(type(self))})

    def scores(self, weights: Mapping[str, float], kl: Tensor | None = None) -> Scores:
        """Returns the rewards and groups of the rows as tensors, for an algorithm. `weights`: of the rewards, by label. `kl`: [B]
        KL of each completion to the reference.
        """
        places, weighed = [self.labels.index(label) for label in weights], np.array(list(weights.values())) != 0
        columns = self.rewards[:, places]
        failed = ((self.causes[:, places] >= 0) & np.isnan(columns) & weighed).any(axis=1, keepdims=True)
        return Scores(
            rewards=torch.from_numpy(self.reward),
            columns=torch.from_numpy(np.where(failed, np.nan, columns)),
            column_weights=torch.tensor(list(weights.values()), dtype=torch.float64),
            group_ids=torch.from_numpy(self.group_id),
            sample_index=torch.from_numpy(self.sample_index),
            truncated=torch.from_numpy(self.truncated),
            kl=kl,
        )

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Returns [B], tokens of prompt and completion."""
        return self.prompt_tokens + self.completion_tokens
