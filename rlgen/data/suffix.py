"""Makes the ids between two turns of the model: the rest of its turn's end, the answers of tools or of an environment, the header
of its next turn.

The chat template renders a conversation that stands for the real one; what it writes behind a turn there becomes the ids. So no
id that the model sampled is ever decoded and tokenised again. This works with templates that do not change a turn when messages
follow it; `Suffixes.open` refuses others.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from rlgen.errors import SetupError
from rlgen.recipe.data import DataRecipe
from rlgen.types import Ids, ids_of

# Words of the conversation that stands for the real one. They are letters, which no template escapes or trims.
USER, SAID, THOUGHT, VALUE, HOLE = "rlgenuser", "rlgensaid", "rlgenthought", "rlgenvalue", "rlgenhole"
ASKED: dict[str, Any] = {"role": "user", "content": USER}
ODD = ' a "b" \\ c\n{"d": [1, "é"]}\n'  # an answer that templates may escape or trim
EMPTY_THINKING = re.compile(r"<think>\s*</think>\s*")
KINDS = ("call", "plain", "thinking", "thinking in the text")
REMEDY = "set data.chat_template to the file of another template"
CALL_ID = "call{:05d}"  # of a call by its place in a turn: nine characters, as Mistral's templates demand
BREAK = "\u200b"  # breaks up the text of a special token if nothing else helps


class Refused(Exception):
    """Raised when the template raises an error for a conversation."""


@dataclass(frozen=True, slots=True)
class Between:
    """What the template writes behind a turn. Between(pieces=("\\n<|im_start|>tool\\n", ...), end="<|im_end|>", own=True)

    The stop token that the model samples takes the place of `end`.
    """

    pieces: tuple[str, ...]  # [answers + 1] around the answers
    end: str
    own: bool  # a turn ends with it; False: what follows a turn begins with it


class Suffixes:
    """The ids between turns, of one chat template.

    Args:
        tools: schemas; (): an environment answers, and no turn calls anything.
        role: of the messages that answer.

    Raises:
        SetupError: the template changes a turn once an answer follows it, or does not show what tools answer; or the tokenizer is
            not a fast one.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        data: DataRecipe,
        tools: Sequence[dict[str, Any]],
        stop_ids: Sequence[int],
        role: Literal["tool", "user"] = "tool",
    ) -> None:
        self.section, self.who = ("tools", "a tool") if tools else ("environment", "the environment")
        if not tokenizer.is_fast:
            what = f"{type(tokenizer).__name__} has no fast form, which replies need"
            raise SetupError(f"{self.section}: {what}; take another model")
        self.tokenizer, self.data, self.tools, self.role = tokenizer, data, list(tools), role
        self.kinds = KINDS if tools else KINDS[1:]  # of turns that are answered, the usual one first
        self.name = str(tools[0]["function"]["name"]) if tools else "environment"  # of what answers a turn that stands for others
        text = json.loads(tokenizer.backend_tokenizer.to_str()) | {"truncation": None, "padding": None}
        self.core = Tokenizer.from_str(json.dumps(text))  # a copy of the tokenizer's own, for other threads
        # One that knows no special tokens, for the text of tools.
        self.plain = Tokenizer.from_str(json.dumps({**text, "added_tokens": [], "post_processor": None}))
        self.ends = {one: tokenizer.convert_ids_to_tokens(one) for one in stop_ids}
        self.special = {one: token.content for one, token in tokenizer.added_tokens_decoder.items()}  # ids that stand for texts
        self._between = cache(self._probed)
        self._expected = cache(lambda text: self.special_of(self.encode(text)))  # special ids of a suffix whose answers have none
        self._check()
        self.verbatim = self._shown((self.name,), 0, ODD) == ODD  # the template shows answers as they are

    def digest(self, *others: str) -> str:
        """Returns the digest of the chat template, and of what decides replies besides."""
        decides = [*others, str(self.tokenizer.chat_template), dict(self.data.template_args)]
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def opens_thinking(self) -> bool:
        """Returns whether the template begins a turn of the model with <think>."""
        return self._between((self.name,), self.kinds[0]).pieces[-1].rstrip().endswith("<think>")

    @property
    def shows_tools(self) -> bool:
        """Returns whether the template shows the schemas of tools to the model."""
        return self._render([ASKED], True) != self._render([ASKED], True, with_tools=False)

    def ids(self, names: Sequence[str], answers: Sequence[str], stop_id: int) -> Ids:
        """Returns the ids that follow a turn.

        Args:
            names: of the tools that answer, in order.
            answers: what they answer; it is tokenised as plain text, whatever it holds.
            stop_id: the sampled id that ended the turn.

        Raises SetupError if the template refuses so many answers.
        """
        try:
            between = self._between(tuple(names), self.kinds[0])
            shown = answers if self.verbatim else [self._shown(tuple(names), *placed) for placed in enumerate(answers)]
        except Refused as error:
            what = f"{self.section}: the chat template refuses {len(names)} answers to a turn"
            raise SetupError(f"{what}: {error}; {REMEDY}") from error
        front = self.ends[stop_id]
        pieces = [front + ("" if between.own or front == between.end else between.end) + between.pieces[0], *between.pieces[1:]]
        found = self.encode(woven(pieces, shown))
        # An answer may have the text of a special token in it.
        if self.special_of(found) != self._expected(woven(pieces, holes_of(answers))):
            parts = zip(pieces, [*map(self.as_plain, shown), []], strict=True)
            found = [one for piece, answer in parts for one in (*self.encode(piece), *answer)]
        if found[0] != stop_id:  # the tokenizer does not recognize it before a text
            found = [stop_id, *self.encode(woven([pieces[0].removeprefix(front), *pieces[1:]], shown))]
        return ids_of(found[1:])

    def turn(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> list[int]:
        """Returns the ids of a turn that makes calls and says nothing, as the template writes it, without its stop token."""
        before = self._render([ASKED], True)
        text = self._render([ASKED, {"role": "assistant", "content": "", "tool_calls": calls_of(dict(enumerate(calls)))}], False)
        at = max(text.rfind(end) for end in self.ends.values())
        return self.encode(text[len(before) : at if at > len(before) else len(text)])

    def cut(self, answer: str, tokens: int, left_out: int = 0) -> str:
        """Returns an answer of at most about `tokens` tokens. One that is cut says so at its end. `left_out`: characters that are
        missing from it already.
        """
        if not left_out and len(answer.encode()) <= tokens:  # no token is shorter than a byte
            return answer
        encoded = self.plain.encode(answer, add_special_tokens=False)
        if not left_out and len(encoded.ids) <= tokens:
            return answer
        mark = "\n[cut: {} more characters]"
        room = max(1, tokens - len(self.plain.encode(mark.format(len(answer) + left_out), add_special_tokens=False).ids))
        end = encoded.offsets[min(room, len(encoded.ids)) - 1][1]
        return answer[:end] + mark.format(len(answer) - end + left_out)

    def encode(self, text: str) -> list[int]:
        return self.core.encode(text, add_special_tokens=False).ids

    def as_plain(self, text: str) -> list[int]:
        """Tokenises a text without any special token, even if it contains the text of one."""
        found = self.plain.encode(text, add_special_tokens=False).ids
        if self.special_of(found):  # the vocabulary itself has it
            for token in sorted(self.special.values(), key=len, reverse=True):
                text = text.replace(token, token[:1] + BREAK + token[1:])
            found = self.plain.encode(text, add_special_tokens=False).ids
        return found

    def special_of(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Returns those ids that stand for whole texts: special tokens, and marks such as <tool_call>."""
        return tuple(one for one in ids if one in self.special)

    def _render(self, messages: list[dict[str, Any]], ongoing: bool, with_tools: bool = True) -> str:
        """Returns the text of a conversation. Raises Refused if the template raises anything."""
        try:
            tools = (self.tools or None) if with_tools else None  # templates may ask whether they are none
            settings = {"tokenize": False, **self.data.template_args}
            return str(self.tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=ongoing, **settings))
        except Exception as error:  # a template is a program and may raise anything
            raise Refused(f"{type(error).__name__}: {error}") from error

    def _whole(self, names: Sequence[str], answers: Sequence[str], kind: str, ongoing: bool = True, rounds: int = 1) -> str:
        """Returns the text of a question, and so many times of a turn of a kind and answers. Some templates accept arguments only
        as text, and some at most one call in a turn.
        """
        tried: list[Refused] = []
        for calls, as_text in itertools.product((names, names[:1]), (False, True)):
            said = turn(calls, kind, as_text)
            try:
                return self._render([ASKED, *[said, *told(self.role, names, answers)] * rounds], ongoing)
            except Refused as error:
                tried.append(error)
        raise tried[0]

    def _probed(self, names: tuple[str, ...], kind: str) -> Between:
        """Returns what stands around the answers of these tools. Raises Refused where the template does not show it."""
        holes = holes_of(names)
        text = self._whole(names, holes, kind)
        places = [text.find(hole) for hole in holes]
        if min(places) < 0 or places != sorted(places) or any(text.count(hole) != 1 for hole in holes):
            raise Refused(f"it does not show what {self.who} answers")
        said = end_of_turn(text[: places[0]])
        stops = [(at, -len(token), token) for token in self.ends.values() if (at := text.find(token, said, places[0])) >= 0]
        if said < 0 or not stops:
            raise Refused(f"no stop token ({', '.join(self.ends.values())}) follows a turn before {self.who} answers")
        at, _, end = min(stops)
        alone = self._whole(names, [], kind, ongoing=False)
        own = alone.find(end, max(0, end_of_turn(alone))) >= 0
        return Between(tuple(re.split("|".join(holes), text[at + len(end) :])), end, own)

    def _shown(self, names: tuple[str, ...], place: int, answer: str) -> str:
        """Returns an answer as the template shows it, escaped or trimmed; the answer itself if the text cannot be found."""
        holes = holes_of(names)
        before, _, after = self._whole(names, holes, self.kinds[0]).partition(holes[place])
        text = self._whole(names, [*holes[:place], answer, *holes[place + 1 :]], self.kinds[0])
        whole = text.startswith(before) and text.endswith(after) and len(text) >= len(before) + len(after)
        return text[len(before) : len(text) - len(after)] if whole else answer

    def _check(self) -> None:
        """Raises SetupError if the template changes earlier turns as a conversation goes on."""
        names = (self.name,)
        where = f"{self.section}: the chat template of {self.data.chat_template or self.tokenizer.name_or_path}"
        try:
            usual = self._between(names, self.kinds[0])
        except Refused as error:
            those = "tools" if self.tools else "an environment"
            raise SetupError(f"{where} cannot be used with {those}: {error}; {REMEDY}") from error
        for kind in self.kinds:
            try:
                found = self._between(names, kind)
                whole = self._whole(names, holes_of(names), kind)
                longer = self._whole(names, holes_of(names), kind, rounds=2)
                alone = self._whole(names, [], kind, ongoing=False)
            except Refused:
                continue  # it takes no such turn
            if found != usual and (kind != "plain" or not self.tools):  # without a call no tool answers
                raise SetupError(f"{where} continues one kind of turn ({kind}) differently from the others; {REMEDY}")
            for later, when in ((whole, f"once {self.who} has answered"), (longer, "once the model has gone on")):
                self._same_start(where, alone, later, kind, when)
            if kind.endswith("text") and SAID in whole and THOUGHT not in whole:
                raise SetupError(f"{where} leaves out the thinking of the model, but the sampled ids have it; {REMEDY}")

    def _same_start(self, where: str, alone: str, later: str, kind: str, when: str) -> None:
        """Raises SetupError if `later` does not begin with the turn of `alone`. An empty block of thinking may come and go."""
        turn_of = alone[: end_of_turn(alone)]
        one, other = EMPTY_THINKING.sub("", turn_of), EMPTY_THINKING.sub("", later)
        if not other.startswith(one):
            at = next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(other))
            raise SetupError(
                f"{where} changes an earlier turn ({kind}) {when}: {one[max(0, at - 20) : at + 40]!r} becomes"
                f" {other[max(0, at - 20) : at + 40]!r}, so that the model would be trained on another text; {REMEDY}"
            )


def woven(pieces: Sequence[str], answers: Sequence[str]) -> str:
    return "".join(part for pair in zip(pieces, [*answers, ""], strict=True) for part in pair)


def turn(names: Sequence[str], kind: str, as_text: bool) -> dict[str, Any]:
    """Returns a turn of the model. `as_text`: arguments are JSON text instead of an object."""
    message: dict[str, Any] = {"role": "assistant", "content": SAID}
    if kind == "thinking":
        message["reasoning_content"] = THOUGHT
    if kind == "thinking in the text":
        message["content"] = f"<think>\n{THOUGHT}\n</think>\n\n{SAID}"
    if kind != "plain":
        message["tool_calls"] = calls_of({place: (name, {"value": VALUE}) for place, name in enumerate(names)}, as_text)
    return message


def calls_of(calls: Mapping[int, tuple[str, Mapping[str, Any]]], as_text: bool = False) -> list[dict[str, Any]]:
    """Returns calls, by their place in a turn, as messages have them. `as_text`: arguments are JSON text, not an object."""
    form: Callable[[Mapping[str, Any]], Any] = json.dumps if as_text else dict
    return [
        {"type": "function", "id": CALL_ID.format(place), "function": {"name": name, "arguments": form(given)}}
        for place, (name, given) in calls.items()
    ]


def told(role: str, names: Sequence[str], answers: Sequence[str]) -> list[dict[str, Any]]:
    """Returns answers as messages. Those of tools, `names`, say which call they answer."""
    calls = [{"name": name, "tool_call_id": CALL_ID.format(place)} if role == "tool" else {} for place, name in enumerate(names)]
    return [{"role": role, **call, "content": answer} for call, answer in zip(calls, answers, strict=False)]


def holes_of(answers: Sequence[str]) -> list[str]:
    """Returns what stands for answers; none is a part of another."""
    return [f"{HOLE}{place}end" for place in range(len(answers))]


def end_of_turn(text: str) -> int:
    """Returns where the last word of a turn ends in the text of a conversation; -1: the text has none of its words."""
    return max(at + len(word) if (at := text.rfind(word)) >= 0 else -1 for word in (SAID, VALUE, THOUGHT))
