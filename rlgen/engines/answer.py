"""Decodes a server's response into arrays, so that no Python object per token remains.

rlgen's own route (`rlgen.engines.gate`) sends arrays after a short header:

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
from rlgen.types import Completion, Ids, LogProbs, Span, logp_of

ROUTE = "/rlgen/generate"  # rlgen's route, see `rlgen.engines.gate`
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


class GenerateResponse(msgspec.Struct):
    choices: list[Choice]
    prompt_token_ids: list[int] | None = None
    usage: Usage | None = None


class Prefilled(msgspec.Struct):
    prompt_logprobs: list[dict[str, Token] | None] | None = None


ANSWER = msgspec.json.Decoder(GenerateResponse)
HEAD = msgspec.json.Decoder(Head)
PREFILLED = msgspec.json.Decoder(Prefilled)
logprob_of = attrgetter("logprob")


def read_answer(raw: bytes, arrays: bool, url: str, version_of: Callable[[str], int]) -> Completion:
    """Returns the completion in a response of the server at `url`.

    `arrays`: whether the response is from rlgen's route. `version_of` maps a label of weights to their version. Raises ServerLost
    if the response is incomplete or has another format, or something else than rlgen ended the completion.
    """
    try:
        head, prompt_ids, ids, logp = (from_arrays if arrays else from_json)(raw)
        if head.finish_reason not in ("stop", "length"):
            ended = f"ended a completion with finish_reason {head.finish_reason!r}"
            raise ServerLost(url, f"{ended}: something other than rlgen stopped it")
        return Completion(
            token_ids=ids.astype(numpy.int32),  # copies: views of the response would keep all its bytes in memory
            logp=logp.astype(numpy.float32),
            finish_reason="stop" if head.finish_reason == "stop" else "length",
            spans=tuple(Span(span.start, span.end, version_of(span.version)) for span in head.weight_versions),
            prompt_ids=prompt_ids.astype(numpy.int32),
            cached_tokens=head.cached_tokens,
        )
    except (msgspec.MsgspecError, ValueError, OverflowError, IndexError, struct.error) as error:
        raise ServerLost(url, f"sent a response that is not a completion ({error})") from error


def from_arrays(raw: bytes) -> tuple[Head, Ids, Ids, LogProbs]:
    """Decodes a response of rlgen's route: its header, and prompt ids, ids and log-probs, which are views of `raw`."""
    (length,) = LENGTH.unpack_from(raw)
    at = LENGTH.size + length
    head = HEAD.decode(raw[LENGTH.size : at])
    if len(raw) != at + 4 * head.prompt_tokens + 8 * head.tokens:
        raise ValueError(f"{len(raw)} bytes for {head.prompt_tokens} and {head.tokens} tokens")
    prompt_ids = numpy.frombuffer(raw, "<i4", head.prompt_tokens, at)
    at += prompt_ids.nbytes
    ids = numpy.frombuffer(raw, "<i4", head.tokens, at)
    return head, prompt_ids, ids, numpy.frombuffer(raw, "<f4", head.tokens, at + ids.nbytes)


def from_json(raw: bytes) -> tuple[Head, Ids, Ids, LogProbs]:
    """Decodes a response of vLLM's route as `from_arrays` does."""
    answer = ANSWER.decode(raw)
    choice = answer.choices[0]
    content = (choice.logprobs.content if choice.logprobs else None) or []
    details = answer.usage.prompt_tokens_details if answer.usage else None
    ids = numpy.array(choice.token_ids or (), numpy.int32)
    prompt_ids = numpy.array(answer.prompt_token_ids or (), numpy.int32)
    head = Head(
        finish_reason=choice.finish_reason,
        tokens=len(ids),
        prompt_tokens=len(prompt_ids),
        cached_tokens=(details.cached_tokens if details else None) or 0,
        weight_versions=tuple(choice.weight_versions or ()),
    )
    return head, prompt_ids, ids, numpy.fromiter(map(logprob_of, content), numpy.float32, len(content))


def read_prefilled(raw: bytes, ids: Sequence[int], first: int, url: str) -> LogProbs:
    """Returns the log-probs of `ids` from index `first` on. Raises ServerLost if they are not in the response."""
    try:
        found: Any = PREFILLED.decode(raw).prompt_logprobs
        return logp_of([found[at][str(ids[at])].logprob for at in range(first, len(ids))])
    except (msgspec.MsgspecError, TypeError, KeyError, IndexError) as error:
        raise ServerLost(url, f"answered without the log-probs of a prompt ({error})") from error


def as_arrays(
    prompt_ids: Sequence[int],
    token_ids: Sequence[int],
    logp: Sequence[float],
    finish_reason: str | None,
    spans: Sequence[Labelled],
    cached_tokens: int,
) -> bytes:
    """Returns the bytes of a response of rlgen's route. Raises ValueError if the numbers of ids and log-probs differ."""
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
