"""Policy losses: hand values, and what no split, padding or NaN may change."""

import math

import pytest
import torch
from torch import Tensor

from rlgen.losses.inputs import LossInputs, Totals
from rlgen.losses.policy import kl_term, policy_loss, reward_kl, row_coefficient

AGGREGATIONS = ("seq_mean", "token_mean", "fixed", "seq_sum")


def inputs(policy_logp: Tensor, **changes: object) -> LossInputs:
    shape = policy_logp.shape
    mask = changes.get("mask", torch.ones(shape, dtype=torch.bool))
    values = {
        "policy_logp": policy_logp,
        "old_logp": policy_logp.detach(),
        "sampler_logp": policy_logp.detach(),
        "ref_logp": None,
        "mask": mask,
        "advantages": torch.ones(shape[0], dtype=torch.float64),
        "weight": torch.ones(shape, dtype=torch.float64),
        "pair_id": torch.full((shape[0],), -1),
        "totals": Totals(sequences=shape[0], tokens=int(mask.sum()), pairs=0),
        "max_tokens": 4,
    }
    return LossInputs(**{**values, **changes})


@pytest.mark.parametrize(
    "advantage, loss, gradient, low, high",
    [
        # r = [1.5, .5, 1]; min(r, clip(r)) = [1.28, .5, 1]: -(2.78)/3; the first is clipped
        (1.0, -0.926666666666, [0, -1 / 6, -1 / 3], 0.0, 1 / 3),
        # max over -A: [1.5, .8, 1]: 3.3/3; the second is clipped
        (-1.0, 1.1, [0.5, 0, 1 / 3], 1 / 3, 0.0),
    ],
)
def test_clip(advantage: float, loss: float, gradient: list[float], low: float, high: float) -> None:
    logp = torch.tensor([[math.log(1.5), math.log(0.5), 0.0]], dtype=torch.float64, requires_grad=True)
    x = inputs(logp, old_logp=torch.zeros(1, 3, dtype=torch.float64), advantages=torch.tensor([advantage]).double())
    value, stats = policy_loss(x, 0.2, 0.28, "token_mean", beta=0.0)
    value.backward()
    assert value.item() == pytest.approx(loss, abs=1e-9)
    assert logp.grad is not None and logp.grad[0].tolist() == pytest.approx(gradient, abs=1e-9)
    assert (stats["clip/low"].value, stats["clip/high"].value) == pytest.approx((low, high))


# L = [1, 3], token loss 1 in row 1 and 2 in row 2, M = 4
@pytest.mark.parametrize("aggregation, value", list(zip(AGGREGATIONS, (1.5, 1.75, 0.875, 3.5), strict=True)))
def test_aggregation(aggregation: str, value: float) -> None:
    totals = Totals(sequences=2, tokens=4, pairs=0)
    coefficient = row_coefficient(aggregation, torch.tensor([1, 3]), totals, 4)[:, 0]
    assert (coefficient * torch.tensor([1.0, 6.0])).sum().item() == pytest.approx(value, abs=1e-12)


def test_weights_scale_the_gradient() -> None:
    # w = [1.2214, .60653, 2], A = 1, on policy: loss -mean(w), gradient -w/3
    weight = torch.tensor([[math.exp(0.2), math.exp(-0.5), 2.0]], dtype=torch.float64)
    logp = torch.tensor([[-1.0, -2.0, -0.5]], dtype=torch.float64, requires_grad=True)
    value, _ = policy_loss(inputs(logp, weight=weight), 0.2, 0.2, "token_mean", beta=0.0)
    value.backward()
    assert value.item() == pytest.approx(-1.275977807, abs=1e-8)
    assert logp.grad is not None
    torch.testing.assert_close(logp.grad, -weight / 3)


def test_kl_term() -> None:
    # u = [ln 2, -ln 2]: k3 = [.19315, .30685]; on policy the gradient of k3 * ratio is u, that of k2
    u = torch.tensor([[math.log(2), -math.log(2)]], dtype=torch.float64, requires_grad=True)
    mask = torch.ones(1, 2, dtype=torch.bool)
    value, measured = kl_term(u, u.detach(), torch.zeros(1, 2, dtype=torch.float64), mask)
    value.sum().backward()
    assert value[0].tolist() == pytest.approx([0.5 + math.log(2) - 1, 2 - math.log(2) - 1], abs=1e-12)
    assert u.grad is not None and u.grad[0].tolist() == pytest.approx([math.log(2), -math.log(2)], abs=1e-12)
    assert measured["kl/ref_k1"][0].tolist() == pytest.approx([math.log(2), -math.log(2)])


def test_kl_is_added_with_beta_and_without_weight() -> None:
    logp = torch.tensor([[math.log(2)]], dtype=torch.float64, requires_grad=True)
    x = inputs(logp, ref_logp=torch.zeros(1, 1), weight=torch.full((1, 1), 5.0), advantages=torch.zeros(1))
    value, _ = policy_loss(x, 0.2, 0.2, "token_mean", beta=0.1)
    assert value.item() == pytest.approx(0.1 * (0.5 + math.log(2) - 1), abs=1e-12)


def test_reward_kl_sums_over_the_mask_and_skips_what_was_not_reported() -> None:
    sampler = torch.tensor([[1.0, math.nan, 3.0], [-1.0, 0.5, math.nan]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]], dtype=torch.bool)
    assert reward_kl(sampler, torch.ones(2, 3), mask).tolist() == pytest.approx([2.0, -2.5])


def ragged(seed: int) -> dict[str, Tensor]:
    """Seven rows of lengths 0 to 9."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([3, 9, 0, 1, 5, 9, 2])
    draw = {name: torch.randn(7, 9, generator=g, dtype=torch.float64) * 0.3 - 1 for name in ("policy", "old", "ref", "w")}
    return {**draw, "mask": torch.arange(9) < lengths[:, None], "a": torch.randn(7, generator=g, dtype=torch.float64)}


def loss_of(rows: list[int], d: dict[str, Tensor], logp: Tensor, aggregation: str) -> Tensor:
    x = inputs(
        logp[rows],
        old_logp=d["old"][rows],
        sampler_logp=d["old"][rows],
        ref_logp=d["ref"][rows],
        mask=d["mask"][rows],
        advantages=d["a"][rows],
        weight=d["w"][rows].exp(),
        totals=Totals(sequences=7, tokens=int(d["mask"].sum()), pairs=0),
        max_tokens=16,
    )
    return policy_loss(x, 0.2, 0.28, aggregation, beta=0.05)[0]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("split", [[[0, 1, 2, 3, 4, 5, 6]], [[2], [6, 0], [5, 4, 1], [3]], [[i] for i in range(7)]])
def test_the_gradient_does_not_depend_on_the_split(aggregation: str, split: list[list[int]]) -> None:
    d = ragged(0)
    whole, parts = (d["policy"].clone().requires_grad_() for _ in range(2))
    loss_of(list(range(7)), d, whole, aggregation).backward()
    for rows in split:
        loss_of(rows, d, parts, aggregation).backward()
    assert whole.grad is not None and parts.grad is not None and whole.grad.abs().max() > 1e-3
    torch.testing.assert_close(parts.grad, whole.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_garbage_in_padding_changes_nothing(garbage: float, aggregation: str) -> None:
    clean, dirty = ragged(1), ragged(1)
    for name in ("policy", "old", "ref", "w"):
        dirty[name] = torch.where(dirty["mask"], dirty[name], garbage)
    results = []
    for d in (clean, dirty):
        logp = d["policy"].clone().requires_grad_()
        value = loss_of(list(range(7)), d, logp, aggregation)
        value.backward()
        results.append((value.item(), logp.grad))
    assert results[0][0] == results[1][0]
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0, atol=0)
    assert (results[1][1][~dirty["mask"]] == 0).all()


def test_on_policy_gradient_is_minus_weight_times_advantage_times_coefficient() -> None:
    d = ragged(2)
    logp = d["policy"].clone().requires_grad_()
    x = inputs(logp, mask=d["mask"], advantages=d["a"], weight=d["w"].exp())
    policy_loss(x, 0.2, 0.2, "seq_mean", beta=0.0)[0].backward()
    coefficient = row_coefficient("seq_mean", d["mask"].sum(1), x.totals, 4)
    torch.testing.assert_close(logp.grad, torch.where(d["mask"], -d["w"].exp() * d["a"][:, None] * coefficient, 0.0))


def test_empty_mask_gives_zero_loss_and_a_backward() -> None:
    logp = torch.randn(2, 3, requires_grad=True)
    value, stats = policy_loss(inputs(logp, mask=torch.zeros(2, 3, dtype=torch.bool)), 0.2, 0.2, "token_mean", beta=0.0)
    value.backward()
    assert value.item() == 0 and logp.grad is not None and (logp.grad == 0).all()
    assert stats["clip/low"].value is None


def test_only_policy_logp_receives_gradient() -> None:
    d = {k: v.clone().requires_grad_() if v.is_floating_point() else v for k, v in ragged(3).items()}
    loss_of(list(range(7)), d, d["policy"], "token_mean").backward()
    assert d["policy"].grad is not None
    assert all(d[name].grad is None for name in ("old", "ref", "w", "a"))
