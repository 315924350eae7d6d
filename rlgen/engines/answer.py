"""Decodes a server's response into arrays, so that no Python object per token remains.

rlgen's own route (`rlgen.engines.arrays`) sends arrays after a short header:

    uint32: bytes of the header | header: JSON, padded with spaces to 4 bytes | int32: prompt ids | int32: ids | float32:
    log-probs

vLLM's route sends JSON with one object per token. Numbers are little-endian.
"""

import struct
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import msgspec
import numpy

from rlgen.errors import ServerLost
from rlgen.types import Completion, FinishReason, Ids, LogProbs, Span, logp_of

ROUTE = "/rlgen/generate"  # rlgen's route, see `rlgen.engines.arrays`
JSON_ROUTE = "/inference/v1/generate"  # vLLM's route
ARRAYS = "application/vnd.rlgen.arrays"
LENGTH = struct.Struct("<I")


class Labelled(msgspec.Struct, frozen=True):
    """The tokens from `start` to `end` of a completion, which the weights labelled `version` sampled."""

    version: str
    start: int
    end: int


class Head(msgspec.Struct, frozen=True):
    """The header before the arrays in a response of rlgen's route."""

    finish_reason: str | None
    tokens: int
    prompt_tokens: int
    cached_tokens: int
    weight_versions: tuple[Labelled, ...]


# The fields of vLLM's response that rlgen uses. gc=False excludes records without references to other objects from garbage
# collection.
class Token(msgspec.Struct, gc=False):
    logprob: float


class Logprobs(msgspec.Struct, gc=False):
    content: list[Token] | None = None


class Choice(msgspec.Struct):
    finish_reason: str | None
    token_ids: list[int] | None = None
    logprobs: Logprobs | None = None
    weight_versions: list[Labelled] | None = None


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens_details: PromptDetails | None = None


class Answer(msgspec.Struct):
    choices: list[Choice]
    prompt_token_ids: list[int] | None = None
    usage: Usage | None = None


class Prefilled(msgspec.Struct):
    prompt_logprobs: list[dict[str, Token] | None] | None = None


ANSWER = msgspec.json.Decoder(Answer)
HEAD = msgspec.json.Decoder(Head)
PREFILLED = msgspec.json.Decoder(Prefilled)
logprob_of = attrgetter("logprob")


def read_answer(raw: bytes, arrays: bool, url: str, version_of: Callable[[str], int]) -> Completion:
    """Returns the completion in a response of the server at `url`.

    Args:
        arrays: whether the response is from rlgen's route.
        version_of: maps a label of weights to their version.

    Raises:
        ServerLost: the response is incomplete or has another format.
    """
    try:
        return from_arrays(raw, url, version_of) if arrays else from_json(raw, url, version_of)
    except (msgspec.MsgspecError, ValueError, OverflowError, IndexError, struct.error) as error:
        raise ServerLost(url, f"sent a response that is not a completion ({error})") from error


def from_arrays(raw: bytes, url: str, version_of: Callable[[str], int]) -> Completion:
    """Decodes a response of rlgen's route. Raises ValueError, MsgspecError or struct.error if the format is wrong."""
    (length,) = LENGTH.unpack_from(raw)
    at = LENGTH.size + length
    head = HEAD.decode(raw[LENGTH.size : at])
    if len(raw) != at + 4 * head.prompt_tokens + 8 * head.tokens:
        raise ValueError(f"{len(raw)} bytes for {head.prompt_tokens} and {head.tokens} tokens")
    prompt_ids = numpy.frombuffer(raw, "<i4", head.prompt_tokens, at)
    at += prompt_ids.nbytes
    ids = numpy.frombuffer(raw, "<i4", head.tokens, at)
    logp = numpy.frombuffer(raw, "<f4", head.tokens, at + ids.nbytes)
    reason = finished(head.finish_reason, url)
    return completion_of(ids, logp, reason, spans_of(head.weight_versions, version_of), prompt_ids, head.cached_tokens)


def from_json(raw: bytes, url: str, version_of: Callable[[str], int]) -> Completion:
    """Decodes a response of vLLM's route. Raises MsgspecError, ValueError, IndexError or OverflowError if it is not one."""
    answer = ANSWER.decode(raw)
    choice = answer.choices[0]
    content = (choice.logprobs.content if choice.logprobs else None) or []
    details = answer.usage.prompt_tokens_details if answer.usage else None
    return completion_of(
        numpy.array(choice.token_ids or (), numpy.int32),
        numpy.fromiter(map(logprob_of, content), numpy.float32, len(content)),
        finished(choice.finish_reason, url),
        spans_of(choice.weight_versions or (), version_of),
        numpy.array(answer.prompt_token_ids or (), numpy.int32),
        (details.cached_tokens if details else None) or 0,
    )


def finished(reason: str | None, url: str) -> FinishReason:
    """Returns the finish reason. Raises ServerLost unless a stop token or the length limit ended the completion."""
    if reason == "stop":
        return "stop"
    if reason == "length":
        return "length"
    raise ServerLost(url, f"ended a completion with finish_reason {reason!r}: something other than rlgen stopped it")


def spans_of(spans: Sequence[Labelled], version_of: Callable[[str], int]) -> tuple[Span, ...]:
    """Returns the spans with weight versions in place of labels."""
    return tuple(Span(span.start, span.end, version_of(span.version)) for span in spans)


def completion_of(
    token_ids: Ids, logp: LogProbs, finish_reason: FinishReason, spans: tuple[Span, ...], prompt_ids: Ids, cached_tokens: int
) -> Completion:
    """Returns the completion record of a response.

    The arrays are copied: views of the response would keep all its bytes in memory, and are read-only.
    """
    return Completion(
        token_ids=token_ids.astype(numpy.int32),
        logp=logp.astype(numpy.float32),
        finish_reason=finish_reason,
        spans=spans,
        prompt_ids=prompt_ids.astype(numpy.int32),
        cached_tokens=cached_tokens,
    )


def read_prefilled(raw: bytes, ids: Sequence[int], first: int, url: str) -> LogProbs:
    """Returns the log-probs of `ids` from index `first` on.

    Raises:
        ServerLost: they are not in the response.
    """
    try:
        found: Any = PREFILLED.decode(raw).prompt_logprobs
        return logp_of([found[at][str(ids[at])].logprob for at in range(first, len(ids))])
    except (msgspec.MsgspecError, TypeError, KeyError, IndexError) as error:
        raise ServerLost(url, f"answered without the log-probs of a prompt ({error})") from error


def packed(
    prompt_ids: Sequence[int],
    token_ids: Sequence[int],
    logp: Sequence[float],
    finish_reason: str | None,
    spans: Sequence[Labelled],
    cached_tokens: int,
) -> bytes:
    """Returns the bytes of a response of rlgen's route, which `from_arrays` decodes.

    Raises:
        ValueError: the numbers of ids and log-probs differ.
    """
    if len(token_ids) != len(logp):
        raise ValueError(f"{len(token_ids)} ids and {len(logp)} log-probs")
    head = msgspec.json.encode(
        Head(
            finish_reason=finish_reason,
            tokens=len(token_ids),
            prompt_tokens=len(prompt_ids),
            cached_tokens=cached_tokens,
            weight_versions=tuple(spans),
        )
    )
    head += b" " * (-len(head) % 4)  # aligned, so that numpy reads the arrays without a copy
    arrays = (numpy.array(prompt_ids, "<i4"), numpy.array(token_ids, "<i4"), numpy.array(logp, "<f4"))
    return b"".join((LENGTH.pack(len(head)), head, *(array.tobytes() for array in arrays)))
