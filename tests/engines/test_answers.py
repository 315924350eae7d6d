"""Answers of a server: read whole or not at all, asked for again after a moment's trouble, and cheap to read.

One that was changed on the way ends with exit 6 and its cause before anything computes with it. What is in an answer is checked
in one place for every engine, `check_answers`: so the faults of `IN_AN_ANSWER` are found in a colocated engine, too.
"""

import asyncio
import json
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy
import pytest
from aiohttp import web
from answers import URL, asking, calls, engine_on, reading, synthetic
from helpers.engines import answering
from helpers.samples import completion, request

from rlgen.engines import client
from rlgen.engines.answer import Labelled, ServerAnswer, read_answer
from rlgen.engines.client import OpenRequests
from rlgen.engines.colocated import ColocatedEngine
from rlgen.engines.http import Server
from rlgen.errors import EngineError, Fault, RlgenError, SentinelError, ServerLost
from rlgen.rollout.answers import check_answers
from rlgen.types import Completion, Sampling, Span

STOP, VOCABULARY = 9, 100
SAMPLING = Sampling(max_tokens=4, temperature=1.0, stop_ids=(STOP,), vocab_size=VOCABULARY)
PROMPTS = ([1, 2, 3], [4, 5])
Answer = dict[str, Any]


def answer_to(prompt: list[int]) -> Answer:
    """What vLLM's route for ids answers: three ids, the last of them the stop token."""
    choice = {
        "token_ids": [7, 8, STOP],
        "finish_reason": "stop",
        "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -1.0}, {"logprob": -0.25}]},
        "weight_versions": [{"version": "r.3", "start": 0, "end": 3}],
    }
    usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": 128}}
    return {"choices": [choice], "prompt_token_ids": prompt, "usage": usage}


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
    "cut off before the limit": (
        choice(token_ids=[7, 7, 7], finish_reason="length"),
        r"engine_settings.* cut answer 1 off after 3 of 4 ids: .* \(max_model_len\)",
    ),
    "a log-prob too few": (logps(-0.5, -1.0), "missing_logprobs.* 3 ids.* and 2 log-probs"),
    "a log-prob too many": (logps(-0.5, -1.0, -0.25, -1.0), "missing_logprobs.* 3 ids"),
    "no log-probs": (choice(logprobs=None), "missing_logprobs.* 3 ids.* and 0 log-probs"),
    "a log-prob of minus infinity": (logps(-0.5, -1e999, -0.25), "not a completion|missing_logprobs"),
    "a log-prob above 0": (logps(-0.5, 0.1, -0.25), "missing_logprobs.* 3 ids.* and 2 log-probs"),
    "a log-prob that is null": (logps(-0.5, None, -0.25), "not a completion"),
    "a log-prob that is no number": (logps(-0.5, float("nan"), -0.25), "not a completion"),
    "weights of an earlier version": (spans(("r.2", 0, 3)), "stale_rollouts.* version 2, but the trainer holds version 3"),
    "weights of a version to come": (spans(("r.4", 0, 3)), "stale_rollouts.* version 4"),
    "weights without a name": (choice(weight_versions=[]), "stale_rollouts.* version -1"),
    "weights of some ids": (spans(("r.3", 0, 2)), "stale_rollouts.* names the weights of 2 of them"),
    "a label of weights that is none": (spans(("nonsense", 0, 3)), "not those of this run"),
    "aborted": (choice(finish_reason="abort"), "finish_reason 'abort'"),
    "no reason": (choice(finish_reason=None), "finish_reason None"),
    "ended without a stop token": (choice(token_ids=[7, 8, 8]), "dropped_stop_token.* its last id is 8"),
    "another prompt": (lambda answer: answer.update(prompt_token_ids=[1, 2]), "missing_prompt.* requests have no answer, "),
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
    requests = [request(prompt, seed=place) for place, prompt in enumerate(PROMPTS)]

    async def reply(asked: web.Request) -> web.Response:
        prompt = (await asked.json())["token_ids"]
        if prompt == PROMPTS[0]:
            return web.Response(body=json.dumps(answer_to(PROMPTS[0])).encode())
        await asyncio.sleep(slow)
        return web.Response(status=second[0], body=second[1])

    async def run() -> list[Completion]:
        async with answering("/inference/v1/generate", reply) as url:
            engine = engine_on([Server(url, "token", 0.3 if slow else 30.0)], run="r")
            return await asyncio.to_thread(engine.generate, requests, SAMPLING)

    answers = asyncio.run(run())
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


def test_answers_of_one_token_are_taken_if_a_text_may_have_ended_them_and_are_else_a_flattened_list() -> None:
    """Of a multiple choice with `rollout.stop: [A, B, C, D]`, each answer is its letter."""
    asked = [request((1, 2), seed) for seed in range(4)]
    letters = [completion((65 + place,), (-1.0,), (1, 2), finish_reason="stop") for place in range(4)]
    cut = [replace(one, finish_reason="length") for one in letters]
    by_text = replace(SAMPLING, stop=("A", "B", "C", "D"))
    check_answers(asked, letters, by_text, 0)
    check_answers(asked, cut, SAMPLING, 0, free=True)  # the user's rollout code may sample one token, or keep one
    for sampling, told in ((SAMPLING, letters), (by_text, [*letters[:3], cut[3]]), (by_text, [*letters, *letters])):
        with pytest.raises(SentinelError, match="a list of completions was flattened") as found:
            check_answers(asked, told, sampling, 0)
        assert found.value.fault is Fault.FLATTENED_COMPLETIONS


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


# --- read whole or not at all ------------------------------------------------------------------------------------------------


def as_json(reason: str | None) -> bytes:
    answer = answer_to([1])
    choice(finish_reason=reason)(answer)
    return msgspec.json.encode(answer)


def arrays_answer(reason: str | None) -> bytes:
    """What rlgen's route answers."""
    return ServerAnswer.of([1], [7, 8, STOP], [-0.5, -1.0, -0.25], reason, [Labelled("r.3", 0, 3)], 128).packed()


@pytest.mark.fault(53)
@pytest.mark.parametrize("reason", ["abort", "error", None, "tool_calls"])
def test_an_answer_that_was_aborted_is_none(proof: Callable[[str], None], reason: str) -> None:
    for form in (as_json, arrays_answer):
        with pytest.raises(ServerLost, match=f"finish_reason {reason!r}: something other than rlgen stopped it") as lost:
            read_answer(form(reason), form is arrays_answer, URL, lambda label: 3)
        assert lost.value.exit_code == 6  # unless it is brought back, and the answer asked again
    output = SimpleNamespace(outputs=[SimpleNamespace(finish_reason=reason, token_ids=[7], logprobs=None)])
    with pytest.raises(EngineError, match=f"finish_reason {reason!r}, not stop or length"):
        ColocatedEngine._completion(SimpleNamespace(weight_version=0), output)  # type: ignore[arg-type]
    proof(f"an answer with finish_reason {reason!r}, three tokens in it, in both forms")


@pytest.mark.parametrize("form", [as_json, arrays_answer])
def test_an_answer_is_read_whole_or_not_at_all(form: Callable[[str | None], bytes]) -> None:
    whole, arrays = form("length"), form is arrays_answer
    asked: list[Any] = []
    answer = read_answer(whole, arrays, URL, lambda label: asked.append(label) or 3)  # type: ignore[func-returns-value]
    assert (list(answer.token_ids), list(answer.logp), list(answer.prompt_ids)) == ([7, 8, STOP], [-0.5, -1.0, -0.25], [1])
    assert (answer.finish_reason, answer.weight_version, asked) == ("length", 3, ["r.3"])
    assert answer.cached_tokens == 128, "the sentinel's probe of the cache goes by it"
    for cut in (0, 3, len(whole) // 2, len(whole) - 1):
        with pytest.raises(ServerLost, match="sent a response that is not a completion"):
            read_answer(whole[:cut], arrays, URL, lambda label: 3)
    with pytest.raises(ValueError, match="2 ids and 1 log-probs"):
        ServerAnswer.of([1], [7, 8], [-0.5], "stop", [], 0).packed()
    with pytest.raises(ServerLost, match="8 bytes of ids, 4 of log-probs"):
        read_answer(msgspec.msgpack.encode(ServerAnswer.of([1], [7, 8], [-0.5], "stop", [], 0)), True, URL, int)


# --- asked for again ---------------------------------------------------------------------------------------------------------


def posted(monkeypatch: pytest.MonkeyPatch, statuses: Iterator[int], again: bool = True) -> tuple[bytes, int]:
    """What the client gets from a server that answers with these statuses, and how often it was asked."""
    monkeypatch.setattr(client, "AGAIN", (0.0, 0.0, 0.0))
    asked = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(await request.text())
        return web.Response(status=next(statuses), text=f"answer {len(asked)}")

    async def run() -> bytes:
        async with answering("/generate", answer) as url:
            server = Server(url, "token", 5.0, again)
            async with server.session() as session:
                return await OpenRequests(server, session).post("/generate", b"the same")

    said = asyncio.run(run())
    assert set(asked) == {"the same"}
    return said, len(asked)


@pytest.mark.parametrize("status", [429, 500, 502, 503])
def test_a_moment_of_trouble_of_a_proxy_is_waited_for(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    assert posted(monkeypatch, iter([status, status, 200])) == (b"answer 3", 3)


@pytest.mark.parametrize(
    ("statuses", "again", "error", "words"),
    [
        ([503] * 9, True, ServerLost, "failed at /generate with 503: answer 4"),  # what stays so
        ([429] * 9, True, EngineError, "answered /generate with 429: answer 4"),
        ([400, 200], True, EngineError, "answer 1"),  # a refusal
        ([500, 200], False, ServerLost, "answer 1"),  # a server that rlgen started
    ],
)
def test_what_is_no_moment_of_trouble_is_an_error_with_its_words(
    monkeypatch: pytest.MonkeyPatch, statuses: list[int], again: bool, error: type[RlgenError], words: str
) -> None:
    with pytest.raises(error, match=words):
        posted(monkeypatch, iter(statuses), again)


# --- what they cost the process that asks, in calls and in CPU time of this process ------------------------------------------

FEW, MANY = 1024, 4096


@pytest.mark.slow  # what it measures is the machine's, if anything else runs there
@pytest.mark.timed
def test_a_request_costs_the_same_however_many_are_open() -> None:
    few, many = calls(FEW), calls(MANY)
    assert many <= 1.05 * few, f"{few:.0f} calls a request with {FEW} open, {many:.0f} with {MANY}"
    # CPU time says the same of what a call does; it is a coarse measure, for a core is twice as fast while its neighbour rests.
    few, many = min(asking(FEW) for _ in range(3)), min(asking(MANY) for _ in range(3))
    assert many <= 3 * few and many <= 1.5, f"{few:.2f} ms a request with {FEW} open, {many:.2f} ms with {MANY}"


def test_reading_arrays_costs_next_to_nothing_and_json_no_object_that_stays() -> None:
    assert 20 * reading(8192, arrays=True) < reading(8192, arrays=False)  # it is a two hundredth
    for arrays in (True, False):
        raw = synthetic(100_000, arrays)
        tracemalloc.start()
        kept = read_answer(raw, arrays, URL, lambda label: 3)
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert (kept.token_ids.dtype, kept.logp.dtype) == (numpy.int32, numpy.float32)
        assert len(kept.token_ids) == len(kept.logp) == 100_000 and kept.spans == (Span(0, 100_000, 3),)
        assert held < 10 * 100_000, "two numbers of 4 bytes a token"
