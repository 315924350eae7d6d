"""Records that flow through a run, in the order in which they are created. All of them are frozen.

Axis letters, used in every docstring and local name:
    P  prompts of a step            G  completions of a prompt (`rollout.group_size`)
    B  rows, B = P * G              T  completion positions, padded on the right
    S  prompt and completion positions together, padded on the right
    L  one row's own tokens         V  vocabulary
    N  tokens of all rows, one row after another

No token is a Python object: values with one entry per token are arrays, and the samples of a step are stored as columns
(`rollout.samples.Samples`).
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length"]
ENVIRONMENT = "environment"  # the role of a message that comes after the last turn, and that the model never reads
Ids: TypeAlias = NDArray[np.int32]
LogProbs: TypeAlias = NDArray[np.float32]
Experts: TypeAlias = NDArray[np.uint8] | NDArray[np.uint16]  # [L, layers, k] by which the engine computed each token


def ids_of(values: Iterable[int]) -> Ids:
    """Returns token ids as an array: ids_of((256, 117)) is [256, 117] of int32."""
    return np.asarray(values if isinstance(values, np.ndarray | list | tuple) else list(values), dtype=np.int32)


def logp_of(values: Iterable[float]) -> LogProbs:
    return np.asarray(values if isinstance(values, np.ndarray | list | tuple) else list(values), dtype=np.float32)


def no_experts() -> Experts:
    """Returns what stands for the experts of tokens that nobody knows: [0, 0, 0]."""
    return np.zeros((0, 0, 0), dtype=np.uint8)


def experts_from_bytes(data: bytes, shape: tuple[int, int, int]) -> Experts:
    """Returns experts from the bytes of their array. Raises ValueError if these have another number of elements."""
    width = len(data) // max(1, math.prod(shape))
    return np.frombuffer(data, dtype="<u2" if width == 2 else "u1").reshape(shape)


class Record:
    """Base of records that hold arrays; compares all fields, arrays element by element."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return all(_same(getattr(self, one.name), getattr(other, one.name)) for one in fields(self))  # type: ignore[arg-type]

    __hash__ = None  # type: ignore[assignment]


def _same(one: Any, other: Any) -> bool:
    """Returns whether two values are equal; NaN, which stands for "not sampled", equals NaN."""
    if isinstance(one, tuple) and any(isinstance(value, np.ndarray) for value in one):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
    return bool(one == other)


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """One image of a prompt, as its file has it. Image(sha256="9f86d0...", data=b"\\x89PNG...", start=17, stop=51)"""

    sha256: str  # of `data`; names the image in caches and records
    data: bytes = field(repr=False)  # the encoded file: pixels are held only of the images that are being computed
    start: int  # its ids in the prompt, as the model's processor writes them for one placeholder: prompt_ids[start:stop]
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt(Record):
    """One data row, templated and tokenised once.

    Prompt(position=17, row=3, text="<|im_start|>user\\nsort 3 1 2...", prompt_ids=[256, 117, 9], columns={"answer": "123"})
    """

    position: int  # index in the run's data order, over all epochs; also the id of the prompt's group
    row: int  # index in the data set, after filtering
    text: str  # what the model sees, as text
    prompt_ids: Ids  # [L] what the model sees
    columns: Mapping[str, Any]  # the data set's columns, for rewards
    messages: Sequence[Mapping[str, Any]] | None = None  # the same as a chat, for rewards; None: a text without a template
    images: tuple[Image, ...] = ()  # in the order of their places


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request(Record):
    """A request to the engine for one completion. Request(prompt_ids=[256, 117, 9], seed=81263)"""

    prompt_ids: Ids  # [L]
    seed: int  # derived from the sample's position, never from call order
    max_tokens: int | None = None  # of this completion; None: those of `Sampling`
    images: tuple[Image, ...] = ()  # of the prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """What a token is sampled from, and what its log-prob is of: softmax(logits / temperature) over the ids that are kept.

    In this order, as in vLLM: `min_p` keeps ids with at least that share of the highest probability, `top_k` the most probable
    ones, and `top_p` the fewest of these that together have this share of the probability that is left.
    """

    temperature: float = 1.0  # above 0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def truncated(self) -> bool:
        return self != self.whole

    @property
    def whole(self) -> "Distribution":
        """Returns the distribution over all ids, at the same temperature."""
        return Distribution(temperature=self.temperature)

    def __str__(self) -> str:
        """Returns `temperature 0.7, top_p 0.95`."""
        other = [one for one in fields(self) if one.name == "temperature" or getattr(self, one.name) != one.default]
        return ", ".join(f"{one.name} {getattr(self, one.name):g}" for one in other)


WHOLE = Distribution()  # the model's own


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings shared by all requests of one call. Sampling(max_tokens=64, temperature=1.0, stop_ids=(257,))"""

    max_tokens: int
    temperature: float  # 0: greedy, the most probable id, or the lowest of equally probable ones; the seed then has no effect
    stop_ids: tuple[int, ...]  # every id that ends a completion; the sampled one is kept
    top_k: int = 0  # 0: all ids. This one and the next two have no effect on greedy completions; see `Distribution`
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()  # texts that end a completion, too; the token that completes one is kept
    regex: str | None = None  # restricts the completions; log-probs are then those of the restricted distribution
    vocab_size: int | None = field(default=None, repr=False)  # every id is below it; None: not checked. No part of `digest`

    def limit_of(self, request: Request) -> int:
        return self.max_tokens if request.max_tokens is None else request.max_tokens

    @property
    def distribution(self) -> Distribution:
        """Returns what log-probs are of, on both sides: what is sampled from; for greedy completions, the model's own."""
        if self.temperature == 0:
            return WHOLE
        return Distribution(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)


class Span(NamedTuple):
    """A range of completion tokens that the model sampled with weights of one version: Span(start=0, stop=3, version=4)

    Tokens between the spans of a completion were not sampled (a tool's answer, for example), and are not trained on.
    """

    start: int
    stop: int
    version: int


def oldest_version(spans: Sequence[Span]) -> int:
    """Returns the oldest weight version that sampled a token; -1 if unknown. Beside others, an empty span has sampled none."""
    newest = max((span.version for span in spans), default=-1)
    return min((span.version for span in spans if span.start < span.stop), default=newest)


def one_span(tokens: int, version: int) -> tuple[Span, ...]:
    return (Span(0, tokens, version),)


def mask_of(spans: Iterable[Span], length: int) -> NDArray[np.bool_]:
    """Returns [L], true for the tokens within `spans`."""
    mask = np.zeros(length, dtype=bool)
    for start, stop, _ in spans:
        mask[start:stop] = True
    return mask


def whole_conversation(messages: str, completion: str) -> list[dict[str, Any]]:
    """Returns all messages after the prompt: those of a `Completion`, and the text of the last turn as the assistant's.

    What an environment said to the last turn stays behind it.
    """
    found = json.loads(messages or "[]")
    end = end_of_talk(found)
    return [*found[:end], {"role": "assistant", "content": completion}, *found[end:]]


def end_of_talk(messages: Sequence[Mapping[str, Any]]) -> int:
    """Returns how many messages come before what an environment said to the last turn; all of them if it said nothing."""
    return len(messages) - (bool(messages) and messages[-1]["role"] == ENVIRONMENT)


def turns_of(spans: Sequence[Span]) -> list[tuple[int, int]]:
    """Returns start and stop of each turn of the model: spans that touch are one turn, which several versions sampled."""
    turns: list[tuple[int, int]] = []
    for start, stop, _ in spans:
        if turns and turns[-1][1] == start:
            turns[-1] = turns[-1][0], stop
        else:
            turns.append((start, stop))
    return turns


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion(Record):
    """The engine's answer to a request. Completion(token_ids=[9, 4, 257], logp=[-.2, -1.1, -.01], finish_reason="stop", ...)

    The answers to the turns of a conversation are joined to one completion, with what stands between them.
    """

    token_ids: Ids  # [L] includes the sampled stop token: stopping is an action
    logp: LogProbs  # [L] log-probability of each sampled token, under `Sampling.distribution`; NaN where not sampled
    finish_reason: FinishReason
    spans: tuple[Span, ...]  # the weight version of each range of sampled tokens
    prompt_ids: Ids  # the prompt that the engine reports it answered
    cached_tokens: int = 0  # prompt tokens that were taken from the prefix cache
    messages: str = ""  # a list in JSON: all turns but the last, and the replies to them; "": there are none
    counts: Mapping[str, int] = field(default_factory=dict)  # of what happened in the replies, by name
    # Of prompt and completion without the last token, which was never computed, if the engine returns them; else `no_experts`.
    experts: Experts = field(default_factory=no_experts)

    @property
    def weight_version(self) -> int:
        """Returns the oldest weight version that sampled one of its tokens; -1 if unknown."""
        return oldest_version(self.spans)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample(Record):
    """One completion of one prompt, from sampling to its rewards; a row of `Samples`.

    Sample(group_id=17, sample_index=0, prompt_ids=[256, 117], completion_ids=[9, 4, 257], sampler_logp=[-.2, -1.1, -.01],
           spans=(Span(0, 3, 4),), finish_reason="stop", seed=81263, completion="bca", rewards={"exact_match": 1.0}, reward=1.0)
    """

    group_id: int  # the prompt's position, which the samples of one prompt share; the only key by which samples are grouped
    sample_index: int  # 0..G-1 within the group
    prompt_ids: Ids  # [L_prompt]
    completion_ids: Ids  # [L] as sampled, never re-tokenised
    sampler_logp: LogProbs  # [L]; NaN where not sampled
    spans: tuple[Span, ...]  # sampled tokens, the stop token included: the loss is over these
    finish_reason: FinishReason
    seed: int
    completion: str  # text for rewards and people only
    rewards: Mapping[str, float | None]  # by name; None: does not apply, or failed
    reward: float | None  # weighted sum of those that apply; None: not scorable
    cached_tokens: int = 0  # prompt tokens that the engine took from its prefix cache
    reward_errors: Mapping[str, str] = field(default_factory=dict)  # by name: "timeout: no answer within 30 s (r.py:3)"
    messages: str = ""  # as of `Completion`; `completion` is the text of the turn after them
    counts: Mapping[str, int] = field(default_factory=dict)  # as of `Completion`
    images: tuple[Image, ...] = ()  # of the prompt
    experts: Experts = field(default_factory=no_experts)  # as of `Completion`

    @property
    def weight_version(self) -> int:
        """Returns the oldest weight version that sampled one of its tokens; -1 if unknown."""
        return oldest_version(self.spans)

    @property
    def loss_mask(self) -> NDArray[np.bool_]:
        return mask_of(self.spans, len(self.completion_ids))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group(Record):
    group_id: int
    prompt: Prompt
    samples: tuple[Sample, ...]  # [G]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """A micro-batch: rows of one forward pass. Every row starts with its prompt; padding is on the right."""

    rows: tuple[int, ...]  # [B] index of each row among the samples that this process trains
    input_ids: "Tensor"  # [B, S] prompt and completion
    lengths: tuple[int, ...]  # [B] tokens of each row, without padding
    prompt_lengths: tuple[int, ...]  # [B]
    same_prompt: tuple[int, ...]  # [B] first row of the batch that has the prompt of each row, of the same group
    completion_ids: "Tensor"  # [B, T]
    mask: "Tensor"  # [B, T] bool, true on sampled tokens, the stop token included
    places: "Tensor"  # [2, N] row and column of each true position of the mask, row by row; known without asking the device
    sampler_logp: "Tensor"  # [B, T] float32
    images: tuple[tuple[Image, ...], ...] = ()  # [B] of each row's prompt; (): no row has any
    experts: "Tensor | None" = None  # [B, S, layers, k] int16 of each token; -1: not known. None: of no token


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a run between two steps. Position(step=20, prompts=160, nonfinite=0)"""

    step: int = 0  # steps done; also the version of the weights
    prompts: int = 0  # prompts taken from the data order, over all epochs; the position of the next prompt
    nonfinite: int = 0  # steps in a row, up to this one, without an update because a number was not finite
