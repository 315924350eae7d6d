"""Conversion of the data set's columns to Arrow, stored beside the samples under their own names and types where possible."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlgen.rollout.parquet import FIXED, UNREADABLE
from rlgen.types import Prompt

LOOKED_AT = 256  # number of prompts that decide the column types


@dataclass(frozen=True, slots=True)
class DataColumns:
    """Names and types of the data set's columns, derived from the first prompts and therefore the same in every process."""

    names: Mapping[str, str]  # name in the file, by name in the data set
    types: Mapping[str, pa.DataType | None]  # by name in the data set; None: JSON text

    @classmethod
    def of(cls, prompt_at: Callable[[int], Prompt], taken: frozenset[str] = FIXED) -> "DataColumns":
        """Derives names and types from the first `LOOKED_AT` prompts of the data order.

        Args:
            taken: names of the file's own columns.
        """
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
