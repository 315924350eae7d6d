"""What holds for every loss, whatever its formula."""

import math
import random
from dataclasses import replace

import pytest
import torch
from loss_cases import (
    ALGORITHMS,
    FIELDS,
    GRPO_LOSSES,
    LOG_PROBS,
    case,
    grpo,
    prepared,
    random_window,
    take,
    tensor,
    value_and_gradient,
)
from torch.testing import assert_close

from rlgen.losses.inputs import LossInputs, Mean, Totals
from rlgen.losses.masking import capped_exp, masked_means, select

every_loss = pytest.mark.parametrize("name", ALGORITHMS)
EXACT = {"rtol": 1e-12, "atol": 1e-14}


@every_loss
@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-9), (torch.float32, 1e-5)], ids=["float64", "float32"])
def test_micro_batches_in_any_order_add_to_the_window(name, count, dtype, bound):
    loss_of = ALGORITHMS[name].loss
    for seed in range(3):
        x = prepared(ALGORITHMS[name], two_windows(seed, dtype))
        loss, gradient, stats = value_and_gradient(loss_of, x)
        assert gradient.abs().max() > 1e-4 or name.startswith(("gspo", "luspo"))  # clipped far off the policy
        summed: dict[str, Mean] = {}
        values = []
        for rows in micro_batches(x, count, seed):
            value, part_stats = loss_of(take(x, rows))
            value.backward()
            values.append(value.detach())
            for key, part in part_stats.items():
                summed[key] = summed.get(key, Mean(0.0, 0.0)) + part
        assert len(values) == count
        # summands of either sign may cancel in the value
        assert (sum(values) - loss).abs() <= bound * torch.stack([*values, loss]).abs().max()
        assert (x.policy_logp.grad - gradient).abs().max() <= bound * gradient.abs().max()
        assert summed.keys() == stats.keys()
        for key, stat in stats.items():
            assert summed[key].value == pytest.approx(stat.value, rel=bound, abs=bound), key


def two_windows(seed: int, dtype: torch.dtype) -> LossInputs:
    """Sixteen rows, in six pairs and four rows without: enough for seven micro-batches that cut no pair."""
    first, second = random_window(seed), random_window(seed + 100)
    second = replace(second, pair_id=torch.where(second.pair_id < 0, -1, second.pair_id + 10))
    fields = {field: torch.cat([getattr(first, field).detach(), getattr(second, field).detach()]) for field in FIELDS}
    numbers = {field: value.to(dtype) for field, value in fields.items() if value.is_floating_point()}
    tokens = int(fields["mask"].sum())
    totals = Totals(sequences=16, tokens=tokens, kept=tokens, prompts=6, pairs=6)
    x = replace(first, **{**fields, **numbers, "totals": totals})
    return replace(x, policy_logp=x.policy_logp.requires_grad_())


def micro_batches(x: LossInputs, count: int, seed: int) -> list[list[int]]:
    """The rows of `x` in uneven parts, shuffled; the two rows of a pair stay together."""
    units: dict[int, list[int]] = {}
    for row, pair in enumerate(x.pair_id.tolist()):
        units.setdefault(pair if pair >= 0 else -1 - row, []).append(row)
    shuffled = list(units.values())
    random.Random(seed).shuffle(shuffled)
    return [*shuffled[: count - 1], [row for unit in shuffled[count - 1 :] for row in unit]]


@every_loss
@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf, 1e4, -1e4])
def test_padding_changes_nothing(name, rubbish):
    clean = random_window(0)
    fields = {field: torch.where(clean.mask, getattr(clean, field).detach(), rubbish) for field in (*LOG_PROBS, "entropy")}
    policy_logp = torch.where(clean.mask, clean.policy_logp.detach(), rubbish).requires_grad_()
    dirty = replace(clean, policy_logp=policy_logp, **fields)
    results = [value_and_gradient(ALGORITHMS[name].loss, prepared(ALGORITHMS[name], x)) for x in (clean, dirty)]
    assert_close(results[1][0], results[0][0], rtol=0, atol=0)
    assert_close(results[1][1], results[0][1], rtol=0, atol=0)
    assert results[1][2] == results[0][2]
    assert results[0][1].isfinite().all() and (results[0][1][~clean.mask] == 0).all()


@every_loss
def test_padding_width_changes_nothing(name):
    x = random_window(1)
    wide = replace(
        x,
        policy_logp=torch.nn.functional.pad(x.policy_logp.detach(), (0, 5)).requires_grad_(),
        **{field: torch.nn.functional.pad(getattr(x, field), (0, 5)) for field in (*LOG_PROBS, "entropy", "mask", "kept")},
    )
    loss, gradient, stats = value_and_gradient(ALGORITHMS[name].loss, prepared(ALGORITHMS[name], x))
    other = value_and_gradient(ALGORITHMS[name].loss, prepared(ALGORITHMS[name], wide))
    assert_close(other[0], loss, **EXACT)
    assert_close(other[1][:, :6], gradient, **EXACT)
    assert {key: stat.value for key, stat in other[2].items()} == pytest.approx({key: s.value for key, s in stats.items()})


@every_loss
def test_rows_may_come_in_any_order(name):
    x, order = prepared(ALGORITHMS[name], random_window(1)), [5, 2, 7, 0, 6, 3, 1, 4]
    loss, gradient, _ = value_and_gradient(ALGORITHMS[name].loss, x)
    value, shuffled_gradient, _ = value_and_gradient(ALGORITHMS[name].loss, shuffled := take(x, order))
    assert_close(value, loss, **EXACT)
    # the gradient is with respect to the gathered rows
    assert shuffled.policy_logp.shape == x.policy_logp.shape
    assert_close(shuffled_gradient, gradient[torch.tensor(order)], **EXACT)


@every_loss
def test_only_policy_logp_receives_gradient(name):
    x = random_window(2)
    frozen = {field: getattr(x, field).clone().requires_grad_() for field in (*LOG_PROBS, "advantages")}
    ALGORITHMS[name].loss(prepared(ALGORITHMS[name], replace(x, **frozen)))[0].backward()
    assert {field for field, value in frozen.items() if value.grad is not None} == set()
    assert x.policy_logp.grad is not None


@every_loss
def test_empty_window_is_a_zero_with_a_graph(name):
    x = random_window(0)
    totals = Totals(sequences=0, tokens=0, kept=0, prompts=0, pairs=0)
    empty = replace(x, mask=torch.zeros_like(x.mask), pair_id=torch.full((8,), -1), totals=totals)
    loss, gradient, stats = value_and_gradient(ALGORITHMS[name].loss, prepared(ALGORITHMS[name], empty))
    assert loss == 0
    assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=0)
    assert {stat.value for stat in stats.values()} == {None}


@every_loss
def test_float32_agrees_with_float64_and_stays_float32(name):
    x = random_window(0)
    fields = {field: getattr(x, field).detach().float() for field in (*LOG_PROBS, "entropy")}
    single = replace(x, policy_logp=x.policy_logp.detach().float().requires_grad_(), **fields)
    loss, gradient, _ = value_and_gradient(ALGORITHMS[name].loss, prepared(ALGORITHMS[name], x))
    value, single_gradient, _ = value_and_gradient(ALGORITHMS[name].loss, prepared(ALGORITHMS[name], single))
    assert value.dtype == torch.float32  # float64 advantages do not widen the loss
    assert_close(value.double(), loss, rtol=1e-5, atol=1e-6)
    assert_close(single_gradient.double(), gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", GRPO_LOSSES)
def test_on_policy_all_variants_have_the_policy_gradient(name):
    # r = 1, w = 1: every variant's slope is -A c; vespo's phi(1) = 1, sapo's gate has slope 1
    algorithm = grpo(loss=name, beta=0.0)
    x = random_window(0)
    policy = x.policy_logp.detach()
    x = replace(x, old_logp=policy, sampler_logp=policy)
    _, gradient, _ = value_and_gradient(algorithm.loss, prepared(algorithm, x))
    lengths = x.mask.sum(1, keepdim=True).clamp(min=1).double()
    coefficient = {"seq_mean": 1 / (lengths * 8), "token_mean": 1 / 21, "fixed": 1 / 80, "seq_sum": 1 / 8}
    expected = -x.advantages[:, None] * coefficient[algorithm.recipe.aggregation]
    assert_close(gradient, torch.where(x.mask, expected, 0.0), **EXACT)


def test_select_before_exp_keeps_the_gradient_finite():
    z = tensor([0.0, 1000.0]).requires_grad_()
    mask = torch.tensor([True, False])
    select(mask, capped_exp(select(mask, z))).sum().backward()
    assert_close(z.grad, tensor([1.0, 0.0]))  # exp'(0) = 1; with the outer select alone it is [1, NaN]


def test_exp_is_capped_at_20():
    assert_close(capped_exp(tensor([1.0, 20.0, 1000.0])), tensor([1.0, 20.0, 20.0]).exp(), **EXACT)
    x = case(tensor([[1000.0]]).requires_grad_(), old_logp=tensor([[0.0]]), advantages=tensor([-1.0]))
    loss, gradient, _ = value_and_gradient(grpo(aggregation="seq_sum", beta=0.0).loss, x)
    assert_close(loss, tensor(20.0).exp())
    assert gradient.item() == 0


def test_means_add_as_sums_and_counts():
    assert Mean(3.0, 2.0) + Mean(1.0, 6.0) == Mean(4.0, 8.0)
    assert (Mean(3.0, 2.0).value, Mean(0.0, 0.0).value) == (1.5, None)
    mask = torch.tensor([[True, True, False], [False, False, False]])
    values = {
        "tokens": tensor([[2.0, 5.0, math.nan], [1.0, 1.0, 1.0]]),
        "flags": torch.tensor([[True, False, True], [True, True, True]]),
        "rows": tensor([[3.0], [math.nan]]),
    }
    assert masked_means(mask, values) == {"tokens": Mean(7.0, 2.0), "flags": Mean(1.0, 2.0), "rows": Mean(3.0, 1.0)}
    assert masked_means(mask, {}) == {}
