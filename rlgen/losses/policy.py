"""Policy-gradient losses: the token losses of a variant, weighted, and aggregated with one coefficient per row."""

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from rlgen.losses.correction import log_ratio
from rlgen.losses.inputs import LossInputs, Mean, Stats, Totals
from rlgen.losses.kl import KL
from rlgen.losses.masking import capped_exp, masked_means, select
from rlgen.losses.variants import Terms, Variant
from rlgen.metrics import Metric

Aggregation: TypeAlias = Literal["seq_mean", "token_mean", "fixed", "seq_sum", "prompt_mean"]


def policy_loss(
    x: LossInputs,
    *,
    variant: Variant,
    aggregation: Aggregation,
    kl: KL | None,  # None: no reference in the loss
    kl_aggregation: Aggregation | None = None,  # None: `aggregation`
    off_policy_max: float | None,  # nats; drop completions of negative advantage beyond it, see `on_policy`; None: keep all
    entropy_bonus: float,  # weight of the mean entropy; 0: none
) -> tuple[Tensor, Stats]:
    """Returns sum_i sum_t [ c_i w keep l + k_i beta kl ] - bonus, with l of the variant, c and k of the aggregations.

    The KL is not affected by `keep`, nor, unless `KL.weighted`, by the weights w. The bonus is `entropy_bonus` times the mean
    entropy of the kept tokens.

    Returns:
        The loss of these rows, and stats; the losses of all micro-batches of a train batch add up to the train batch's.
    """
    terms = Terms.of(x)
    token, measured = variant.loss(terms)
    if not variant.weighs:
        token = token * terms.weight
    if off_policy_max is not None:
        kept_B1 = on_policy(x, terms.advantages, off_policy_max)
        token = select(kept_B1, token)
        measured[Metric.OPSM_DROPPED] = ~kept_B1
    token_BT = select(x.kept, token)
    measured |= {
        Metric.KL_OLD_K1: -terms.log_ratio,
        Metric.KL_OLD_K3: capped_exp(terms.log_ratio) - 1 - terms.log_ratio,
        Metric.ENTROPY: x.entropy,
        Metric.ENTROPY_KEPT: x.kept,
    }
    coefficient_B1 = row_coefficient(aggregation, x).to(token_BT.dtype)
    loss = (coefficient_B1 * token_BT).sum()
    policy_part = Mean(loss.detach().double(), x.mask.sum().double() / max(x.totals.tokens, 1))
    if kl is not None:
        assert x.ref_logp is not None  # a reference is held whenever the KL is in the loss
        kl_BT, kl_measured = kl.loss(x.policy_logp, x.old_logp, x.ref_logp, x.mask)
        if kl.weighted:
            kl_BT = kl_BT * terms.weight
        loss = loss + kl.beta * (row_coefficient(kl_aggregation or aggregation, x).to(kl_BT.dtype) * kl_BT).sum()
        measured |= kl_measured
    if entropy_bonus:
        loss = loss - entropy_bonus * select(x.kept, x.entropy).sum() / max(x.totals.kept, 1)
    return loss, masked_means(x.mask, measured) | {Metric.POLICY_LOSS: policy_part}


def row_coefficient(aggregation: Aggregation, x: LossInputs) -> Tensor:
    """Returns the factor of each row's sum of token losses. Denominators are of the whole train batch.

    `seq_mean` (GRPO): 1 / (length * sequences); `token_mean` (DAPO): 1 / tokens; `fixed` (Dr. GRPO):
    1 / (sequences * max_tokens); `seq_sum` (RLOO): 1 / sequences; `prompt_mean` (ScaleRL, arXiv 2510.13786):
    1 / (prompts * tokens of the row's group).

    Returns:
        [B, 1] float64
    """
    totals: Totals = x.totals
    sequences, tokens, prompts = max(totals.sequences, 1), max(totals.tokens, 1), max(totals.prompts, 1)
    lengths_B1 = x.mask.sum(dim=1, keepdim=True).clamp(min=1).double()
    if aggregation == "seq_mean":
        return 1.0 / (lengths_B1 * sequences)
    if aggregation == "prompt_mean":
        return 1.0 / (x.group_tokens[:, None].clamp(min=1).double() * prompts)
    divisor = {"token_mean": tokens, "fixed": sequences * x.max_tokens, "seq_sum": sequences}[aggregation]
    return torch.full_like(lengths_B1, 1.0 / divisor)


def on_policy(x: LossInputs, advantages: Tensor, most: float) -> Tensor:
    """Returns whether each row [B, 1] is kept by off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556).

    A row of negative advantage ([B, 1]) is dropped if the mean of sampler - policy over its tokens exceeds `most` nats.
    """
    lengths_B1 = x.mask.sum(dim=1, keepdim=True).clamp(min=1)
    gap_B1 = -log_ratio(x.policy_logp, x.sampler_logp, x.mask).sum(dim=1, keepdim=True) / lengths_B1
    return (advantages >= 0) | (gap_B1 <= most)
