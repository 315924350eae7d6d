"""Pairs by group id, and the losses on them."""

import math

import pytest
import torch

from rlgen.losses.inputs import LossInputs, Totals
from rlgen.losses.preference import dpo_loss, match_pairs, select_pairs

NAN = math.nan


@pytest.mark.parametrize(
    "rewards, margin, ties, pair",
    [
        ([0.2, 0.9, 0.9, 0.1], 0.0, "skip", (1, 3)),
        ([0.2, NAN, 0.9, 0.1], 0.0, "skip", (2, 3)),
        ([0.5, 0.5], 0.0, "skip", None),
        ([0.5, 0.5], 0.0, "first", (0, 1)),
        ([0.5, 0.4], 0.2, "skip", None),
        ([NAN, 1.0], 0.0, "first", None),
    ],
)
def test_select_pairs(rewards: list[float], margin: float, ties: str, pair: tuple[int, int] | None) -> None:
    r = torch.tensor(rewards, dtype=torch.float64)
    chosen, rejected = select_pairs(r, torch.full((len(r),), 5), torch.arange(len(r)), margin, ties)
    assert (chosen.tolist(), rejected.tolist()) == (([], []) if pair is None else ([pair[0]], [pair[1]]))


def test_pairs_follow_ids_and_indices_not_positions() -> None:
    # interleaved and shuffled: group 9 has rewards 3, 1 (by index), group 4 has 0, 0, 2
    ids, index = torch.tensor([9, 4, 4, 9, 4]), torch.tensor([1, 2, 1, 0, 0])
    rewards = torch.tensor([1.0, 2.0, 0.0, 3.0, 0.0], dtype=torch.float64)
    chosen, rejected = select_pairs(rewards, ids, index, 0.0, "skip")
    assert (chosen.tolist(), rejected.tolist()) == ([1, 3], [2, 0])


def inputs(policy: list[float], ref: list[float], pair_id: list[int], side: list[float]) -> LossInputs:
    logp = torch.tensor(policy, dtype=torch.float64)[:, None].requires_grad_()
    return LossInputs(
        policy_logp=logp,
        old_logp=logp.detach(),
        sampler_logp=logp.detach(),
        ref_logp=torch.tensor(ref, dtype=torch.float64)[:, None],
        mask=torch.ones(len(policy), 1, dtype=torch.bool),
        advantages=torch.tensor(side),
        weight=torch.ones(len(policy), 1),
        pair_id=torch.tensor(pair_id),
        totals=Totals(sequences=len(policy), tokens=len(policy), pairs=len(set(pair_id))),
        max_tokens=1,
    )


@pytest.mark.parametrize("loss, value", [("sigmoid", 0.6587595), ("ipo", 18.49)])
def test_dpo_values(loss: str, value: float) -> None:
    # h = (-1 - -1.5) - (-1.2 - -1.0) = .7, beta .1: -log sigmoid(.07), (.7 - 5)^2
    x = inputs([-1.0, -1.5], [-1.2, -1.0], [0, 0], [1.0, -1.0])
    measured, stats = dpo_loss(x, 0.1, loss)
    measured.backward()
    assert measured.item() == pytest.approx(value, abs=1e-6)
    slope = -0.1 / (1 + math.exp(0.07)) if loss == "sigmoid" else 2 * (0.7 - 5)
    assert x.policy_logp.grad is not None
    assert x.policy_logp.grad[:, 0].tolist() == pytest.approx([slope, -slope], abs=1e-9)
    assert stats["dpo/margin"].value == pytest.approx(0.07) and stats["dpo/accuracy"].value == 1.0


def test_policy_equal_to_reference_is_log_two_and_swapping_flips_the_margin() -> None:
    assert dpo_loss(inputs([-1, -2], [-1, -2], [0, 0], [1, -1]), 0.3, "sigmoid")[0].item() == pytest.approx(math.log(2))
    one, other = (dpo_loss(inputs([-1, -2], [-3, -1], [0, 0], s), 0.3, "sigmoid")[1] for s in ([1, -1], [-1, 1]))
    assert one["dpo/margin"].value == pytest.approx(-(other["dpo/margin"].value or 0)) and one["dpo/margin"].value


def test_order_and_split_change_nothing() -> None:
    policy, ref, pair, side = [-1.0, -2, -3, -4], [-2.0, -2, -2, -2], [7, 3, 3, 7], [1.0, -1, 1, -1]
    whole = dpo_loss(inputs(policy, ref, pair, side), 0.1, "sigmoid")[0].item()
    order = [2, 0, 3, 1]
    moved = dpo_loss(inputs(*([v[i] for i in order] for v in (policy, ref, pair, side))), 0.1, "sigmoid")[0].item()  # type: ignore[arg-type]
    assert moved == pytest.approx(whole, abs=1e-15)


def test_a_pair_needs_one_row_on_each_side() -> None:
    with pytest.raises(ValueError, match="2 chosen and 0 rejected"):
        match_pairs(torch.tensor([0, 0]), torch.tensor([1.0, 1.0]))
    with pytest.raises(ValueError, match="1 chosen and 0 rejected"):
        match_pairs(torch.tensor([0, 0]), torch.tensor([1.0, 0.0]))


def test_no_pairs_give_zero_and_a_backward() -> None:
    x = inputs([-1.0], [-1.0], [-1], [0.0])
    loss, stats = dpo_loss(x, 0.1, "sigmoid")
    loss.backward()
    assert loss.item() == 0 and stats["dpo/margin"].value is None
