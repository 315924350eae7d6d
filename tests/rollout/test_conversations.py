"""Conversations of several turns, token for token, on every engine: what was sampled is what is trained on."""

import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import OPENERS, open_server, tiny_model
from helpers.engines import recoveries
from helpers.samples import completion, request
from helpers.scripted import Recorded, Scripted, dialogue, in_threads, reply_ids
from helpers.slow import slow_but
from helpers.waiting import HANGS

from rlgen.engines.base import Engine, Finished, FollowUpQueue
from rlgen.errors import EngineError, Fault, SentinelError
from rlgen.models.policy import Policy
from rlgen.models.tiny import byte_tokenizer
from rlgen.processes import Processes
from rlgen.rollout.answers import check_answers
from rlgen.rollout.conversations import Conversations, turn_seed
from rlgen.rollout.sample import first_tokens, rollout, sample_seed, turns_apart
from rlgen.rollout.samples import Samples
from rlgen.rollout.score import score
from rlgen.types import WHOLE, Completion, Prompt, Request, Sample, Sampling, Span, ids_of, turns_of

pytestmark = pytest.mark.usefixtures("one_thread")

STOPS = (*range(200, 258), 259)  # a turn ends after four tokens or so; the model itself names the last two
SAMPLING = Sampling(max_tokens=60, temperature=1.0, stop_ids=STOPS)
SIZE = 3
PROMPTS = [
    Prompt(position=at, row=at, text="", prompt_ids=ids_of([(3 * at + one) % 190 for one in range(150 + at)]), columns={})
    for at in range(4)
]


def talk(engine: Engine, version: int, sampling: Sampling = SAMPLING, **script: Any) -> tuple[Recorded, list[Sample], Scripted]:
    """The samples of all prompts, what the engine was asked for them, and the script that replied."""
    recorded, led = Recorded(engine), dialogue(**script)
    groups = rollout(recorded, PROMPTS, sampling, SIZE, 5, version, byte_tokenizer(), led)  # type: ignore[arg-type]
    assert isinstance(led.turns, Scripted)
    return recorded, [sample for group in groups for sample in group.samples], led.turns


def bits(samples: Sequence[Sample]) -> list[Any]:
    return [(s.completion_ids.tolist(), s.sampler_logp.tobytes(), s.spans, s.finish_reason, s.messages) for s in samples]


def test_ids_of_the_engine_are_those_of_the_row_to_the_last(engine: Engine) -> None:
    recorded, samples, script = talk(engine, engine.weight_version, later=in_threads)
    by_first = {asked.seed: (asked, answer) for asked, answer in recorded.finished}
    several = 0
    for sample in samples:
        assert sample.seed == sample_seed(5, sample.group_id, sample.sample_index), "the first turn is sampled as ever"
        row, mask = sample.prompt_ids, np.zeros(0, dtype=bool)
        turns = turns_of(sample.spans)
        for turn in range(len(turns)):
            asked, answer = by_first.pop(turn_seed(sample.seed, turn))
            assert np.array_equal(asked.prompt_ids, row), "the prompt of a turn is all that comes before it"
            start, stop = turns[turn]
            assert np.array_equal(sample.completion_ids[start:stop], answer.token_ids)
            assert np.array_equal(sample.sampler_logp[start:stop], answer.logp)
            row, mask = np.concatenate([row, answer.token_ids]), np.append(mask, [True] * len(answer.token_ids))
            if turn + 1 < len(turns):
                between = reply_ids(answer)
                row, mask = np.concatenate([row, between]), np.append(mask, [False] * len(between))
        assert np.array_equal(np.concatenate([sample.prompt_ids, sample.completion_ids]), row)
        assert np.array_equal(sample.loss_mask, mask) and np.array_equal(np.isnan(sample.sampler_logp), ~mask)
        assert len(json.loads(sample.messages or "[]")) == 2 * (len(turns) - 1) == 2 * sample.counts.get("calls", 0)
        several += len(turns) == 3
    assert not by_first, "the engine was asked for nothing else"
    assert several > len(samples) / 2
    assert {len(sample.completion_ids) for sample in samples} <= set(range(1, SAMPLING.max_tokens + 1))
    assert script.rooms[0] == SAMPLING.max_tokens - len(script.talks[0].completion.token_ids)


def test_the_trainer_computes_the_same_log_probs_of_each_turn_and_the_cache_is_used(engine: Engine) -> None:
    recorded, samples, _ = talk(engine, engine.weight_version)
    policy = Policy(tiny_model("qwen3"), torch.float32, True)
    own = score(policy, samples, WHOLE, 4096, Processes.alone())
    for sample, logp in zip(samples, own, strict=True):
        mask = torch.from_numpy(sample.loss_mask)
        assert (logp[mask] - torch.from_numpy(sample.sampler_logp)[mask]).abs().max() <= 1e-4
        assert (logp[~mask] == 0).all()
    if engine.facts().cache_block:
        later = [answer for asked, answer in recorded.finished if asked.max_tokens is not None]
        assert all(answer.cached_tokens >= 128 for answer in later) and len(later) > len(samples)


def test_replies_in_any_order_give_the_same_rows(engine: Engine) -> None:
    at_once, later = talk(engine, engine.weight_version)[1], talk(engine, engine.weight_version, later=in_threads)[1]
    assert bits(at_once) == bits(later)
    assert bits(at_once) != bits(talk(engine, engine.weight_version, times=1)[1])


@pytest.mark.slow
def test_a_server_that_is_killed_among_conversations_changes_nothing() -> None:
    opened: Any = open_server("qwen3")
    killed: list[int] = []

    def later(turn: Any, answer: Any) -> None:
        if turn.turn == 1 and not killed:
            for process in [one for server in opened._keeper._processes.values() for one in server.processes()]:
                killed.append(process.pid)
                process.kill()
        answer()

    try:
        undisturbed = talk(opened, 0)[1]
        assert bits(talk(opened, 0, later=later)[1]) == bits(undisturbed)
        assert killed and recoveries(opened) == 1
    finally:
        opened.close()


@pytest.mark.parametrize("kind", slow_but(["colocated", "server"], "colocated"))
def test_a_slow_reply_holds_up_no_other_conversation(kind: str) -> None:
    """Told by the order of events: the slow reply comes only when all others have ended."""
    opened = OPENERS[kind]("qwen3")
    others = threading.Semaphore(0)

    def later(turn: Any, answer: Any) -> None:
        slow = turn.prompt.position == 0 and turn.sample_index == 0
        if not slow:
            answer()
            return

        def wait() -> None:
            for _ in range(len(PROMPTS) * SIZE - 1):
                assert others.acquire(timeout=HANGS)
            answer()

        threading.Thread(target=wait).start()

    asked = [request(prompt.prompt_ids.tolist(), seed) for seed, prompt in enumerate(PROMPTS * SIZE)]
    places = [(prompt, index // len(PROMPTS)) for index, prompt in enumerate(PROMPTS * SIZE)]
    ended: list[int] = []

    def told(place: int, answer: Completion) -> None:
        ended.append(place)
        others.release()

    with_slow = Conversations(dialogue(times=1, later=later), places, asked, SAMPLING, 0, 0, told)
    try:
        opened.generate(asked, SAMPLING, with_slow.finished, with_slow.further)
    finally:
        opened.close()
    slow = places.index((PROMPTS[0], 0))
    if len(turns_of(with_slow.result()[slow].spans)) > 1:
        assert ended[-1] == slow and len(ended) == len(asked)
    else:
        pytest.fail("the slow conversation has one turn: take another seed")


class Told:
    """An engine that gives what it is told to, by the number of the request; each answer is for another number of tokens."""

    def __init__(self, *answers: tuple[tuple[int, ...], str], version: int = 0) -> None:
        self.answers, self.version = answers, version
        self.asked: list[Request] = []

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        finished: Finished | None = None,
        further: FollowUpQueue | None = None,
    ) -> list[Completion]:
        given: list[Completion] = []
        waiting = list(requests)
        while waiting:
            for one in waiting:
                self.asked.append(one)
                ids, reason = self.answers[len(given)]
                logp = (-0.5,) * len(ids)
                given.append(completion(ids, logp, one.prompt_ids.tolist(), self.version, reason))  # type: ignore[arg-type]
                assert finished is not None
                finished(len(given) - 1, given[-1])
            waiting = further.wait() if further else []
        return given


ONE = [Prompt(position=7, row=7, text="", prompt_ids=ids_of([1, 2]), columns={})]
SHORT = Sampling(max_tokens=12, temperature=1.0, stop_ids=(250,))


def one_sample(engine: Told, sampling: Sampling = SHORT, **script: Any) -> Sample:
    ((sample,),) = (group.samples for group in rollout(engine, ONE, sampling, 1, 0, 0, byte_tokenizer(), dialogue(**script)))  # type: ignore[arg-type]
    return sample


def test_a_row_is_turns_and_replies_and_no_token_more() -> None:
    engine = Told(((65, 250), "stop"), ((66, 67, 250), "stop"))
    sample = one_sample(engine, times=1)
    reply = reply_ids(completion((65, 250), (0.0, 0.0), (1, 2))).tolist()  # [65, 50, 11, 12]
    assert sample.completion_ids.tolist() == [65, 250, *reply, 66, 67, 250] and len(reply) == 4
    assert sample.spans == (Span(0, 2, 0), Span(6, 9, 0)) and sample.finish_reason == "stop"
    assert sample.completion == "cd" and json.loads(sample.messages)[0] == {"role": "assistant", "content": "turn 0 of 0"}
    assert sample.counts == {"calls": 1, "turn0": 1}
    first, second = turns_apart(sample)  # as the sentinel looks for causes
    assert second.prompt_ids.tolist() == [1, 2, 65, 250, *reply] and second.completion_ids.tolist() == [66, 67, 250]
    assert first.prompt_ids.tolist() == [1, 2] and first.spans == (Span(0, 2, 0),) and second.spans == (Span(0, 3, 0),)
    assert second.sampler_logp.tolist() == [-0.5] * 3
    cut = first_tokens(sample, 2 + 5)  # ends between the turns
    assert cut.spans == (Span(0, 2, 0),) and len(turns_apart(cut)) == 1 and first_tokens(sample, 2 + 8).spans[1] == Span(6, 8, 0)
    assert [one.max_tokens for one in engine.asked] == [None, 12 - 2 - 4]
    assert engine.asked[1].prompt_ids.tolist() == [1, 2, 65, 250, *reply]


@pytest.mark.parametrize(
    ("answers", "script", "ids", "counts"),
    [
        ([((65,) * 12, "length")], {}, 12, {}),
        ([((65, 250), "stop"), ((66,) * 6, "length")], {}, 12, {"calls": 1, "turn0": 1}),  # all of the room
        ([((65, 250), "stop"), ((66, 250), "stop")], {"max_turns": 2}, 8, {"calls": 2, "turn0": 1, "turn1": 1, "unanswered": 1}),
        ([((65,) * 9 + (250,), "stop")], {}, 10, {"calls": 1, "turn0": 1, "unanswered": 1}),  # a reply, and no token after it
        ([((65,) * 11 + (250,), "stop")], {}, 12, {"calls": 1, "turn0": 1, "unanswered": 1}),
        ([((65, 250), "stop")], {"later": lambda talk, answer: None, "reply_timeout": 0.05}, 2, {"late": 1}),
    ],
)
def test_a_conversation_that_runs_out_is_truncated_after_a_turn(
    answers: list[Any], script: dict[str, Any], ids: int, counts: dict[str, int]
) -> None:
    sample = one_sample(Told(*answers), **script)
    assert sample.finish_reason == "length" and len(sample.completion_ids) == ids and sample.loss_mask[-1]
    assert sample.counts == counts


def test_a_reply_that_comes_too_late_or_twice_is_left_out() -> None:
    answers: list[Any] = []
    late = one_sample(Told(((65, 250), "stop")), later=lambda talk, answer: answers.append(answer), reply_timeout=0.05)
    answers[0]()
    assert late.counts == {"late": 1} and len(late.completion_ids) == 2
    twice = one_sample(Told(((65, 250), "stop"), ((66, 250), "stop")), times=1, later=lambda talk, answer: (answer(), answer()))
    assert len(turns_of(twice.spans)) == 2 and twice.counts["calls"] == 1


def test_an_error_of_what_replies_ends_the_call() -> None:
    class Broken(Scripted):
        def reply(self, talk: Any, room: int, answer: Any) -> None:
            threading.Timer(0.01, lambda: answer(EngineError("the tools are gone"))).start()

    with pytest.raises(EngineError, match="the tools are gone"):
        rollout(Told(((65, 250), "stop")), ONE, SHORT, 1, 0, 0, byte_tokenizer(), replace(dialogue(), turns=Broken()))  # type: ignore[arg-type]


def test_a_turn_that_does_not_answer_its_request_is_a_fault_and_gets_no_reply() -> None:
    engine = Told(((65, 250), "stop"), ((66, 251), "stop"))
    with pytest.raises(SentinelError) as caught:
        one_sample(engine)
    assert caught.value.fault is Fault.DROPPED_STOP_TOKEN and len(engine.asked) == 2
    with pytest.raises(SentinelError) as caught:
        one_sample(Told(((65, 250), "stop"), version=1))
    assert caught.value.fault is Fault.STALE_ROLLOUTS


def joined(**changes: Any) -> Completion:
    """Two turns, [7, 250] and [8, 250], with two ids between them."""
    nan = float("nan")
    whole = completion((7, 250, 5, 6, 8, 250), (-1.0, -1.0, nan, nan, -1.0, -1.0), (1, 2))
    return replace(whole, **{"spans": (Span(0, 2, 0), Span(4, 6, 0)), **changes})


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"logp": np.full(6, -1.0, dtype=np.float32)}, Fault.MISSING_LOGPROBS),  # of ids that nobody sampled
        ({"spans": (Span(0, 1, 0), Span(4, 6, 0))}, Fault.MISSING_LOGPROBS),  # fewer than have log-probs
        ({"spans": (Span(0, 2, 0), Span(3, 6, 0))}, Fault.MISSING_LOGPROBS),
        ({"spans": (Span(0, 2, 0), Span(4, 5, 0))}, Fault.STALE_ROLLOUTS),  # does not reach the end
        ({"token_ids": ids_of((7, 9, 5, 6, 8, 250))}, Fault.DROPPED_STOP_TOKEN),  # of the first turn
        ({"spans": (Span(0, 2, 0), Span(4, 6, 1))}, None),  # weights changed in flight
    ],
)
def test_a_joined_row_is_checked(changes: dict[str, Any], fault: Fault | None) -> None:
    asked = [request((1, 2), 0)]
    check_answers(asked, [joined()], SHORT, 1, 0, joined=True)
    if fault is None:
        check_answers(asked, [joined(**changes)], SHORT, 1, 0, joined=True)
        return
    with pytest.raises(SentinelError) as caught:
        check_answers(asked, [joined(**changes)], SHORT, 1, 0, joined=True)
    assert caught.value.fault is fault
    with pytest.raises(SentinelError):  # one turn has no gaps
        check_answers(asked, [joined()], SHORT, 1, 0)


@pytest.mark.parametrize("spans", [((0, 1, 0), (1, 2, 3)), ((0, 1, 2), (1, 2, 1))])
def test_spans_of_weights_that_cannot_have_sampled_are_a_fault(spans: tuple[tuple[int, int, int], ...]) -> None:
    asked = [request((4,), 1)]
    answer = completion((7, 250), (-1.0, -0.1), (4,))
    with pytest.raises(SentinelError) as caught:
        check_answers(asked, [replace(answer, spans=tuple(Span(*span) for span in spans))], SHORT, 2, 0)
    assert caught.value.fault is Fault.STALE_ROLLOUTS
    check_answers(asked, [replace(answer, spans=(Span(0, 1, 0), Span(1, 2, 2)))], SHORT, 2, 0)


def test_turns_and_messages_of_rows_as_columns() -> None:
    engine = Told(((65, 250), "stop"), ((66, 67, 250), "stop"))
    talked, plain = one_sample(engine, times=1), one_sample(Told(((65, 250), "stop")), times=0)
    columns = Samples.of([plain, talked, plain], ())
    assert columns.turns.tolist() == [1, 2, 1] and columns.sampled_tokens.tolist() == [2, 5, 2]
    assert [row.loss_mask.tolist() for row in columns] == [one.loss_mask.tolist() for one in (plain, talked, plain)]
    for row, one in enumerate((plain, talked, plain)):
        assert replace(columns[row], completion=one.completion) == one  # rewards begun early are not begun again
    again = Samples.join([columns.take([0, 2]), columns.take([1])])
    assert again.messages == ("", "", talked.messages) and again.counts == ({}, {}, talked.counts)
    assert columns.take([0]).turns.tolist() == [1] and Samples.of([], ()).turns.tolist() == []
    touching = replace(talked, spans=(Span(0, 1, 0), Span(1, 2, 1), Span(6, 9, 1)))  # one turn, two versions
    assert Samples.of([touching], ()).turns.tolist() == [2] and turns_of(touching.spans) == [(0, 2), (6, 9)]
