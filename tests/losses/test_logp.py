"""Log-probs by chunks of positions equal those of the whole."""

import math
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from torch.nn.functional import cross_entropy

from rlgen.losses.logp import CHUNK_LOGITS, LogitRule, head_scores, truncation
from rlgen.types import WHOLE, Distribution

N, H, V = 13, 8, 50


def kept(logits: torch.Tensor, ids: torch.Tensor, at: Distribution) -> torch.Tensor:
    """Which ids of each row a distribution keeps, found by sorting the whole row: the definition, and the sampled id.

    If `top_k` alone drops the sampled id, it takes the place of the last one.
    """
    found = torch.zeros_like(logits, dtype=torch.bool)
    for row, values in enumerate(logits.detach() / at.temperature):
        least = values.max() + math.log(at.min_p) if at.min_p else -math.inf
        left = [v for v in values.argsort(descending=True).tolist() if values[v] >= least]
        left = left[: at.top_k or None]
        shares = values[left].softmax(0).cumsum(0).tolist()
        count = sum(before < at.top_p or at.top_p == 1 for before in [0.0, *shares[:-1]])
        last_leaves = count == at.top_k and ids[row] not in left[:count]
        found[row, left[: count - last_leaves]] = True
    return found.scatter(1, ids[:, None], True)


RULES = [{}, {"top_k": 7}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 20, "top_p": 0.8, "min_p": 0.05}]


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("chunk", [None, 1, 5, 13])
@pytest.mark.parametrize("softcap, scale", [(None, 1.0), (3.0, 0.5)])
@pytest.mark.parametrize("dtype, rtol, atol", [(torch.float64, 1e-11, 1e-12), (torch.float32, 1e-5, 1e-6)])
@pytest.mark.parametrize("entropy", ["value", "gradient"])
def test_values_and_gradients(chunk, softcap, scale, dtype, rtol, atol, entropy, rules) -> None:
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*s, generator=g, dtype=dtype).requires_grad_() for s in ((N, H), (V, H)))
    bias = torch.randn(V, generator=g, dtype=dtype).requires_grad_()
    ids, at = torch.randint(0, V, (N,), generator=g), (WHOLE, Distribution(temperature=0.7, **rules))
    scores = head_scores(hidden, weight, ids, at, entropy=entropy, bias=bias, rule=LogitRule(softcap, scale), chunk=chunk)
    logits = scale * (hidden @ weight.T + bias)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    each = [(logits / one.temperature).masked_fill(~kept(logits, ids, one), -1e30) for one in at]
    whole = torch.stack([-cross_entropy(one, ids, reduction="none") for one in each])
    whole_entropy = torch.distributions.Categorical(logits=each[-1]).entropy()  # of the last one
    torch.testing.assert_close(scores.logp, whole, rtol=rtol, atol=atol)
    torch.testing.assert_close(scores.entropy, whole_entropy, rtol=rtol, atol=atol)
    assert scores.entropy.requires_grad == (entropy == "gradient") and (scores.sure is None) == (not rules)
    upstream, of_entropy = torch.randn(2, N, generator=g, dtype=dtype), torch.randn(N, generator=g, dtype=dtype)
    objectives = []
    for logp, entropies in (scores[:2], (whole, whole_entropy)):
        part = (entropies * of_entropy).sum() if entropy == "gradient" else 0.0
        objectives.append((logp * upstream).sum() + part)
    gradients = [torch.autograd.grad(objective, (hidden, weight, bias)) for objective in objectives]
    for chunked, full in zip(*gradients, strict=True):
        torch.testing.assert_close(chunked, full, rtol=rtol, atol=10 * atol)


def test_a_nucleus_of_many_ids_is_found() -> None:
    """Of 5,000 nearly equal ids, of which `NUCLEUS` are sorted at first; and of a row that one id rules."""
    g = torch.Generator().manual_seed(0)
    logits = torch.stack(
        [0.01 * torch.randn(5000, generator=g), torch.randn(5000, generator=g).index_fill(0, torch.tensor(7), 30)]
    )
    found = truncation(logits.double(), Distribution(top_p=0.9)).lowest
    counts = (logits.double() >= found[:, None]).sum(1).tolist()
    assert 4490 < counts[0] < 4510 and counts[1] == 1
    assert torch.equal(logits.double() >= found[:, None], kept(logits.double(), logits.argmax(1), Distribution(top_p=0.9)))


def test_tokens_at_the_edge_of_what_is_kept_are_unsure() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    at = {top_p: truncation(logits, Distribution(top_p=top_p), near=1e-3).sure.item() for top_p in (0.5, 0.5005, 0.51, 0.79, 0.8)}
    assert at == {0.5: False, 0.5005: False, 0.51: True, 0.79: True, 0.8: False}
    at = {min_p: truncation(logits, Distribution(min_p=min_p), near=1e-3).sure.item() for min_p in (0.4, 0.4003, 0.41, 0.6)}
    assert at == {0.4: False, 0.4003: False, 0.41: True, 0.6: False}


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("others", [{}, {"top_p": 0.999, "min_p": 0.01}], ids=str)
def test_a_sampled_id_that_rounding_puts_behind_the_k_th_takes_its_place(top_k: int, others: dict[str, float]) -> None:
    """The engine kept the k-th id and sampled it. In the trainer the next one is as probable, or more by rounding."""
    engine = torch.full((1, 8), -5.0)
    engine[0, :4] = torch.tensor([1.0, 0.9, 0.8, 0.7])
    engine[0, top_k] = engine[0, top_k - 1] - 1e-5
    trainer = engine.clone()
    trainer[0, [top_k - 1, top_k]] = engine[0, [top_k, top_k - 1]]
    at, sampled = (Distribution(top_k=top_k, **others),), torch.tensor([top_k - 1])
    of_engine, of_trainer = (head_scores(logits, torch.eye(8), sampled, at) for logits in (engine, trainer))
    torch.testing.assert_close(of_trainer.logp, of_engine.logp, rtol=0, atol=2e-5)
    assert of_engine.sure.item() and of_trainer.sure.item()


def test_no_entropy_unless_asked_for() -> None:
    hidden, weight, ids = torch.randn(N, H), torch.randn(V, H), torch.zeros(N, dtype=torch.long)
    assert all(head_scores(hidden, weight, ids, (WHOLE,), chunk=chunk).entropy is None for chunk in (None, 5))
    assert CHUNK_LOGITS // V > N  # above, `None` is one chunk


@pytest.mark.parametrize("chunk", [None, 5])
def test_a_bfloat16_engine_holds_rounded_weights_and_so_multiplies_the_trainer(chunk) -> None:
    """vLLM's product: factors of bfloat16, added up in float32. Unrounded, they would differ by 5e-3 nats on average."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 1024, generator=g).bfloat16().requires_grad_()
    weight, bias = (0.1 * torch.randn(*size, generator=g) for size in ((4096, 1024), (4096,)))
    weight.requires_grad_(), bias.requires_grad_()
    ids = torch.randint(0, 4096, (64,), generator=g)
    scores = head_scores(hidden, weight, ids, (WHOLE,), entropy="gradient", bias=bias, chunk=chunk)
    factors = [given.detach().bfloat16().double().requires_grad_() for given in (hidden, weight, bias)]
    exact, unrounded = (
        torch.distributions.Categorical(logits=states @ matrix.T + offset)
        for states, matrix, offset in (factors, [given.detach().double() for given in (hidden, weight, bias)])
    )
    gaps = [(scores.logp[0] - head.log_prob(ids)).abs().mean() for head in (exact, unrounded)]
    assert gaps[0] < 5e-6 < 2e-3 < gaps[1]
    upstream = torch.randn(2, 64, generator=g)
    gradients = [
        torch.autograd.grad((upstream * torch.stack([logp, entropy])).sum(), given)
        for logp, entropy, given in (
            (scores.logp[0], scores.entropy, (hidden, weight, bias)),
            (exact.log_prob(ids), exact.entropy(), factors),
        )
    ]
    for ours, true in zip(*gradients, strict=True):
        assert (ours - true).norm() < 2**-8 * true.norm()  # the slope of the logits is rounded once
    assert [gradient.dtype for gradient in gradients[0]] == [torch.bfloat16, torch.float32, torch.float32]


def test_a_head_in_bfloat16_rounds_its_logits() -> None:
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(N, H, generator=g).bfloat16(), torch.randn(V, H, generator=g)
    ids = torch.randint(0, V, (N,), generator=g)
    rounded = (hidden @ weight.bfloat16().T).float().log_softmax(-1).gather(1, ids[:, None])[:, 0]
    gaps = [
        (head_scores(hidden, weight, ids, (WHOLE,), rule=LogitRule(fp32=fp32)).logp[0] - rounded).abs().max().item()
        for fp32 in (False, True)
    ]
    assert gaps[0] < 1e-5 < 1e-3 < gaps[1]


def test_log_probs_near_zero_keep_their_digits() -> None:
    # Logits of 100 and 90: log p is -log(1 + e^-10), of which 100 - logsumexp keeps nothing.
    scores = head_scores(torch.tensor([[10.0]]), torch.tensor([[10.0], [9.0]]), torch.tensor([0]), (WHOLE,))
    torch.testing.assert_close(scores.logp.double(), -torch.tensor([[-10.0]]).double().exp().log1p(), rtol=2e-3, atol=0)


def test_only_what_needs_a_gradient_gets_one() -> None:
    hidden, weight = torch.randn(N, H), torch.randn(V, H)
    for given in (hidden, weight):
        given.requires_grad_()
        head_scores(hidden, weight, torch.zeros(N, dtype=torch.long), (WHOLE,), chunk=5).logp.sum().backward()
        assert given.grad.abs().max() > 0
        given.requires_grad_(False)
        given.grad = None
    assert hidden.grad is None and weight.grad is None


def test_no_positions_give_a_gradient_of_zero() -> None:
    weight = torch.randn(V, H, requires_grad=True)
    scores = head_scores(
        torch.empty(0, H), weight, torch.empty(0, dtype=torch.long), (WHOLE, Distribution(temperature=0.5)), entropy="gradient"
    )
    assert scores.logp.shape == (2, 0)
    (scores.logp.sum() + scores.entropy.sum()).backward()
    assert (weight.grad == 0).all()


@pytest.mark.slow
def test_memory_is_at_most_an_eighth_of_the_full_computation() -> None:
    """`make head-memory` on a smaller vocabulary, by chunks of the same share of the tokens."""
    sizes = ["--tokens=2048", "--vocabulary=32768", "--hidden=64", "--chunk=110", "--repeats=1"]
    command = [sys.executable, "scripts/head_memory.py", *sizes]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # small steps: threads would mostly wait for each other
    measured = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert measured.returncode == 0, measured.stdout + measured.stderr
    rows = [line.split() for line in measured.stdout.splitlines()[2:]]
    assert [row[0] for row in rows] == ["none", "value", "gradient"]
    tensor_mib = 2048 * 32_768 * 4 / 2**20
    assert all(float(row[1]) > 2.9 * tensor_mib for row in rows)  # the full one holds logits, log-probs and a gradient
