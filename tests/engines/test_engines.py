"""Every engine keeps the promises of `Engine`: ids in, ids out, log-probs that mean the same as the trainer's.

Tests that take the fixture `engine` go through the protocol alone and run on each of them; the others are about one engine.
"""

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import open_transformers, open_vllm, plan_of, tiny_model
from helpers import adapters
from helpers.engines import changed
from helpers.samples import answered, request
from torch import Tensor

from rlgen.engines import vllm_compat
from rlgen.engines.base import Engine, fingerprint
from rlgen.engines.colocated import ColocatedEngine
from rlgen.engines.http import Server
from rlgen.engines.plan import settings_digest
from rlgen.engines.transformers import TransformersEngine
from rlgen.engines.worker import Worker
from rlgen.errors import EngineError, Fault, SentinelError
from rlgen.models.policy import Policy
from rlgen.models.tiny import byte_tokenizer
from rlgen.models.weights import checkpoint_tensors
from rlgen.processes import Processes
from rlgen.rollout.answers import check_answers
from rlgen.rollout.sample import build_groups, rollout
from rlgen.sentinel.probe import TrainerSide
from rlgen.types import WHOLE, Completion, Distribution, Prompt, Request, Sampling, ids_of

STOPS = (257, 259)


def requests(count: int, longest: int = 30) -> list[Request]:
    """Prompts of unequal lengths, some of them equal."""
    rng = random.Random(0)
    prompts = [tuple(rng.randrange(256) for _ in range(rng.randrange(1, longest))) for _ in range(count - 2)]
    return [request(ids, 100 + place) for place, ids in enumerate([*prompts, prompts[0], prompts[0]])]


def gap(policy: Policy, asked: list[Request], answers: list[Completion], distribution: Distribution) -> float:
    return adapters.gap(policy, [answered(one, answer) for one, answer in zip(asked, answers, strict=True)], distribution)


@pytest.fixture
def own_weights_after(engine: Engine) -> Iterator[None]:
    """Other tests share the engine."""
    yield
    engine.sync(checkpoint_tensors(tiny_model("qwen3")), 0)


def logp_after(ids: Sequence[int]) -> Tensor:
    """Log-probs [V] of the next token, by the model itself."""
    with torch.no_grad():
        logp: Tensor = tiny_model("qwen3")(torch.tensor([list(ids)])).logits[0, -1].log_softmax(-1)
    return logp


def test_each_completion_is_told_of_once_and_stands_at_the_place_of_its_request(engine: Engine) -> None:
    asked, sampling = requests(24), Sampling(max_tokens=30, temperature=1.0, stop_ids=(*STOPS, *range(100, 140)))
    told: list[tuple[int, Completion]] = []
    for _ in range(2):  # an engine numbers its requests over all calls
        told.clear()
        answers = engine.generate(asked, sampling, lambda place, completion: told.append((place, completion)))
        assert dict(told) == dict(enumerate(answers)) and len(told) == len(asked)
        assert [answer.prompt_ids.tolist() for answer in answers] == [one.prompt_ids.tolist() for one in asked]
    lengths = [len(completion.token_ids) for _, completion in told]
    assert min(lengths) < max(lengths) and [place for place, _ in told] != sorted(place for place, _ in told)  # not at the end


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_log_probs_are_the_trainers_at_the_sampling_temperature(engine: Engine, temperature: float) -> None:
    asked, policy = requests(24), Policy(tiny_model("qwen3"), torch.float32, True)
    sampling = Sampling(max_tokens=40, temperature=temperature, stop_ids=STOPS)
    answers = engine.generate(asked, sampling)
    assert sampling.distribution == Distribution(temperature=temperature or 1.0)  # greedy: of the model as it is
    assert gap(policy, asked, answers, sampling.distribution) < 1e-5
    # the comparison can fail: scored at another temperature it is far off
    assert gap(policy, asked, answers, Distribution(temperature=0.5 + (temperature or 1.0))) > 0.1


@pytest.mark.parametrize(
    "rules", [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.3}, {"top_p": 0.8, "top_k": 40, "min_p": 0.1}], ids=str
)
def test_a_truncated_distribution_is_the_trainers(engine: Engine, rules: dict[str, Any]) -> None:
    asked, policy = requests(24), Policy(tiny_model("qwen3"), torch.float32, True)
    sampling = Sampling(max_tokens=40, temperature=0.7, stop_ids=STOPS, **rules)
    answers, alone = engine.generate(asked, sampling), Processes.alone()
    samples = [answered(one, answer) for one, answer in zip(asked, answers, strict=True)]
    side = TrainerSide(policy=policy, budget=4096, processes=alone, engine_dtype=None, engine_holds=None)
    sure = side.sure(samples, sampling.distribution)
    assert sure is not None and torch.cat(sure).double().mean() > 0.5  # of 300 nearly equal ids, one is often at the edge
    assert side.gap(samples, sampling.distribution).max_delta < 1e-5
    assert gap(policy, asked, answers, sampling.distribution.whole) > 0.1  # over all ids they are others


@pytest.mark.usefixtures("own_weights_after")
def test_greedy_takes_the_most_probable_id_and_of_equal_ones_the_lowest(engine: Engine) -> None:
    model = tiny_model("qwen3")
    with torch.no_grad():  # ids come in fours of the same embedding, which is the head's row too
        weight = model.get_input_embeddings().weight
        weight.copy_(weight[torch.arange(len(weight)) // 4 * 4])
    engine.sync(checkpoint_tensors(model), 1)
    asked = requests(16)
    answers = engine.generate(asked, Sampling(max_tokens=12, temperature=0.0, stop_ids=STOPS))
    for one, answer in zip(asked, answers, strict=True):
        ids = [*one.prompt_ids.tolist(), *answer.token_ids.tolist()]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, len(one.prompt_ids) - 1 : -1]
        best = logits.unflatten(-1, (-1, 4))[..., 0].argmax(-1) * 4
        assert list(answer.token_ids) == best.tolist()
    assert len({id_ for answer in answers for id_ in answer.token_ids.tolist()}) > 10
    assert answers[0].token_ids.tolist() == answers[-1].token_ids.tolist()  # one prompt, two seeds


def test_no_requests_no_answers(engine: Engine) -> None:
    """A process whose share of the prompts is empty asks too."""
    sampling = Sampling(max_tokens=4, temperature=1.0, stop_ids=STOPS)
    assert engine.generate([], sampling) == [] and engine.prefill_logp([]) == []
    assert rollout(engine, [], sampling, 4, 0, engine.weight_version, byte_tokenizer()) == []
    assert len(engine.generate(requests(3), sampling)) == 3


def test_prefilling_gives_the_log_probs_of_decoding(engine: Engine) -> None:
    """Also where a single token is the prompt, or the completion."""
    asked = [request([7], 1), *requests(10, longest=200)]
    answers = engine.generate(asked, Sampling(max_tokens=20, temperature=1.0, stop_ids=STOPS))
    rows = [(answer.prompt_ids, answer.token_ids) for answer in answers] + [(ids_of([7]), ids_of([9]))]
    prefilled = engine.prefill_logp(rows)
    assert [len(logp) for logp in prefilled] == [len(ids) for _, ids in rows]
    for answer, logp in zip(answers, prefilled[:-1], strict=True):
        assert logp.tolist() == pytest.approx(answer.logp.tolist(), abs=1e-5)
    assert prefilled[-1][0] == pytest.approx(logp_after([7])[9].item(), abs=1e-5)


def test_a_receipt_is_of_every_byte_that_was_sent(engine: Engine) -> None:
    sent = dict(checkpoint_tensors(changed(tiny_model("qwen3"))))
    receipt = engine.sync(iter(sent.items()), 3, hashed=True)
    assert receipt.received == {name: fingerprint(tensor, hashed=True) for name, tensor in sent.items()}
    assert (receipt.version, engine.weight_version) == (3, 3)
    # nothing that the checkpoint holds is left as it was; a head that is tied has no tensor of its own there
    assert not set(receipt.not_loaded) & set(sent)
    shapes = engine.sync(checkpoint_tensors(tiny_model("qwen3")), 0)  # other tests share the engine
    assert shapes.received == {name: fingerprint(tensor, hashed=False) for name, tensor in sent.items()}


def test_stop_tokens_are_kept_and_lengths_are_right(engine: Engine) -> None:
    # a third of the vocabulary stops, so that every case occurs
    stops = tuple(range(0, 260, 8))
    answers = engine.generate(requests(40), Sampling(max_tokens=6, temperature=1.0, stop_ids=stops))
    assert {c.finish_reason for c in answers} == {"stop", "length"}
    for c in answers:
        assert 1 <= len(c.token_ids) == len(c.logp) <= 6
        assert (c.token_ids[-1] in stops) == (c.finish_reason == "stop")
        assert not set(c.token_ids[:-1].tolist()) & set(stops)
        assert c.finish_reason == "stop" or len(c.token_ids) == 6


def test_a_completion_follows_from_its_request_alone(engine: Engine) -> None:
    asked = requests(16, longest=200)
    sampling = Sampling(max_tokens=30, temperature=1.0, stop_ids=STOPS)
    whole = engine.generate(asked, sampling)
    assert whole[0].token_ids.tolist() != whole[-1].token_ids.tolist()  # one prompt, two seeds
    reversed_ = engine.generate(asked[::-1], sampling)[::-1]
    alone = [engine.generate([request], sampling)[0] for request in asked[:4]]
    assert ids(reversed_) == ids(whole) and ids(alone) == ids(whole[:4])
    twice = engine.generate([asked[0], asked[0]], sampling)  # one prompt, one seed
    assert ids(twice) == ids(whole[:1]) * 2


def ids(answers: list[Completion]) -> list[list[int]]:
    return [answer.token_ids.tolist() for answer in answers]


def test_sampling_follows_the_distribution(engine: Engine) -> None:
    prompt = (10, 20, 30)
    answers = engine.generate([request(prompt, i) for i in range(2000)], Sampling(max_tokens=1, temperature=0.5, stop_ids=()))
    p = (logp_after(prompt) / 0.5).softmax(-1)
    top = p.argmax().item()
    share = sum(c.token_ids[0] == top for c in answers) / 2000
    assert abs(share - p[top].item()) < 4 * (p[top].item() / 2000) ** 0.5 and p[top] > 0.03


def test_a_nucleus_is_what_is_sampled_and_its_log_probs_are_said(engine: Engine) -> None:
    prompt, sampling = (10, 20, 30), Sampling(max_tokens=1, temperature=0.5, top_p=0.3, stop_ids=())
    answers = engine.generate([request(prompt, i) for i in range(500)], sampling)
    p, order = (logp_after(prompt).double() / 0.5).softmax(-1).sort(descending=True)
    count = int((p.cumsum(-1) < 0.3).sum()) + 1  # the fewest with 0.3 together
    kept = dict(zip(order[:count].tolist(), (p[:count] / p[:count].sum()).log().tolist(), strict=True))
    assert 1 < count < 100 and {int(one.token_ids[0]) for one in answers} <= set(kept)
    assert all(abs(float(one.logp[0]) - kept[int(one.token_ids[0])]) < 1e-4 for one in answers)
    assert len({int(one.token_ids[0]) for one in answers}) > 0.8 * count


def test_the_process_is_left_as_it_was_found() -> None:
    def state() -> list[Any]:
        threads = torch.get_num_threads(), id(torch.set_num_threads), os.sched_getaffinity(0)
        return [dict(os.environ), torch.get_rng_state().tolist(), random.getstate(), *threads]

    before = state()
    opened = open_vllm("qwen3", max_num_seqs=4)
    assert state() == before
    opened.generate(requests(4), Sampling(max_tokens=3, temperature=1.0, stop_ids=STOPS))
    opened.sync(tiny_model("qwen3").named_parameters(), 1)
    opened.close()
    assert state() == before


@pytest.mark.usefixtures("own_weights_after")
def test_changed_weights_arrive(engine: Engine) -> None:
    """The engine computes with the weights it was sent, and only after it was sent them. Of more models: `test_parity.py`."""
    model = tiny_model("qwen3")
    policy, asked = Policy(model, torch.float32, True), requests(12)
    sampling = Sampling(max_tokens=24, temperature=1.0, stop_ids=STOPS)
    assert gap(policy, asked, engine.generate(asked, sampling), WHOLE) < 1e-5
    changed(model, 0.05)
    assert gap(policy, asked, engine.generate(asked, sampling), WHOLE) > 0.1
    engine.sync(checkpoint_tensors(model), 7)
    answers = engine.generate(asked, sampling)
    assert gap(policy, asked, answers, WHOLE) < 2e-5
    assert {c.weight_version for c in answers} == {7} and engine.weight_version == 7


# The engine that the tests above share, which is opened once.
on_vllm = pytest.mark.parametrize("engine", ["colocated"], indirect=True)


@on_vllm
@pytest.mark.usefixtures("own_weights_after")
def test_a_sync_empties_the_prefix_cache(engine: Engine) -> None:
    """Blocks hold 128 tokens, so only a long prompt can hit the cache."""
    model = tiny_model("qwen3")
    asked = [request(tuple(range(250)) * 2, i) for i in range(4)]
    sampling = Sampling(max_tokens=8, temperature=1.0, stop_ids=STOPS)
    engine.generate(asked, sampling)
    assert all(answer.cached_tokens >= 128 for answer in engine.generate(asked, sampling)), "what a sync must empty"
    changed(model, 0.05)
    engine.sync(model.named_parameters(), 1)
    after = engine.generate(asked[:1], sampling)
    assert after[0].cached_tokens == 0 and gap(Policy(model, torch.float32, True), asked[:1], after, WHOLE) < 2e-5


def test_transformers_sync_refuses_what_does_not_fit() -> None:
    opened, weights = open_transformers("qwen3"), dict(tiny_model("qwen3").named_parameters())
    some = list(weights.items())
    receipt = opened.sync(some[1:], 1)
    assert receipt.not_loaded == (some[0][0],) and list(receipt.received) == [name for name, _ in some[1:]]
    with pytest.raises(EngineError, match="has no tensor nothing"):
        opened.sync([("nothing", some[0][1])], 1)
    with pytest.raises(EngineError, match="has no tensor"):
        opened.sync([(some[0][0], some[0][1][:3])], 1)


@on_vllm
def test_an_engine_that_answers_for_another_prompt_is_caught(engine: ColocatedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = engine._llm.generate
    monkeypatch.setattr(engine._llm, "generate", lambda *a, **k: generate(*a, **k)[::-1])
    sampling = Sampling(max_tokens=3, temperature=1.0, stop_ids=STOPS)
    answers = engine.generate(requests(4), sampling)
    assert [answer.prompt_ids.tolist() for answer in answers] == [one.prompt_ids.tolist() for one in requests(4)][::-1]
    with pytest.raises(SentinelError, match="completion_order"):
        check_answers(requests(4), answers, sampling, version=0)


def test_structured_regex() -> None:
    sampling = Sampling(max_tokens=8, temperature=1.0, stop_ids=STOPS, regex="[0-9]{3}")
    with closing(open_vllm("qwen3", structured_outputs=True, max_num_seqs=8)) as opened:
        texts = [byte_tokenizer().decode(c.token_ids[:3]) for c in opened.generate(requests(6), sampling)]
    assert all(len(text) == 3 and text.isdigit() for text in texts) and len(texts) == 6


def stops_at_text(kind: str) -> Engine:
    if kind == "colocated":
        return open_vllm("qwen3", stops_at_text=True, max_num_seqs=8)
    return TransformersEngine(model=tiny_model("qwen3"), fp32_head=True, max_num_seqs=8, tokenizer=byte_tokenizer())


@pytest.mark.parametrize("kind", ["colocated", "transformers"])
def test_a_text_ends_completions_and_the_token_that_completes_it_is_kept(kind: str) -> None:
    """Texts of two tokens that completions without them have: the same ones end there, to the id and the log-prob."""
    opened, asked = stops_at_text(kind), requests(16)
    free = Sampling(max_tokens=40, temperature=1.0, stop_ids=STOPS)
    whole = opened.generate(asked, free)

    def text(ids: Sequence[int]) -> str:
        return byte_tokenizer().decode(ids, skip_special_tokens=True)

    pairs = [text(one.token_ids[place : place + 2]) for one in whole for place in range(5, len(one.token_ids) - 2)]
    stop = tuple([pair for pair in pairs if pair.isascii() and len(pair) == 2][::20][:8])
    answers = opened.generate(asked, replace(free, stop=stop))
    opened.close()
    ended = 0
    for one, other in zip(whole, answers, strict=True):
        ids = one.token_ids.tolist()
        at = next((n for n in range(1, len(ids) + 1) if any(part in text(ids[:n]) for part in stop)), len(ids))
        assert other.token_ids.tolist() == ids[:at] and other.logp == pytest.approx(one.logp[:at], abs=1e-5)
        if at < len(ids):
            assert other.finish_reason == "stop"
            ended += 1
    assert ended >= 2
    prompts = [Prompt(position=place, row=0, text="", prompt_ids=one.prompt_ids, columns={}) for place, one in enumerate(asked)]
    groups = build_groups(prompts, asked, answers, replace(free, stop=stop), byte_tokenizer())
    assert sum(any(group.samples[0].completion.endswith(part) for part in stop) for group in groups) == ended
    cut = next(place for place, one in enumerate(answers) if len(one.token_ids) < len(whole[place].token_ids))
    answers[cut] = replace(answers[cut], token_ids=answers[cut].token_ids[:-1], logp=answers[cut].logp[:-1])
    with pytest.raises(SentinelError, match="neither a stop token nor a text of rollout") as caught:
        build_groups(prompts, asked, answers, replace(free, stop=stop), byte_tokenizer())
    assert caught.value.fault is Fault.DROPPED_STOP_TOKEN


@pytest.mark.fault(50)
def test_a_server_of_another_vllm(monkeypatch: pytest.MonkeyPatch, proof: Callable[[str], None]) -> None:
    """Its worker runs rlgen's methods: what it answers is what the trainer says, not a bare status 500."""
    worker = Worker()
    worker.vllm_config = None
    monkeypatch.setattr(vllm_compat, "NEWEST", (0, 1))
    monkeypatch.setattr(Server, "call", lambda *_: {"results": [worker.rlgen_facts()]})
    with pytest.raises(EngineError, match=r"http://here: vLLM .* is installed, but rlgen needs 0\.\d+ to 0\.1; install one"):
        Server("http://here", "token", 5.0).facts()
    proof("a worker that runs a vLLM newer than rlgen knows is asked what it is")


def test_an_engine_names_the_plan_that_it_was_started_by(engine: Engine) -> None:
    """The journal takes no answer of another plan: that of a server comes from the server itself."""
    plan = engine.facts().plan
    if engine.facts().engine.startswith("vllm"):
        assert plan == plan_of("qwen3").digest() != plan_of("qwen3", model_impl="transformers").digest()
    if isinstance(engine, TransformersEngine):
        assert plan == settings_digest({"attention": "sdpa", "max_num_seqs": 64})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: sleep frees memory on CUDA only")
def test_sleep_frees_memory_and_a_sync_wakes() -> None:
    opened, model = open_vllm("qwen3", sleep=True, dtype="bfloat16"), tiny_model("qwen3")
    before = torch.cuda.mem_get_info()[0]
    opened.sleep()
    assert torch.cuda.mem_get_info()[0] > before
    opened.sync(model.named_parameters(), 1)
    assert opened.generate(requests(4), Sampling(max_tokens=3, temperature=1.0, stop_ids=STOPS))[0].weight_version == 1
    opened.close()
