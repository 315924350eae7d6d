"""Decodes a server's response into arrays, so that no Python object per token remains.

rlgen's own route (`rlgen.engines.gate`) sends an `Answer` in msgpack. vLLM's route sends JSON with one object per token.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import msgspec
import numpy

from rlgen.errors import ServerLost
from rlgen.types import Completion, LogProbs, Span, logp_of

ROUTE = "/rlgen/sample"  # rlgen's route, see `rlgen.engines.gate`
JSON_ROUTE = "/inference/v1/generate"  # vLLM's route
ARRAYS = "application/vnd.rlgen.arrays"


class Labelled(msgspec.Struct, frozen=True):
    """The tokens from `start` to `end` of a completion, which the weights labelled `version` sampled."""

    version: str
    start: int
    end: int


class Answer(msgspec.Struct, frozen=True):
    """A response of rlgen's route."""

    finish_reason: str | None
    prompt_ids: bytes  # int32, little-endian
    token_ids: bytes  # int32, little-endian
    logp: bytes  # float32, little-endian
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


ANSWER = msgspec.msgpack.Decoder(Answer)
GENERATED = msgspec.json.Decoder(GenerateResponse)
PREFILLED = msgspec.json.Decoder(Prefilled)
logprob_of = attrgetter("logprob")


def read_answer(raw: bytes, arrays: bool, url: str, version_of: Callable[[str], int]) -> Completion:
    """Returns the completion in a response of the server at `url`.

    `arrays`: whether the response is from rlgen's route. `version_of` maps a label of weights to their version. Raises ServerLost
    if the response is incomplete or has another format, or something else than rlgen ended the completion.
    """
    try:
        answer = ANSWER.decode(raw) if arrays else from_json(raw)
        if answer.finish_reason not in ("stop", "length"):
            ended = f"ended a completion with finish_reason {answer.finish_reason!r}"
            raise ServerLost(url, f"{ended}: something other than rlgen stopped it")
        return Completion(
            token_ids=numpy.frombuffer(answer.token_ids, "<i4").astype(numpy.int32),
            logp=numpy.frombuffer(answer.logp, "<f4").astype(numpy.float32),
            finish_reason="stop" if answer.finish_reason == "stop" else "length",
            spans=tuple(Span(span.start, span.end, version_of(span.version)) for span in answer.weight_versions),
            prompt_ids=numpy.frombuffer(answer.prompt_ids, "<i4").astype(numpy.int32),
            cached_tokens=answer.cached_tokens,
        )
    except (msgspec.MsgspecError, ValueError, OverflowError, IndexError) as error:
        raise ServerLost(url, f"sent a response that is not a completion ({error})") from error


def from_json(raw: bytes) -> Answer:
    """Decodes a response of vLLM's route."""
    answer = GENERATED.decode(raw)
    choice = answer.choices[0]
    content = (choice.logprobs.content if choice.logprobs else None) or []
    details = answer.usage.prompt_tokens_details if answer.usage else None
    return Answer(
        finish_reason=choice.finish_reason,
        prompt_ids=numpy.array(answer.prompt_token_ids or (), "<i4").tobytes(),
        token_ids=numpy.array(choice.token_ids or (), "<i4").tobytes(),
        logp=numpy.fromiter(map(logprob_of, content), "<f4", len(content)).tobytes(),
        cached_tokens=(details.cached_tokens if details else None) or 0,
        weight_versions=tuple(choice.weight_versions or ()),
    )


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
    answer = Answer(
        finish_reason=finish_reason,
        prompt_ids=numpy.array(prompt_ids, "<i4").tobytes(),
        token_ids=numpy.array(token_ids, "<i4").tobytes(),
        logp=numpy.array(logp, "<f4").tobytes(),
        cached_tokens=cached_tokens,
        weight_versions=tuple(spans),
    )
    return msgspec.msgpack.encode(answer)
