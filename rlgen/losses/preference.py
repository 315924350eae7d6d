"""Selection of preference pairs among the completions of a prompt, and the preference losses over them."""

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlgen.losses.advantages import CONSTANT_SPREAD
from rlgen.losses.inputs import LossInputs, Mean, Stats, onto
from rlgen.losses.kl import to_reference
from rlgen.losses.masking import masked_means, select
from rlgen.metrics import Metric

Ties: TypeAlias = Literal["skip", "first"]
Pairing: TypeAlias = Literal["best_worst", "outside_in", "best_random"]
PreferenceLoss: TypeAlias = Literal["sigmoid", "ipo", "hinge"]
Lengths: TypeAlias = Literal["sum", "mean"]


def select_pairs(
    rewards: Tensor, group_ids: Tensor, sample_index: Tensor, *, pairing: Pairing, min_margin: float, ties: Ties
) -> tuple[Tensor, Tensor]:
    """Selects chosen and rejected candidates of each group, found by group id. No candidate is in two pairs.

    Args:
        rewards: [B], NaN: unscorable, never chosen nor rejected.
        sample_index: [B] index within the group; of candidates with equal rewards the one with the lower index ranks higher.
        pairing: `best_worst`: one pair. `outside_in`: also the second best and the second worst, and so on.
            `best_random`: the best and any other, drawn by the group id.
        min_margin: a pair's rewards differ by more than this.
        ties: `skip` drops pairs of equal rewards; `first` keeps them.

    Returns:
        Rows of the chosen [P] and of the rejected [P], pair by pair, by ascending group id.
    """
    pairs: list[tuple[int, int]] = []
    for group_id in group_ids.unique().tolist():
        rows = ((group_ids == group_id) & ~rewards.isnan()).nonzero()[:, 0].tolist()
        ranked = sorted(rows, key=lambda row: (-rewards[row].item(), sample_index[row].item()))
        level = {row: rewards[row].item() for row in ranked}
        for above, below in pairwise(ranked):  # rewards that differ only by rounding are equal
            level[below] = level[above] if level[above] - level[below] <= CONSTANT_SPREAD else level[below]
        ranked.sort(key=lambda row: (-level[row], sample_index[row].item()))
        for best, worst in candidates(ranked, pairing, group_id):
            margin = level[best] - level[worst]
            if margin > min_margin + CONSTANT_SPREAD or (ties == "first" and margin == 0):
                pairs.append((best, worst))
    chosen, rejected = zip(*pairs, strict=True) if pairs else ((), ())
    return torch.tensor(chosen, dtype=torch.long), torch.tensor(rejected, dtype=torch.long)


def candidates(ranked: Sequence[int], pairing: Pairing, group_id: int) -> list[tuple[int, int]]:
    if len(ranked) < 2:
        return []
    if pairing == "best_random":
        return [(ranked[0], random.Random(group_id).choice(ranked[1:]))]
    count = 1 if pairing == "best_worst" else len(ranked) // 2
    return [(ranked[place], ranked[-1 - place]) for place in range(count)]


def dpo_loss(x: LossInputs, *, beta: float, loss: PreferenceLoss, lengths: Lengths) -> tuple[Tensor, Stats]:
    """Returns the mean over all pairs of the train batch of a loss of h = (policy - ref) chosen - (policy - ref) rejected.

    `sigmoid`: -log sigmoid(beta h) (DPO, arXiv 2305.18290). `ipo`: (h - 1 / (2 beta))^2 (arXiv 2310.12036). `hinge`:
    max(0, 1 - beta h) (SLiC-HF, arXiv 2305.10425; without gradient at 0). A pair with a row of importance weight 0 has no
    loss, but stays in the mean's denominator. The stats include entropy and KL per token, as for policy losses.

    Args:
        lengths: log-probs are a `sum` over a completion's tokens, or their `mean`.

    Raises:
        ValueError: a pair id without exactly one chosen and one rejected row.
    """
    assert x.ref_logp is not None  # a preference loss always has a reference
    chosen, rejected = (onto(rows, x.policy_logp.device) for rows in match_pairs(x.pair_id, x.advantages))
    policy_B = select(x.mask, x.policy_logp).sum(dim=1)
    log_ratio_B = policy_B - select(x.mask, x.ref_logp.detach()).sum(dim=1)
    if lengths == "mean":
        log_ratio_B = log_ratio_B / x.mask.sum(dim=1).clamp(min=1)
    h_P = log_ratio_B[chosen] - log_ratio_B[rejected]
    if loss == "sigmoid":
        loss_P = -logsigmoid(beta * h_P)
    elif loss == "ipo":
        loss_P = (h_P - 1 / (2 * beta)).square()
    else:
        loss_P = torch.relu(1 - beta * h_P)
    row_kept_B = (x.weight.detach() > 0).any(dim=1)
    kept_P = row_kept_B[chosen] & row_kept_B[rejected]
    # The empty sum keeps a batch without pairs connected to the graph.
    total = select(kept_P, loss_P).sum() / max(x.totals.pairs, 1) + 0.0 * policy_B.sum()
    measured = {
        Metric.DPO_MARGIN: beta * h_P,
        Metric.DPO_ACCURACY: h_P > 0,
        Metric.DPO_CHOSEN_REWARD: beta * log_ratio_B[chosen],
        Metric.DPO_REJECTED_REWARD: beta * log_ratio_B[rejected],
        Metric.DPO_KEPT: kept_P,
    }
    count = float(len(h_P))
    stats: Stats = {name: Mean(value.detach().double().sum(), count) for name, value in measured.items()}
    k1_BT, k3_BT = to_reference(x.policy_logp.detach(), x.ref_logp, x.mask)
    of_tokens = masked_means(x.mask, {Metric.ENTROPY: x.entropy, Metric.KL_REF_K1: k1_BT, Metric.KL_REF_K3: k3_BT})
    return total, stats | of_tokens | {Metric.DPO_BETA: Mean(beta * count, count)}


def match_pairs(pair_id: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Returns rows of the chosen [P] and the rejected [P] of each pair, whatever their order in the batch."""
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
    return (
        torch.tensor([chosen[0] for chosen, _ in sides.values()], dtype=torch.long),
        torch.tensor([rejected[0] for _, rejected in sides.values()], dtype=torch.long),
    )
