"""Preferences between completions of one prompt."""

from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlgen.losses.inputs import LossInputs, Mean, Stats
from rlgen.losses.masking import select

Ties: TypeAlias = Literal["skip", "first"]
PreferenceLoss: TypeAlias = Literal["sigmoid", "ipo"]


def select_pairs(
    rewards: Tensor, group_ids: Tensor, sample_index: Tensor, min_margin: float, ties: Ties
) -> tuple[Tensor, Tensor]:
    """The best and the worst candidate of each group, found by group id.

    Args:
        rewards: [B], NaN: unscorable, never chosen nor rejected.
        sample_index: [B] place within the group; of equal candidates the first is chosen, the last rejected.
        min_margin: a pair's rewards differ by more than this.
        ties: `skip` drops groups of equal rewards; `first` keeps them as pairs all the same.

    Returns:
        Rows of the chosen [P] and of the rejected [P], pair by pair, by ascending group id.
    """
    chosen: list[int] = []
    rejected: list[int] = []
    for group_id in group_ids.unique().tolist():
        rows = ((group_ids == group_id) & ~rewards.isnan()).nonzero()[:, 0].tolist()
        if len(rows) < 2:
            continue
        best = min(rows, key=lambda row: (-rewards[row].item(), sample_index[row].item()))
        worst = min(rows, key=lambda row: (rewards[row].item(), -sample_index[row].item()))
        margin = (rewards[best] - rewards[worst]).item()
        if margin > min_margin or (ties == "first" and margin == 0):
            chosen.append(best)
            rejected.append(worst)
    return torch.tensor(chosen, dtype=torch.long), torch.tensor(rejected, dtype=torch.long)


def dpo_loss(x: LossInputs, beta: float, loss: PreferenceLoss) -> tuple[Tensor, Stats]:
    """DPO (arXiv 2305.18290), -log sigmoid(beta h), or IPO (arXiv 2310.12036), (h - 1 / (2 beta))^2, over all pairs.

    h = (policy_chosen - policy_rejected) - (ref_chosen - ref_rejected), log-probs summed over each completion.

    Raises:
        ValueError: a pair id without exactly one chosen and one rejected row.
    """
    assert x.ref_logp is not None  # a preference loss always has a reference
    chosen, rejected = match_pairs(x.pair_id, x.advantages)
    policy_B = select(x.mask, x.policy_logp).sum(dim=1)
    log_ratio_B = policy_B - select(x.mask, x.ref_logp.detach()).sum(dim=1)
    h_P = log_ratio_B[chosen] - log_ratio_B[rejected]
    loss_P = -logsigmoid(beta * h_P) if loss == "sigmoid" else (h_P - 1 / (2 * beta)).square()
    # The empty sum keeps a batch without pairs connected to the graph.
    total = loss_P.sum() / max(x.totals.pairs, 1) + 0.0 * policy_B.sum()
    measured = {
        "dpo/margin": beta * h_P,
        "dpo/accuracy": h_P > 0,
        "dpo/chosen_reward": beta * log_ratio_B[chosen],
        "dpo/rejected_reward": beta * log_ratio_B[rejected],
    }
    count = float(len(h_P))
    return total, {name: Mean(value.detach().double().sum().item(), count) for name, value in measured.items()}


def match_pairs(pair_id: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the chosen [P] and the rejected [P] of each pair, whatever their order in the batch.

    Raises:
        ValueError: a pair id without exactly one chosen and one rejected row.
    """
    sides: dict[int, tuple[list[int], list[int]]] = {}
    for row, (pair, advantage) in enumerate(zip(pair_id.tolist(), advantages.tolist(), strict=True)):
        if pair >= 0:
            chosen, rejected = sides.setdefault(pair, ([], []))
            if advantage > 0:
                chosen.append(row)
            elif advantage < 0:
                rejected.append(row)
    for pair, (chosen, rejected) in sides.items():
        if len(chosen) != 1 or len(rejected) != 1:
            raise ValueError(f"pair {pair} has {len(chosen)} chosen and {len(rejected)} rejected rows, not one of each")
    device = pair_id.device
    return (
        torch.tensor([chosen[0] for chosen, _ in sides.values()], dtype=torch.long, device=device),
        torch.tensor([rejected[0] for _, rejected in sides.values()], dtype=torch.long, device=device),
    )
