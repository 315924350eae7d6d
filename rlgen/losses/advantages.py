"""Computes advantages from rewards. Groups are found by id: rows may be in any order, and groups may have different sizes.

All functions take rewards [B] (NaN: unscorable) and group ids [B] of a whole rollout, and compute in float64.
"""

from typing import Literal, TypeAlias

import torch
from torch import Tensor

Scale: TypeAlias = Literal["group", "batch", "batch_centered", "none"]

# EPSILON is added to standard deviations; a group whose rewards spread by at most CONSTANT_SPREAD is constant. We compare the
# spread and not the standard deviation, because rounding of the mean gives equal rewards a small standard deviation.
EPSILON = 1e-4
CONSTANT_SPREAD = 1e-8


def group_advantages(rewards: Tensor, group_ids: Tensor, scale: Scale) -> Tensor:
    """Returns the advantages of GRPO (arXiv 2402.03300): (r - group mean) / (s + EPSILON), over scorable rows, ddof 1.

    Args:
        scale: what s is: `group` the group's standard deviation; `batch` that of all scorable rows (arXiv 2508.08221);
            `batch_centered` that of r - group mean over all scorable rows (arXiv 2510.13786); `none`: no division
            (arXiv 2503.20783).

    Returns:
        [B] float64; exactly 0 for unscorable rows, in groups of fewer than two scorable rows, and in constant groups.
    """
    rewards_B = rewards.double()
    scorable_B = ~rewards_B.isnan()
    centred_B = torch.zeros_like(rewards_B)
    std_B = torch.ones_like(rewards_B)
    groups = scorable_groups(rewards_B, group_ids)
    for rows in groups:
        if not is_constant(rewards_B[rows]):
            centred_B[rows] = rewards_B[rows] - rewards_B[rows].mean()
            std_B[rows] = rewards_B[rows].std()
    if scale == "none" or not groups:
        return centred_B
    if scale == "group":
        return centred_B / (std_B + EPSILON)
    spread_of = rewards_B if scale == "batch" else centred_B
    return centred_B / (spread_of[scorable_B].std() + EPSILON)


def gdpo_advantages(columns: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
    """Returns the advantages of GDPO (arXiv 2601.05242), which keeps a reward of large scale from dominating the others.

    Each reward is normalised within its groups, then the weighted sum of the rewards is normalised over the batch.

    Args:
        columns: [B, K] the single rewards; NaN: does not apply, and counts as 0, which is a normalised column's mean.
        weights: [K].

    Returns:
        [B] float64; exactly 0 for rows without any reward, and where nothing varies.
    """
    parts = [group_advantages(column_B, group_ids, "group") for column_B in columns.unbind(dim=1)]
    sums_B = torch.stack(parts, dim=1) @ weights.double()
    return normalized(sums_B, ~columns.isnan().all(dim=1))


def rloo_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Returns the advantages of RLOO (arXiv 2402.14740): r minus the mean of the *other* scorable rewards of its group.

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


def normalized(values: Tensor, counted: Tensor) -> Tensor:
    """Returns (v - mean) / (std + EPSILON) over the counted rows of [B], ddof 1; exactly 0 for others, and where v is constant.

    A value of exactly 0 stays 0: it belongs to a group without signal. The input is advantages, whose mean is 0 up to rounding.
    """
    values_n = values[counted]
    normalized_B = torch.zeros_like(values)
    if len(values_n) >= 2 and not is_constant(values_n):
        scaled_n = (values_n - values_n.mean()) / (values_n.std() + EPSILON)
        normalized_B[counted] = torch.where(values_n == 0, 0.0, scaled_n)
    return normalized_B


def zero_variance(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Returns which groups give no signal: bool, one for each group of at least two scorable rows, by ascending id."""
    flags = [is_constant(rewards[rows]) for rows in scorable_groups(rewards, group_ids)]
    return torch.tensor(flags, dtype=torch.bool, device=rewards.device)


def without_signal(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Returns [B] bool, true for rows of groups with constant rewards or fewer than two scorable rows, which give no gradient."""
    silent_B = torch.ones_like(group_ids, dtype=torch.bool)
    for rows in scorable_groups(rewards, group_ids):
        silent_B[group_ids == group_ids[rows[0]]] = is_constant(rewards[rows])
    return silent_B


def scorable_groups(rewards: Tensor, group_ids: Tensor) -> list[Tensor]:
    """Returns the indices of the scorable rows of each group that has at least two of them, by ascending group id."""
    scorable_B = ~rewards.isnan()
    rows = [(scorable_B & (group_ids == group_id)).nonzero()[:, 0] for group_id in group_ids.unique()]
    return [rows_n for rows_n in rows if len(rows_n) >= 2]


def is_constant(rewards: Tensor) -> bool:
    return bool(rewards.max() - rewards.min() <= CONSTANT_SPREAD)
