"""Answers the model's turns with an environment: passes on what the model says, and appends what the environment answers.

Before prompts are templated and tokenised, `observed` asks the environment once for each row what the model reads first. So the
completions of one prompt begin alike, in the same state, and can be compared.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pyarrow

from rlgen.data.source import Rows, TextRows
from rlgen.data.suffix import Suffixes
from rlgen.errors import RlgenError, ToolError
from rlgen.recipe.models import SEED_COLUMN
from rlgen.rollout.tools import COUNTS
from rlgen.rollout.turns import Answer, ConversationState, Reply
from rlgen.tools.arena import EnvPool
from rlgen.tools.box import Answered
from rlgen.types import ENVIRONMENT, Prompt
from rlgen.worker_pool.failures import Failed

BEFORE = "before_reset"  # column of the data's own prompts, where the environment has replaced them
AT_ONCE = 1000  # rows


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
        for came in every(rows, partial(self.arena.first, demonstrate=True)):
            if isinstance(came, Failed):
                raise ToolError(f"environment: `demonstrate` gave no first message: {came.message}")
            said = [*self.suffixes.encode(came["said"]), stop]
            found.append((said, self.suffixes.ids([ENVIRONMENT], [came["text"]], stop).tolist()))
        return found

    def end(self, conversation: Hashable) -> None:
        """Abandons a conversation in which the environment is not done."""
        talk = self._talks.pop(conversation, None)
        if talk is not None:
            self.arena.end(talk)

    def close(self) -> None:
        self.arena.close()


def observed(rows: Rows, column: str, arena: EnvPool) -> Rows:
    """Returns the rows with a column `seed` and with new prompts in `column`: what `reset` returned replaces a row's prompt, or
    the text of its last message. Where `reset` returned None, the prompt stays.

    Raises ToolError if the environment fails for a row, or what it returns cannot be read.
    """
    texts: list[str] = []
    replaced = False
    for start in range(0, len(rows.rows), AT_ONCE):
        read = rows.at(range(start, min(start + AT_ONCE, len(rows.rows))))
        some = [json.loads(json.dumps(row, default=str)) for row in read]  # as conversations get them: a time is a text
        given = [{SEED_COLUMN: row_seed(place), **row} for place, row in enumerate(some, start)]
        for row in given:
            row[column] = "" if row[column] is None else row[column]
        firsts = every([begin_of(row, column) for row in given], arena.first)
        for place, (row, first) in enumerate(zip(given, firsts, strict=True), start):
            if isinstance(first, Failed):
                raise ToolError(f"environment: it fails for row {place} of {rows.source}: {first.cause}: {first.message}")
            if (text := first["text"]) is not None:
                if first["characters"] > len(text):
                    raise ToolError("environment: reset returned a text longer than environment.max_output_tokens; raise that")
                row |= {BEFORE: row[column], column: replaced_by(text, row[column])}
                replaced = True
            texts.append(json.dumps(row))
    columns = (*rows.columns, *(() if SEED_COLUMN in rows.columns else (SEED_COLUMN,)), *((BEFORE,) if replaced else ()))
    digest = hashlib.sha256(json.dumps([rows.fingerprint, texts]).encode()).hexdigest()
    held = TextRows(pyarrow.chunked_array([pyarrow.array(texts, pyarrow.large_string())]), columns)
    return replace(rows, rows=held, columns=columns, fingerprint=digest)


def replaced_by(text: str, prompt: Any) -> Any:
    """Returns what a prompt is with this text; a chat keeps all but the text of its last message. A list that is no chat stays:
    `build_prompts` leaves it out or refuses it.
    """
    if not isinstance(prompt, list):
        return text
    return [*prompt[:-1], {**prompt[-1], "content": text}] if prompt and isinstance(prompt[-1], dict) else prompt


def every(rows: Sequence[dict[str, Any]], ask: Callable[[dict[str, Any], Answered], None]) -> list[dict[str, Any] | Failed]:
    """Asks an arena about rows, all at once, and returns the answers. Raises RlgenError if it answers with one."""
    came: list[Future[dict[str, Any] | Failed | RlgenError]] = [Future() for _ in rows]
    for row, one in zip(rows, came, strict=True):
        ask(row, one.set_result)
    for one in as_completed(came):
        if isinstance(answer := one.result(), RlgenError):
            raise answer
    return [answer for one in came if not isinstance(answer := one.result(), RlgenError)]


def begin_of(columns: Mapping[str, Any], column: str) -> dict[str, Any]:
    """Returns what `reset` may take by name: the columns of a row, its own prompt as `prompt`, and `seed`."""
    own = columns.get(BEFORE)
    return {**columns, "prompt": columns[column] if own is None else own}


def first_of(columns: Mapping[str, Any], column: str) -> str | None:
    """Returns what `reset` returned for a row when its prompt was made."""
    if columns.get(BEFORE) is None:
        return None
    prompt = columns[column]
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])


def row_seed(row: int) -> int:
    """Returns a seed of 31 bits from the index of a row, so that it is the same in each run."""
    return int.from_bytes(hashlib.sha256(f"environment/{row}".encode()).digest()[:4]) >> 1
