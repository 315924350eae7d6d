"""Conversations without tools: replies that follow from the ids of a turn, and an engine that takes down what it is asked."""

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlgen.engines.base import Engine, Finished, FollowUpQueue
from rlgen.rollout.conversations import Dialogue
from rlgen.rollout.turns import Answer, ConversationState, Reply
from rlgen.types import Completion, Ids, Request, Sampling, ids_of


def reply_ids(turn: Completion) -> Ids:
    """Three ids or more, which follow from those of the turn; the last two are always the same."""
    length = 1 + int(turn.token_ids.sum()) % 4
    return ids_of([*(int(one) % 200 for one in turn.token_ids[:length]), 11, 12])


@dataclass
class Scripted:
    """Replies to the first turns of each conversation, and leaves the others to the model. A `Turns`."""

    times: int = 2  # replies to each conversation
    later: Callable[[ConversationState, Callable[[], None]], None] = lambda talk, answer: (
        answer()
    )  # calls its argument when it replies
    digest: str = "scripted"
    talks: list[ConversationState] = field(default_factory=list)
    rooms: list[int] = field(default_factory=list)
    code: Mapping[str, str | None] = field(default_factory=dict)
    ended: list[Hashable] = field(default_factory=list)
    closed: bool = False

    def reply(self, talk: ConversationState, room: int, answer: Answer) -> None:
        self.talks.append(talk)
        self.rooms.append(room)
        if talk.turn >= self.times:
            answer(None)
            return
        said = f"turn {talk.turn} of {talk.sample_index}"
        messages = ({"role": "assistant", "content": said}, {"role": "tool", "content": str(len(talk.completion.token_ids))})
        reply = Reply(ids=reply_ids(talk.completion), counts={"calls": 1, f"turn{talk.turn}": 1}, messages=messages)
        self.later(talk, lambda: answer(reply))

    def end(self, conversation: Hashable) -> None:
        self.ended.append(conversation)

    def close(self) -> None:
        self.closed = True


def in_threads(talk: ConversationState, answer: Callable[[], None]) -> None:
    """Replies from a thread each, after times that differ."""
    threading.Timer(0.002 * (talk.sample_index * 7 % 5), answer).start()


def dialogue(max_turns: int = 8, reply_timeout: float = 600.0, **script: Any) -> Dialogue:
    return Dialogue(turns=Scripted(**script), max_turns=max_turns, reply_timeout=reply_timeout)


@dataclass
class Recorded:
    """An engine, and all that it was asked and has answered, in the order in which it finished."""

    engine: Engine
    finished: list[tuple[Request, Completion]] = field(default_factory=list)

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        finished: Finished | None = None,
        further: FollowUpQueue | None = None,
    ) -> list[Completion]:
        asked = list(requests)
        if further is not None:
            put = further.put
            further.put = lambda request: (asked.extend([request] if request else []), put(request))[1]  # type: ignore[method-assign]

        def told(number: int, completion: Completion) -> None:
            self.finished.append((asked[number], completion))
            if finished:
                finished(number, completion)

        answers = self.engine.generate(requests, sampling, told, further)
        assert len(answers) == len(asked), "one answer to each request, further ones too"
        for request, answer in zip(asked, answers, strict=True):
            assert np.array_equal(request.prompt_ids, answer.prompt_ids)
        return answers
