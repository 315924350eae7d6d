"""Hand values of the policy losses; the derivation stands beside each number."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers.entropy import entropy_threshold
from loss_cases import case, grpo, prepared, random_window, tensor, value_and_gradient
from torch import Tensor
from torch.testing import assert_close

from rlgen.algorithms.registry import build_algorithm
from rlgen.losses.inputs import LossInputs, Stats, Totals
from rlgen.losses.kl import KL, reward_kl
from rlgen.losses.masking import entropy_kept
from rlgen.losses.policy import Aggregation, policy_loss, row_coefficient
from rlgen.losses.variants import Cispo, Clip, Sapo, Terms, Variant, Vespo
from rlgen.recipe.trainers import RLOORecipe

NAN = math.nan
LN2 = math.log(2)
close = partial(assert_close, rtol=1e-9, atol=1e-12)
CLIP = Clip(0.2, 0.2, None, "token")
PLAIN = {"variant": CLIP, "aggregation": "token_mean", "kl": None, "off_policy_max": None, "entropy_bonus": 0.0}
VESPO = Vespo(k_positive=2.0, lambda_positive=3.0, k_negative=3.0, lambda_negative=2.0)


def loss_with(variant: Variant, aggregation: Aggregation = "token_mean") -> Callable[[LossInputs], tuple[Tensor, Stats]]:
    return partial(policy_loss, **{**PLAIN, "variant": variant, "aggregation": aggregation})


def moved(ratio: list[float], advantage: float, **given: object) -> LossInputs:
    """One row with these ratios policy / old."""
    log_ratio = tensor([ratio]).log()
    old = given.pop("old_logp", torch.zeros_like(log_ratio))
    return case((old + log_ratio).requires_grad_(), old_logp=old, advantages=tensor([advantage]), **given)


@pytest.mark.parametrize(
    "advantage, loss, gradient, low, high",
    [
        # r = [1.5, .5, 1] is clamped to [1.28, .8, 1]. A = 1: min(r, clamp r) = [1.28, .5, 1], the clamp has no gradient.
        (1.0, -(1.28 + 0.5 + 1) / 3, [0, -0.5 / 3, -1 / 3], 0, 1 / 3),
        # A = -1: max(r, clamp r) = [1.5, .8, 1]; now the second token sits on the clamp.
        (-1.0, (1.5 + 0.8 + 1) / 3, [0.5, 0, 1 / 3], 1 / 3, 0),
    ],
)
def test_clip(advantage, loss, gradient, low, high):
    value, slope, stats = value_and_gradient(loss_with(Clip(0.2, 0.28, None, "token")), moved([1.5, 0.5, 1.0], advantage))
    close(value, tensor(loss))
    close(slope, tensor([gradient]))
    assert (stats["clip/low"].value, stats["clip/high"].value, stats["clip/region"].value) == (low, high, low + high)
    assert stats["policy_loss"].value == pytest.approx(loss)
    # k1 = mean(-x), k3 = mean(r - 1 - x), x = ln r
    assert stats["kl/old_k1"].value == pytest.approx(-(math.log(1.5) + math.log(0.5)) / 3)
    assert stats["kl/old_k3"].value == pytest.approx(-(math.log(1.5) + math.log(0.5)) / 3)


@pytest.mark.parametrize(
    "high, loss, slope",
    [
        # x = [.3, -.1, .1]: s = exp(.1) = 1.10517, ds/dlogp = s / 3, over three tokens of a seq_mean: -s, -s / 3 each
        (0.2, -math.exp(0.1), -math.exp(0.1) / 3),
        # clipped at 1 + 4e-4: no gradient
        (4e-4, -1.0004, 0.0),
    ],
)
@pytest.mark.parametrize("level", ["sequence", "sequence_token"])
def test_gspo(high, loss, slope, level):
    x = moved([math.exp(0.3), math.exp(-0.1), math.exp(0.1)], 1.0)
    value, gradient, _ = value_and_gradient(loss_with(Clip(3e-4, high, None, level), "seq_mean"), x)
    close(value, tensor(loss))
    close(gradient, tensor([[slope] * 3]))


def test_gspo_token_weighs_each_token_and_gspo_their_mean():
    # w = [2, 1, 0], s = e^.1: gspo gives every token s mean(w) / 3, gspo_token s w_t / 3
    x = moved([math.exp(0.3), math.exp(-0.1), math.exp(0.1)], 1.0, weight=tensor([[2.0, 1.0, 0.0]]))
    slope = -math.exp(0.1) / 3
    whole, single = (loss_with(Clip(0.2, 0.2, None, level), "seq_mean") for level in ("sequence", "sequence_token"))
    close(value_and_gradient(whole, x)[1], tensor([[slope] * 3]))
    close(value_and_gradient(single, x)[1], tensor([[2 * slope, slope, 0.0]]))


def test_delta_bounds_huge_ratios_of_negative_advantages():
    for delta, value, slope in ((None, 10.0, 10.0), (4.0, 4.0, 0.0)):
        loss, gradient, _ = value_and_gradient(loss_with(Clip(0.2, 0.28, delta, "token")), moved([10.0], -1.0))
        close(loss, tensor(value))
        close(gradient, tensor([[slope]]))


def test_cispo():
    # logp = [-1, -2], r = [8, .5] capped at 5: -(5 * -1 + .5 * -2) / 2 = 3; gradient -min(r, 5) / 2
    policy = tensor([[-1.0, -2.0]])
    x = case(policy.clone().requires_grad_(), old_logp=policy - tensor([[8.0, 0.5]]).log())
    loss, gradient, stats = value_and_gradient(loss_with(Cispo(5.0)), x)
    close(loss, tensor(3.0))
    close(gradient, tensor([[-2.5, -0.25]]))
    assert stats["cispo/clipped"].value == 0.5


@pytest.mark.parametrize(
    "advantage, loss, gradient",
    # A > 0: tau 1: -4 (sigmoid(0) + sigmoid(1)) / 2, slope -4 s(1 - s) r / 2; A < 0: tau 1.05
    [(1.0, -2.46212, [-0.5, -0.78645]), (-1.0, 2.36338, [0.5, 0.76811])],
)
def test_sapo(advantage, loss, gradient):
    value, slope, _ = value_and_gradient(loss_with(Sapo(1.0, 1.05)), moved([1.0, 2.0], advantage))
    assert value.item() == pytest.approx(loss, abs=5e-6)
    assert slope[0].tolist() == pytest.approx(gradient, abs=5e-6)


@pytest.mark.parametrize("advantage, phi", [(1.0, [1.12042, 1.0, 0.19915]), (-1.0, [0.33979, 1.0, 1.08268])])
def test_vespo_phi(advantage, phi):
    # W^k exp(lambda (1 - W)) at W = [.5, 1, 2], with (k, lambda) = (2, 3) or (3, 2)
    ratios = [moved([w], advantage) for w in (0.5, 1.0, 2.0)]
    assert [VESPO.phi(Terms.of(x)).item() for x in ratios] == pytest.approx(phi, abs=5e-6)


@pytest.mark.parametrize(
    "weight, loss",
    # logp = [-1, -2], r = [2, 1]: W = 2 w_1 w_2; -phi(W) (-1 - 2) / 2
    [(tensor([[1.0, 1.0]]), 0.29872), (tensor([[1.0, 0.5]]), 1.5), (tensor([[0.5]]), 1.5)],
)
def test_vespo_takes_weights_of_tokens_or_of_the_row(weight, loss):
    policy = tensor([[-1.0, -2.0]])
    x = case(policy.clone().requires_grad_(), old_logp=policy - tensor([[2.0, 1.0]]).log(), weight=weight)
    assert value_and_gradient(loss_with(VESPO), x)[0].item() == pytest.approx(loss, abs=5e-6)


def test_vespo_drops_a_row_with_a_masked_token():
    x = moved([1.0, 1.0], 1.0, weight=tensor([[1.0, 0.0]]), old_logp=tensor([[-1.0, -2.0]]))
    loss, gradient, _ = value_and_gradient(loss_with(VESPO), x)
    assert abs(loss.item()) < 1e-13 and gradient.abs().max() < 1e-13


@pytest.mark.parametrize(
    "aggregation, value",
    # L = [1, 3], token loss 1 in row 1 and 2 in row 2, M = 4, two prompts: prompt_mean (1 / 1 + 6 / 3) / 2
    [("seq_mean", 1.5), ("token_mean", 1.75), ("fixed", 0.875), ("seq_sum", 3.5), ("prompt_mean", 1.5)],
)
def test_aggregation(aggregation, value):
    mask = torch.tensor([[1, 0, 0], [1, 1, 1]], dtype=torch.bool)
    x = case(tensor([[0.0] * 3] * 2), mask=mask, max_tokens=4)
    assert (row_coefficient(aggregation, x)[:, 0] * tensor([1.0, 6.0])).sum().item() == pytest.approx(value, abs=1e-12)


def test_prompt_mean_of_one_prompt_is_its_token_mean():
    mask = torch.tensor([[1, 0, 0], [1, 1, 1]], dtype=torch.bool)
    totals = Totals(sequences=2, tokens=4, kept=4, prompts=1, pairs=0)
    x = case(tensor([[0.0] * 3] * 2), mask=mask, group_tokens=torch.tensor([4, 4]), totals=totals)
    assert (row_coefficient("prompt_mean", x)[:, 0] * tensor([1.0, 6.0])).sum().item() == pytest.approx(1.75, abs=1e-12)


def test_weights_scale_the_gradient():
    # w = [1.2214, .60653, 2], on policy: loss -mean(w), gradient -w / 3
    weight = tensor([[math.exp(0.2), math.exp(-0.5), 2.0]])
    loss, gradient, _ = value_and_gradient(loss_with(Clip(0.2, 0.2, None, "token")), moved([1.0] * 3, 1.0, weight=weight))
    close(loss, -weight.mean())
    close(gradient, -weight / 3)


@pytest.mark.parametrize(
    "estimator, value, gradient",
    [
        # u = [ln 2, -ln 2]: k3 = e^-u + u - 1 = [.19315, .30685], its slope 1 - e^-u = [.5, -1]
        ("k3", [LN2 - 0.5, 1 - LN2], [0.5, -1.0]),
        # times a ratio of 1 whose slope is 1: slope k3 + k3' = u
        ("k3_is", [LN2 - 0.5, 1 - LN2], [LN2, -LN2]),
        ("k2", [LN2**2 / 2, LN2**2 / 2], [LN2, -LN2]),
    ],
)
def test_kl(estimator, value, gradient):
    policy = tensor([[LN2, -LN2]]).requires_grad_()
    mask = torch.ones(1, 2, dtype=torch.bool)
    kl, measured = KL(1.0, estimator, False).loss(policy, policy.detach(), torch.zeros(1, 2), mask)
    kl.sum().backward()
    close(kl.detach(), tensor([value]))
    close(policy.grad, tensor([gradient]))
    close(measured["kl/ref_k1"], tensor([[LN2, -LN2]]))


@pytest.mark.parametrize(
    "policy, old, value, gradient",
    [
        # ref 0, u = policy: k3 r = (e^-u + u - 1) e^(policy - old) = e^-old + (u - 1) r, of slope u r; a power is at most e^20
        (-52.0, 0.0, 1.0, 0.0),  # r = e^-52: 1 - 53 e^-52
        (-52.0, -52.0, math.exp(20), -52.0),  # r = 1: e^52, capped, - 53
        (-30.0, -10.0, math.exp(10) - 31 * math.exp(-20), -30 * math.exp(-20)),
    ],
)
def test_k3_is_far_from_the_reference(policy, old, value, gradient):
    leaf, mask = tensor([[policy]]).requires_grad_(), torch.ones(1, 1, dtype=torch.bool)
    kl, _ = KL(1.0, "k3_is", False).loss(leaf, tensor([[old]]), torch.zeros(1, 1), mask)
    kl.sum().backward()
    assert kl.item() == pytest.approx(value, rel=1e-6)
    assert leaf.grad.item() == pytest.approx(gradient, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("weighted, factor", [(False, 1.0), (True, 5.0)])
def test_kl_is_added_with_beta_and_weighted_only_on_request(weighted, factor):
    settings = {**PLAIN, "kl": KL(0.1, "k3_is", weighted)}
    given = {"ref_logp": torch.zeros(1, 1), "weight": tensor([[5.0]]), "advantages": tensor([0.0])}
    loss, stats = policy_loss(case(tensor([[LN2]]).requires_grad_(), **given), **settings)
    assert loss.item() == pytest.approx(0.1 * (LN2 - 0.5) * factor, abs=1e-12)
    assert stats["policy_loss"].value == 0.0
    assert stats["kl/ref_k3"].value == pytest.approx(LN2 - 0.5)


def test_reward_kl_sums_over_the_mask_and_skips_what_was_not_reported():
    sampler = tensor([[1.0, NAN, 3.0], [-1.0, 0.5, NAN]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]], dtype=torch.bool)
    close(reward_kl(sampler, torch.ones(2, 3), mask), tensor([2.0, -2.5]))


def test_off_policy_rows_of_negative_advantage_are_dropped():
    # mean(sampler - policy) = [.7, .2, 2], delta .5: only the first goes, the third has A > 0
    policy = tensor([[-1.0, -1.0]] * 3)
    x = case(
        policy.clone().requires_grad_(),
        sampler_logp=policy + tensor([[1.0, 0.4], [0.2, NAN], [2.0, 2.0]]),
        advantages=tensor([-1.0, -1.0, 1.0]),
    )
    _, gradient, stats = value_and_gradient(partial(policy_loss, **{**PLAIN, "off_policy_max": 0.5}), x)
    close(gradient, tensor([[0.0, 0.0], [1 / 6, 1 / 6], [-1 / 6, -1 / 6]]))
    assert stats["opsm/dropped_frac"].value == pytest.approx(1 / 3)


def test_top_entropy_of_a_whole_completion_weighs_it_by_the_kept_share():
    """All of its tokens are in the ratio: the notice of such recipes says so."""
    x = moved([1.0] * 4, 1.0, kept=torch.tensor([[True, False, False, True]]))
    loss, gradient, _ = value_and_gradient(loss_with(Clip(0.2, 0.28, None, "sequence")), x)
    close(loss, tensor(-0.5))
    close(gradient, tensor([[-0.125] * 4]))


def test_top_entropy():
    # the .6 quantile of five values lies at rank 2.4 of [.1, .2, .4, .6, .9]: .4 + .4 * .2 = .48
    entropy = tensor([[0.1, 0.9, 0.4, 0.2, 0.6, NAN]])
    mask = torch.tensor([[True] * 5 + [False]])
    threshold = entropy_threshold(entropy, mask, 0.4)
    assert threshold == pytest.approx(0.48, abs=1e-12)
    kept = entropy_kept(entropy, mask, threshold)
    assert kept.tolist() == [[False, True, False, False, True, False]]
    # l = -1 under A = 1, r = 1: two of five tokens
    x = case(torch.zeros(1, 6, dtype=torch.float64, requires_grad=True), mask=mask, kept=kept)
    loss, _, stats = value_and_gradient(loss_with(Clip(0.2, 0.2, None, "token")), x)
    close(loss, tensor(-0.4))
    assert stats["entropy_mask/kept_frac"].value == pytest.approx(0.4)
    assert not entropy_kept(entropy, torch.zeros_like(mask), entropy_threshold(entropy, torch.zeros_like(mask), 0.4)).any()


def test_entropy_bonus():
    # H = [.5, 1], [2]: mean 3.5 / 3; the loss of -1 a token is -1; -1 - .1 * 1.16667; dH = -.1 / 3
    entropy = tensor([[0.5, 1.0], [2.0, NAN]]).requires_grad_()
    mask = torch.tensor([[True, True], [True, False]])
    x = case(torch.zeros(2, 2, dtype=torch.float64, requires_grad=True), mask=mask, entropy=entropy)
    loss, stats = policy_loss(x, **{**PLAIN, "entropy_bonus": 0.1})
    loss.backward()
    close(loss.detach(), tensor(-1 - 0.1 * 3.5 / 3))
    close(entropy.grad, tensor([[-0.1 / 3, -0.1 / 3], [-0.1 / 3, 0.0]]))
    assert stats["entropy"].value == pytest.approx(3.5 / 3) and stats["policy_loss"].value == -1.0


def test_rloo_of_tokens_and_of_sequences_agree_on_policy():
    # A = [1, -1], L = [1, 2]: per token -A / 2
    mask = torch.tensor([[True, False], [True, True]])
    x = case(tensor([[-1.0, NAN], [-0.5, -2.0]]).requires_grad_(), mask=mask, advantages=tensor([1.0, -1.0]))
    for ratio in ("token", "sequence"):
        _, gradient, _ = value_and_gradient(build_algorithm(RLOORecipe(kind="rloo", ratio=ratio)).loss, x)
        close(gradient, tensor([[-0.5, 0.0], [0.5, 0.5]]))


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_rloo_adds_up_the_kl_over_tokens_with_either_ratio(ratio):
    # k2 = (policy - ref)^2 / 2: .005 for each of three tokens of two rows; .1 * .015 / 2
    mask = torch.tensor([[True, False], [True, True]])
    x = case(tensor([[-1.0, NAN], [-0.5, -2.0]]).requires_grad_(), mask=mask, advantages=tensor([0.0, 0.0]))
    x = replace(x, ref_logp=x.policy_logp.detach() - 0.1)
    settings = RLOORecipe(kind="rloo", ratio=ratio, beta=0.1, kl="k2", updates_per_rollout=2)
    close(build_algorithm(settings).loss(x)[0].detach(), tensor(0.1 * 3 * 0.005 / 2))


@pytest.mark.parametrize(
    "advantage, loss, slope",
    [
        # r = exp(.1 + .2) = 1.34986 > 1.2, A = 1: clipped, once for the row
        (1.0, -1.2, 0.0),
        # A = -1: max(r, 1.2) = r, and each token of the product has the slope r
        (-1.0, math.exp(0.3), math.exp(0.3)),
    ],
)
def test_rloo_sequence_clips_the_product(advantage, loss, slope):
    x = moved([math.exp(0.1), math.exp(0.2)], advantage)
    value, gradient, _ = value_and_gradient(build_algorithm(RLOORecipe(kind="rloo", ratio="sequence")).loss, x)
    close(value, tensor(loss))
    close(gradient, tensor([[slope, slope]]))


def test_bnpo_is_dapo():
    x = random_window(0)
    results = [value_and_gradient(algorithm.loss, prepared(algorithm, x)) for algorithm in (grpo(loss="bnpo"), grpo(loss="dapo"))]
    assert torch.equal(results[0][1], results[1][1])


def test_a_row_without_tokens_counts_as_a_sequence():
    x = random_window(0)
    fewer = replace(x, totals=replace(x.totals, sequences=6))
    full, less = (value_and_gradient(grpo(loss="grpo").loss, prepared(grpo(), y))[1] for y in (x, fewer))
    close(less, full * 8 / 6)
