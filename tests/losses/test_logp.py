"""Log-probs by chunks of positions equal those of the whole."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from rlgen.losses.logp import head_logp

N, H, V = 13, 8, 50


@pytest.mark.parametrize("chunk", [None, 1, 5, 13])
@pytest.mark.parametrize("softcap, scale", [(None, 1.0), (3.0, 0.5)])
def test_values_and_gradients(chunk: int | None, softcap: float | None, scale: float) -> None:
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*s, generator=g, dtype=torch.float64).requires_grad_() for s in ((N, H), (V, H)))
    bias = torch.randn(V, generator=g, dtype=torch.float64).requires_grad_()
    ids, temperatures = torch.randint(0, V, (N,), generator=g), (0.7, 1.0)
    logp = head_logp(hidden, weight, ids, temperatures, bias=bias, softcap=softcap, scale=scale, chunk=chunk)
    logits = scale * (hidden @ weight.T + bias)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    whole = torch.stack([-cross_entropy(logits / t, ids, reduction="none") for t in temperatures])
    torch.testing.assert_close(logp, whole, rtol=1e-12, atol=1e-12)
    upstream = torch.randn(2, N, generator=g, dtype=torch.float64)
    for a, b in zip(*(torch.autograd.grad(x, (hidden, weight, bias), upstream) for x in (logp, whole)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_bfloat16_hidden_states_with_a_float32_head() -> None:
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(N, H, generator=g).bfloat16(), torch.randn(V, H, generator=g)
    ids = torch.randint(0, V, (N,), generator=g)
    exact = (hidden.double() @ weight.double().T).log_softmax(-1).gather(1, ids[:, None])[:, 0]
    gaps = [(head_logp(hidden, weight, ids, (1.0,), fp32=fp32)[0] - exact).abs().max().item() for fp32 in (True, False)]
    assert gaps[0] < 1e-5 < 1e-3 < gaps[1]
