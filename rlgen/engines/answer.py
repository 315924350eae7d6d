"""Decodes a server's response into arrays, so that no Python object per token remains.

rlgen's own route (`rlgen.engines.gate`) sends a `ServerAnswer` in msgpack. vLLM's route sends JSON with one object per token.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy

from rlgen.errors import ServerLost
from rlgen.types import Completion, Experts, LogProbs, Span, experts_from_bytes, logp_of, no_experts

ROUTE = "/rlgen/sample"  # rlgen's route, see `rlgen.engines.gate`
JSON_ROUTE = "/inference/v1/generate"  # vLLM's route
ARRAYS = "application/vnd.rlgen.arrays"


class Labelled(msgspec.Struct, frozen=True):
    """The tokens from `start` to `end` of a completion, which the weights labelled `version` sampled."""

    version: str
    start: int
    end: int


class ServerAnswer(msgspec.Struct, frozen=True):
    """A response of rlgen's route."""

    finish_reason: str | None
    prompt_ids: bytes  # int32, little-endian
    token_ids: bytes  # int32, little-endian
    logp: bytes  # float32, little-endian
    cached_tokens: int
    weight_versions: Sequence[Labelled]
    experts: bytes = b""  # uint8 or uint16
    experts_shape: tuple[int, int, int] = (0, 0, 0)

    @classmethod
    def of(
        cls,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        logp: Sequence[float],
        finish_reason: str | None,
        spans: Sequence[Labelled],
        cached_tokens: int,
        experts: Experts | None = None,
    ) -> "ServerAnswer":
        ids, sampled, numbers = numpy.array(prompt_ids, "<i4"), numpy.array(token_ids, "<i4"), numpy.array(logp, "<f4")
        arrays = ids.tobytes(), sampled.tobytes(), numbers.tobytes()
        experts = no_experts() if experts is None else experts
        return cls(finish_reason, *arrays, cached_tokens, spans, experts.tobytes(), experts.shape)

    def packed(self) -> bytes:
        """Returns the bytes of the response. Raises ValueError if the numbers of ids and log-probs differ."""
        if len(self.token_ids) != len(self.logp):
            raise ValueError(f"{len(self.token_ids) // 4} ids and {len(self.logp) // 4} log-probs")
        return msgspec.msgpack.encode(self)


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


ANSWER = msgspec.msgpack.Decoder(ServerAnswer)
GENERATED = msgspec.json.Decoder(GenerateResponse)
PREFILLED = msgspec.json.Decoder(Prefilled)


def read_answer(raw: bytes, arrays: bool, url: str, version_of: Callable[[str], int]) -> Completion:
    """Returns the completion in a response of the server at `url`.

    `arrays`: whether the response is from rlgen's route. `version_of` maps a label of weights to their version. Raises ServerLost
    if the response is incomplete or has another format, or something else than rlgen ended the completion.
    """
    try:
        answer = ANSWER.decode(raw) if arrays else from_json(raw)
        if arrays and len(answer.token_ids) != len(answer.logp):
            raise ValueError(f"{len(answer.token_ids)} bytes of ids, {len(answer.logp)} of log-probs")
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
            experts=experts_from_bytes(answer.experts, answer.experts_shape),
        )
    except (msgspec.MsgspecError, ValueError, OverflowError, IndexError) as error:
        raise ServerLost(url, f"sent a response that is not a completion ({error})") from error


def from_json(raw: bytes) -> ServerAnswer:
    """Decodes a response of vLLM's route."""
    answer = GENERATED.decode(raw)
    choice = answer.choices[0]
    logp = [token.logprob for token in (choice.logprobs and choice.logprobs.content) or ()]
    details = answer.usage.prompt_tokens_details if answer.usage else None
    cached = (details.cached_tokens if details else None) or 0
    prompt_ids, ids = answer.prompt_token_ids or (), choice.token_ids or ()
    return ServerAnswer.of(prompt_ids, ids, logp, choice.finish_reason, choice.weight_versions or (), cached)


def read_prefilled(raw: bytes, ids: Sequence[int], first: int, url: str) -> LogProbs:
    """Returns the log-probs of `ids` from index `first` on. Raises ServerLost if they are not in the response."""
    try:
        found: Any = PREFILLED.decode(raw).prompt_logprobs
        return logp_of([found[at][str(ids[at])].logprob for at in range(first, len(ids))])
    except (msgspec.MsgspecError, TypeError, KeyError, IndexError) as error:
        raise ServerLost(url, f"answered without the log-probs of a prompt ({error})") from error
