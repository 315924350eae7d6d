"""`data.source` to rows: a built-in task, local files or a data set of the hub. No code of a data set runs.

JSON and CSV are read here, value by value as the file says: the loaders of `datasets` guess types, which
makes a date of the text "2024-01-01", a number of the answer "07" and nothing of the answer "NA".
"""

import csv
import glob
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import datasets

from rlgen.data.tasks import Row, generate
from rlgen.errors import DataError, SetupError
from rlgen.recipe.models import TASKS, DataRecipe
from rlgen.recipe.rules import is_local_source

# Of a data set that `save_to_disk` wrote: facts about it, not rows.
SIDECARS = {"dataset_info.json", "state.json"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A data set as it was read, with what the run's record says of it.

    Rows(rows=[{"question": "1+1", "answer": "2"}], columns=("question", "answer"), kind="file",
         source="/data/train.jsonl", fingerprint="9f86d0...", files=("/data/train.jsonl",))
    """

    rows: Sequence[Mapping[str, Any]]  # after `data.limit`; each has every column, None where the source has no value
    columns: tuple[str, ...]
    kind: Literal["task", "file", "hub"]
    source: str
    fingerprint: str  # sha256 of the local files or of the task's rows; of the hub its commit
    files: tuple[str, ...] = ()  # of a local source


def load_rows(data: DataRecipe, seed: int) -> Rows:
    """Reads the data set that `data` names and checks that it has rows, and the columns that `data` names.

    Args:
        data: a local source is absolute.
        seed: of the run; the rows of a built-in task follow from it.

    Raises:
        DataError: no file, no row, a file that cannot be read, a column that is not there.
        SetupError: the hub cannot be reached, or does not hold or does not hand out the data set.
    """
    if data.source.startswith("task:"):
        rows = task_rows(data, seed)
    elif is_local_source(data.source):
        rows = file_rows(data)
    else:
        rows = hub_rows(data)
    if not len(rows.rows):
        raise DataError(f"data.source: {data.source} holds no row")
    for key, column in (("prompt", data.columns.prompt), ("answer", data.columns.answer)):
        if column is not None and column not in rows.columns:
            close = get_close_matches(column, rows.columns, n=1)
            guess = f"did you mean `{close[0]}`? " if close else ""
            raise DataError(
                f"data.columns.{key}: {data.source} has no column `{column}`; {guess}It has {', '.join(rows.columns)}"
            )
    return rows


def task_rows(data: DataRecipe, seed: int) -> Rows:
    """The rows of `task:NAME`."""
    name = data.source.removeprefix("task:")
    rows = generate(name, TASKS[name].model_validate(data.options), seed)[: data.limit]
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    return Rows(rows=rows, columns=tuple(rows[0]), kind="task", source=data.source, fingerprint=digest)


def file_rows(data: DataRecipe) -> Rows:
    """The rows of a file, a folder or a glob; several files in the order of their names."""
    files = find_files(data.source)
    suffixes = {file.suffix.lower() for file in files}
    rows: Any
    if suffixes <= TEXT_READERS.keys():
        records = [row for file in files for row in TEXT_READERS[file.suffix.lower()](file)]
        columns = tuple(dict.fromkeys(name for row in records for name in row))
        rows = [{name: row.get(name) for name in columns} for row in records[: data.limit]]
    elif len(suffixes) == 1 and suffixes <= TABLE_FORMATS.keys():
        names = [str(file) for file in files]
        datasets.disable_progress_bars()
        try:
            table = datasets.load_dataset(TABLE_FORMATS[suffixes.pop()], data_files=names, split="train")
        # Whatever a damaged file makes pyarrow raise is a fault of the file.
        except Exception as error:
            raise DataError(f"data.source: {', '.join(names)} cannot be read: {error.__cause__ or error}") from error
        columns, rows = tuple(table.column_names), head(table, data.limit)
    else:
        known = " ".join((*TEXT_READERS, *TABLE_FORMATS))
        raise DataError(
            f"data.source: {data.source} names files of {' '.join(sorted(suffixes)) or 'no known format'}; "
            f"known are {known}, parquet and arrow not together with others"
        )
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return Rows(
        rows=rows,
        columns=columns,
        kind="file",
        source=data.source,
        fingerprint=digest.hexdigest(),
        files=tuple(map(str, files)),
    )


def find_files(source: str) -> list[Path]:
    """The files of a path, a folder or a glob, sorted by name.

    Raises:
        DataError: there is none.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        known = (*TEXT_READERS, *TABLE_FORMATS)
        files = [f for f in path.iterdir() if f.suffix.lower() in known and f.name not in SIDECARS]
    elif path.is_file():
        files = [path]
    else:
        files = [Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file()]
    if not files:
        raise DataError(f"data.source: {source}: there is no such file, and no file matches it")
    return sorted(files)


def read_lines(path: Path) -> Iterator[Row]:
    """The objects of a JSON Lines file; empty lines are skipped."""
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            yield parse_row(line, path, number)


def read_json(path: Path) -> Iterator[Row]:
    """The objects of a JSON array, or of JSON Lines under the name of JSON."""
    text = read_text(path)
    if not text.lstrip().startswith("["):
        yield from read_lines(path)
        return
    try:
        rows = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"data.source: {path}: not JSON: {error}") from error
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f"data.source: {path}: element {number} is not an object of columns")
        yield row


def read_csv(path: Path) -> Iterator[Row]:
    """The records of a CSV file with a line of column names; every value is text."""
    lines = csv.DictReader(read_text(path).splitlines(keepends=True), strict=True)
    try:
        for row in lines:
            if None in row or None in row.values():
                raise DataError(
                    f"data.source: {path}:{lines.line_num}: the record has not {len(lines.fieldnames or ())} "
                    "values, one for each column; put values with a comma in double quotes"
                )
            yield row
    except csv.Error as error:
        raise DataError(f"data.source: {path}:{lines.line_num}: not CSV: {error}") from error


def read_text(path: Path) -> str:
    """A file in UTF-8, with or without a byte order mark."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"data.source: {path} cannot be read as text in UTF-8: {error}") from error


def parse_row(line: str, path: Path, number: int) -> Row:
    """One line of JSON Lines."""
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"data.source: {path}:{number}: the line is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f"data.source: {path}:{number}: the line is not an object of columns: {line[:60]}")
    return row


TEXT_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": read_lines,
    ".json": read_json,
    ".csv": read_csv,
}
TABLE_FORMATS = {".parquet": "parquet", ".arrow": "arrow"}


def hub_rows(data: DataRecipe) -> Rows:
    """The rows of a data set of the hub, of one commit."""
    name = data.source + (f" (revision {data.revision})" if data.revision else "")
    if Path(data.source).exists():
        # `datasets` would read it instead, and nothing would say which rows were meant.
        raise DataError(f"data.source: {data.source} is a folder here and a name of the hub; write ./{data.source}")
    datasets.disable_progress_bars()
    try:
        builder = datasets.load_dataset_builder(data.source, data.subset, revision=data.revision)
        builder.download_and_prepare()
        table = builder.as_dataset(split=data.split)
    except OSError as error:  # no network, no such repository or revision, no access, too many requests
        said = " ".join(str(error).split()).partition(" For more information check")[0]
        raise SetupError(
            f"data.source: the hub gives no {name}: {said}. Check the name and the network; "
            "for a gated data set accept its terms and log in with `hf auth login`"
        ) from error
    except RuntimeError as error:  # the data set is a script
        raise SetupError(f"data.source: {name} cannot be loaded without running its code: {error}") from error
    except (ValueError, datasets.exceptions.DatasetsError) as error:  # subset, split, damaged files
        raise DataError(f"data.source: {name}: {error.__cause__ or error}") from error
    return Rows(
        rows=head(table, data.limit),
        columns=tuple(table.column_names),
        kind="hub",
        source=data.source,
        fingerprint=builder.hash,
    )


def cached_rows(rows: Rows, revision: str | None) -> str | None:
    """What is said of a data set of the hub while the environment forbids the network (HF_DATASETS_OFFLINE, HF_HUB_OFFLINE)."""
    if rows.kind != "hub" or not datasets.config.HF_HUB_OFFLINE:
        return None
    # `datasets` takes what it read last, whatever revision is asked for.
    unsure = "" if revision in (None, rows.fingerprint) else f"; nobody can say whether that is data.revision {revision}"
    return f"offline: data.source {rows.source} is taken from the cache, commit {rows.fingerprint}{unsure}"


def head(table: datasets.Dataset, limit: int | None) -> datasets.Dataset:
    """The first `limit` rows."""
    return table if limit is None else table.select(range(min(limit, len(table))))
