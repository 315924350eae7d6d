"""Answers the turns of a model that call tools: reads the calls, runs them, and appends what the tools answer."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlgen.data.suffix import Suffixes, calls_of, told
from rlgen.errors import RlgenError, SetupError
from rlgen.recipe.data import ToolFormat
from rlgen.rollout.turns import Answer, ConversationState, Reply
from rlgen.tools.box import ToolAnswer, ToolBox, ToolCall
from rlgen.tools.formats import Malformed, Turn, read_turn
from rlgen.types import Prompt

# The name of the count for each reason why a call has no answer of its tool.
COUNTS = {
    "unknown": "unknown",
    "arguments": "invalid",
    "error": "raised",
    "memory": "raised",
    "timeout": "timeouts",
    "died": "died",
}


@dataclass(frozen=True, slots=True, eq=False)
class ToolTurns:
    """Answers the model with tools. Implements `Turns`."""

    box: ToolBox
    suffixes: Suffixes
    format: ToolFormat

    @property
    def digest(self) -> str:
        return self.suffixes.digest(self.box.digest, self.format)

    @property
    def code(self) -> Mapping[str, str | None]:
        facts = self.box.calls.pools[0].facts()
        return {f"tools/{entry.label}": fact.sha256 for entry, fact in zip(self.box.entries, facts, strict=True)}

    def reply(self, talk: ConversationState, room: int, answer: Answer) -> None:
        """Starts the calls of a turn. `answer` gets None if there are none, and else a Reply, once all tools have answered."""
        text = self.suffixes.tokenizer.decode(talk.completion.token_ids[:-1], skip_special_tokens=False)
        turn = read_turn(self.format, text, self.suffixes.opens_thinking, self.box.schemas)
        if not turn.calls:
            answer(None)
        elif talk.last:
            answer(Reply(ids=talk.completion.token_ids[:0]))
        else:
            calls = [call for call in turn.calls if isinstance(call, ToolCall)]
            self.box.call(calls, partial(self.answered, talk, room, turn, answer))

    def answered(
        self, talk: ConversationState, room: int, turn: Turn, answer: Answer, answers: Sequence[ToolAnswer] | RlgenError
    ) -> None:
        """Passes on what follows a turn whose tools have answered the calls that are not malformed, in their order."""
        if isinstance(answers, RlgenError):
            answer(answers)
            return
        came = iter(answers)
        every = [
            ToolAnswer(f"Error: the call cannot be read: {call.why}") if isinstance(call, Malformed) else next(came)
            for call in turn.calls
        ]
        limits = {entry.label: entry.max_output_tokens for entry in self.box.entries}
        default = self.box.entries[0].label
        names = [call.name if isinstance(call, ToolCall) and call.name in limits else default for call in turn.calls]
        share = max(1, room // 2 // len(every))
        pairs = zip(names, every, strict=True)
        texts = [self.suffixes.cut(one.text, min(limits[name], share), one.left_out) for name, one in pairs]
        counts = Counter({"calls": len(every)})
        for call, one, text in zip(turn.calls, every, texts, strict=True):
            if isinstance(call, Malformed):
                counts["malformed"] += 1
            elif one.why:
                counts[COUNTS[one.why]] += 1
            counts["cut"] += text != one.text or one.left_out > 0
        try:
            ids = self.suffixes.ids(names, texts, int(talk.completion.token_ids[-1]))
        except SetupError as error:
            answer(error)
            return
        answer(Reply(ids=ids, counts=dict(+counts), messages=(assistant(turn), *told("tool", names, texts))))

    def demonstrated(self, prompts: Sequence[Prompt]) -> list[tuple[list[int], list[int]]]:
        """Returns for each prompt the ids of a turn that calls the first tool with the prompt, and of the tool's answer."""
        entry, schema = self.box.entries[0], self.box.schemas[0]
        parameter = next(iter(schema["function"]["parameters"]["properties"]))
        calls = [ToolCall(entry.label, {parameter: prompt.columns["prompt"]}) for prompt in prompts]
        answers: Future[Sequence[ToolAnswer] | RlgenError] = Future()
        self.box.call(calls, answers.set_result)
        told = answers.result()
        if isinstance(told, RlgenError):
            raise told
        stop, found = int(self.suffixes.tokenizer.eos_token_id), []
        for call, one in zip(calls, told, strict=True):
            said = [*self.suffixes.turn([(call.name, call.arguments)]), stop]
            found.append((said, self.suffixes.ids([call.name], [one.text], stop).tolist()))
        return found

    def end(self, conversation: Hashable) -> None:
        """Does nothing: tools remember no conversation."""

    def close(self) -> None:
        self.box.close()


def assistant(turn: Turn) -> Mapping[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": turn.content}
    if turn.thinking:
        message["reasoning_content"] = turn.thinking
    calls = calls_of({place: (one.name, one.arguments) for place, one in enumerate(turn.calls) if isinstance(one, ToolCall)})
    return {**message, "tool_calls": calls} if calls else message
