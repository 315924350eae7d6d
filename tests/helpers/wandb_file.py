"""Reads what wandb writes offline. wandb has no reader in Python; the records are those of its own protocol."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, HEADER, START = 1 << 15, 7, 7  # bytes of a block, of the header of a chunk, and of that of the file
WHOLE, LAST = 1, 4  # kinds of a chunk: a record, and the end of one


def read_wandb(path: Path) -> list[Any]:
    """The records of a `.wandb` file, which has the form of LevelDB's log."""
    from wandb.proto.wandb_internal_pb2 import Record  # takes seconds

    return [Record.FromString(record) for record in chunks(path.read_bytes())]


def chunks(data: bytes) -> Iterator[bytes]:
    at, record = START, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:  # no room for a header: the rest of the block is empty
            at += BLOCK - at % BLOCK
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (WHOLE, LAST):
            yield record
            record = b""


def rows_of(records: list[Any]) -> list[dict[str, Any]]:
    """What was logged, a row each."""
    kept = [record.history.item for record in records if record.WhichOneof("record_type") == "history"]
    return [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items} for items in kept]
