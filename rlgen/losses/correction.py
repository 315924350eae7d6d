"""The importance weight between what the engine sampled from and what the trainer computes, and how far they differ.

d = old_logp - sampler_logp, ratio = exp(d). Nothing here is differentiated.
"""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from rlgen.losses.masking import capped_exp, select

Mode: TypeAlias = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """How ratios become weights. Correction(mode="token_truncate", low=None, high=2.0, geometric=None)

    `token_*`: the ratio of each token. `sequence_*`: of each completion, exp(sum d). `*_truncate` moves ratios into
    [low, high] (Yao et al. 2025), `*_mask` sets those outside to 0 and keeps the others as they are (IcePop 2025).
    `none`: ones.
    """

    mode: Mode
    low: float | None
    high: float | None
    geometric: tuple[float, float] | None  # drop completions whose mean ratio, exp(mean d), is outside ("When Speed Kills", 2025)

    @property
    def of_rows(self) -> bool:
        return self.mode.startswith("sequence")


def importance_weight(old_logp: Tensor, sampler_logp: Tensor, mask: Tensor, correction: Correction) -> Tensor:
    """The weight of each token [B, T], or for `sequence_*` modes of each row [B, 1].

    Returns:
        Detached. Where the engine reported no log-prob, outside the mask, and of rows with an empty mask, the ratio is 1.
    """
    d_BT = log_ratio(old_logp, sampler_logp, mask)
    low = -math.inf if correction.low is None else correction.low
    high = math.inf if correction.high is None else correction.high
    ratio = ratio_of(d_BT, correction)
    if correction.mode == "none":
        weight = torch.ones_like(ratio)
    elif correction.mode.endswith("truncate"):
        weight = ratio.clamp(low, high)
    else:
        weight = select((ratio >= low) & (ratio <= high), ratio)
    if correction.geometric is None:
        return weight
    lowest, highest = correction.geometric
    mean_ratio_B1 = capped_exp(d_BT.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1))
    return select((mean_ratio_B1 >= lowest) & (mean_ratio_B1 <= highest), weight)


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
def mismatch(
    old_logp: Tensor, sampler_logp: Tensor, weight: Tensor, mask: Tensor, correction: Correction
) -> dict[str, float | None]:
    """Diagnostics of one window, from all of its rows at once. None: nothing to average.

    `sampler/*` are over tokens that the engine scored. Tokens come from the sampler, so plain means estimate
    KL(sampler || policy): `kl_k1`, and `kl`, its k3; `kl_reverse_*` estimate KL(policy || sampler) by the ratio.
    `is/*` are over what the correction weighs, masked tokens or rows: `raw` the ratio, `weight` what the loss uses.
    `clipped_frac` counts ratios that a truncation moved, `masked_frac` weights of 0. `ess` is the effective share of
    samples, (sum w)^2 / (N sum w^2): of the weights, of the ratios (`ess_raw`), and of whole rows' ratios (`ess_seq`),
    because tokens hide the collapse of rows.

    Args:
        old_logp, sampler_logp, mask: [B, T], the window's rows padded to one width.
        weight: of `importance_weight` with the same `correction`.
    """
    d_BT = log_ratio(old_logp.double(), sampler_logp.double(), mask)
    scored_BT = mask & sampler_logp.isfinite()
    d_N = d_BT[scored_BT]
    rows_B = mask.any(dim=1)
    if not rows_B.any():
        return dict.fromkeys(MISMATCH)
    if correction.of_rows:
        raw_M, weight_M = ratio_of(d_BT, correction)[rows_B, 0], weight.double()[rows_B, 0]
    else:
        raw_M, weight_M = ratio_of(d_BT, correction)[mask], weight.double().expand_as(d_BT)[mask]
    if not len(d_N):  # the engine reported nothing: the ratios are all 1, and the gap is unknown
        unknown = {key: None for key in MISMATCH if key.startswith("sampler/")}
        d_N = d_BT.new_zeros(1)
    else:
        unknown = {}
    ratio_N, size_N = capped_exp(d_N), d_N.abs().sort().values
    # Compared with the weight, not with the caps: rounding of a float32 weight aside, one that was moved or dropped differs.
    moved_M = (weight_M - raw_M).abs() > 1e-6 * raw_M
    truncated_M = moved_M & (weight_M > 0) & correction.mode.endswith("truncate")
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
        truncated_M.double().mean(),
        (weight_M == 0).double().mean(),
        (~scored_BT[mask]).double().mean(),
        effective_share(weight_M),
        effective_share(raw_M),
        effective_share(capped_exp(d_BT.sum(dim=1))[rows_B]),
    )
    return dict(zip(MISMATCH, torch.stack(values).tolist(), strict=True)) | unknown


def log_ratio(old_logp: Tensor, sampler_logp: Tensor, mask: Tensor) -> Tensor:
    """d [B, T], detached; 0 outside the mask and where the engine reported nothing."""
    scored = mask & sampler_logp.isfinite()
    return select(scored, old_logp.detach()) - select(scored, sampler_logp)


def ratio_of(d: Tensor, correction: Correction) -> Tensor:
    """The ratio of each token [B, T], or of each row [B, 1], before anything is capped."""
    return capped_exp(d.sum(dim=1, keepdim=True) if correction.of_rows else d)


def effective_share(weights: Tensor) -> Tensor:
    """(sum w)^2 / (N sum w^2) of [N] weights, in [0, 1]; 0 if all are 0."""
    square = weights.square().sum()
    return torch.where(square > 0, weights.sum().square() / (len(weights) * square), 0.0)
