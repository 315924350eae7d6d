"""Reads `data.source` to rows: a built-in task, local files or a data set of the hub. Code of a data set is never run.

Rows of files stay on disk: Parquet and hub data are Arrow tables of `datasets`. Rows of JSON and CSV files are kept as JSON
texts, because one of their columns may hold values of several types, and are parsed when they are requested. Every value stays
as the file has it; the loaders of `datasets` would guess types: the text "2024-01-01" becomes a date, the answer "07" a number,
and the answer "NA" a missing value.
"""

import csv
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

import datasets
import pyarrow

from rlgen.data.cache import BATCH, Write, cache_key, cached
from rlgen.data.tasks import Row, generate
from rlgen.errors import DataError, SetupError
from rlgen.recipe.data import TASKS, DataRecipe
from rlgen.recipe.paths import like, matches
from rlgen.recipe.rules import is_local_source

# Metadata files written by `save_to_disk`, which hold no rows.
SIDECARS = {"dataset_info.json", "state.json"}
TABLE_FORMATS = {".parquet": "parquet", ".arrow": "arrow"}
READ_BYTES = 2**20
CACHED_BYTES = 2**20  # rows of JSON and CSV files from this total size on are cached
CELL = 2**27  # characters of a CSV cell, instead of 131072; so a quote that is never closed does not fill the memory
TEXTS = pyarrow.schema([("row", pyarrow.large_string())])


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A data set as it was read, with its description for the run's record.

    Rows(rows=[{"question": "1+1", "answer": "2"}], columns=("question", "answer"), kind="file",
         source="/data/train.jsonl", fingerprint="9f86d0...", files=("/data/train.jsonl",))
    """

    rows: Sequence[Mapping[str, Any]]  # after `data.limit`; each has every column, None where the source has no value
    columns: tuple[str, ...]
    kind: Literal["task", "file", "hub"]
    source: str
    fingerprint: str  # SHA-256 of the local files or of the task's rows; commit of a hub data set
    files: tuple[str, ...] = ()  # of a local source

    def at(self, indices: Sequence[int]) -> list[Mapping[str, Any]]:
        rows = zip(*self.values(indices, self.columns), strict=True)
        return [dict(zip(self.columns, row, strict=True)) for row in rows]

    def values(self, indices: Sequence[int], columns: Sequence[str]) -> list[list[Any]]:
        """Returns one list of values per column of `columns`, of the rows at `indices`."""
        if isinstance(self.rows, datasets.Dataset):
            some = self.rows if set(columns) == set(self.columns) else self.rows.select_columns(sorted(set(columns)))
            table = some[indices if isinstance(indices, range) else list(indices)]
            return [table[name] for name in columns]
        rows = [self.rows[index] for index in indices]
        return [[row[name] for row in rows] for name in columns]

    def batches(self, columns: Sequence[str], size: int = BATCH) -> Iterator[tuple[range, list[list[Any]]]]:
        """Yields (indices, values of `columns`) for all rows in order, `size` rows at a time."""
        for start in range(0, len(self.rows), size):
            indices = range(start, min(start + size, len(self.rows)))
            yield indices, self.values(indices, columns)


@dataclass(frozen=True, slots=True, eq=False)
class TextRows(Sequence[Row]):
    """Rows stored as JSON texts in an Arrow table, each parsed when it is requested."""

    texts: pyarrow.ChunkedArray
    columns: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: Any) -> Any:
        """Returns a row with every column, None where the file has no value; for a slice, a list of rows."""
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        row = json.loads(self.texts[index].as_py())
        return {name: row.get(name) for name in self.columns}


def read_lines(path: Path) -> Iterator[Row]:
    """Reads the objects of a JSON Lines file; skips empty lines. Raises DataError."""
    for number, line in enumerate(text_lines(path), 1):
        if line.strip():
            yield parse_row(line, path, number)


def rows_of_json(path: Path) -> Iterator[Row]:
    """Reads the objects of a JSON array, or of JSON Lines in a file named .json. Raises DataError."""
    if not next((line for line in text_lines(path) if line.strip()), "").lstrip().startswith("["):
        yield from read_lines(path)
        return
    try:
        rows = json.loads("".join(text_lines(path)))
    except (ValueError, RecursionError) as error:
        raise DataError(f"data.source: {path}: not JSON: {error}") from error
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f"data.source: {path}: element {number} is not an object of columns")
        yield row


def read_csv(path: Path) -> Iterator[Row]:
    """Reads the records of a CSV file whose first line has the column names; every value is text. Raises DataError."""
    csv.field_size_limit(CELL)
    lines = csv.DictReader(text_lines(path), strict=True)
    try:
        names = Counter(lines.fieldnames or ())
        if twice := [name for name, count in names.items() if name and count > 1]:  # a row would have the last one's value
            at = f"data.source: {path}:{lines.reader.line_num}"
            raise DataError(f"{at}: the column `{twice[0]}` is there twice; rename one of them, or remove it")
        for row in lines:
            if None in row or None in row.values():
                raise DataError(
                    f"data.source: {path}:{lines.line_num}: the record does not have {len(lines.fieldnames or ())} "
                    "values, one for each column; put values with a comma in double quotes"
                )
            yield row
    except csv.Error as error:
        raise DataError(f"data.source: {path}:{lines.reader.line_num}: not CSV: {error}") from error


def text_lines(path: Path) -> Iterator[str]:
    """Reads the lines of a UTF-8 file, with or without a byte order mark, one at a time, with line ends. Raises DataError."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from file
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"data.source: {path} cannot be read as text in UTF-8: {error}") from error


def parse_row(line: str, path: Path, number: int) -> Row:
    """Parses one line of JSON Lines to an object. Raises DataError."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError also for a number with more digits than Python converts
        raise DataError(f"data.source: {path}:{number}: the line is not JSON: {error}") from error
    if not isinstance(row, dict):
        hint = "; an array of rows is a file that ends in .json" if isinstance(row, list) else ""
        raise DataError(f"data.source: {path}:{number}: the line is not an object of columns: {line.strip()[:60]}{hint}")
    return row


TEXT_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {".jsonl": read_lines, ".json": rows_of_json, ".csv": read_csv}


def load_rows(data: DataRecipe, seed: int) -> Rows:
    """Reads the data set that `data` names; checks that it has rows, and the columns that `data` names.

    Args:
        data: the path of a local source must be absolute.
        seed: of the run; the rows of a built-in task follow from it.

    Raises:
        DataError: no file, no row, an unreadable file, or a missing column.
        SetupError: the hub cannot be reached, or lacks the data set, or refuses access to it.
    """
    if data.source.startswith("task:"):
        rows = task_rows(data, seed)
    elif is_local_source(data.source):
        rows = file_rows(data)
    else:
        rows = hub_rows(data)
    if not len(rows.rows):
        raise DataError(f"data.source: {data.source} holds no row")
    for key, column in (("prompt", data.columns.prompt), ("answer", data.columns.answer), ("images", data.columns.images)):
        if column is not None and column not in rows.columns:
            close = get_close_matches(column, rows.columns, n=1)
            guess = f"did you mean `{close[0]}`? " if close else ""
            raise DataError(
                f"data.columns.{key}: {data.source} has no column `{column}`; {guess}it has {', '.join(rows.columns)};"
                f" set data.columns.{key} to one of them"
            )
    if isinstance(rows.rows, datasets.Dataset):
        return replace(rows, rows=undecoded(rows.rows, data.columns.images))
    return rows


def undecoded(table: datasets.Dataset, images: str | None) -> datasets.Dataset:
    """Returns a data set with media as their files have them: the column `images`, and sounds and videos, which need packages to
    be decoded. Rewards get other images as pixels.
    """
    for name, feature in table.features.items():
        inner = getattr(feature, "feature", feature)  # of a list
        if getattr(inner, "decode", False) and (name == images or not isinstance(inner, datasets.Image)):
            kept = replace(inner, decode=False)
            table = table.cast_column(name, kept if inner is feature else datasets.List(kept))
    return table


def task_rows(data: DataRecipe, seed: int) -> Rows:
    name = data.source.removeprefix("task:")
    rows = generate(name, TASKS[name].model_validate(data.options), seed)[: data.limit]
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    return Rows(rows=rows, columns=tuple(rows[0]), kind="task", source=data.source, fingerprint=digest)


def file_rows(data: DataRecipe) -> Rows:
    """Reads the rows of a file, a folder or a glob; several files in the order of their names. Raises DataError."""
    files = find_files(data.source)
    suffixes = {file.suffix.lower() for file in files}
    rows: Any
    if suffixes <= TEXT_READERS.keys():
        digest = files_digest(files)
        rows = text_rows(data, files, digest)
        columns = rows.columns
    elif len(suffixes) == 1 and suffixes <= TABLE_FORMATS.keys():
        names, kind = [str(file) for file in files], TABLE_FORMATS[suffixes.pop()]
        # By default `datasets` reads as many rows at a time as a file's first row group has, and fails if it has none.
        options = {"batch_size": BATCH} if kind == "parquet" else {}
        datasets.disable_progress_bars()
        try:
            table = datasets.load_dataset(kind, data_files=names, split="train", **options)
        # pyarrow raises many types for a damaged file; all of them mean that the file is at fault.
        except Exception as error:
            said = str(error.__cause__ or error)
            if "corresponds to no data" in said:
                raise DataError(f"data.source: {data.source} holds no row") from error
            hint = " Write it without columns of this type, or as JSON Lines." if "dtype equivalent" in said else ""
            raise DataError(f"data.source: {', '.join(names)} cannot be read: {said}{hint}") from error
        columns, rows, digest = tuple(table.column_names), head(table, data.limit), files_digest(files)
    else:
        known = " ".join((*TEXT_READERS, *TABLE_FORMATS))
        raise DataError(
            f"data.source: {data.source} names files of {' '.join(sorted(suffixes)) or 'no known format'}; "
            f"known formats are {known}; parquet and arrow cannot be mixed with others"
        )
    return Rows(rows=rows, columns=columns, kind="file", source=data.source, fingerprint=digest, files=tuple(map(str, files)))


def text_rows(data: DataRecipe, files: Sequence[Path], digest: str) -> TextRows:
    """Returns the rows of JSON and CSV files; large files are read once and then taken from the cache. Raises DataError."""
    formats = [file.suffix.lower() for file in files]
    large = sum(file.stat().st_size for file in files) >= CACHED_BYTES
    key = cache_key({"files": digest, "formats": formats}) if large else None
    made = cached("rows", key, TEXTS, partial(write_texts, data.source, files, digest))
    texts = made.table.column("row")
    return TextRows(texts if data.limit is None else texts.slice(0, data.limit), tuple(made.facts["columns"]))


def write_texts(source: str, files: Sequence[Path], digest: str, write: Write) -> dict[str, Any]:
    """Writes each row of the files as JSON, and returns the names of all their columns. Raises DataError."""
    columns: dict[str, None] = {}  # in the order of their first rows
    rows = chain.from_iterable(TEXT_READERS[file.suffix.lower()](file) for file in files)
    while batch := list(islice(rows, BATCH)):
        columns |= dict.fromkeys(chain.from_iterable(batch))
        try:
            texts = list(map(json.dumps, batch))
        except RecursionError as error:
            raise DataError(f"data.source: {source}: a row is nested too deeply") from error
        write(pyarrow.record_batch([pyarrow.array(texts, pyarrow.large_string())], schema=TEXTS))
    if files_digest(files) != digest:
        raise DataError(f"data.source: {source} changed while it was read; wait until it is complete, and start again")
    return {"columns": list(columns)}


def files_digest(files: Sequence[Path]) -> str:
    """Returns the SHA-256 of files without blank lines at the end, which hold no row. Raises DataError if one is unreadable."""
    digest = hashlib.sha256()
    for path in files:
        try:
            with path.open("rb") as file:
                one, blank = hashlib.sha256(), bytearray()
                for line in iter(partial(file.readline, READ_BYTES), b""):
                    if line.isspace():
                        blank += line
                        continue
                    one.update(blank + line)
                    blank.clear()
                digest.update(one.digest())
        except OSError as error:
            raise DataError(f"data.source: {path} cannot be read: {error}") from error
    return digest.hexdigest()


def find_files(source: str) -> list[Path]:
    """Returns the files of a path, a folder or a glob, sorted by name. Raises DataError if there is none."""
    path = Path(source).expanduser()
    if path.is_dir():
        known = (*TEXT_READERS, *TABLE_FORMATS)
        shown = (file for file in path.iterdir() if not file.name.startswith("."))  # as globs do
        files = [file for file in shown if file.suffix.lower() in known and file.name not in SIDECARS]
    else:
        files = [Path(name) for name in matches(str(path)) if Path(name).is_file()]
    if not files:
        hint = like(source)
        raise DataError(f"data.source: {source}: there is no such file, and no file matches it" + (f"; {hint}" if hint else ""))
    return sorted(files)


def hub_rows(data: DataRecipe) -> Rows:
    """Downloads a data set of the hub, at one commit, and returns its rows. Raises DataError or SetupError."""
    name = data.source + (f" (revision {data.revision})" if data.revision else "")
    if Path(data.source).exists():
        # `datasets` would read the folder instead of the hub, without a warning.
        raise DataError(f"data.source: {data.source} is a folder here and a name of the hub; write ./{data.source}")
    datasets.disable_progress_bars()
    try:
        builder = datasets.load_dataset_builder(data.source, data.subset, revision=data.revision)
        builder.download_and_prepare()
        table = builder.as_dataset(split=data.split)
    except OSError as error:  # no network, no such repository or revision, no access, too many requests
        said = " ".join(str(error).split()).partition(" For more information check")[0]
        raise SetupError(
            f"data.source: the hub did not provide {name}: {said}. Check the name and the network; "
            "for a gated data set accept its terms and log in with `hf auth login`"
        ) from error
    except RuntimeError as error:  # the data set is a script
        raise SetupError(f"data.source: {name} cannot be loaded without running its code: {error}") from error
    except (ValueError, datasets.exceptions.DatasetsError) as error:  # subset, split, damaged files
        raise DataError(f"data.source: {name}: {error.__cause__ or error}") from error
    rows, columns = head(table, data.limit), tuple(table.column_names)
    return Rows(rows=rows, columns=columns, kind="hub", source=data.source, fingerprint=builder.hash)


def cached_rows(rows: Rows, revision: str | None) -> str | None:
    """Returns a message that hub data comes from the cache, if the network is off (HF_DATASETS_OFFLINE, HF_HUB_OFFLINE)."""
    if rows.kind != "hub" or not datasets.config.HF_HUB_OFFLINE:
        return None
    # `datasets` takes the revision it read last, ignoring the requested one.
    unsure = "" if revision in (None, rows.fingerprint) else f"; it may differ from data.revision {revision}"
    return f"offline: data.source {rows.source} is taken from the cache, commit {rows.fingerprint}{unsure}"


def head(table: datasets.Dataset, limit: int | None) -> datasets.Dataset:
    return table if limit is None else table.select(range(min(limit, len(table))))
