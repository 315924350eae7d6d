"""The importance weight between what the engine sampled from and what the trainer computes, and how far they differ.

d = old_logp - sampler_logp, ratio = exp(d). Nothing here is differentiated.
"""

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from rlgen.losses.masking import capped_exp, select

Correction: TypeAlias = Literal["none", "token_truncate"]


def importance_weight(old_logp: Tensor, sampler_logp: Tensor, mask: Tensor, mode: Correction, max: float) -> Tensor:
    """The weight of each token.

    Args:
        mode: `none`: ones; `token_truncate`: the token's ratio, at most `max` (truncated importance sampling, Yao et al.
            2025).

    Returns:
        [B, T] detached. Outside the mask, and where the engine reported no log-prob, the ratio is 1.
    """
    if mode == "none":
        return torch.ones_like(old_logp)
    return capped_exp(log_ratio(old_logp, sampler_logp, mask)).clamp(max=max)


@torch.no_grad()
def mismatch(old_logp: Tensor, sampler_logp: Tensor, weight: Tensor, mask: Tensor) -> dict[str, float | None]:
    """Diagnostics of one window, from all of its rows at once. None: nothing to average.

    `sampler/*` are over tokens that the engine scored. Tokens come from the sampler, so plain means estimate
    KL(sampler || policy): `kl_k1`, and `kl`, its k3; `kl_reverse_*` estimate KL(policy || sampler) by the ratio.
    `is/*` are over all masked tokens: `raw` the ratio, `weight` what the loss uses. `ess` is the effective share of
    samples, (sum w)^2 / (N sum w^2): of the weights, of the ratios (`ess_raw`), and of whole rows' ratios (`ess_seq`),
    because tokens hide the collapse of rows.

    Args:
        old_logp, sampler_logp, weight, mask: [B, T], the window's rows padded to one width.
    """
    d_BT = log_ratio(old_logp.double(), sampler_logp.double(), mask)
    raw_BT = capped_exp(d_BT)
    scored_BT = mask & sampler_logp.isfinite()
    d_N, ratio_N = d_BT[scored_BT], raw_BT[scored_BT]
    raw_M, weight_M = raw_BT[mask], weight.double()[mask]
    raw_rows = capped_exp(d_BT.sum(dim=1))[mask.any(dim=1)]
    # Ones everywhere are no correction; elsewhere a weight that is neither the ratio nor 0 is the cap.
    clipped_M = ~weight_M.isclose(raw_M) & (weight_M != 0) & (weight_M != 1).any()
    values = {
        "sampler/delta_mean": d_N.abs().mean(),
        "sampler/kl": (ratio_N - 1 - d_N).mean(),
        "sampler/kl_k1": -d_N.mean(),
        "sampler/kl_reverse_k1": (ratio_N * d_N).mean(),
        "sampler/kl_reverse_k3": (ratio_N * d_N - ratio_N + 1).mean(),
        "is/raw_mean": raw_M.mean(),
        "is/weight_mean": weight_M.mean(),
        "is/clipped_frac": clipped_M.double().mean(),
        "is/masked_frac": (weight_M == 0).double().mean(),
        "is/unscored_frac": (~scored_BT[mask]).double().mean(),
        "is/ess": effective_share(weight_M),
        "is/ess_raw": effective_share(raw_M),
        "is/ess_seq": effective_share(raw_rows),
    }
    return values
