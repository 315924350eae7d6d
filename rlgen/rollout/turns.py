"""Defines what answers the model between its turns: tools, an environment, a simulated user.

A conversation is one completion: the turns that the model samples, and between them ids that are appended as they are. A sampled
id is never decoded and tokenised again.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from rlgen.errors import RlgenError
from rlgen.types import Completion, Ids, Prompt


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ConversationState:
    """A conversation after a turn of the model that a stop token ended.

    ConversationState(conversation=7, prompt=Prompt(...), sample_index=0, turn=1, completion=Completion(...), last=False)
    """

    conversation: Hashable  # the same object in all turns of a conversation, and in no other
    prompt: Prompt
    sample_index: int  # 0..G-1 within the prompt's group
    turn: int  # 0 for the first
    completion: Completion  # this turn alone; its `prompt_ids` are everything before it
    last: bool  # no turn can follow: turns or tokens ran out


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reply:
    """What follows a turn. Reply(ids=[198, 12, 40], counts={"calls": 1}, messages=({"role": "assistant", ...}, ...))

    If `ends`, no turn follows, and `ids` are dropped.
    """

    ids: Ids  # [L] appended, not trained on: the rest of the turn's end, the answer, the header of the next turn
    counts: Mapping[str, int] = field(default_factory=dict)  # added to the metrics tools/NAME: {"calls": 2, "malformed": 1}
    # The turn and its reply as messages, for rewards and people: the assistant's, then those of the tools.
    messages: tuple[Mapping[str, Any], ...] = ()
    unread: tuple[Mapping[str, Any], ...] = ()  # kept instead of `messages` if no turn follows: the model never reads it
    ends: bool = False  # the conversation is over, with this turn as its last one; it does not count as truncated


# Receives what follows a turn, from any thread. None: the model ended the conversation. An error ends the run.
Answer: TypeAlias = Callable[[Reply | RlgenError | None], None]


class Turns(Protocol):
    """Answers the turns of the model. One object serves all conversations of a process at the same time."""

    @property
    def digest(self) -> str:
        """Returns the digest of everything that decides replies: the tools' sources, their limits, the chat template."""

    @property
    def code(self) -> Mapping[str, str | None]:
        """Returns the SHA-256 of the user's code behind each part that replies: {"tools/search": "9f86d0..."}; None: built in."""

    def reply(self, talk: ConversationState, room: int, answer: Answer) -> None:
        """Works out what follows a turn, and calls `answer` once, perhaps from another thread, perhaps before it returns.

        It must not wait: other conversations go on meanwhile. If `talk.last`, `answer` gets None if the turn needs no reply, else
        any Reply, whose ids are dropped. The conversation then counts as truncated, unless the Reply `ends` it.

        `room`: tokens that the completion may still take, reply and next turn together. A Reply whose ids leave no room for a
        token ends the conversation, truncated.
        """

    def end(self, conversation: Hashable) -> None:
        """Called for each conversation that has ended, in whatever way, even if `reply` never saw it. It must not wait."""

    def close(self) -> None:
        """Frees all resources. No answer is needed any more."""
