"""What a judge is asked, what it may answer, and what happens when it does not. The server is a real one."""

import asyncio
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.judge_server import HANG, JudgeServer, lines_of, serving
from helpers.scoring import Build, group, totals
from helpers.waiting import HANGS

from rlgen.errors import RewardError
from rlgen.recipe.judges import SCORE, JudgeArgs
from rlgen.rewards import endpoint
from rlgen.rewards.endpoint import NoAnswer
from rlgen.rewards.judge import Judge, Unreadable

QUESTION = "Task {prompt} Known: {answer}\nAnswer {completion}"


def by_length(question: str) -> str:
    """As many points as the completion has characters."""
    return f"I thought about it. Score: {len(question.rpartition('Answer ')[2])}"


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with serving(by_length) as judge:
        yield judge


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "FIRST_PAUSE", 0.01)


def args_of(server: JudgeServer, **changes: Any) -> dict[str, Any]:
    return {"url": server.url, "model": "m", "prompt": QUESTION, "pattern": r"Score: (\S+)", **changes}


def judge_of(server: JudgeServer, timeout: float = HANGS, answers: Path | None = None, **changes: Any) -> Judge:
    return Judge(JudgeArgs(**args_of(server, **changes)), timeout, answers, "judge")


def rated(judge: Judge, *completions: str, prompt: str = "3+4=", messages: Any = None) -> list[float | BaseException]:
    """The scores of completions that are asked for at the same time."""

    async def ask() -> list[float | BaseException]:
        calls = [judge.rate(prompt=prompt, completion=c, prompt_messages=messages, answer=7) for c in completions]
        return await asyncio.gather(*calls, return_exceptions=True)

    return asyncio.run(ask())


def compared(judge: Judge, *completions: str) -> list[float | None]:
    count = len(completions)
    return asyncio.run(judge.compare(prompts=["3+4="] * count, completions=completions, prompt_messages=[None] * count))


# --- one by one ------------------------------------------------------------------------------------------------------


def test_the_question_holds_prompt_completion_and_columns(server: JudgeServer) -> None:
    judge = judge_of(server, system="Be strict.", max_tokens=5, extra={"seed": 3, "temperature": None})
    assert rated(judge, "{prompt}") == [8.0]  # what the policy writes is not filled in
    (body,) = server.bodies
    assert body == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be strict."},
            {"role": "user", "content": "Task 3+4= Known: 7\nAnswer {prompt}"},
        ],
        "max_tokens": 5,
        "seed": 3,
    }


@pytest.mark.parametrize(
    ("messages", "shown"),
    [
        (None, "3+4="),
        ([{"role": "user", "content": "three and four"}], "three and four"),
        ([{"role": "system", "content": "Count."}, {"role": "user", "content": "3"}], "system: Count.\n\nuser: 3"),
        ([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "how many?"}]}], "[image]how many?"),
    ],
)
def test_the_judge_sees_a_chat_without_the_policys_template(server: JudgeServer, messages: Any, shown: str) -> None:
    rated(judge_of(server), "x", messages=messages)
    assert server.questions == [f"Task {shown} Known: 7\nAnswer x"]


@pytest.mark.parametrize(
    ("said", "changes", "score"),
    [
        ("Score: 3 no, Score: 4.5", {}, 4.5),
        ("**7** of 10", {"pattern": r"\*\*(\d)\*\*"}, 7.0),
        ('I say {"score": 1}. No: ```json\n{"why": {"score": 9}, "score": "6"}\n``` {', {"pattern": None, "field": "score"}, 6.0),
    ],
)
def test_the_score_is_the_last_that_the_answer_says(said: str, changes: Any, score: float) -> None:
    with serving(lambda _: said) as server:
        assert rated(judge_of(server, **changes), "x") == [score]


@pytest.mark.parametrize(
    ("said", "changes", "why"),
    [
        ("I cannot rate this.", {}, "the answer holds no score: I cannot rate this."),
        ("Score: high", {}, "the score is 'high', which is not a number, in: Score: high"),
        ("Score: 11", {}, "the score 11 is not within 0 and 10"),
        ("Score: 1e999", {"pattern": SCORE}, "the score inf is not within 0 and 10"),
        ("Score: nan", {}, "the score nan is not within 0 and 10"),
        ("Score: 0.5", {"low": 1.0, "high": 5.0}, "the score 0.5 is not within 1 and 5"),
        ('{"points": 3}', {"pattern": None, "field": "score"}, "the answer holds no score"),
        ('{"score": null}', {"pattern": None, "field": "score"}, "not a number"),
    ],
)
@pytest.mark.fault(36)
def test_what_is_no_score_is_a_failure_that_shows_the_answer(said: str, changes: Any, why: str, proof: Any) -> None:
    with serving(lambda _: said) as server:
        (failed,) = rated(judge_of(server, **changes), "x")
        assert isinstance(failed, Unreadable) and why in str(failed) and len(server.bodies) == 1
    proof(str(failed))


# --- the line to it --------------------------------------------------------------------------------------------------


@pytest.mark.fault(35)
@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_failure_that_passes_is_asked_again(server: JudgeServer, status: int, proof: Any) -> None:
    server.answer = lambda question: (status, "busy") if len(server.bodies) < 3 else by_length(question)
    assert rated(judge_of(server), "abcd") == [4.0] and len(server.bodies) == 3
    proof(f"HTTP {status} twice, then an answer")


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ((401, "wrong key"), "the judge refused with HTTP 401: wrong key"),
        ((404, "no such model"), "HTTP 404: no such model"),
        ((307, "", {"Location": "http://127.0.0.1:1/"}), "the judge refused with HTTP 307"),
        ((200, "<html>"), "the judge sent no chat completion (JSONDecodeError"),
        ((200, '{"choices": []}'), "the judge sent no chat completion (IndexError"),
        ((200, "[]"), "the judge sent no chat completion (TypeError"),
        (None, "the judge sent an answer without a text"),
    ],
)
def test_a_refusal_is_not_asked_again(server: JudgeServer, said: Any, why: str) -> None:
    server.answer = lambda _: said
    (failed,) = rated(judge_of(server), "x")
    assert isinstance(failed, NoAnswer) and why in str(failed) and len(server.bodies) == 1


def test_the_server_says_when_to_come_back(server: JudgeServer) -> None:
    server.answer = lambda question: (429, "later", {"Retry-After": "1"}) if len(server.bodies) == 1 else by_length(question)
    began = time.monotonic()
    assert rated(judge_of(server), "x") == [1.0] and time.monotonic() - began >= 1.0
    server.answer = lambda _: (429, "later", {"Retry-After": "1000"})
    began = time.monotonic()
    (failed,) = rated(judge_of(server, timeout=20.0), "y")
    assert "in 1 attempt; the last: HTTP 429: later" in str(failed) and time.monotonic() - began < 10, "it would be too late"


@pytest.mark.parametrize(
    ("said", "settings", "why", "requests"),
    [
        ((500, "no\nluck"), {"retries": 2}, "did not answer in 3 attempts; the last: HTTP 500: no luck", 3),
        (HANG, {"timeout": 0.5}, "did not answer in 1 attempt; the last: no answer in time", 1),  # before the call times out
        (None, {"url": "http://127.0.0.1:1/v1", "retries": 1}, "did not answer in 2 attempts; the last: ClientConnectorError", 0),
    ],
)
def test_a_failure_that_stays_is_said(server: JudgeServer, said: Any, settings: dict[str, Any], why: str, requests: int) -> None:
    server.answer = lambda _: said
    (failed,) = rated(judge_of(server, **settings), "x")
    assert str(failed).startswith(f"the judge {why}") and len(server.bodies) == requests


def test_one_request_that_hangs_is_sent_again(server: JudgeServer) -> None:
    server.answer = lambda question: HANG if len(server.bodies) == 1 else by_length(question)
    assert rated(judge_of(server, request_timeout=0.5), "xy") == [2.0] and len(server.bodies) == 2


def test_requests_at_once_are_limited(server: JudgeServer) -> None:
    assert rated(judge_of(server, concurrency=3), *("abcdefghi"[:n] for n in range(1, 10))) == [float(n) for n in range(1, 10)]
    assert server.most_at_once == 3


# --- the key ---------------------------------------------------------------------------------------------------------


def test_the_key_is_sent_and_never_said(server: JudgeServer, monkeypatch: pytest.MonkeyPatch, opened: Build) -> None:
    monkeypatch.setenv("MY_JUDGE_API_KEY", "open-sesame-1234")
    server.answer = lambda _: (401, f"wrong key {server.keys[-1]}")
    args = args_of(server, key_env="MY_JUDGE_API_KEY")
    scorer = opened([{"use": "judge", "args": args, "on_error": "skip", "max_error_fraction": 1.0}], {"answer"})
    (scored,) = scorer.score([group("a")], 1)
    (said,) = (sample.reward_errors["judge"] for sample in scored.samples)
    assert server.keys == ["Bearer open-sesame-1234"]
    assert "HTTP 401: wrong key" in said and "[redacted]" in said and "sesame" not in said


def test_a_key_that_is_not_set_is_an_error_before_anything_is_asked(server: JudgeServer) -> None:
    with pytest.raises(RewardError, match="the environment variable NO_SUCH_API_KEY is not set"):
        judge_of(server, key_env="NO_SUCH_API_KEY")


# --- asked once ------------------------------------------------------------------------------------------------------


def test_equal_questions_are_asked_once(server: JudgeServer, tmp_path: Path) -> None:
    judge = judge_of(server, answers=tmp_path)
    assert rated(judge, "ab", "ab", "abc") == [2.0, 2.0, 3.0] and rated(judge, "ab") == [2.0]
    assert len(server.bodies) == 2
    (file,) = tmp_path.iterdir()
    assert [line["answer"] for line in lines_of(file)] == [by_length("Answer ab"), by_length("Answer abc")]


def test_answers_outlive_the_process_even_if_it_is_killed_while_it_writes(server: JudgeServer, tmp_path: Path) -> None:
    assert rated(judge_of(server, answers=tmp_path), "ab") == [2.0]
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text() + '\n{"request": "half')
    assert rated(judge_of(server, answers=tmp_path), "abc") == [3.0]
    server.answer = lambda _: (500, "gone")
    again = judge_of(server, answers=tmp_path, retries=0)
    assert rated(again, "ab", "abc") == [2.0, 3.0] and len(server.bodies) == 2
    assert "gone" in str(rated(judge_of(server, answers=tmp_path, retries=0, model="other"), "ab")), "another request"
    assert rated(Judge(JudgeArgs(**args_of(server, retries=0)), HANGS, tmp_path, "namesake"), "ab") != [2.0], "of another judge"


def test_what_another_process_of_training_was_told_is_known(
    server: JudgeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    rated(judge_of(server, answers=tmp_path), "ab")
    monkeypatch.setenv("RANK", "0")
    assert rated(judge_of(server, answers=tmp_path), "ab", "c") == [2.0, 1.0] and len(server.bodies) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["judge@0.jsonl", "judge@1.jsonl"]


def test_a_budget_of_requests_is_that_of_the_run(server: JudgeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget: Any = {"budget_requests": 3, "answers": tmp_path, "concurrency": 1}
    server.answer = lambda question: (503, "busy") if len(server.bodies) == 1 else by_length(question)
    assert rated(judge_of(server, **budget), "ab") == [2.0]  # the second of the attempts
    later = judge_of(server, **budget)  # after a resume
    found = rated(later, "ab", "abc", "abcd")
    assert found[:2] == [2.0, 3.0] and "budget_requests 3 is spent" in str(found[2]) and len(server.bodies) == 3
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "of which this process has 2" in str(rated(judge_of(server, **budget), "abcde"))


def test_a_budget_of_tokens_ends_with_the_request_that_spends_it(server: JudgeServer) -> None:
    found = rated(judge_of(server, budget_tokens=15, concurrency=1), "a", "ab", "abc")  # ten each
    assert found[:2] == [1.0, 2.0] and "budget_tokens 15 is spent" in str(found[2]) and len(server.bodies) == 2


# --- each against each -----------------------------------------------------------------------------------------------

PAIR: dict[str, Any] = {"pairwise": True, "prompt": None, "pattern": None}
SHOWN_PAIR = re.compile(r"Answer A:\n(.*)\n\nAnswer B:\n(.*)\n", re.DOTALL)


def answers_in(question: str) -> tuple[str, str]:
    found = SHOWN_PAIR.search(question)
    assert found is not None
    return found[1], found[2]


def longer(question: str) -> str:
    first, second = map(len, answers_in(question))
    return "So [[A]]" if first > second else "So [[B]]" if second > first else "So [[C]]"


@pytest.mark.parametrize(
    ("says", "completions", "rates", "requests"),
    [
        # abc beats three of three; the two of length 2 tie with each other, beat one and lose to one.
        (longer, ["ab", "abc", "xy", "z"], [0.5, 1.0, 0.5, 0.0], 12),
        (lambda _: "[[A]]", ["ab", "abc", "xy"], [0.5, 0.5, 0.5], 6),  # it likes what it reads first, and prefers nothing
        (lambda question: "[[A]]" if answers_in(question) == ("x", "y") else "[[C]]", ["x", "y"], [0.75, 0.25], 2),
        # Equal completions tie without a question.
        (longer, ["ab", "ab", "abc"], [0.25, 0.25, 1.0], 2),
        (longer, ["same", "same"], [0.5, 0.5], 0),
        (longer, ["alone"], [None], 0),
    ],
)
def test_win_rates_are_shares_of_the_comparisons_that_are_won(
    server: JudgeServer, says: Any, completions: list[str], rates: list[float | None], requests: int
) -> None:
    server.answer = says
    assert compared(judge_of(server, **PAIR), *completions) == rates
    distinct = set(completions)
    assert {answers_in(question) for question in server.questions} == {(a, b) for a in distinct for b in distinct if a != b}
    assert len(server.bodies) == requests


@pytest.mark.parametrize("said", ["neither", "[[D]]"])
def test_a_comparison_without_a_verdict_fails_the_group(server: JudgeServer, said: str) -> None:
    server.answer = lambda question: said if answers_in(question) == ("x", "y") else "[[A]]"
    with pytest.raises(Unreadable, match="the answer holds no score"):
        compared(judge_of(server, **PAIR), "x", "y", "z")


def test_comparisons_that_are_given_up_count_after_a_resume(server: JudgeServer, tmp_path: Path) -> None:
    said = iter([*[HANG] * 5, "neither"])
    server.answer = lambda question: next(said)
    with pytest.raises(Unreadable):
        compared(judge_of(server, answers=tmp_path, **PAIR), "x", "y", "z")
    (file,) = tmp_path.iterdir()
    assert sorted(line.get("failed", line.get("answer")) for line in lines_of(file)) == ["given up"] * 5 + ["neither"]
    server.answer = longer
    with pytest.raises(NoAnswer, match="budget_requests 6 is spent"):
        compared(judge_of(server, answers=tmp_path, budget_requests=6, **PAIR), "x", "yy")


def test_a_question_of_ones_own_may_answer_in_json(server: JudgeServer) -> None:
    question = "{prompt}\nAnswer A:\n{first}\n\nAnswer B:\n{second}\n"
    server.answer = lambda asked: json.dumps({"better": "tie" if "abc" in asked else "b"})
    judge = judge_of(server, pairwise=True, prompt=question, pattern=None, field="better")
    assert compared(judge, "x", "abc") == [0.5, 0.5]
    server.answer = lambda _: '{"better": "both"}'
    with pytest.raises(Unreadable, match="the verdict is 'both', not A, B or C"):
        compared(judge, "x", "y")


# --- in a worker -----------------------------------------------------------------------------------------------------


def test_a_judge_beside_other_rewards(server: JudgeServer, opened: Build, tmp_path: Path) -> None:
    server.answer = lambda question: longer(question) if "Answer A" in question else by_length(question)
    entries = [
        {"use": "judge", "args": args_of(server), "weight": 0.5},
        {"use": "exact_match"},
        {"use": "judge", "name": "pairs", "args": {"url": server.url, "model": "m", "pairwise": True}},
    ]
    scorer = opened(entries, {"answer"}, answers=tmp_path)
    scored = scorer.score([group("7", "77"), group("777", "7777", group_id=18)], 1)
    assert [dict(sample.rewards) for sample in scored[0].samples] == [
        {"judge": 1.0, "exact_match": 1.0, "pairs": 0.0},
        {"judge": 2.0, "exact_match": 0.0, "pairs": 1.0},
    ]
    assert totals(scored) == [[1.5, 2.0], [1.5, 3.0]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["judge@0.jsonl", "pairs@0.jsonl"]


def test_an_outage_follows_the_policy_of_errors(server: JudgeServer, opened: Build) -> None:
    server.answer = lambda question: (400, "no") if question.endswith(" ab") else by_length(question)
    scorer = opened([{"use": "judge", "args": args_of(server), "on_error": "skip", "max_error_fraction": 0.4}], {"answer"})
    (scored,) = scorer.score([group("a", "ab", "abc")], 1)
    assert totals([scored]) == [[1.0, None, 3.0]]
    assert scored.samples[1].reward_errors["judge"].startswith("error: NoAnswer: the judge refused with HTTP 400: no")
    gone = opened([{"use": "judge", "args": args_of(server, url="http://127.0.0.1:1/v1", retries=0)}], {"answer"})
    with pytest.raises(RewardError, match=r"reward judge, prompt at position 17, sample 0: NoAnswer: .*ClientConnectorError"):
        gone.score([group("a")], 1)
