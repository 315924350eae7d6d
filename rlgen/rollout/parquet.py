"""Parquet files of the samples of a step, one row per sample: for people, for tools, and for a resumed run.

Token ids and log-probs use byte-stream-split encoding (the first byte of all values, then the second ...), which makes them
compress well. Pages carry checksums. The file's metadata holds what the journal needs to reuse answers and rewards.
"""

import json
import math
import zlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rlgen.files import whole_file
from rlgen.rollout.samples import Ragged, Samples
from rlgen.types import Prompt, end_of_talk

TOKENS = ("prompt_ids", "completion_ids", "sampler_logp", "policy_logp")  # columns of int32 or float32
SPAN = pa.struct([(name, pa.int32()) for name in ("start", "stop", "version")])
ROW_GROUP = 1 << 21  # tokens that are converted and held in memory at once
STAMP = b"rlgen"  # key of rlgen's entry in the file metadata
STAMPED = frozenset(["engine", "sampling", "judge", "weights", "columns", "kept", "crc32"])
TOKEN_LEVEL, LEVEL = 1, 3  # zstd levels: higher ones take twice the time and save 1 %
Stamp = Mapping[str, Any]
# The exceptions that pyarrow raises for damaged files.
UNREADABLE = (OSError, pa.ArrowException, ValueError, KeyError, TypeError, IndexError, OverflowError, MemoryError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """The rows of one step that one process writes."""

    step: int
    samples: Samples  # those that it trains, and those that it sampled and no process trains
    policy_logp: Ragged  # float32, the trainer's log-probs before the first update, under `Sampling.distribution`
    advantage: NDArray[np.float64]  # [B]
    trained: NDArray[np.bool_]  # [B]

    def in_order(self) -> "Rollout":
        """Returns the rows sorted by group, and within a group by sample index."""
        order = np.lexsort((self.samples.sample_index, self.samples.group_id))
        if (np.diff(order) == 1).all():
            return self
        return replace(
            self,
            samples=self.samples.take(order),
            policy_logp=self.policy_logp.take(order),
            advantage=self.advantage[order],
            trained=self.trained[order],
        )


def write_part(path: Path, rollout: Rollout, texts: Mapping[str, pa.Array], stamp: Stamp) -> None:
    """Writes the rows of one process to a Parquet file. Raises CheckpointError if it cannot be written.

    Args:
        rollout: sorted, as `in_order` returns it.
        texts: further columns, one value per row: prompts, completions and the data set's columns.
        stamp: metadata that the journal needs to decide later whether the rows can be reused.
    """
    stamp = {**stamp, "crc32": checksum(rollout.samples, stamp)}
    tables = (arrow_table(rollout, rows, texts) for rows in row_groups(rollout.samples))
    first = next(tables)
    schema = first.schema.with_metadata({STAMP: json.dumps(stamp).encode()})
    streams = [f"{name}.list.element" for name in TOKENS]
    others = [leaf for leaf in physical_columns(schema) if leaf not in streams]
    with (
        whole_file(path) as file,
        pq.ParquetWriter(
            file,
            schema,
            compression="zstd",
            compression_level={leaf: TOKEN_LEVEL if leaf in streams else LEVEL for leaf in physical_columns(schema)},
            use_dictionary=[leaf for leaf in others if leaf != "completion"],
            column_encoding=dict.fromkeys(streams, "BYTE_STREAM_SPLIT"),
            write_page_checksum=True,
            write_statistics=others,
        ) as writer,
    ):
        for part in (first, *tables):
            writer.write_table(part.cast(schema), row_group_size=max(1, len(part)))


def row_groups(samples: Samples) -> Iterator[slice]:
    """Yields slices of rows with about `ROW_GROUP` tokens each; one empty slice if there are no rows."""
    ends = samples.lengths.cumsum()
    start = 0
    while start < len(samples) or start == 0:
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(ends.searchsorted(before + ROW_GROUP, side="right")))
        yield slice(start, min(stop, len(samples)))
        start = stop


def arrow_table(rollout: Rollout, rows: slice, texts: Mapping[str, pa.Array]) -> pa.Table:
    """Builds the Arrow table of some rows, with the columns in the order that is convenient to read."""
    s = rollout.samples
    count = rows.stop - rows.start
    errors = [list(errors.items()) for errors in s.reward_errors[rows]]
    fixed: dict[str, pa.Array] = {
        "step": pa.array(np.full(count, rollout.step, dtype=np.int32)),
        "group_id": pa.array(s.group_id[rows]),
        "sample_index": pa.array(s.sample_index[rows].astype(np.int32)),
        "prompt": texts["prompt"][rows],
        "completion": texts["completion"][rows],
        "finish_reason": pa.array(np.where(s.truncated[rows], "length", "stop").astype(object), pa.string()),
        "rewards": by_label(s.labels, s.rewards[rows]),
        "reward": pa.array(s.reward[rows], from_pandas=True),
        "reward_errors": pa.array(errors, pa.map_(pa.string(), pa.string())),
        "advantage": pa.array(rollout.advantage[rows].astype(np.float64)),
        "trained": pa.array(rollout.trained[rows]),
        **{name: column[rows] for name, column in texts.items() if name not in ("prompt", "completion")},
        "prompt_ids": lists(s.prompt_ids, rows),
        "completion_ids": lists(s.completion_ids, rows),
        "sampler_logp": lists(s.sampler_logp, rows),
        "policy_logp": lists(rollout.policy_logp, rows, empty_is_null=True),
        "loss_mask": lists(s.loss_mask, rows),
        "weight_version": pa.array(s.weight_version[rows].astype(np.int32)),
        "spans": pa.array([s.spans_of(row) for row in range(rows.start, rows.stop)], pa.list_(SPAN)),
        "seed": pa.array(s.seed[rows]),
        "cached_tokens": pa.array(s.cached_tokens[rows].astype(np.int32)),
    }
    return pa.table({name: column for name, column in fixed.items() if name != "rewards" or s.labels})


# Columns that every file has; a column of the data set with one of these names is renamed (`free_name`).
FIXED = frozenset(
    [
        *("step", "group_id", "sample_index", "prompt", "completion", "finish_reason", "reward", "rewards", "reward_errors"),
        *("advantage", "trained", "prompt_ids", "completion_ids", "sampler_logp", "policy_logp", "loss_mask"),
        *("weight_version", "spans", "seed", "cached_tokens"),
    ]
)
# Columns that every file of a run with tools has besides.
OF_TURNS = frozenset(["messages", "tool_counts"])


def has_turns(names: Container[str]) -> bool:
    """Returns whether a file with these columns is of a run with tools; else a column `messages` is one of the data set."""
    return "tool_counts" in names


DERIVED = frozenset(["prompt", "completion", "policy_logp", "loss_mask"])  # columns that the journal does not read


LOOKED_AT = 256  # number of prompts that decide the column types


@dataclass(frozen=True, slots=True)
class DataColumns:
    """Names and types of the data set's columns, derived from the first prompts and therefore the same in every process."""

    names: Mapping[str, str]  # name in the file, by name in the data set
    types: Mapping[str, pa.DataType | None]  # by name in the data set; None: JSON text

    @classmethod
    def of(cls, prompt_at: Callable[[int], Prompt], taken: frozenset[str] = FIXED) -> "DataColumns":
        """Derives names and types from the first `LOOKED_AT` prompts in data order. `taken`: names of the file's own columns."""
        rows = [prompt_at(position).columns for position in range(LOOKED_AT)]
        names = list(dict.fromkeys(name for row in rows for name in row))
        arrays = {name: typed([row.get(name) for row in rows], None) for name in names}
        types = {name: None if array is None else array.type for name, array in arrays.items()}
        return cls({name: free_name(name, names, taken) for name in names}, types)

    def arrays(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, pa.Array]:
        """Returns the columns of some rows as Arrow arrays, by name in the file."""
        return {named: self._array([row.get(name) for row in rows], self.types[name]) for name, named in self.names.items()}

    @staticmethod
    def _array(values: Sequence[Any], kind: pa.DataType | None) -> pa.Array:
        if kind is not None and (array := typed(values, kind)) is not None:
            return array
        other = None if kind is None else typed(values, None)
        # If the first prompts held only None, or only integers, the type found here can still be merged with theirs.
        if other is not None and (pa.types.is_null(kind) or (pa.types.is_integer(kind) and pa.types.is_floating(other.type))):
            return other
        return pa.array([as_text(value) for value in values], pa.string())


def free_name(name: str, names: Sequence[str], taken: frozenset[str] = FIXED) -> str:
    """Returns the name of a column in the file: a data column `step` becomes `data_step`, because the file has its own `step`."""
    if name not in taken:
        return name
    named = f"data_{name}"
    while named in taken or named in names:
        named = f"data_{named}"
    return named


def typed(values: Sequence[Any], kind: pa.DataType | None) -> pa.Array | None:
    """Returns the values as an array of type `kind` (None: inferred); None if the array would not return the same values."""
    try:
        array = pa.array(values, kind)
        pq.write_table(pa.table({"": array.slice(0, 0)}), pa.BufferOutputStream())  # Parquet cannot store every Arrow type
        return array if all(map(same, array.to_pylist(), values)) else None
    except (*UNREADABLE, UnicodeError, RecursionError):
        return None


def same(left: Any, right: Any) -> bool:
    """Returns whether two values are equal after storage: lists equal tuples, 1 equals 1.0, and NaN equals NaN."""
    if isinstance(left, list) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, float) and isinstance(right, float) and math.isnan(left):
        return math.isnan(right)
    return isinstance(left, bool) == isinstance(right, bool) and bool(left == right)


def as_text(value: Any) -> str | None:
    """Returns a value as JSON, with `repr` for types that JSON lacks; None stays None."""
    return None if value is None else json.dumps(value, default=repr)


def as_json(table: pa.Table, names: Sequence[str]) -> pa.Table:
    """Returns the table with the named columns converted to JSON text."""
    for name in names:
        if name in table.column_names and table.schema.field(name).type != pa.string():
            values = [as_text(value) for value in table[name].to_pylist()]
            table = table.set_column(table.schema.get_field_index(name), name, pa.array(values, pa.string()))
    return table


def lists(ragged: Ragged, rows: slice, empty_is_null: bool = False) -> pa.Array:
    """Converts rows of unequal lengths to an Arrow list array, without copying the values."""
    offsets = ragged.offsets[rows.start : rows.stop + 1]
    values = pa.array(ragged.values[offsets[0] : offsets[-1]])
    mask = pa.array(np.diff(offsets) == 0) if empty_is_null else None
    return pa.ListArray.from_arrays(pa.array((offsets - offsets[0]).astype(np.int32)), values, mask=mask)


def by_label(labels: Sequence[str], rewards: NDArray[np.float64]) -> pa.Array:
    """Converts rewards [B, K] to one struct per row; NaN becomes null."""
    fields = [pa.array(rewards[:, place], from_pandas=True) for place in range(len(labels))]
    return pa.StructArray.from_arrays(fields, names=list(labels)) if labels else pa.nulls(len(rewards))


def physical_columns(schema: pa.Schema) -> list[str]:
    """Returns the paths of the physical columns of a file, such as "prompt_ids.list.element"."""
    sink = pa.BufferOutputStream()
    pq.write_table(schema.empty_table(), sink)
    physical = pq.ParquetFile(pa.BufferReader(sink.getvalue())).schema
    return [physical.column(place).path for place in range(len(physical))]


def checksum(samples: Samples, stamp: Stamp) -> int:
    """Returns the CRC-32 of everything that the journal reads from a file; Parquet's checksums cover pages, but not all bytes."""
    said = sorted((key, value) for key, value in stamp.items() if key != "crc32")
    rewards = np.where(np.isnan(samples.rewards), np.nan, samples.rewards)
    reward = np.where(np.isnan(samples.reward), np.nan, samples.reward)
    texts: list[object] = [json.dumps(said), samples.labels, [sorted(errors.items()) for errors in samples.reward_errors]]
    if any(samples.messages) or any(samples.counts):
        texts += [samples.messages, [sorted(counts.items()) for counts in samples.counts]]
    crc = zlib.crc32(repr(tuple(texts)).encode())
    for ragged in (samples.prompt_ids, samples.completion_ids, samples.sampler_logp):
        crc = zlib.crc32(np.ascontiguousarray(ragged.offsets).data, crc)
        crc = zlib.crc32(np.ascontiguousarray(ragged.values).data, crc)
    spans = np.column_stack([np.repeat(np.arange(len(samples)), samples.spans.lengths), samples.spans.values])
    columns = (samples.group_id, samples.sample_index, spans, samples.truncated, samples.seed, samples.cached_tokens)
    for column in (*columns, rewards, reward):
        crc = zlib.crc32(np.ascontiguousarray(column).data, crc)
    return crc


def parts_of(path: Path) -> list[Path]:
    """Returns the files of a step: `path` itself, or the complete parts in the folder of that name."""
    return sorted(path.glob("part-*.parquet")) if path.is_dir() else [path] if path.is_file() else []


def read_stamp(part: Path) -> Stamp | None:
    """Reads the metadata that the journal needs; returns None if it is missing or unreadable."""
    try:
        stamp = json.loads((pq.read_schema(part).metadata or {})[STAMP])
        return stamp if isinstance(stamp, dict) and stamp.keys() >= STAMPED else None
    except UNREADABLE:
        return None


def read_part(part: Path) -> tuple[Samples, Stamp] | None:
    """Reads the samples of a file and its metadata; returns None if the file is unreadable or its checksum does not match."""
    stamp = read_stamp(part)
    if stamp is None:
        return None
    try:
        with pq.ParquetFile(part, page_checksum_verification=True) as file:
            wanted = (FIXED | OF_TURNS if stamp.get("turns") else FIXED) - DERIVED
            names = [name for name in file.schema_arrow.names if name in wanted]
            samples = samples_of(file.read(columns=names))
        return (samples, stamp) if stamp["crc32"] == checksum(samples, stamp) else None
    except UNREADABLE:
        return None


def samples_of(columns: pa.Table) -> Samples:
    """Converts the columns that `table` builds back to samples, without the derived columns."""

    def column(name: str) -> Any:
        return columns[name].combine_chunks()

    def numbers(name: str, dtype: Any) -> NDArray[Any]:
        return np.asarray(column(name).to_numpy(zero_copy_only=False), dtype=dtype)

    names = columns.column_names
    messages = [last_left_out(text) for text in column("messages").to_pylist()] if "messages" in names else []
    counts = [dict(pairs) for pairs in column("tool_counts").to_pylist()] if "tool_counts" in names else []
    spans = column("spans")
    edges = spans.offsets.to_numpy().astype(np.int64)
    fields = [field.to_numpy()[edges[0] : edges[-1]].astype(np.int64) for field in spans.values.flatten()]
    rewards = {}
    if "rewards" in names:
        scored = column("rewards")
        rewards = {kind.name: one.to_numpy(zero_copy_only=False) for kind, one in zip(scored.type, scored.flatten(), strict=True)}
    return Samples(
        labels=tuple(rewards),
        group_id=numbers("group_id", np.int64),
        sample_index=numbers("sample_index", np.int64),
        prompt_ids=ragged(columns, "prompt_ids"),
        completion_ids=ragged(columns, "completion_ids"),
        sampler_logp=ragged(columns, "sampler_logp"),
        spans=Ragged(np.column_stack(fields), edges - edges[0]),
        truncated=numbers("finish_reason", object) == "length",
        seed=numbers("seed", np.int64),
        cached_tokens=numbers("cached_tokens", np.int64),
        rewards=np.array([*rewards.values()], dtype=np.float64).reshape(len(rewards), len(columns)).T,
        reward=numbers("reward", np.float64),
        reward_errors=tuple(dict(errors) for errors in column("reward_errors").to_pylist()),
        messages=tuple(messages) if any(messages) else (),
        counts=tuple(counts) if any(counts) else (),
    )


def ragged(table: pa.Table, name: str) -> Ragged:
    """Returns a column of lists; null is an empty row."""
    array = table[name].combine_chunks()
    lengths = np.asarray(array.value_lengths().fill_null(0), dtype=np.int64)
    return Ragged(array.flatten().to_numpy(zero_copy_only=False), np.append(0, np.cumsum(lengths)))


def last_left_out(messages: str) -> str:
    """Returns the messages of a row as `Completion` holds them: without the last turn, whose text is the completion."""
    before = json.loads(messages)
    del before[end_of_talk(before) - 1]
    return json.dumps(before) if before else ""
