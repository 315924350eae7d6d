"""Policy-gradient losses: a clipped ratio, weighted, aggregated by a coefficient for each row."""

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from rlgen.losses.inputs import LossInputs, Stats, Totals
from rlgen.losses.masking import capped_exp, masked_means, select

Aggregation: TypeAlias = Literal["seq_mean", "token_mean", "fixed", "seq_sum"]


def row_coefficient(aggregation: Aggregation, lengths: Tensor, totals: Totals, max_tokens: int) -> Tensor:
    """What each row's sum of token losses is multiplied with. Denominators are of the whole window.

    Args:
        aggregation: `seq_mean` (GRPO), 1 / (length * sequences); `token_mean` (DAPO), 1 / tokens; `fixed` (Dr. GRPO),
            1 / (sequences * max_tokens); `seq_sum` (RLOO), 1 / sequences.
        lengths: [B] tokens under the mask.

    Returns:
        [B, 1] float64
    """
    sequences, tokens = max(totals.sequences, 1), max(totals.tokens, 1)
    lengths_B1 = lengths[:, None].clamp(min=1).double()
    if aggregation == "seq_mean":
        return 1.0 / (lengths_B1 * sequences)
    divisor = {"token_mean": tokens, "fixed": sequences * max_tokens, "seq_sum": sequences}[aggregation]
    return torch.full_like(lengths_B1, 1.0 / divisor)


def policy_loss(x: LossInputs, clip_low: float, clip_high: float, aggregation: Aggregation, beta: float) -> tuple[Tensor, Stats]:
    """PPO's clipped objective (arXiv 1707.06347) with importance weights, and a KL to the reference beside it.

    sum_i c_i sum_t [ -w min(r A, clamp(r, 1 - clip_low, 1 + clip_high) A) + beta * kl ], r = exp(policy - old).

    Args:
        beta: of the KL term, which the importance weight does not touch; above 0 it needs `x.ref_logp`.

    Returns:
        The loss of these rows; the losses of all micro-batches of a window add up to the window's.
    """
    log_ratio_BT = select(x.mask, x.policy_logp) - select(x.mask, x.old_logp.detach())
    ratio_BT = capped_exp(log_ratio_BT)
    advantages_B1 = x.advantages.detach()[:, None].to(ratio_BT.dtype)
    clipped_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    gain_BT = torch.minimum(ratio_BT * advantages_B1, clipped_BT * advantages_B1)
    token_BT = -select(x.mask, x.weight.detach()) * gain_BT

    too_low = (ratio_BT < 1 - clip_low) & (advantages_B1 < 0)
    too_high = (ratio_BT > 1 + clip_high) & (advantages_B1 > 0)
    measured = {
        "clip/low": too_low,
        "clip/high": too_high,
        "clip/region": too_low | too_high,
        "kl/old_k1": -log_ratio_BT,
        "kl/old_k3": ratio_BT - 1 - log_ratio_BT,
    }
    if beta > 0:
        assert x.ref_logp is not None  # a reference is held whenever beta is above 0
        kl_BT, kl_measured = kl_term(x.policy_logp, x.old_logp, x.ref_logp, x.mask)
        token_BT = token_BT + beta * kl_BT
        measured |= kl_measured
    coefficient_B1 = row_coefficient(aggregation, x.mask.sum(dim=1), x.totals, x.max_tokens).to(token_BT.dtype)
    return (coefficient_B1 * select(x.mask, token_BT)).sum(), masked_means(x.mask, measured)


def kl_term(policy_logp: Tensor, old_logp: Tensor, ref_logp: Tensor, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """KL(policy || reference) as a loss: k3 times the differentiable ratio (arXiv 2512.02556).

    Its gradient is that of the reverse KL; the gradient of plain k3 is biased. u = policy - ref, k3 = exp(-u) + u - 1.

    Returns:
        [B, T], 0 outside the mask; and the plain k1 and k3 for the metrics.
    """
    policy_BT = select(mask, policy_logp)
    u_BT = policy_BT - select(mask, ref_logp.detach())
    k3_BT = capped_exp(-u_BT) + u_BT - 1
    ratio_BT = capped_exp(policy_BT - select(mask, old_logp.detach()))
    return select(mask, k3_BT * ratio_BT), {"kl/ref_k1": u_BT.detach(), "kl/ref_k3": k3_BT.detach()}


def reward_kl(sampler_logp: Tensor, ref_logp: Tensor, mask: Tensor) -> Tensor:
    """KL of each completion to the reference for use in a reward: the sum of k1 = sampler - ref over its tokens.

    Args:
        sampler_logp: [B, T] of the true behaviour policy; NaN counts as 0.

    Returns:
        [B] float64, detached.
    """
    scored = mask & sampler_logp.isfinite()
    k1_BT = select(scored, sampler_logp.double()) - select(scored, ref_logp.double())
    return k1_BT.detach().sum(dim=1)
