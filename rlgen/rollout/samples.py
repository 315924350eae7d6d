"""The samples of a step as columns, which are arrays over all rows. `rlgen.types` explains the letters of their axes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlgen.types import Experts, Image, Record, Sample, Span, no_experts

# What a row has in the columns of `Samples` that may be empty.
ABSENT: Mapping[str, Any] = {"reward_errors": {}, "messages": "", "counts": {}, "images": (), "experts": no_experts()}
# Columns that `Sample` has under the same name: one integer per row, and one array per row.
INTEGERS = ("group_id", "sample_index", "seed", "cached_tokens")
ARRAYS = {"prompt_ids": np.int32, "completion_ids": np.int32, "sampler_logp": np.float32}


@dataclass(frozen=True, slots=True, eq=False)
class Ragged(Record):
    """Rows of unequal lengths in one array, values[offsets[i]:offsets[i + 1]]: Ragged([9, 8, 257], [0, 1, 3])[1] is [8, 257]"""

    values: NDArray[Any]  # [N]
    offsets: NDArray[np.int64]  # [B + 1]

    @classmethod
    def of(cls, rows: Sequence[NDArray[Any]], dtype: Any, shape: tuple[int, ...] = ()) -> "Ragged":
        """Concatenates rows into one array; this is the only copy made of them. `shape`: of one entry of a row."""
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        return cls(np.concatenate(rows, dtype=dtype) if rows else np.zeros((0, *shape), dtype=dtype), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> NDArray[Any]:
        """Returns a view of one row."""
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return (self[row] for row in range(len(self)))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Returns [B], the length of each row."""
        return np.diff(self.offsets)

    def take(self, rows: Sequence[int] | NDArray[np.int64]) -> "Ragged":
        """Returns a copy of the rows at these indices, in their order."""
        return Ragged.of([self[row] for row in rows], self.values.dtype, self.values.shape[1:])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Samples(Record):
    """The samples of a step that one process holds, as columns: one array per field, tokens of all rows concatenated.

    Each row has spans instead of one mask and one version, so that a conversation of several turns is a row like any other.
    """

    labels: tuple[str, ...]  # [K] names of the rewards
    group_id: NDArray[np.int64]  # [B] the prompt's position
    sample_index: NDArray[np.int64]  # [B] within the group
    prompt_ids: Ragged  # int32
    completion_ids: Ragged  # int32 [N]
    sampler_logp: Ragged  # float32 [N], NaN where not sampled
    spans: Ragged  # int64 [M, 3]: start, stop, version
    truncated: NDArray[np.bool_]  # [B] ended by the token limit
    seed: NDArray[np.int64]  # [B]
    cached_tokens: NDArray[np.int64]  # [B]
    rewards: NDArray[np.float64]  # [B, K], NaN: does not apply, or failed
    reward: NDArray[np.float64]  # [B], NaN: not scorable
    reward_errors: tuple[Mapping[str, str], ...]  # [B] by name, empty for most
    # [B] as of `Sample`; (): there are none
    messages: tuple[str, ...] = ()
    counts: tuple[Mapping[str, int], ...] = ()
    images: tuple[tuple[Image, ...], ...] = ()
    experts: tuple[Experts, ...] = ()

    @classmethod
    def of(cls, samples: Sequence[Sample], labels: Sequence[str] | None = None) -> "Samples":
        """Converts samples to columns. `labels`: names of the rewards; None: those of the first sample."""
        names = tuple(labels if labels is not None else samples[0].rewards if samples else ())
        spans = [np.array(sample.spans, dtype=np.int64).reshape(-1, 3) for sample in samples]
        single = [[_number(sample.rewards[name]) for name in names] for sample in samples]
        columns: dict[str, Any] = {name: np.array([getattr(one, name) for one in samples], dtype=np.int64) for name in INTEGERS}
        columns |= {name: Ragged.of([getattr(one, name) for one in samples], dtype) for name, dtype in ARRAYS.items()}
        optional = {name: tuple(getattr(one, name) for one in samples) for name in ABSENT}
        columns |= {name: column if any(map(len, column)) or name == "reward_errors" else () for name, column in optional.items()}
        return cls(
            labels=names,
            spans=Ragged.of(spans, np.int64, (3,)),
            truncated=np.array([sample.finish_reason == "length" for sample in samples], dtype=bool),
            rewards=np.array(single, dtype=np.float64).reshape(len(samples), len(names)),
            reward=np.array([_number(sample.reward) for sample in samples], dtype=np.float64),
            **columns,
        )

    def __len__(self) -> int:
        return len(self.group_id)

    def __getitem__(self, row: int) -> Sample:
        """Returns one row; its tokens are views, and `completion` is empty, because the columns do not hold the text."""
        columns: dict[str, Any] = {name: int(getattr(self, name)[row]) for name in INTEGERS}
        columns |= {name: getattr(self, name)[row] for name in ARRAYS}
        columns |= {name: getattr(self, name)[row] if getattr(self, name) else absent for name, absent in ABSENT.items()}
        return Sample(
            spans=self.spans_of(row),
            finish_reason="length" if self.truncated[row] else "stop",
            completion="",
            rewards={name: _value(self.rewards[row, k]) for k, name in enumerate(self.labels)},
            reward=_value(self.reward[row]),
            **columns,
        )

    def __iter__(self) -> Iterator[Sample]:
        return (self[row] for row in range(len(self)))

    def take(self, rows: Sequence[int] | NDArray[np.int64]) -> "Samples":
        """Returns a copy of the rows at these indices, in their order."""
        rows = np.asarray(rows, dtype=np.int64)
        columns: dict[str, Any] = {}
        for name in columns_of(type(self)):
            column = getattr(self, name)
            if isinstance(column, Ragged):
                columns[name] = column.take(rows)
            elif isinstance(column, np.ndarray):
                columns[name] = column[rows]
            else:
                columns[name] = tuple(column[row] for row in rows) if column else ()
        return replace(self, **columns)

    @classmethod
    def join(cls, parts: Sequence["Samples"]) -> "Samples":
        """Concatenates the rows of several `Samples` that have the same rewards, in their order."""
        columns: dict[str, Any] = {}
        for name in columns_of(cls):
            of_parts = [getattr(part, name) for part in parts]
            if isinstance(of_parts[0], Ragged):
                offsets = np.concatenate([[0], *(column.lengths for column in of_parts)]).cumsum().astype(np.int64)
                columns[name] = Ragged(np.concatenate([column.values for column in of_parts]), offsets)
            elif isinstance(of_parts[0], np.ndarray):
                columns[name] = np.concatenate(of_parts)
            elif any(of_parts):
                filled = [column or (ABSENT[name],) * len(part) for column, part in zip(of_parts, parts, strict=True)]
                columns[name] = tuple(value for column in filled for value in column)
        return replace(parts[0], **columns)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Returns [B], tokens of prompt and completion."""
        return self.prompt_ids.lengths + self.completion_ids.lengths

    @property
    def loss_mask(self) -> Ragged:
        """Returns bool [N], true for sampled tokens."""
        return self.covered(np.ones(len(self.spans.values), dtype=bool))

    def spans_by(self, version: int, whole: bool = False) -> Ragged:
        """Returns bool [M], true for the spans that the weights of `version` sampled; `whole`: only those that are a whole turn.

        An engine that keeps its cache computes the other tokens of a turn from activations of several weights. If earlier weights
        computed its prompt alone, an empty span begins the turn.
        """
        turns = np.cumsum(self._begins)
        alone = np.bincount(turns)[turns] == 1 if whole else True
        return Ragged((self.spans.values[:, 2] == version) & alone, self.spans.offsets)

    def covered(self, chosen: NDArray[np.bool_]) -> Ragged:
        """Returns bool [N], true within the spans that are `chosen` [M]."""
        offsets = self.completion_ids.offsets
        edges = np.zeros(offsets[-1] + 1, dtype=np.int8)
        spans = (self.spans.values[:, :2] + offsets[self._row_of_span, None])[chosen]
        # `np.add.at` counts repeated indices, which occur where one span begins at the end of another.
        np.add.at(edges, spans[:, 0], 1)
        np.add.at(edges, spans[:, 1], -1)
        return Ragged(np.cumsum(edges[:-1], dtype=np.int8).astype(bool), offsets)

    def spans_of(self, row: int) -> tuple[Span, ...]:
        return tuple(Span(*span) for span in self.spans[row].tolist())

    @property
    def _row_of_span(self) -> NDArray[np.int64]:
        return np.repeat(np.arange(len(self)), self.spans.lengths)

    @property
    def sampled_tokens(self) -> NDArray[np.int64]:
        """Returns [B], the number of tokens that the model sampled."""
        lengths = self.spans.values[:, 1] - self.spans.values[:, 0]
        return np.bincount(self._row_of_span, lengths, minlength=len(self)).astype(np.int64)

    @property
    def turns(self) -> NDArray[np.int64]:
        """Returns [B], the turns of the model: spans of a row that do not touch the one before them."""
        return np.bincount(self._row_of_span[self._begins], minlength=len(self))

    @property
    def _begins(self) -> NDArray[np.bool_]:
        """Returns bool [M], true for the first span of each turn."""
        rows, starts, stops = self._row_of_span, self.spans.values[:, 0], self.spans.values[:, 1]
        return np.append(True, (rows[1:] != rows[:-1]) | (starts[1:] != stops[:-1]))[: len(rows)]

    @property
    def weight_version(self) -> NDArray[np.int64]:
        """Returns [B], the oldest weight version that sampled a token of the row; -1: unknown."""
        oldest, starts, stops = np.full(len(self), np.iinfo(np.int64).max), self.spans.values[:, 0], self.spans.values[:, 1]
        np.minimum.at(oldest, self._row_of_span[starts < stops], self.spans.values[starts < stops, 2])
        return np.where(oldest == np.iinfo(np.int64).max, self.newest_version, oldest)

    @property
    def newest_version(self) -> NDArray[np.int64]:
        """Returns [B], the newest weight version that sampled a token of the row; -1: unknown."""
        newest = np.full(len(self), -1)
        np.maximum.at(newest, self._row_of_span, self.spans.values[:, 2])
        return newest


def columns_of(kind: type) -> list[str]:
    """Returns the fields of `Samples` or `RowTable` with one entry a row: all but the names of the rewards."""
    return [one.name for one in fields(kind) if one.name != "labels"]


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _value(number: float) -> float | None:
    return None if np.isnan(number) else float(number)
