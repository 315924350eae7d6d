"""Rewards to advantages. Groups are found by id: rows may come in any order and groups may be uneven.

All functions take rewards [B] (NaN: unscorable) and group ids [B] of a whole rollout, and compute in float64.
"""

from typing import Literal, TypeAlias

import torch
from torch import Tensor

Scale: TypeAlias = Literal["group", "batch", "none"]

# Added to standard deviations; and the spread of rewards up to which a group counts as constant. The spread decides, not
# the standard deviation: rounding of the mean gives equal rewards a small one.
EPSILON = 1e-4
CONSTANT_SPREAD = 1e-8


def group_advantages(rewards: Tensor, group_ids: Tensor, scale: Scale) -> Tensor:
    """GRPO (arXiv 2402.03300): (r - group mean) / (s + EPSILON), over scorable rows, ddof 1.

    Args:
        scale: what s is: `group` the group's standard deviation, `batch` that of all scorable rows (arXiv 2508.08221);
            `none`: no division (arXiv 2503.20783).

    Returns:
        [B] float64; exactly 0 for unscorable rows, in groups of fewer than two scorable rows, and in constant groups.
    """
    rewards_B = rewards.double()
    advantages_B = torch.zeros_like(rewards_B)
    groups = scorable_groups(rewards_B, group_ids)
    batch_std = rewards_B[~rewards_B.isnan()].std() if scale == "batch" and groups else None
    for rows in groups:
        rewards_n = rewards_B[rows]
        if is_constant(rewards_n):
            continue
        centred_n = rewards_n - rewards_n.mean()
        if scale == "none":
            advantages_B[rows] = centred_n
        else:
            std = rewards_n.std() if batch_std is None else batch_std
            advantages_B[rows] = centred_n / (std + EPSILON)
    return advantages_B


def rloo_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """RLOO (arXiv 2402.14740): r minus the mean of the *other* scorable rewards of its group.

    Returns:
        [B] float64; exactly 0 where `group_advantages` is.
    """
    rewards_B = rewards.double()
    advantages_B = torch.zeros_like(rewards_B)
    for rows in scorable_groups(rewards_B, group_ids):
        rewards_n = rewards_B[rows]
        if not is_constant(rewards_n):
            advantages_B[rows] = rewards_n - (rewards_n.sum() - rewards_n) / (len(rewards_n) - 1)
    return advantages_B


def zero_variance(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Which groups give no signal: bool, one for each group of at least two scorable rows, by ascending id."""
    flags = [is_constant(rewards[rows]) for rows in scorable_groups(rewards, group_ids)]
    return torch.tensor(flags, dtype=torch.bool, device=rewards.device)


def scorable_groups(rewards: Tensor, group_ids: Tensor) -> list[Tensor]:
    """The scorable rows of each group that has at least two of them, by ascending id."""
    scorable_B = ~rewards.isnan()
    rows = [(scorable_B & (group_ids == group_id)).nonzero()[:, 0] for group_id in group_ids.unique()]
    return [rows_n for rows_n in rows if len(rows_n) >= 2]


def is_constant(rewards: Tensor) -> bool:
    """Whether rewards [n] are equal up to CONSTANT_SPREAD."""
    return bool(rewards.max() - rewards.min() <= CONSTANT_SPREAD)
