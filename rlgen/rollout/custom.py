"""Runs a sampler that the user writes, `rollout.use`, and proves that what it returns is what the engine sampled.

The function is called as function(prompts, engine) in the trainer's process, once for the prompts of a step:

    def think_twice(prompts, engine):
        places = [(prompt, sample) for prompt in range(len(prompts)) for sample in range(engine.group_size)]
        first = engine.generate([Ask(prompt, sample, max_tokens=100) for prompt, sample in places])
        ...
        return [Rolled(prompt, sample, ids, logp) for ...]

Each token that it returns either has no log-prob, and is not trained on; or the engine must have sampled it after exactly the ids
before it, with bit for bit that log-prob. Anything else ends the run.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from rlgen.engines.base import Engine, Finished
from rlgen.errors import Fault, RlgenError, SentinelError, ToolError
from rlgen.rollout.answers import check_answers
from rlgen.rollout.conversations import turn_seed
from rlgen.types import Completion, Ids, Prompt, Request, Sampling, Span, ids_of
from rlgen.worker_pool.failures import described, user_line
from rlgen.worker_pool.find import find_function
from rlgen.worker_pool.source import Trade

ROLLOUT = Trade("rollout.use", "rollout", ToolError)


@dataclass(frozen=True, slots=True)
class Ask:
    """A request to the engine. Ask(prompt=0, sample=3, after=[9, 4, 257], max_tokens=20)"""

    prompt: int  # index into the prompts
    sample: int  # 0..group_size-1
    after: Sequence[int] = ()  # ids that stand between the prompt and what is to be sampled
    max_tokens: int | None = None  # None: as many as the completion has left


@dataclass(frozen=True, slots=True)
class Answer:
    """What the engine sampled. Answer(ids=[9, 4, 257], logp=[-0.2, -1.1, -0.01], stopped=True)"""

    ids: list[int]
    logp: list[float]
    stopped: bool  # the last id is a stop token; else it was cut off


@dataclass(frozen=True, slots=True)
class Rolled:
    """One completion that a rollout returns. Rolled(prompt=0, sample=3, ids=[9, 4, 88], logp=[-0.2, -1.1, None])"""

    prompt: int
    sample: int
    ids: Sequence[int]
    logp: Sequence[float | None]  # as the engine returned it; None, or NaN: masked, not trained on


Function: TypeAlias = Callable[[Sequence[Prompt], "Handle"], Sequence[Rolled]]


@dataclass(slots=True, eq=False)
class Handle:
    """The engine, as a rollout sees it. It keeps all answers."""

    group_size: int
    _engine: Engine
    _sampling: Sampling
    _tokenizer: PreTrainedTokenizerBase
    _prompts: Sequence[Prompt]
    _requests: Sequence[Request]  # of the completions: group_size for each prompt
    _version: int
    _asked: Counter[tuple[int, int]] = field(default_factory=Counter)  # by prompt and sample
    # By prompt: the ids between it and an answer, and the answer.
    _given: dict[int, list[tuple[Ids, Completion]]] = field(default_factory=lambda: defaultdict(list))

    @property
    def max_tokens(self) -> int:
        return self._sampling.max_tokens

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self._sampling.stop_ids

    def generate(self, asks: Sequence[Ask]) -> list[Answer]:
        """Samples after given ids, all requests at once, and returns the answers in their order.

        What is sampled follows from the run's seed, the prompt, the sample, and how often that sample was asked for.

        Raises:
            ValueError: a request is for no prompt or sample of the step, or leaves no room for a token.
            EngineError: as `Engine.generate` raises it.
            SentinelError: an answer does not match its request.
        """
        requests = [self._request(ask) for ask in asks]
        found = self._engine.generate(requests, self._sampling)
        check_answers(requests, found, self._sampling, self._version)
        for ask, answer in zip(asks, found, strict=True):
            self._given[ask.prompt].append((ids_of(ask.after), answer))
        return [Answer(one.token_ids.tolist(), one.logp.tolist(), one.finish_reason == "stop") for one in found]

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, to be put between sampled ids. Never encode a text that was sampled."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, for decisions only: never encode it again."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def _request(self, ask: Ask) -> Request:
        """Returns the request of an ask, with the seed of its place. Raises ValueError."""
        if not (0 <= ask.prompt < len(self._prompts) and 0 <= ask.sample < self.group_size):
            raise ValueError(f"{ask} names none of the {len(self._prompts)} prompts with {self.group_size} samples each")
        room = self.max_tokens - len(ask.after)
        tokens = room if ask.max_tokens is None else min(room, ask.max_tokens)
        if tokens < 1:
            raise ValueError(
                f"`after` has {len(ask.after)} ids, which leaves no room in rollout.max_completion_tokens {self.max_tokens}"
            )
        place = ask.prompt, ask.sample
        seed = self._requests[ask.prompt * self.group_size + ask.sample].seed
        request = Request(
            prompt_ids=np.concatenate([self._prompts[ask.prompt].prompt_ids, ids_of(ask.after)], dtype=np.int32),
            seed=turn_seed(seed, self._asked[place]),
            max_tokens=tokens,
        )
        self._asked[place] += 1
        return request

    def proved(self, rolled: Rolled, where: str) -> Completion:
        """Checks that the engine sampled each token that is marked as sampled after the ids before it. Returns the completion.

        Raises SentinelError if it did not sample one there, or with another log-prob, or if no token was sampled; ToolError for
        what are no lists of ids and of log-probs.
        """
        try:
            ids, logp = ids_of(rolled.ids), np.array(rolled.logp, dtype=np.float32)  # None becomes NaN
            if ids.ndim != 1 or logp.ndim != 1:
                raise TypeError(f"ids is a {type(rolled.ids).__name__}, logp a {type(rolled.logp).__name__}")
        except (TypeError, ValueError, OverflowError) as error:
            raise ToolError(f"{where}: ids must be a list of token ids, and logp one of numbers and None: {error}") from error
        if len(logp) != len(ids):
            raise SentinelError(Fault.MISSING_LOGPROBS, f"it has {len(ids)} ids and {len(logp)} log-probs", where)
        sampled, versions = ~np.isnan(logp), np.full(len(ids), -1, dtype=np.int64)
        for after, answer in self._given[rolled.prompt]:
            start = len(after)
            if start < len(ids) and np.array_equal(ids[:start], after):
                length = min(len(ids) - start, len(answer.token_ids))
                same = ids[start : start + length] == answer.token_ids[:length]
                length = length if same.all() else int(same.argmin())  # by ids alone: an id before may be masked
                as_told = logp[start : start + length].view(np.int32) == answer.logp[:length].view(np.int32)
                own = versions[start : start + length]
                for first, stop, version in answer.spans:
                    own[first:stop][as_told[first:stop]] = version
        if (wrong := np.flatnonzero(sampled & (versions < 0))).size:
            at = int(wrong[0])
            raise SentinelError(
                Fault.FOREIGN_TOKENS,
                f"id {ids[at]} at place {at} has the log-prob {logp[at]:.6g}, but the engine did not sample it with this log-prob"
                f" after the {at} ids before it; return ids and log-probs as the engine gave them, and None for all others",
                where,
            )
        if not sampled.any():
            raise SentinelError(Fault.FOREIGN_TOKENS, "none of its ids was sampled, so nothing could be learned from it", where)
        if len(ids) > self.max_tokens:
            what = f"it has {len(ids)} ids, more than rollout.max_completion_tokens {self.max_tokens}"
            raise SentinelError(Fault.FOREIGN_TOKENS, what, where)
        stopped = bool(sampled[-1]) and int(ids[-1]) in self.stop_ids
        return Completion(
            token_ids=ids,
            logp=logp,
            finish_reason="stop" if stopped else "length",
            spans=spans_of(np.where(sampled, versions, -1)),
            prompt_ids=self._prompts[rolled.prompt].prompt_ids,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomRollout:
    """The function of `rollout.use`. CustomRollout(use="mine.py:think_twice", function=..., sha256="9f86d0...")"""

    use: str
    function: Function
    sha256: str | None  # of its code

    @classmethod
    def load(cls, use: str) -> "CustomRollout":
        """Imports the function. Raises ToolError if there is none, or its import fails."""
        function, sha256 = find_function(use, ROLLOUT)
        return cls(use=use, function=function, sha256=sha256)

    def __call__(
        self,
        engine: Engine,
        prompts: Sequence[Prompt],
        requests: Sequence[Request],
        sampling: Sampling,
        tokenizer: PreTrainedTokenizerBase,
        version: int,
        finished: Finished,
    ) -> list[Completion]:
        """Returns the completions of all requests, in their order, and passes each to `finished`.

        Raises:
            ToolError: the function raised, or did not return one Rolled for each sample.
            SentinelError: the engine did not sample a token that the function marks as sampled.
        """
        size = len(requests) // max(1, len(prompts))
        handle = Handle(size, engine, sampling, tokenizer, prompts, requests, version)
        where = f"rollout.use {self.use}"
        try:
            returned = list(self.function(prompts, handle))
        except RlgenError:
            raise
        except Exception as error:  # user code may raise anything
            line = user_line(error, self.use.rpartition(":")[0])
            raise ToolError(f"{where} raised {described(error)} {line}".rstrip()) from error
        if odd := [one for one in returned if not isinstance(one, Rolled)]:
            raise ToolError(f"{where} returned a {type(odd[0]).__name__}; it must return a list of rlgen.rollout.custom.Rolled")
        wanted = [(prompt, sample) for prompt in range(len(prompts)) for sample in range(size)]
        there = Counter((one.prompt, one.sample) for one in returned)
        for prompt, sample in [*wanted, *there]:
            if there[prompt, sample] != 1 or (prompt, sample) not in wanted:
                what = f"returned sample {sample} of prompt {prompt} {there[prompt, sample]} times"
                raise ToolError(f"{where} {what}; it must return each of {size} samples of {len(prompts)} prompts once")
        found = [
            handle.proved(one, f"{where}, prompt at position {prompts[one.prompt].position}, sample {one.sample}")
            for one in sorted(returned, key=lambda one: (one.prompt, one.sample))
        ]
        for place, completion in enumerate(found):
            finished(place, completion)
        return found


def spans_of(versions: NDArray[np.int64]) -> tuple[Span, ...]:
    """Returns the spans of tokens by the version that sampled each; -1: not sampled."""
    edges = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return tuple(Span(start, stop, int(versions[start])) for start, stop in itertools.pairwise(edges) if versions[start] >= 0)
