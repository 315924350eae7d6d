"""Advantages by group id."""

import math

import pytest
import torch

from rlgen.losses.advantages import gdpo_advantages, group_advantages, normalized, rloo_advantages, without_signal, zero_variance

IDS = torch.tensor([7, 3, 7, 3])
REWARDS = torch.tensor([1.0, 2.0, 0.0, 4.0], dtype=torch.float64)


@pytest.mark.parametrize(
    "scale, expected",
    [
        # groups (1, 0) and (2, 4): std .70711 and 1.41421; of all rewards 1.70783
        ("group", [0.70701, -0.70706, -0.70701, 0.70706]),
        ("batch", [0.29275, -0.58551, -0.29275, 0.58551]),
        ("none", [0.5, -1.0, -0.5, 1.0]),
        # centred [.5, -1, -.5, 1]: std .91287
        ("batch_centered", [0.54766, -1.09533, -0.54766, 1.09533]),
    ],
)
def test_group_advantages(scale: str, expected: list[float]) -> None:
    assert group_advantages(REWARDS, IDS, scale).tolist() == pytest.approx(expected, abs=5e-6)


def test_unscorable_rows_leave_the_statistics() -> None:
    rewards, ids = torch.tensor([1.0, math.nan, 0.0]), torch.zeros(3, dtype=torch.long)
    assert group_advantages(rewards, ids, "group").tolist() == pytest.approx([0.70701, 0, -0.70701], abs=5e-6)
    assert rloo_advantages(rewards, ids).tolist() == [1.0, 0.0, -1.0]


def test_rloo_and_normalized_over_the_rollout() -> None:
    # the mean of the others is [.25, .75, .5]; the advantages have a mean of 0 and a std of .75
    advantages = rloo_advantages(torch.tensor([1.0, 0.0, 0.5]), torch.zeros(3, dtype=torch.long))
    assert advantages.tolist() == [0.75, -0.75, 0.0]
    counted = torch.ones(3, dtype=torch.bool)
    assert normalized(advantages, counted).tolist() == pytest.approx([0.99987, -0.99987, 0.0], abs=5e-6)
    # an unscorable row neither counts nor moves; two equal values are constant
    three = torch.tensor([2.0, 9.0, -2.0], dtype=torch.float64)
    assert normalized(three, torch.tensor([True, False, True])).tolist() == pytest.approx([0.70708, 0, -0.70708], abs=5e-6)
    assert normalized(torch.tensor([3.0, 3.0]), torch.ones(2, dtype=torch.bool)).tolist() == [0.0, 0.0]


def test_gdpo_normalises_each_reward_before_the_sum() -> None:
    # columns by group: (1, 0), (1, 0) and (0, 0), (10, 0): s = [.707, -.707, 1.414, -1.414], then over the batch
    columns, ids = torch.tensor([[1.0, 0.0], [0, 0], [1, 10], [0, 0]]), torch.tensor([0, 0, 1, 1])
    expected = [0.54765, -0.54765, 1.09537, -1.09537]
    assert gdpo_advantages(columns, torch.ones(2), ids).tolist() == pytest.approx(expected, abs=5e-6)
    # a reward that does not apply is neutral; a row without any is out
    columns = torch.tensor([[1.0, math.nan], [0, math.nan], [math.nan, math.nan]])
    advantages = gdpo_advantages(columns, torch.tensor([1.0, 9.0]), torch.zeros(3, dtype=torch.long))
    assert advantages.tolist() == pytest.approx([0.70700, -0.70700, 0.0], abs=5e-5) and advantages[2] == 0
    assert gdpo_advantages(torch.full((4, 2), 100.3), torch.ones(2), torch.zeros(4, dtype=torch.long)).tolist() == [0.0] * 4


def test_batch_scales_count_rows_alone_in_their_group() -> None:
    # the single row is scorable: std of (1, 0, 5) is 2.64575, of the centred (.5, -.5, 0) it is .5
    rewards, ids = torch.tensor([1.0, 0.0, 5.0]), torch.tensor([0, 0, 1])
    assert group_advantages(rewards, ids, "batch").tolist() == pytest.approx([0.18898, -0.18898, 0.0], abs=1e-5)
    assert group_advantages(rewards, ids, "batch_centered").tolist() == pytest.approx([0.9998, -0.9998, 0.0], abs=1e-5)


@pytest.mark.parametrize("scale", ["group", "batch", "batch_centered", "none"])
@pytest.mark.parametrize("rewards", [[100.3] * 6, [math.nan] * 6, [5.0] + [math.nan] * 5])
def test_no_signal_is_exactly_zero(scale: str, rewards: list[float]) -> None:
    r, ids = torch.tensor(rewards, dtype=torch.float32), torch.zeros(6, dtype=torch.long)
    assert group_advantages(r, ids, scale).tolist() == [0.0] * 6
    assert rloo_advantages(r, ids).tolist() == [0.0] * 6


def test_zero_variance_counts_groups_of_two_or_more_and_rows_alone_have_no_signal() -> None:
    rewards, ids = torch.tensor([1.0, 1.0, 1.0, 0.0, 9.0, math.nan, 2.0]), torch.tensor([4, 4, 2, 2, 8, 8, 9])
    assert zero_variance(rewards, ids).tolist() == [False, True]
    assert without_signal(rewards, ids).tolist() == [True, True, False, False, True, True, True]


def test_rows_may_stand_in_any_order() -> None:
    g = torch.Generator().manual_seed(0)
    rewards, ids = torch.randn(40, generator=g), torch.randint(0, 6, (40,), generator=g)
    order = torch.randperm(40, generator=g)
    for advantages in (lambda r, i: group_advantages(r, i, "group"), rloo_advantages):
        torch.testing.assert_close(advantages(rewards[order], ids[order]), advantages(rewards, ids)[order])
