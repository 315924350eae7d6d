"""Answers of a server that were changed on the way: each ends with exit 6 and its cause before anything computes with it.

What is in an answer is checked in one place for every engine, `check_answers`: so the faults of `IN_AN_ANSWER` are found in a
colocated engine, too.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from rlgen.engines import client
from rlgen.engines.http import Server
from rlgen.errors import EngineError, RlgenError
from rlgen.rollout.answers import check_answers
from rlgen.types import Completion, Request, Sampling

STOP, VOCABULARY = 9, 100
SAMPLING = Sampling(max_tokens=4, temperature=1.0, stop_ids=(STOP,), vocab_size=VOCABULARY)
PROMPTS = ([1, 2, 3], [4, 5])
Answer = dict[str, Any]


def answer_to(prompt: list[int]) -> Answer:
    """What vLLM answers: three ids, the last of them the stop token."""
    choice = {
        "token_ids": [7, 8, STOP],
        "finish_reason": "stop",
        "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -1.0}, {"logprob": -0.25}]},
        "weight_versions": [{"version": "r.3", "start": 0, "end": 3}],
    }
    return {"choices": [choice], "prompt_token_ids": prompt}


def choice(**changes: Any) -> Callable[[Answer], None]:
    return lambda answer: answer["choices"][0].update(changes)


def logps(*values: Any) -> Callable[[Answer], None]:
    return choice(logprobs={"content": [{"logprob": value} for value in values]})


def spans(*of: tuple[str, int, int]) -> Callable[[Answer], None]:
    return choice(weight_versions=[{"version": version, "start": start, "end": end} for version, start, end in of])


def all_of(*changes: Callable[[Answer], None]) -> Callable[[Answer], None]:
    def change(answer: Answer) -> None:
        for one in changes:
            one(answer)

    return change


IN_AN_ANSWER: dict[str, tuple[Callable[[Answer], None], str]] = {
    "an id beyond the vocabulary": (choice(token_ids=[7, VOCABULARY, STOP]), "unknown_ids.* has the id 100"),
    "a negative id": (choice(token_ids=[7, -1, STOP]), "unknown_ids.* has the id -1"),
    "an id of 40 bits": (choice(token_ids=[7, 1 << 40, STOP]), "not a completion"),
    "an id with a fraction": (choice(token_ids=[7, 8.5, STOP]), "not a completion"),
    "an id as text": (choice(token_ids=[7, "8", STOP]), "not a completion"),
    "no ids": (choice(token_ids=[], logprobs=None, weight_versions=[]), "dropped_stop_token.* has no ids"),
    "more ids than asked for": (
        all_of(choice(token_ids=[7, 7, 7, 7, STOP]), logps(*[-1.0] * 5), spans(("r.3", 0, 5))),
        "engine_settings.* has 5 ids, but 4 were asked for",
    ),
    "a log-prob too few": (logps(-0.5, -1.0), "missing_logprobs.* 3 ids and 2 log-probs"),
    "a log-prob too many": (logps(-0.5, -1.0, -0.25, -1.0), "missing_logprobs.* 3 ids"),
    "no log-probs": (choice(logprobs=None), "missing_logprobs.* 3 ids and 0 log-probs"),
    "a log-prob of minus infinity": (logps(-0.5, -1e999, -0.25), "not a completion|missing_logprobs"),
    "a log-prob above 0": (logps(-0.5, 0.1, -0.25), "missing_logprobs.* 3 ids and 2 log-probs"),
    "a log-prob that is null": (logps(-0.5, None, -0.25), "not a completion"),
    "a log-prob that is no number": (logps(-0.5, float("nan"), -0.25), "not a completion"),
    "weights of an earlier version": (spans(("r.2", 0, 3)), "stale_rollouts.* version 2, but the trainer holds version 3"),
    "weights of a version to come": (spans(("r.4", 0, 3)), "stale_rollouts.* version 4"),
    "weights without a name": (choice(weight_versions=[]), "stale_rollouts.* version -1"),
    "weights of some ids": (spans(("r.3", 0, 2)), "stale_rollouts.* names the weights of 2 of them"),
    "a label of weights that is none": (spans(("nonsense", 0, 3)), "not a completion"),
    "aborted": (choice(finish_reason="abort"), "finish_reason 'abort'"),
    "no reason": (choice(finish_reason=None), "finish_reason None"),
    "ended without a stop token": (choice(token_ids=[7, 8, 8]), "dropped_stop_token.* its last id is 8"),
    "another prompt": (lambda answer: answer.update(prompt_token_ids=[1, 2]), "missing_prompt.* no answer to their prompt"),
    "no prompt": (lambda answer: answer.pop("prompt_token_ids"), "missing_prompt"),
    "no choice": (lambda answer: answer.update(choices=[]), "not a completion"),
}

Bytes = Callable[[bytes, bytes], tuple[int, bytes]]
ON_THE_WAY: dict[str, tuple[Bytes, str]] = {
    "the answer to another request": (lambda own, other: (200, other), "completion_order|missing_prompt"),
    "cut in the middle": (lambda own, other: (200, own[: len(own) // 2]), "not a completion"),
    "twice": (lambda own, other: (200, own + own), "not a completion"),
    "empty": (lambda own, other: (200, b""), "not a completion"),
    "a page of a proxy": (lambda own, other: (200, b"<html>busy</html>"), "not a completion"),
    "another encoding": (lambda own, other: (200, own.decode().encode("utf-16")), "not a completion"),
    "an error of the server": (lambda own, other: (500, b"out of memory"), "failed at .* with 500"),
    "a refusal": (lambda own, other: (400, b"too long"), "with 400"),
    "a redirect": (lambda own, other: (302, b""), "with 302"),
}


def collected(second: tuple[int, bytes], slow: float = 0.0) -> list[Completion]:
    """The completions that the client reads, where the second of two requests gets these status and bytes, after `slow` s."""
    requests = [Request(prompt_ids=np.array(prompt, np.int32), seed=place) for place, prompt in enumerate(PROMPTS)]
    found: dict[int, Completion] = {}

    async def reply(request: web.Request) -> web.Response:
        prompt = (await request.json())["token_ids"]
        if prompt == PROMPTS[0]:
            return web.Response(body=json.dumps(answer_to(PROMPTS[0])).encode())
        await asyncio.sleep(slow)
        return web.Response(status=second[0], body=second[1])

    async def run() -> None:
        app = web.Application()
        app.router.add_post("/inference/v1/generate", reply)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server = Server(f"http://127.0.0.1:{runner.addresses[0][1]}", "token", 0.3 if slow else 30.0)
        try:
            version = lambda label, url: int(label.removeprefix("r."))  # noqa: E731
            await client.sample([server], dict(enumerate(requests)), SAMPLING, lambda: "", version, found.__setitem__, 8)
        finally:
            await runner.cleanup()

    asyncio.run(run())
    answers = [found[place] for place in range(len(requests))]
    check_answers(requests, answers, SAMPLING, 3)
    return answers


def test_what_nobody_changed_is_taken() -> None:
    answers = collected((200, json.dumps(answer_to(PROMPTS[1])).encode()))
    assert [answer.prompt_ids.tolist() for answer in answers] == list(PROMPTS)


@pytest.mark.parametrize("name", IN_AN_ANSWER)
def test_an_answer_that_was_changed_ends_with_its_cause(name: str) -> None:
    change, words = IN_AN_ANSWER[name]
    answer = answer_to(PROMPTS[1])
    change(answer)
    with pytest.raises(RlgenError, match=words) as found:
        collected((200, json.dumps(answer).encode()))
    assert found.value.exit_code == EngineError.exit_code == 6


@pytest.mark.parametrize("name", ON_THE_WAY)
def test_a_response_that_is_no_answer_ends_with_its_cause(name: str) -> None:
    change, words = ON_THE_WAY[name]
    own, other = (json.dumps(answer_to(prompt)).encode() for prompt in (PROMPTS[1], PROMPTS[0]))
    with pytest.raises(RlgenError, match=words) as found:
        collected(change(own, other))
    assert found.value.exit_code == 6


def test_a_server_that_is_too_slow_ends_with_its_cause() -> None:
    with pytest.raises(RlgenError, match="has answered none for") as found:
        collected((200, json.dumps(answer_to(PROMPTS[1])).encode()), slow=0.6)
    assert found.value.exit_code == 6
