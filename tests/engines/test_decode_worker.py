"""What rlgen's worker of vLLM's CPU engine leaves out changes no token: kernels of norms, seeds of the noise, ranks."""

import gc

import pytest
import torch
from conftest import open_vllm
from test_decode import PLAIN, SAMPLING, pair, requests

from rlgen.engines import vllm_compat


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


@pytest.mark.parametrize("model", ["mistral", "qwen3_moe"])
def test_windows_and_experts_decode_to_the_last_bit(model: str) -> None:
    for engines in pair(model, max_num_seqs=16):
        told, same = engines.both(requests(12, seed=2))
    assert told == same and sum(len(one.token_ids) for one in same) > 500


def test_the_kernel_norms_as_the_layer_does() -> None:
    from rlgen.engines.decode_worker import norm

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
    from rlgen.engines.decode_worker import Seeds, next_seed

    seeds, mine = Seeds(), [torch.Generator().manual_seed(seed) for seed in (0, 1)]
    found = [[next_seed(seeds, generator) for generator in mine] for _ in range(150)]
    alone = [torch.Generator().manual_seed(seed) for seed in (0, 1)]
    assert found == [[torch.randint(0, 2**31, (1,), generator=one).item() for one in alone] for _ in range(150)]
    assert len(seeds) == 2
    del mine
    gc.collect()
    assert not seeds  # nothing is kept of a request that has ended
