"""Binary records with checksums in an append-only file: a partly written or damaged record does not affect the others.

A frame is a header (magic, length of the payload, CRC-32 of the payload, CRC-32 of these three fields) and a payload, which is
one record encoded by msgspec. The header's own checksum distinguishes an incomplete frame at the end of a file, which a killed
process leaves, from a damaged one.
"""

import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rlgen.files import append_bytes, read_bytes, written
from rlgen.types import Completion, FinishReason, Ids, Span

MAGIC = b"\xa7rlj"
FIELDS, SEAL = struct.Struct("<4sII"), struct.Struct("<I")
HEADER = FIELDS.size + SEAL.size


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """One answer of the engine, with digests of the request, the engine and the weights."""

    group_id: int
    sample_index: int
    asked: str  # digest of prompt ids, seed and sampling settings
    engine: str  # digest of what decides how ids become log-probs
    weights: dict[int, str | None]  # digests by version
    token_ids: bytes  # int32
    logp: bytes  # float32
    finish_reason: FinishReason
    spans: list[tuple[int, int, int]]
    cached_tokens: int
    messages: str = ""  # of a conversation, as of `Completion`
    counts: dict[str, int] = {}

    def completion(self, prompt_ids: Ids) -> Completion:
        """Returns the answer as the engine gave it; `prompt_ids` are not stored and come from the request."""
        return Completion(
            token_ids=np.frombuffer(self.token_ids, dtype="<i4").astype(np.int32),
            logp=np.frombuffer(self.logp, dtype="<f4").astype(np.float32),
            finish_reason=self.finish_reason,
            spans=tuple(Span(*span) for span in self.spans),
            prompt_ids=prompt_ids,
            cached_tokens=self.cached_tokens,
            messages=self.messages,
            counts=self.counts,
        )


class Rewards(msgspec.Struct, frozen=True, array_like=True, tag="rewards"):
    """The rewards of the samples of one group."""

    group_id: int
    of: str  # digest of all that the rewards depend on
    samples: list[dict[str, Any]]  # fields of each sample, in the order of the group


Record = Answer | Rewards
_encode, _decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(Record).decode


@dataclass(frozen=True, slots=True)
class Found:
    """The result of reading a file of frames."""

    records: Sequence[Record]
    damaged: int  # number of damaged frames, or of byte ranges between frames
    end: int  # offset of an incomplete last frame, else the length of the file


def frame(record: Record) -> bytes:
    """Encodes a record as a frame: header and payload."""
    payload = _encode(record)
    fields = FIELDS.pack(MAGIC, len(payload), zlib.crc32(payload))
    return b"".join((fields, SEAL.pack(zlib.crc32(fields)), payload))


def read_frames(path: Path) -> Found:
    """Reads a file of frames; a missing file has none. Raises CheckpointError for a symbolic link."""
    try:
        content = read_bytes(path)
    except FileNotFoundError:
        return Found((), 0, 0)
    return parse(content)


def parse(content: bytes) -> Found:
    """Returns the records whose checksums match, and counts damaged frames; after one it continues at the next valid header."""
    records: list[Record] = []
    view, at, damaged = memoryview(content), 0, 0
    while at < len(content):
        length = length_at(content, at)
        if length is None:
            after = next_header(content, at + 1)
            if after is None and MAGIC.startswith(content[at : at + len(MAGIC)]) and len(content) - at < HEADER:
                break  # an incomplete header
            damaged += 1
            at = len(content) if after is None else after
            continue
        stop = at + HEADER + length
        if stop > len(content):
            after = next_header(content, at + 1)
            if after is None:
                break  # an incomplete payload
            damaged += 1
            at = after
            continue
        payload = view[at + HEADER : stop]
        if zlib.crc32(payload) == FIELDS.unpack_from(content, at)[2] and (record := decoded(payload)) is not None:
            records.append(record)
        else:
            damaged += 1
        at = stop
    return Found(records, damaged, at)


def length_at(content: bytes, at: int) -> int | None:
    """Returns the payload length from the header at offset `at`; None if no valid header is there."""
    if len(content) - at < HEADER:
        return None
    magic, length, _ = FIELDS.unpack_from(content, at)
    sealed = magic == MAGIC and SEAL.unpack_from(content, at + FIELDS.size)[0] == zlib.crc32(content[at : at + FIELDS.size])
    return int(length) if sealed else None


def next_header(content: bytes, start: int) -> int | None:
    """Returns the offset of the next valid header from `start` on; None if there is none."""
    at = content.find(MAGIC, start)
    while at >= 0:
        if length_at(content, at) is not None:
            return at
        at = content.find(MAGIC, at + 1)
    return None


def decoded(payload: memoryview) -> Record | None:
    """Decodes a payload; returns None if it is not a record of this version of rlgen."""
    try:
        record: Record = _decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    if isinstance(record, Answer) and (len(record.token_ids) % 4 or len(record.logp) % 4):
        return None
    return record


def append_frames(path: Path, records: Sequence[Record], begun: bool) -> None:
    """Appends records to a file, without flushing.

    Args:
        begun: this process has appended to the file before. If not, an incomplete frame at its end, left by a killed process, is
            truncated first.

    Raises:
        CheckpointError: the disk is full, or `path` is a symbolic link.
    """
    if not begun and path.exists():
        with written(path):
            content = read_bytes(path)
            if (end := parse(content).end) < len(content):
                os.truncate(path, end)
    append_bytes(path, b"".join(map(frame, records)), False)
