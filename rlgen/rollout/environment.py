"""Answers the model's turns with an environment: passes on what the model says, and appends what the environment answers."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rlgen.data.suffix import Suffixes
from rlgen.errors import RlgenError, ToolError
from rlgen.rollout.observed import begin_of, every, first_of
from rlgen.rollout.tools import COUNTS
from rlgen.rollout.turns import Answer, ConversationState, Reply
from rlgen.tools.arena import EnvPool
from rlgen.types import ENVIRONMENT, Prompt
from rlgen.worker_pool.failures import Failed


@dataclass(frozen=True, slots=True, eq=False)
class EnvironmentTurns:
    """Answers the model with an environment. Implements `Turns`.

    The messages hold its answer to each turn, as {"role": "user", "content": observation, "reward": 0.5}. Its answer to the last
    turn has the role "environment", because the model does not read it. If it failed, that message is {"role": "environment",
    "error": why}. The reward `environment` adds up the rewards of the messages.
    """

    arena: EnvPool
    suffixes: Suffixes
    column: str  # of the data set, which holds prompts
    _talks: dict[Hashable, int] = field(default_factory=dict)  # the arena's number of each conversation that is not done

    @property
    def digest(self) -> str:
        """Returns the digest of the environment and the chat template."""
        return self.suffixes.digest(self.arena.digest)

    @property
    def code(self) -> Mapping[str, str | None]:
        """Returns the SHA-256 of the environment's code, by "environment/NAME"."""
        return {f"environment/{self.arena.settings.use.rpartition(':')[2]}": self.arena.calls.pools[0].facts()[0].sha256}

    def reply(self, talk: ConversationState, room: int, answer: Answer) -> None:
        """Passes a turn on. `answer` gets a Reply, which ends the conversation if the environment is done or has failed."""
        text = self.suffixes.tokenizer.decode(talk.completion.token_ids[:-1], skip_special_tokens=True)
        thought, _, said = text.rpartition("</think>")
        turn = {"role": "assistant", "content": said.strip() if thought else said}
        if thought:
            turn["reasoning_content"] = thought.removeprefix("<think>").strip()
        done = partial(self.answered, talk, room, turn, answer)
        if talk.turn == 0:
            columns = talk.prompt.columns
            number = self._talks[talk.conversation] = self.arena.number()
            self.arena.begin(number, begin_of(columns, self.column), first_of(columns, self.column), turn["content"], done)
        else:
            self.arena.step(self._talks[talk.conversation], turn["content"], done)

    def answered(
        self,
        talk: ConversationState,
        room: int,
        turn: Mapping[str, str],
        answer: Answer,
        came: Mapping[str, Any] | Failed | RlgenError,
    ) -> None:
        """Passes on what the environment answers to a turn."""
        if isinstance(came, RlgenError):
            answer(came)
            return
        counts, nothing = Counter({"steps": 1}), talk.completion.token_ids[:0]
        if isinstance(came, Failed):
            self._talks.pop(talk.conversation, None)
            counts[COUNTS[came.cause]] += 1
            error = {"role": ENVIRONMENT, "error": f"{came.cause}: {came.message}"}
            answer(Reply(ids=nothing, counts=dict(counts), unread=(error,), ends=True))
            return
        limit = min(self.arena.settings.max_output_tokens, max(1, room // 2))
        text = self.suffixes.cut(came["text"], limit, came["characters"] - len(came["text"]))
        counts["cut"] += text != came["text"] or came["characters"] > len(came["text"])
        unread = {"role": ENVIRONMENT, "content": text, "reward": came["reward"]}
        if came["done"]:
            self._talks.pop(talk.conversation, None)
            answer(Reply(ids=nothing, counts=dict(+counts), unread=(unread,), ends=True))
            return
        told = {"role": self.arena.settings.role, "content": text, "reward": came["reward"]}
        ids = self.suffixes.ids([ENVIRONMENT], [text], int(talk.completion.token_ids[-1]))
        answer(Reply(ids=ids, counts=dict(+counts), messages=(turn, told), unread=(unread,)))

    def demonstrated(self, prompts: Sequence[Prompt]) -> list[tuple[list[int], list[int]]]:
        """Returns for each prompt the ids of a good first message, and of the environment's answer to it.

        Raises ToolError if the environment has no method `demonstrate`, or fails.
        """
        rows = [begin_of(prompt.columns, self.column) for prompt in prompts]
        stop, found = int(self.suffixes.tokenizer.eos_token_id), []
        for came in every(rows, self.arena.demonstrate):
            if isinstance(came, Failed):
                raise ToolError(f"environment: no good first message is known: {came.message}")
            found.append(
                ([*self.suffixes.encode(came["said"]), stop], self.suffixes.ids([ENVIRONMENT], [came["text"]], stop).tolist())
            )
        return found

    def end(self, conversation: Hashable) -> None:
        """Abandons a conversation in which the environment is not done."""
        talk = self._talks.pop(conversation, None)
        if talk is not None:
            self.arena.end(talk)

    def close(self) -> None:
        """Ends the environment's processes."""
        self.arena.close()
