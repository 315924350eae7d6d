"""Digests of everything that decides an answer or a reward; equal digests mean that a stored result can be reused."""

import hashlib
from collections.abc import Sequence

from rlgen.types import Group, Ids, Prompt, Sample


def digest(*things: object) -> str:
    """Returns 16 hex digits of SHA-256 over the `repr` of the values.

    Takes only values that `repr` describes fully: numbers, texts, tuples, dataclasses without arrays.
    """
    return hashlib.sha256(repr(things).encode()).hexdigest()[:16]


def columns_digest(prompt: Prompt) -> str:
    """Returns the digest of the data set's columns of a prompt, which its rewards may depend on."""
    return hashlib.sha256(repr(sorted(prompt.columns.items())).encode("utf-8", "replace")).hexdigest()[:16]


def asked_digest(prompt_ids: Ids, seed: int, sampling: str) -> str:
    """Returns the digest of a request: prompt ids, seed and the digest of the sampling settings."""
    made = hashlib.sha256(f"{seed} {sampling} {len(prompt_ids)} ".encode())
    made.update(prompt_ids.astype("<i4", copy=False).tobytes())
    return made.hexdigest()[:16]


def digest_of(judge: str, group: Group, samples: Sequence[Sample]) -> str:
    """Returns the digest of all that a group's rewards depend on: reward functions, data columns, and the group's samples."""
    shape = [(s.sample_index, len(s.prompt_ids), len(s.completion_ids), s.finish_reason) for s in samples]
    made = hashlib.sha256(repr((judge, columns_digest(group.prompt), shape)).encode())
    for sample in samples:
        made.update(sample.messages.encode())
        made.update(sample.prompt_ids.astype("<i4", copy=False).tobytes())
        made.update(sample.completion_ids.astype("<i4", copy=False).tobytes())
    return made.hexdigest()[:16]
