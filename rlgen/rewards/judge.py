"""Scores completions by a language model behind an OpenAI-compatible API: one by one, or each against each. Runs in a worker."""

import asyncio
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

from rlgen.errors import RewardError
from rlgen.recipe.judges import COMPARISON, PLACEHOLDER, RATING, SCORE, VERDICT, JudgeArgs
from rlgen.rewards.endpoint import Answers, Endpoint
from rlgen.worker_pool.failures import redact_and_shorten
from rlgen.worker_pool.source import FunctionFacts

T = TypeVar("T")
SHOWN = 500  # characters of an answer in a message
VERDICTS = {"A": 1.0, "B": 0.0, "C": 0.5, "TIE": 0.5}  # the first answer's share of the win


class Unreadable(Exception):
    """Raised when the judge's answer holds no score."""


def question_of(settings: JudgeArgs) -> str:
    """Returns the question. Raises RewardError if its file cannot be read, or does not show what is judged."""
    if settings.prompt is not None:
        return settings.prompt
    if settings.prompt_file is None:
        return COMPARISON if settings.pairwise else RATING
    try:
        text = Path(settings.prompt_file).read_text(encoding="utf-8")
        settings.check_question(text)
    except (OSError, ValueError) as error:
        raise RewardError(f"rewards: judge: {settings.prompt_file} cannot be used as the question: {error}") from error
    return text


def facts_of_judge(settings: JudgeArgs) -> FunctionFacts:
    """Returns what the reward is called with: what the question names, and for a prompt its messages; and the SHA-256 of the file
    with the question, if there is one.
    """
    question, own = question_of(settings), {"prompt", "completion", "first", "second"}
    given = ("prompts", "completions") if settings.pairwise else ("prompt", "completion")
    names = (*given, "prompt_messages", *sorted(set(PLACEHOLDER.findall(question)) - own))
    sha256 = None if settings.prompt_file is None else hashlib.sha256(question.encode()).hexdigest()
    return FunctionFacts(tuple((name, "KEYWORD_ONLY", True) for name in names), is_async=True, file=None, sha256=sha256)


class Judge:
    def __init__(self, settings: JudgeArgs, timeout: float, answers: Path | None, name: str) -> None:
        """Reads the question, the key and the answers so far, and connects to nothing. For the arguments see `RewardSource`.

        Raises:
            RewardError: the question or the key is not there.
            CheckpointError: the answers so far cannot be read.
        """
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self._settings = settings
        self._question = question_of(settings)
        self._endpoint = Endpoint(settings, timeout, Answers(answers, name, rank), rank, world)
        self._pattern = re.compile(settings.pattern or (VERDICT if settings.pairwise else SCORE))

    async def rate(self, *, prompt: str, completion: str, prompt_messages: Any, **columns: Any) -> float:
        """Returns the score of one completion. Raises NoAnswer, or Unreadable for no score within `low` and `high`."""
        values = {**columns, "prompt": transcript(prompt, prompt_messages), "completion": completion}
        said = await self._endpoint.ask(filled(self._question, values))
        settings, found = self._settings, self._found(said)
        try:
            score = float(found)
        except (TypeError, ValueError):
            raise Unreadable(
                f"the score is {str(found)[:80]!r}, which is not a number, in: {redact_and_shorten(said, SHOWN)}"
            ) from None
        if not settings.low <= score <= settings.high:
            raise Unreadable(f"the score {score:g} is not within {settings.low:g} and {settings.high:g}")
        return score

    async def compare(
        self, *, prompts: Sequence[str], completions: Sequence[str], prompt_messages: Sequence[Any], **columns: Sequence[Any]
    ) -> list[float | None]:
        """Returns the win rate of each completion against the others: every pair is shown in both orders, and equal ones tie.
        Raises NoAnswer or Unreadable if a comparison fails.
        """
        shared = {**{name: values[0] for name, values in columns.items()}, "prompt": transcript(prompts[0], prompt_messages[0])}
        pairs = list(combinations(dict.fromkeys(completions), 2))

        async def share(first: str, second: str) -> float:
            said = await self._endpoint.ask(filled(self._question, {**shared, "first": first, "second": second}))
            verdict = VERDICTS.get(str(found := self._found(said)).strip().upper())
            if verdict is None:
                raise Unreadable(f"the verdict is {str(found)[:80]!r}, not A, B or C, in: {redact_and_shorten(said, SHOWN)}")
            return verdict

        try:
            async with asyncio.TaskGroup() as group:
                asked = [(group.create_task(share(a, b)), group.create_task(share(b, a))) for a, b in pairs]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None  # the first that failed has cancelled the others
        # The mean of both orders: a judge that prefers what it reads first gives a tie.
        wins = {pair: (one.result() + 1.0 - other.result()) / 2 for pair, (one, other) in zip(pairs, asked, strict=True)}
        return win_rates(completions, lambda one, other: wins.get((one, other), 1.0 - wins.get((other, one), 0.5)))

    def _found(self, said: str) -> Any:
        """Returns what the answer says as its score. Raises Unreadable."""
        if self._settings.field is not None:
            for value in reversed(objects_in(said)):
                if self._settings.field in value:
                    return value[self._settings.field]
        elif matches := self._pattern.findall(said):
            return matches[-1]
        raise Unreadable(f"the answer holds no score: {redact_and_shorten(said, SHOWN)}")


def win_rates(items: Sequence[T], wins: Callable[[T, T], float]) -> list[float | None]:
    """Returns [G], the mean share from 0 to 1 that each item wins against the others; None for a single one. Their mean is 0.5.

    `wins`: the share of the first of two items, from 0 (it loses) to 1; for the swapped items it gives 1 minus that.
    """
    rates: list[float | None] = []
    for place, item in enumerate(items):
        others = [wins(item, other) for index, other in enumerate(items) if index != place]
        rates.append(sum(others) / len(others) if others else None)
    return rates


def transcript(prompt: str, messages: Sequence[Mapping[str, Any]] | None) -> str:
    """Returns a prompt as people read it: the text; the user's message of a chat; or each message after the name of its role."""
    if messages is None:
        return prompt
    if len(messages) == 1:
        return message_text(messages[0])
    return "\n\n".join(f"{message['role']}: {message_text(message)}" for message in messages)


def message_text(message: Mapping[str, Any]) -> str:
    """Returns the text of a message, with [image] in the place of each image."""
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "[image]") for part in content)


def filled(question: str, values: Mapping[str, Any]) -> str:
    """Returns the question with the values in place of their names, as JSON unless they are texts; braces in a value stay."""

    def text(match: re.Match[str]) -> str:
        value = values[match[1]]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)

    return PLACEHOLDER.sub(text, question)


def objects_in(text: str) -> list[dict[str, Any]]:
    """Returns the JSON objects in a text, in their order, without those inside of others."""
    found, decoder, place = [], json.JSONDecoder(), text.find("{")
    while place >= 0:
        try:
            value, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            end = place + 1
        else:
            found.append(value)
        place = text.find("{", end)
    return found
