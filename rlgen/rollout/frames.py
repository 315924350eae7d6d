"""Binary records with checksums in an append-only file: a partly written or damaged record does not affect the others.

A frame is a header (magic, length of the payload, CRC-32 of the payload, CRC-32 of these three fields) and a payload, which is
one record encoded by msgspec. The header's own checksum distinguishes an incomplete frame at the end of a file, which a killed
process leaves, from a damaged one. The few small records that a person may want to read
are lines of JSON with a checksum.

Digests stand for everything that decides an answer or a reward: where they are equal, a stored result can be reused.
"""

import hashlib
import json
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from rlgen.files import append_bytes, read_bytes, written
from rlgen.types import Completion, FinishReason, Ids, Prompt, Sample, Span, experts_from_bytes

MAGIC = b"\xa7rlj"
FIELDS, SEAL = struct.Struct("<4sII"), struct.Struct("<I")
HEADER = FIELDS.size + SEAL.size


class AnswerRecord(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
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
    experts: bytes = b""  # uint8 or uint16
    experts_shape: tuple[int, int, int] = (0, 0, 0)

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
            experts=experts_from_bytes(self.experts, self.experts_shape),
        )


class Rewards(msgspec.Struct, frozen=True, array_like=True, tag="rewards"):
    group_id: int
    of: str  # digest of all that the rewards depend on
    samples: list[dict[str, Any]]  # fields of each sample, in the order of the group


Record = AnswerRecord | Rewards
Line = dict[str, Any]
_encode, _decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(Record).decode


class FramesRead(NamedTuple):
    records: Sequence[Record]
    damaged: int  # frames, or byte ranges between frames
    end: int  # offset of an incomplete last frame, else the length of the file


def frame(record: Record) -> bytes:
    payload = _encode(record)
    fields = FIELDS.pack(MAGIC, len(payload), zlib.crc32(payload))
    return b"".join((fields, SEAL.pack(zlib.crc32(fields)), payload))


def read_frames(path: Path) -> FramesRead:
    """Reads a file of frames; a missing file has none. Raises CheckpointError for a symbolic link."""
    try:
        return parse_frames(read_bytes(path))
    except FileNotFoundError:
        return FramesRead((), 0, 0)


def parse_frames(content: bytes) -> FramesRead:
    """Returns the records whose checksums match, and counts damaged frames; after one it continues at the next valid header."""
    records: list[Record] = []
    view, at, damaged = memoryview(content), 0, 0
    while at < len(content):
        length = length_at(content, at)
        stop = at + HEADER + (length or 0)
        if length is None or stop > len(content):
            after = next_header(content, at + 1)
            begun = length is not None or (MAGIC.startswith(content[at : at + len(MAGIC)]) and len(content) - at < HEADER)
            if after is None and begun:
                break  # an incomplete frame
            stop = len(content) if after is None else after
            damaged += 1
        elif (record := decode_record(view[at + HEADER : stop], FIELDS.unpack_from(content, at)[2])) is None:
            damaged += 1
        else:
            records.append(record)
        at = stop
    return FramesRead(records, damaged, at)


def length_at(content: bytes, at: int) -> int | None:
    """Returns the payload length from the header at offset `at`; None if no valid header is there."""
    if len(content) - at < HEADER:
        return None
    magic, length, _ = FIELDS.unpack_from(content, at)
    sealed = magic == MAGIC and SEAL.unpack_from(content, at + FIELDS.size)[0] == zlib.crc32(content[at : at + FIELDS.size])
    return int(length) if sealed else None


def next_header(content: bytes, start: int) -> int | None:
    """Returns the offset of the next valid header from `start` on; None if there is none."""
    places = (found.start() for found in re.compile(re.escape(MAGIC)).finditer(content, start))
    return next((at for at in places if length_at(content, at) is not None), None)


def decode_record(payload: memoryview, crc32: int) -> Record | None:
    """Decodes a payload; returns None if it is damaged, or not a record of this version of rlgen."""
    if zlib.crc32(payload) != crc32:
        return None
    try:
        record: Record = _decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    if isinstance(record, AnswerRecord) and (len(record.token_ids) % 4 or len(record.logp) % 4):
        return None
    return record


def append_frames(path: Path, records: Sequence[Record], begun: bool) -> None:
    """Appends records to a file, without flushing. Raises CheckpointError: the disk is full, or `path` is a symbolic link.

    `begun`: this process has appended to the file before. If not, an incomplete frame at its end, left by a killed process, is
    truncated first.
    """
    if not begun and path.exists():
        with written(path):
            content = read_bytes(path)
            if (end := parse_frames(content).end) < len(content):
                os.truncate(path, end)
    append_bytes(path, b"".join(map(frame, records)), False)


def sealed(line: Line) -> str:
    """Returns one line of JSON whose last key, `crc32`, is the CRC-32 of the JSON without that key."""
    text = json.dumps(line)
    return f'{text[:-1]}, "crc32": {zlib.crc32(text.encode())}}}\n'


def sound_lines(path: Path, say: Callable[[str], None]) -> Iterator[Line]:
    """Reads the lines whose checksums match; ignores an incomplete last line, and reports the number of damaged ones by `say`."""
    *whole, last = read_bytes(path).split(b"\n")
    lines = [line for text in whole if (line := parsed(text)) is not None]
    if damaged := len(whole) - len(lines):
        say(f"journal: {damaged} lines of {path.name} are ignored: damaged, or of another version of rlgen")
    yield from lines
    if (line := parsed(last)) is not None:
        yield line


def parsed(text: bytes) -> Line | None:
    """Parses one line; returns None if `sealed` did not produce exactly these bytes."""
    try:
        line = json.loads(text)
        made = sealed({key: value for key, value in line.items() if key != "crc32"})
    except (ValueError, AttributeError, RecursionError):
        return None
    return line if made.encode() == text + b"\n" else None


def mend(path: Path) -> None:
    """Truncates an incomplete last line: its writer was killed."""
    with written(path):
        os.truncate(path, read_bytes(path).rfind(b"\n") + 1)


def digest(*things: object) -> str:
    """Returns 16 hex digits of SHA-256 over values that `repr` describes fully: numbers, texts, dataclasses without arrays."""
    return hashlib.sha256(repr(things).encode()).hexdigest()[:16]


def columns_digest(prompt: Prompt) -> str:
    """Returns the digest of the data set's columns of a prompt, which its rewards may depend on."""
    return hashlib.sha256(repr(sorted(prompt.columns.items())).encode("utf-8", "replace")).hexdigest()[:16]


def asked_digest(prompt_ids: Ids, seed: int, sampling: str) -> str:
    """Returns the digest of a request: prompt ids, seed and the digest of the sampling settings."""
    made = hashlib.sha256(f"{seed} {sampling} {len(prompt_ids)} ".encode())
    made.update(prompt_ids.astype("<i4", copy=False).tobytes())
    return made.hexdigest()[:16]


def rewards_digest(judge: str, columns: str, samples: Sequence[Sample]) -> str:
    """Returns the digest of all that a group's rewards depend on: reward functions, `columns_digest`, and the group's samples."""
    shape = [(s.sample_index, len(s.prompt_ids), len(s.completion_ids), s.finish_reason) for s in samples]
    made = hashlib.sha256(repr((judge, columns, shape)).encode())
    for sample in samples:
        made.update(sample.messages.encode())
        made.update(sample.prompt_ids.astype("<i4", copy=False).tobytes())
        made.update(sample.completion_ids.astype("<i4", copy=False).tobytes())
    return made.hexdigest()[:16]
