"""vLLM with rlgen's scheduler and worker gives what it gives with its own: ids, log-probs and blocks, to the last bit.

For this vLLM's own worker gets the same kernels of norms, which round differently; they are compared on their own. What rlgen's
worker leaves out changes no token: modules, seeds of the noise, ranks. Recorded kernels compute from what stands in memory when
they are called again, and nothing else is recorded.
"""

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conftest import open_vllm, plan_of, tiny_model
from helpers.before import before
from helpers.samples import request
from torch import Tensor

from rlgen.engines import vllm_compat, vllm_weights
from rlgen.engines.colocated import ColocatedEngine
from rlgen.engines.cpu_decode.recording import Recording, record
from rlgen.models.weights import checkpoint_tensors
from rlgen.types import Completion, Request, Sampling

PLAIN = {"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler", "worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker"}
SAMPLING = Sampling(max_tokens=200, temperature=1.0, stop_ids=(257, 259))  # blocks have 128 tokens


def requests(count: int, seed: int) -> list[Request]:
    """Requests of which some share a prompt, and some fill a block with it."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(256) for _ in range(draw.choice((1, 7, 127, 128, 129, 200)))] for _ in range(count // 2)]
    return [request(tuple(prompts[place // 2]), 1000 * seed + place) for place in range(count)]


@pytest.fixture(autouse=True, scope="module")
def _vllm() -> None:
    with vllm_compat.process_kept_as_is():
        vllm_compat.import_vllm()


@dataclass
class Pair:
    """Two engines of one model: one with vLLM's scheduler and worker, one with rlgen's."""

    plain: ColocatedEngine
    ours: ColocatedEngine

    def both(self, asked: list[Request]) -> tuple[list[Completion], list[Completion]]:
        return self.plain.generate(asked, SAMPLING), self.ours.generate(asked, SAMPLING)

    def schedulers(self) -> list[Any]:
        return [engine._llm.llm_engine.engine_core.engine_core.scheduler for engine in (self.plain, self.ours)]


def pair(model: str = "qwen3", **changes: Any) -> Iterator[Pair]:
    with closing(open_vllm(model, **changes, extra=PLAIN)) as plain, closing(open_vllm(model, **changes)) as ours:
        from rlgen.engines.cpu_decode.worker import choose_kernels

        choose_kernels(vllm_weights.model_in(plain._llm))
        yield Pair(plain, ours)


@pytest.fixture(scope="module")
def roomy() -> Iterator[Pair]:
    yield from pair(max_num_seqs=16)


@pytest.fixture(scope="module")
def narrow() -> Iterator[Pair]:
    """Engines whose blocks do not suffice for all the requests that run at a time: some give way, and are computed again."""
    yield from pair(max_num_seqs=16, kv_cache_gib=18 * 256 / (1 << 20))


def counted(monkeypatch: pytest.MonkeyPatch, scheduler: Any) -> tuple[list[int], list[int]]:
    """Returns the number of requests in each steady step from here on: of the scheduler, and of the runner."""
    from rlgen.engines.cpu_decode.worker import DecodeRunner

    steps: list[int] = []
    shorter: list[int] = []
    ours = type(scheduler)._next_token_of_each

    def counting(self: Any) -> Any:
        output = ours(self)
        steps.append(output.total_num_scheduled_tokens)
        return output

    monkeypatch.setattr(type(scheduler), "_next_token_of_each", counting)
    before(DecodeRunner, "_go_on", lambda _, last, output: shorter.append(output.total_num_scheduled_tokens), monkeypatch.setattr)
    return steps, shorter


def test_ids_and_log_probs_are_the_same_to_the_last_bit(roomy: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, ours = roomy.schedulers()
    assert type(plain).__module__.startswith("vllm.") and type(ours).__name__ == "DecodeScheduler"
    (steps, shorter), ended = counted(monkeypatch, ours), set()
    for seed in range(3):  # more requests than run at a time; some end while others wait
        told, same = roomy.both(requests(24, seed))
        assert told == same
        ended |= {one.finish_reason for one in told}
    assert ended == {"stop", "length"} and sum(steps) > 0.5 * sum(len(one.token_ids) for one in same)
    assert set(steps) >= {1, 2, 16} and set(shorter) >= {1, 2, 16} and sum(shorter) > 0.7 * sum(steps)
    assert not ours._held and not ours.requests


def test_the_prefix_cache_knows_the_same_blocks(roomy: Pair) -> None:
    asked = requests(16, seed=7)
    told, same = roomy.both(asked)
    # Prompts that go on where the answers ended: their blocks were filled while decoding.
    longer = [
        request((*one.prompt_ids.tolist(), *answer.token_ids.tolist()), one.seed + 500)
        for one, answer in zip(asked, told, strict=True)
    ]
    told, same = roomy.both(longer)
    assert told == same and sum(one.cached_tokens for one in told) > 16 * 128
    free = [scheduler.kv_cache_manager.block_pool.get_num_free_blocks() for scheduler in roomy.schedulers()]
    assert free[0] == free[1]


def test_requests_that_give_way_are_computed_again(narrow: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, ours = narrow.schedulers()
    (steps, shorter), gave_way = counted(monkeypatch, ours), list[tuple[Any, int]]()

    def note(scheduler: Any, one: Any, *_: Any) -> None:
        gave_way.append((scheduler, one.num_output_tokens))

    before(type(plain), "_preempt_request", note, monkeypatch.setattr)
    told, same = narrow.both(requests(16, seed=3))
    assert told == same and steps and shorter
    ended = [[tokens for scheduler, tokens in gave_way if scheduler is one] for one in (plain, ours)]
    assert ended[0] == ended[1] and max(ended[0]) > 0  # after tokens that nobody was told of yet


def test_an_aborted_request_leaves_nothing_behind(roomy: Pair) -> None:
    from vllm.sampling_params import RequestOutputKind

    engine, vllm = roomy.ours._llm.llm_engine, roomy.ours._vllm
    scheduler = roomy.schedulers()[1]
    asked = requests(6, seed=5)
    prompts, told = vllm_compat.vllm_prompts(asked, salt="aborted"), {}
    for place, (one, prompt) in enumerate(zip(asked, prompts, strict=True)):
        params = vllm_compat.sampling_params(vllm, one, SAMPLING)
        params.output_kind = RequestOutputKind.FINAL_ONLY  # as `generate` sets it
        engine.add_request(f"abort-{place}", prompt, params)
    for step in range(400):
        told |= {output.request_id: output for output in engine.step() if output.finished}
        if step == 20:
            assert set(scheduler._held) == set(scheduler.requests)
            engine.abort_request(["abort-0"])
    assert len(told) == 5 and not scheduler.requests
    whole = {f"abort-{place}": answer for place, answer in enumerate(roomy.plain.generate(asked, SAMPLING))}
    for name, output in told.items():
        answer = next(answer for place, answer in whole.items() if name.startswith(place))
        assert list(output.outputs[0].token_ids) == answer.token_ids.tolist()


def test_tokens_are_held_only_where_that_is_asked_for(roomy: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, (asked,) = roomy.schedulers()[1], requests(2, seed=4)[:1]
    most: list[int] = []
    hold = type(scheduler)._hold

    def noted(self: Any, output: Any) -> Any:
        left = hold(self, output)
        most.append(len(self._held))
        return left

    monkeypatch.setattr(type(scheduler), "_hold", noted)
    found = []
    for extra in ({vllm_compat.HELD: True}, {vllm_compat.HELD: False}, None):
        most.clear()
        params = vllm_compat.sampling_params(roomy.ours._vllm, asked, SAMPLING)
        params.extra_args = extra
        output = roomy.ours._llm.generate(vllm_compat.vllm_prompts([asked], salt="held"), [params], use_tqdm=False)[0]
        found.append((max(most), tuple(output.outputs[0].token_ids)))
    assert [held for held, _ in found] == [1, 0, 0] and len({ids for _, ids in found}) == 1


def test_what_depends_on_the_number_of_tokens_changes_in_steady_steps(roomy: Pair) -> None:
    from vllm.sampling_params import RequestOutputKind

    asked, found = requests(4, seed=9), []
    for engine in (roomy.plain, roomy.ours):
        params = [vllm_compat.sampling_params(engine._vllm, one, SAMPLING) for one in asked]
        for place, one in enumerate(params):
            one.min_tokens, one.stop_token_ids, one.output_kind = 20 + place, list(range(0, 240)), RequestOutputKind.FINAL_ONLY
            one._all_stop_token_ids = set(one.stop_token_ids)
        outputs = engine._llm.generate(vllm_compat.vllm_prompts(asked, salt="least"), params, use_tqdm=False)
        found.append([tuple(output.outputs[0].token_ids) for output in outputs])
    assert found[0] == found[1]
    # Most ids end an answer, once it is long enough.
    assert all(20 + place < len(ids) < 40 + place for place, ids in enumerate(found[0]))


@pytest.mark.slow
def test_a_version_that_it_was_not_compared_with_keeps_its_own() -> None:
    ours = {
        "scheduler_cls": "rlgen.engines.cpu_decode.scheduler.DecodeScheduler",
        "worker_cls": "rlgen.engines.cpu_decode.worker.DecodeWorker",
    }
    assert vllm_compat.arguments(plan_of("qwen3")).items() >= ours.items()
    assert not ours.keys() & vllm_compat.arguments(plan_of("qwen3", vllm="0.33.0")).keys()
    assert not ours.keys() & vllm_compat.arguments(plan_of("qwen3", on_gpu=True)).keys()


# --- the worker ---------------------------------------------------------------------------------------------------------------


def test_tokens_are_those_of_vllm_as_it_is() -> None:
    asked = requests(24, seed=11)
    with closing(open_vllm("qwen3", extra=PLAIN)) as plain, closing(open_vllm("qwen3")) as ours:
        told, same = plain.generate(asked, SAMPLING), ours.generate(asked, SAMPLING)
    gaps = []
    for one, other in zip(told, same, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist() and one.finish_reason == other.finish_reason
        gaps.append(abs(one.logp - other.logp).max())
    assert 0 < max(gaps) < 1e-5  # other kernels round differently


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The kernels of each repeated step from here on."""
    found: list[int] = []
    before(Recording, "repeat", lambda recording, *_: found.append(len(recording.calls)), monkeypatch.setattr)
    return found


# The other tests repeat the kernels of qwen3; mistral has the same layers.
@pytest.mark.parametrize("model", ["qwen3", "mistral", "gemma3_text", "qwen3_moe"])
@pytest.mark.slow
def test_repeated_kernels_decode_to_the_last_bit(model: str, repeated: list[int]) -> None:
    for engines in pair(model, max_num_seqs=16):
        told, same = engines.both(requests(12, seed=2))
    assert told == same and sum(len(one.token_ids) for one in same) > 500
    assert len(repeated) > 100 and min(repeated) > 40


@pytest.mark.slow
def test_what_is_recorded_ends_with_the_weights(repeated: list[int]) -> None:
    for engines in pair("qwen3", max_num_seqs=16):
        told = []
        for engine in (engines.plain, engines.ours):
            told.append(with_other_weights(engine, at_step=30))
        assert told[0] == told[1] and len(repeated) > 50
        unchanged = engines.plain.generate(requests(4, seed=8), SAMPLING)
        assert [one.token_ids.tolist() for one in unchanged] != [ids for ids, _ in told[0]]


def with_other_weights(engine: ColocatedEngine, at_step: int) -> list[tuple[list[int], list[float]]]:
    """Ids and log-probs of four requests, between two tokens of which all weights are replaced."""
    llm, vllm, found = engine._llm, engine._vllm, {}
    asked = requests(4, seed=8)
    for place, (one, prompt) in enumerate(zip(asked, vllm_compat.vllm_prompts(asked, salt="other"), strict=True)):
        params = vllm_compat.sampling_params(vllm, one, SAMPLING)
        llm.llm_engine.add_request(str(place), prompt, params)
    model = tiny_model("qwen3")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    step = 0
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            found[int(output.request_id)] = output.outputs[0]
        step += 1
        if step == at_step:
            held, config = vllm_weights.model_in(llm), llm.llm_engine.model_config
            reload = lambda weights: llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})  # noqa: E731
            assert not vllm_weights.load_into(held, config, reload, checkpoint_tensors(model))
    return [
        (list(one.token_ids), [next(iter(at.values())).logprob for at in one.logprobs]) for one in map(found.get, range(4)) if one
    ]


@pytest.mark.slow
def test_a_repeated_step_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch, repeated: list[int]) -> None:
    from rlgen.engines.cpu_decode import worker as decode_worker

    def wrong(step: Callable[[], tuple[Tensor, ...]], changing: Sequence[Tensor]) -> Any:
        told, recording = record(step, changing)
        assert recording is not None
        del recording.calls[-3]
        return told, recording

    monkeypatch.setattr(decode_worker, "record", wrong)
    for engines in pair("qwen3", max_num_seqs=16):
        told, same = engines.both(requests(12, seed=2))
    assert told == same and len(repeated) == 1


def test_the_kernel_norms_as_the_layer_does() -> None:
    from rlgen.engines.cpu_decode.worker import norm

    layer = open_layer(64)
    rows = torch.randn(7, 3, 96)[..., :64]  # as queries that are part of a wider tensor
    assert not rows.is_contiguous()
    torch.testing.assert_close(norm(layer, rows), layer.forward_native(rows), rtol=1e-5, atol=1e-6)
    x, residual = torch.randn(7, 64), torch.randn(7, 64)
    expected = layer.forward_native(x.clone(), residual.clone())
    for found, value in zip(norm(layer, x, residual), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-6)


def open_layer(width: int) -> torch.nn.Module:
    """A norm with weights that are not 1."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.layernorm import RMSNorm

    with set_current_vllm_config(VllmConfig()):
        layer = RMSNorm(width)
    torch.nn.init.normal_(layer.weight)
    return layer


def test_seeds_are_those_that_are_drawn_one_by_one() -> None:
    from rlgen.engines.cpu_decode.worker import Seeds, next_seed

    seeds, mine = Seeds(), [torch.Generator().manual_seed(seed) for seed in (0, 1)]
    found = [[next_seed(seeds, generator) for generator in mine] for _ in range(150)]
    alone = [torch.Generator().manual_seed(seed) for seed in (0, 1)]
    assert found == [[torch.randint(0, 2**31, (1,), generator=one).item() for one in alone] for _ in range(150)]
    assert len(seeds) == 2
    del mine
    gc.collect()
    assert not seeds  # nothing is kept of a request that has ended


# --- recorded kernels ---------------------------------------------------------------------------------------------------------

WEIGHT, BIAS = torch.randn(6, 4), torch.randn(6)


def layers(x: Tensor, other: Tensor) -> tuple[Tensor, ...]:
    """Views, copies, kernels that change what they are given, and kernels that have no variant that writes into memory."""
    rows = torch.nn.functional.linear(x.view(3, 4), WEIGHT, BIAS)
    first, second = rows.chunk(2, dim=-1)
    gated = torch.nn.functional.silu(first) * second.contiguous()
    gated.mul_(other)
    values, places = gated.softmax(-1).topk(2)
    return torch.nn.functional.layer_norm(gated, (3,)), values.float(), places, torch.cat([gated, first.cos()], dim=1)


@torch.inference_mode()
def test_repeated_kernels_compute_from_what_stands_in_memory() -> None:
    draw = torch.Generator().manual_seed(0)
    x, other = torch.randn(12, generator=draw), torch.randn(3, 3, generator=draw)
    told, recording = record(lambda: layers(x, other), [other])
    assert recording is not None and all(map(torch.equal, told, layers(x, other)))
    for _ in range(3):
        x.normal_(generator=draw)
        other = torch.randn(3, 3, generator=draw)  # in other memory
        expected = layers(x, other)
        repeated = recording.repeat([other])
        assert all(map(torch.equal, expected, repeated)) and all(one is two for one, two in zip(repeated, told, strict=True))
    assert not any(call.kernel is torch.ops.aten.view.default for call in recording.calls)


@pytest.mark.parametrize(
    "step",
    [
        lambda x: (x.exp(),),
        lambda x: (x * float(x[0]),),  # a number that the program reads
        lambda x: (x * (2.0 if x.sum() > 0 else 1.0),),
        lambda x: (x + torch.tensor([1.0]),),  # a tensor that the program makes
        lambda x: (x.fill_(1.0),),
    ],
)
@torch.inference_mode()
def test_a_step_with_another_kernel_is_not_recorded(step: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
    x = torch.arange(4.0)
    expected = step(x.clone())
    told, recording = record(lambda: step(x), [])
    assert recording is None and torch.equal(told[0], expected[0])
