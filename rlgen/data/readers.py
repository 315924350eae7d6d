"""Readers of JSON and CSV files that keep every value as the file has it.

The loaders of `datasets` guess types: the text "2024-01-01" becomes a date, the answer "07" a number, and the answer "NA" a
missing value.
"""

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from rlgen.data.tasks import Row
from rlgen.errors import DataError


def read_lines(path: Path) -> Iterator[Row]:
    """Reads the objects of a JSON Lines file; skips empty lines. Raises DataError."""
    for number, line in enumerate(text_lines(path), 1):
        if line.strip():
            yield parse_row(line, path, number)


def read_json(path: Path) -> Iterator[Row]:
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
    lines = csv.DictReader(text_lines(path), strict=True)
    try:
        for row in lines:
            if None in row or None in row.values():
                raise DataError(
                    f"data.source: {path}:{lines.line_num}: the record does not have {len(lines.fieldnames or ())} "
                    "values, one for each column; put values with a comma in double quotes"
                )
            yield row
    except csv.Error as error:
        raise DataError(f"data.source: {path}:{lines.line_num}: not CSV: {error}") from error


def text_lines(path: Path) -> Iterator[str]:
    """Reads the lines of a UTF-8 file, with or without a byte order mark, one at a time. Raises DataError."""
    try:
        with path.open(encoding="utf-8-sig") as file:
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
        raise DataError(f"data.source: {path}:{number}: the line is not an object of columns: {line[:60]}{hint}")
    return row


TEXT_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": read_lines,
    ".json": read_json,
    ".csv": read_csv,
}
