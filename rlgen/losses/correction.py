"""The importance weight between what the engine sampled from and what the trainer computes, and how far they differ.

d = old_logp - sampler_logp, ratio = exp(d). Nothing here is differentiated.
"""

import math

import torch
from torch import Tensor

from rlgen.losses.masking import capped_exp, select


def importance_weight(old_logp: Tensor, sampler_logp: Tensor, mask: Tensor, cap: float | None) -> Tensor:
    """The weight of each token: its ratio, at most `cap` (token-level truncated importance sampling, Yao et al. 2025).

    Args:
        cap: None: no correction, ones.

    Returns:
        [B, T] detached. Outside the mask, and where the engine reported no log-prob, the ratio is 1.
    """
    if cap is None:
        return torch.ones_like(old_logp, requires_grad=False)
    return capped_exp(log_ratio(old_logp, sampler_logp, mask)).clamp(max=cap)


MISMATCH = (
    "sampler/delta_mean",
    "sampler/delta_max",
    "sampler/delta_p999",
    "sampler/kl",
    "sampler/kl_k1",
    "sampler/kl_reverse_k1",
    "sampler/kl_reverse_k3",
    "is/raw_min",
    "is/raw_mean",
    "is/raw_max",
    "is/weight_min",
    "is/weight_mean",
    "is/weight_max",
    "is/clipped_frac",
    "is/masked_frac",
    "is/unscored_frac",
    "is/ess",
    "is/ess_raw",
    "is/ess_seq",
)


@torch.no_grad()
def mismatch(old_logp: Tensor, sampler_logp: Tensor, weight: Tensor, mask: Tensor, corrected: bool) -> dict[str, float | None]:
    """Diagnostics of one window, from all of its rows at once. None: nothing to average.

    `sampler/*` are over tokens that the engine scored. Tokens come from the sampler, so plain means estimate
    KL(sampler || policy): `kl_k1`, and `kl`, its k3; `kl_reverse_*` estimate KL(policy || sampler) by the ratio.
    `is/*` are over all masked tokens: `raw` the ratio, `weight` what the loss uses. `ess` is the effective share of
    samples, (sum w)^2 / (N sum w^2): of the weights, of the ratios (`ess_raw`), and of whole rows' ratios (`ess_seq`),
    because tokens hide the collapse of rows.

    Args:
        old_logp, sampler_logp, weight, mask: [B, T], the window's rows padded to one width.
        corrected: whether `weight` is a correction; else nothing counts as clipped.
    """
    d_BT = log_ratio(old_logp.double(), sampler_logp.double(), mask)
    raw_BT = capped_exp(d_BT)
    scored_BT = mask & sampler_logp.isfinite()
    d_N, ratio_N = d_BT[scored_BT], raw_BT[scored_BT]
    raw_M, weight_M = raw_BT[mask], weight.double()[mask]
    raw_rows = capped_exp(d_BT.sum(dim=1))[mask.any(dim=1)]
    # A weight below its ratio was capped; rounding of float32 aside.
    clipped_M = (weight_M < raw_M * (1 - 1e-6)) & corrected
    if not len(raw_M):
        return dict.fromkeys(MISMATCH)
    if not len(d_N):  # the engine reported nothing: the ratios are all 1, and the gap is unknown
        unknown = {key: None for key in MISMATCH if key.startswith("sampler/")}
        d_N, ratio_N = d_BT.new_zeros(1), d_BT.new_ones(1)
    else:
        unknown = {}
    size_N = d_N.abs().sort().values
    values = (
        size_N.mean(),
        size_N[-1],
        size_N[math.ceil(0.999 * len(size_N)) - 1],  # nearest rank
        (ratio_N - 1 - d_N).mean(),
        -d_N.mean(),
        (ratio_N * d_N).mean(),
        (ratio_N * d_N - ratio_N + 1).mean(),
        raw_M.min(),
        raw_M.mean(),
        raw_M.max(),
        weight_M.min(),
        weight_M.mean(),
        weight_M.max(),
        clipped_M.double().mean(),
        (weight_M == 0).double().mean(),
        (~scored_BT[mask]).double().mean(),
        effective_share(weight_M),
        effective_share(raw_M),
        effective_share(raw_rows),
    )
    return dict(zip(MISMATCH, torch.stack(values).tolist(), strict=True)) | unknown


def log_ratio(old_logp: Tensor, sampler_logp: Tensor, mask: Tensor) -> Tensor:
    """d [B, T], detached; 0 outside the mask and where the engine reported nothing."""
    scored = mask & sampler_logp.isfinite()
    return select(scored, old_logp.detach()) - select(scored, sampler_logp)


def effective_share(weights: Tensor) -> Tensor:
    """(sum w)^2 / (N sum w^2) of [N] weights, in [0, 1]; 0 if all are 0."""
    square = weights.square().sum()
    return torch.where(square > 0, weights.sum().square() / (len(weights) * square), 0.0)
