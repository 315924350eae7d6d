"""What rlgen's worker of vLLM's CPU engine leaves out changes no token: modules, kernels of norms, seeds of the noise, ranks.

Recorded kernels compute from what stands in memory when they are called again, and nothing else is recorded.
"""

import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from conftest import CPU, open_vllm
from test_decode import PLAIN, SAMPLING, pair, requests
from torch import Tensor

from rlgen.engines import vllm_compat, vllm_weights
from rlgen.engines.colocated import ColocatedEngine
from rlgen.engines.cpu_decode.recording import Recording, record
from rlgen.models.load import load_model, locate
from rlgen.models.weights import checkpoint_tensors


@pytest.fixture(autouse=True)
def _vllm() -> None:
    with vllm_compat.process_kept_as_is():
        vllm_compat.import_vllm()


def test_tokens_are_those_of_vllm_as_it_is() -> None:
    plain, ours = open_vllm("qwen3", extra=PLAIN), open_vllm("qwen3")
    asked = requests(24, seed=11)
    told, same = plain.generate(asked, SAMPLING), ours.generate(asked, SAMPLING)
    plain.close()
    ours.close()
    gaps = []
    for one, other in zip(told, same, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist() and one.finish_reason == other.finish_reason
        gaps.append(abs(one.logp - other.logp).max())
    assert 0 < max(gaps) < 1e-5  # other kernels round differently


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The kernels of each repeated step from here on."""
    found: list[int] = []
    repeat = Recording.repeat

    def counting(recording: Recording, changing: Sequence[Tensor]) -> tuple[Tensor, ...]:
        found.append(len(recording.calls))
        return repeat(recording, changing)

    monkeypatch.setattr(Recording, "repeat", counting)
    return found


# The tests below and `test_decode.py` repeat the kernels of qwen3; mistral has the same layers.
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


def reload(llm: Any, weights: Any) -> None:
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})


def with_other_weights(engine: ColocatedEngine, at_step: int) -> list[tuple[list[int], list[float]]]:
    """Ids and log-probs of four requests, between two tokens of which all weights are replaced."""
    llm, vllm, found = engine._llm, engine._vllm, {}
    asked = requests(4, seed=8)
    for place, (one, prompt) in enumerate(zip(asked, vllm_compat.vllm_prompts(asked, salt="other"), strict=True)):
        params = vllm_compat.sampling_params(vllm, one, SAMPLING)
        llm.llm_engine.add_request(str(place), prompt, params)
    model = load_model(locate("tiny:qwen3"), None, torch.float32, "sdpa", CPU)
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
            assert not vllm_weights.load_into(held, config, partial(reload, llm), checkpoint_tensors(model))
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
