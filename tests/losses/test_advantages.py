"""Advantages by group id."""

import math

import pytest
import torch

from rlgen.losses.advantages import group_advantages, rloo_advantages, zero_variance

IDS = torch.tensor([7, 3, 7, 3])
REWARDS = torch.tensor([1.0, 2.0, 0.0, 4.0], dtype=torch.float64)


@pytest.mark.parametrize(
    "scale, expected",
    [
        # groups (1, 0) and (2, 4): std .70711 and 1.41421; of all rewards 1.70783
        ("group", [0.70701, -0.70706, -0.70701, 0.70706]),
        ("batch", [0.29275, -0.58551, -0.29275, 0.58551]),
        ("none", [0.5, -1.0, -0.5, 1.0]),
    ],
)
def test_group_advantages(scale: str, expected: list[float]) -> None:
    assert group_advantages(REWARDS, IDS, scale).tolist() == pytest.approx(expected, abs=5e-6)


def test_unscorable_rows_leave_the_statistics() -> None:
    rewards, ids = torch.tensor([1.0, math.nan, 0.0]), torch.zeros(3, dtype=torch.long)
    assert group_advantages(rewards, ids, "group").tolist() == pytest.approx([0.70701, 0, -0.70701], abs=5e-6)
    assert rloo_advantages(rewards, ids).tolist() == [1.0, 0.0, -1.0]


def test_rloo() -> None:
    # the mean of the others: [.25, .75, .5]
    assert rloo_advantages(torch.tensor([1.0, 0.0, 0.5]), torch.zeros(3, dtype=torch.long)).tolist() == [
        0.75,
        -0.75,
        0.0,
    ]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("rewards", [[100.3] * 6, [math.nan] * 6, [5.0] + [math.nan] * 5])
def test_no_signal_is_exactly_zero(scale: str, rewards: list[float]) -> None:
    r, ids = torch.tensor(rewards, dtype=torch.float32), torch.zeros(6, dtype=torch.long)
    assert group_advantages(r, ids, scale).tolist() == [0.0] * 6
    assert rloo_advantages(r, ids).tolist() == [0.0] * 6


def test_zero_variance_counts_groups_of_two_or_more() -> None:
    rewards = torch.tensor([1.0, 1.0, 1.0, 0.0, 9.0, math.nan, 2.0])
    assert zero_variance(rewards, torch.tensor([4, 4, 2, 2, 8, 8, 9])).tolist() == [False, True]


def test_rows_may_stand_in_any_order() -> None:
    g = torch.Generator().manual_seed(0)
    rewards, ids = torch.randn(40, generator=g), torch.randint(0, 6, (40,), generator=g)
    order = torch.randperm(40, generator=g)
    for advantages in (lambda r, i: group_advantages(r, i, "group"), rloo_advantages):
        torch.testing.assert_close(advantages(rewards[order], ids[order]), advantages(rewards, ids)[order])
