"""Leads conversations of several turns: what the model says goes to `Turns`, and the reply back to the engine, as ids.

A conversation is joined to one completion. Ids between two turns were not sampled: they have no log-prob (NaN), and no span. Each
turn is one request: everything before it is the prompt, so that the engine's prefix cache holds most of it.
"""

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import numpy as np

from rlgen.engines.base import Finished, FollowUpQueue
from rlgen.errors import RlgenError, SentinelError
from rlgen.rollout.answers import check_answers
from rlgen.rollout.frames import digest
from rlgen.rollout.turns import ConversationState, Reply, Turns
from rlgen.types import Completion, FinishReason, Ids, Prompt, Request, Sampling, Span

UNANSWERED = "unanswered"  # counts replies that were not given, or not read, because turns or tokens ran out
LATE = "late"  # counts replies that did not come in time


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialogue:
    """How conversations are led. Dialogue(turns=ToolTurns(...), max_turns=8, reply_timeout=600.0)"""

    turns: Turns
    max_turns: int  # of the model
    reply_timeout: float  # seconds; a conversation whose reply takes longer ends there, truncated

    @property
    def digest(self) -> str:
        return digest(self.turns.digest, self.max_turns, self.reply_timeout)


def turn_seed(seed: int, turn: int) -> int:
    """Returns the seed of a turn from that of the sample: the first turn has the sample's own."""
    if not turn:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}/{turn}".encode()).digest()[:8]) >> 2


@dataclass(slots=True, eq=False)
class Conversation:
    prompt: Prompt
    sample_index: int
    request: Request  # of the turn that the engine samples, or has sampled last
    seed: int  # of the first turn
    turns: list[Completion] = field(default_factory=list)
    replies: list[Ids] = field(default_factory=list)  # one less than `turns`, when the conversation has ended
    messages: list[Mapping[str, Any]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    waits: bool = False  # for a reply

    @property
    def tokens(self) -> int:
        return sum(len(turn.token_ids) for turn in self.turns) + sum(map(len, self.replies))

    def joined(self, finish_reason: FinishReason) -> Completion:
        ids, logp, spans, length, experts = [], [], [], 0, self.turns[0].experts[:0]
        for place, turn in enumerate(self.turns):
            # What a turn samples sees the cache of the turns before it: tokens keep the experts that computed them first.
            experts = np.concatenate([experts, turn.experts[len(experts) :]])
            spans += [Span(length + start, length + stop, version) for start, stop, version in turn.spans]
            reply = self.replies[place] if place < len(self.replies) else np.zeros(0, dtype=np.int32)
            ids += [turn.token_ids, reply]
            logp += [turn.logp, np.full(len(reply), np.nan, dtype=np.float32)]
            length += len(turn.token_ids) + len(reply)
        return Completion(
            token_ids=np.concatenate(ids, dtype=np.int32),
            logp=np.concatenate(logp, dtype=np.float32),
            finish_reason=finish_reason,
            spans=tuple(spans),
            prompt_ids=self.turns[0].prompt_ids,
            cached_tokens=sum(turn.cached_tokens for turn in self.turns),
            messages=json.dumps(self.messages, default=repr) if self.messages else "",
            counts=dict(self.counts),
            experts=experts,
        )


class Conversations:
    """The conversations of one call of the engine: pass `finished` and `further` to it, and take the completions from `result`.

    Args:
        places: prompt and sample index of each request.
        version, oldest: of the weights that may sample, as in `check_answers`.
        ended: called for each conversation that has ended, with its index into `requests`, from any thread.
    """

    def __init__(
        self,
        dialogue: Dialogue,
        places: Sequence[tuple[Prompt, int]],
        requests: Sequence[Request],
        sampling: Sampling,
        version: int,
        oldest: int,
        ended: Finished | None = None,
    ) -> None:
        self.further = FollowUpQueue()
        self._dialogue, self._sampling, self._version, self._oldest = dialogue, sampling, version, oldest
        self._ended = ended
        self._all = [
            Conversation(prompt, index, request, request.seed) for (prompt, index), request in zip(places, requests, strict=True)
        ]
        self._of_request = list(range(len(requests)))  # the conversation of each of the engine's requests
        self._asked = list(requests)  # all requests, and their answers
        self._told: dict[int, Completion] = {}
        self._joined: dict[int, Completion] = {}
        self._lock = threading.Lock()  # guards the fields above, and those of each conversation
        self._telling = threading.Lock()
        self._clock = Clock(dialogue.reply_timeout)

    def finished(self, number: int, answer: Completion) -> None:
        """Handles the engine's answer to its request `number`: a turn, which ends the conversation or gets a reply."""
        place = self._of_request[number]
        talk = self._all[place]
        self._told[number] = answer
        try:
            check_answers([talk.request], [answer], self._sampling, self._version, self._oldest)
        except SentinelError:
            return  # `result` checks all answers, and its error says more
        talk.turns.append(answer)
        if answer.finish_reason == "length":
            self._end(place, "length")
            return
        turn, room = len(talk.turns) - 1, self._sampling.max_tokens - talk.tokens
        last = turn + 1 >= self._dialogue.max_turns or room < 1
        told = ConversationState(
            conversation=talk, prompt=talk.prompt, sample_index=talk.sample_index, turn=turn, completion=answer, last=last
        )
        talk.waits = True
        self.further.expect()
        try:
            self._dialogue.turns.reply(told, room, lambda reply: self._replied(place, turn, reply, last))
        except RlgenError as error:
            self.further.fail(error)
            return
        if talk.waits:
            self._clock.start(lambda: self._late(place, turn))

    def _replied(self, place: int, turn: int, reply: Reply | RlgenError | None, last: bool) -> None:
        """Handles the reply to a turn. Called from any thread."""
        talk = self._all[place]
        if not self._is_first(talk, turn):
            return
        if isinstance(reply, RlgenError):
            self.further.fail(reply)
            return
        if reply is None:
            self._end(place, "stop")
            self.further.put(None)
            return
        talk.counts.update(reply.counts)
        room = self._sampling.max_tokens - talk.tokens - len(reply.ids)
        if reply.ends or last or room < 1:
            talk.messages += reply.unread
            if not reply.ends:
                talk.counts[UNANSWERED] += 1
            self._end(place, "stop" if reply.ends else "length")
            self.further.put(None)
            return
        talk.messages += reply.messages
        talk.replies.append(reply.ids)
        before = talk.turns[-1]
        request = Request(
            prompt_ids=np.concatenate([before.prompt_ids, before.token_ids, reply.ids], dtype=np.int32),
            seed=turn_seed(talk.seed, turn + 1),
            max_tokens=room,
        )
        with self._lock:  # the engine numbers requests in the order in which they are put
            talk.request = request
            self._of_request.append(place)
            self._asked.append(request)
            self.further.put(request)

    def _late(self, place: int, turn: int) -> None:
        """Ends a conversation whose reply has not come in time."""
        talk = self._all[place]
        if self._is_first(talk, turn):
            talk.counts[LATE] += 1
            self._end(place, "length")
            self.further.put(None)

    def _is_first(self, talk: Conversation, turn: int) -> bool:
        """Returns whether a conversation still waits for the reply to a turn: the reply, or the clock, ends that once."""
        with self._lock:
            first = talk.waits and len(talk.turns) == turn + 1
            talk.waits = talk.waits and not first
        return first

    def _end(self, place: int, finish_reason: FinishReason) -> None:
        """Joins a conversation that has ended, and passes it to `ended`."""
        completion = self._joined[place] = self._all[place].joined(finish_reason)
        self._dialogue.turns.end(self._all[place])
        if self._ended is not None:
            try:
                with self._telling:  # one at a time, as an engine does
                    self._ended(place, completion)
            except RlgenError as error:  # in a thread of `Turns` it would be lost
                self.further.fail(error)

    def result(self) -> list[Completion]:
        """Returns the completions, in the order of the requests that the conversations began with. Raises as `check_answers`."""
        self.close()
        numbers = sorted(self._told)
        asked, told = [self._asked[number] for number in numbers], [self._told[number] for number in numbers]
        check_answers(asked, told, self._sampling, self._version, self._oldest)
        return [self._joined[place] for place in range(len(self._all))]

    def sampled(self, engine: Callable[[], object]) -> list[Completion]:
        """Has the engine sample all turns, and returns the completions. Raises as the engine, and as `check_answers`."""
        with closing(self):
            engine()
        return self.result()

    def close(self) -> None:
        """Stops the clock, and abandons the conversations that have not ended."""
        self._clock.close()
        for place, talk in enumerate(self._all):
            if place not in self._joined:
                self._dialogue.turns.end(talk)


class Clock:
    """Calls each function a fixed time after it was passed to `start`, in one thread, which starts with the first function."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._due: SimpleQueue[tuple[float, Callable[[], None]]] = SimpleQueue()
        self._lock = threading.Lock()
        self._running, self._closed = False, threading.Event()

    def start(self, call: Callable[[], None]) -> None:
        """Calls `call` when the time has passed, unless `close` is called before."""
        self._due.put((time.monotonic() + self._seconds, call))
        with self._lock:
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="rlgen-replies", daemon=True).start()

    def _run(self) -> None:
        while True:
            due, call = self._due.get()
            if self._closed.wait(due - time.monotonic()):
                return
            call()

    def close(self) -> None:
        """Cancels all calls that are not due yet."""
        self._closed.set()
        self._due.put((0.0, lambda: None))  # wakes the thread
