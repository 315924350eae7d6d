"""The importance weight between the engine's log-probs and the trainer's, and metrics of how far they differ.

d = old_logp - sampler_logp, ratio = exp(d). Nothing here is differentiated.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from rlgen.losses.masking import capped_exp, select
from rlgen.losses.order import Total, alone, kth_smallest
from rlgen.metrics import Metric

Mode: TypeAlias = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Settings for turning ratios into weights. Correction(mode="token_truncate", low=None, high=2.0, geometric=None)

    `token_*` modes use the ratio of each token, `sequence_*` that of each completion, exp(sum d). `*_truncate` clamps ratios to
    [low, high] (Yao et al. 2025), `*_mask` sets those outside to 0 and keeps the others unchanged (IcePop 2025).
    `none` gives ones.
    """

    mode: Mode
    low: float | None
    high: float | None
    geometric: tuple[float, float] | None  # drop completions whose mean ratio, exp(mean d), is outside ("When Speed Kills", 2025)

    @property
    def of_rows(self) -> bool:
        return self.mode.startswith("sequence")


NO_CORRECTION = Correction(mode="none", low=None, high=None, geometric=None)


def importance_weight(old_logp: Tensor, sampler_logp: Tensor, mask: Tensor, correction: Correction) -> Tensor:
    """Returns the weight of each token [B, T], or for `sequence_*` modes of each row [B, 1].

    Returns:
        Detached weights. The ratio is 1 where the engine reported no log-prob, outside the mask, and in rows with an empty mask.
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


# Names of the quantities that are summed over micro-batches and processes, and of those whose largest value is kept.
SUMS = (
    *("tokens", "scored", "size", "k3", "d", "ratio_d", "reverse_k3"),
    *("weighed", "raw", "raw_square", "weight", "weight_square", "clipped", "masked"),
    *("rows", "row_ratio", "row_ratio_square"),
)
LARGEST = ("size", "raw", "weight", "-raw", "-weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """How far engine and trainer differ on some rows of a train batch, as sums that can be added to those of other rows.

    All of it stays on the device that computed it until `of_train_batch`, once a step: no micro-batch waits for the device.

    Rows with a NaN log-prob of the trainer are left out: the policy could not compute it, which says nothing about the engine. An
    infinite one stays: the engine sampled a token to which the policy gives probability 0.
    """

    sums: Tensor  # [len(SUMS)] float64
    largest: Tensor  # [len(LARGEST)] float64
    sizes: Tensor  # [N] float32, |d| of each token; NaN if the engine did not score it

    @classmethod
    @torch.no_grad()
    def of(cls, old_logp: Tensor, sampler_logp: Tensor, weight: Tensor, mask: Tensor, correction: Correction) -> "Mismatch":
        """Measures rows [B, T]; `weight` is that of `importance_weight` with the same `correction`."""
        mask = mask & ~(mask & old_logp.isnan()).any(dim=1, keepdim=True)
        d_BT = log_ratio(old_logp.double(), sampler_logp.double(), mask)
        rows_B1, scored = mask.any(dim=1, keepdim=True), mask & sampler_logp.isfinite()
        # Values that do not count are replaced, not left out: their number is not known without waiting for the device.
        weighed = rows_B1 if correction.of_rows else mask
        raw = select(weighed, ratio_of(d_BT, correction))
        weight = select(weighed, weight.double().expand_as(raw))
        ratio_BT, size_BT = capped_exp(d_BT), d_BT.abs()  # d is 0 where the engine scored nothing
        row_B1 = select(rows_B1, capped_exp(d_BT.sum(dim=1, keepdim=True)))
        # Compares with the weight instead of the caps: a changed weight differs by more than the rounding of float32.
        clipped = ((weight - raw).abs() > 1e-6 * raw) & (weight > 0) & correction.mode.endswith("truncate")
        sums = {
            "tokens": mask.sum(),
            "scored": scored.sum(),
            "size": size_BT.sum(),
            "k3": (ratio_BT - 1 - d_BT).sum(),
            "d": d_BT.sum(),
            "ratio_d": (ratio_BT * d_BT).sum(),
            "reverse_k3": (ratio_BT * d_BT - ratio_BT + 1).sum(),
            "weighed": weighed.sum(),
            "raw": raw.sum(),
            "raw_square": raw.square().sum(),
            "weight": weight.sum(),
            "weight_square": weight.square().sum(),
            "clipped": clipped.sum(),
            "masked": (weighed & (weight == 0)).sum(),
            "rows": rows_B1.sum(),
            "row_ratio": row_B1.sum(),
            "row_ratio_square": row_B1.square().sum(),
        }
        of_weights = [largest(values, weighed) for values in (raw, weight, -raw, -weight)]
        return cls(
            sums=torch.stack([sums[name].double() for name in SUMS]),
            largest=torch.stack([largest(size_BT, scored), *of_weights]),
            sizes=torch.where(scored, size_BT, math.nan).float().flatten(),
        )

    @classmethod
    def of_train_batch(cls, parts: Sequence["Mismatch"]) -> "Mismatch":
        """Adds up those of all micro-batches of a train batch, and brings them to the CPU."""
        if not parts:
            nothing = torch.zeros(0, 1)
            return cls.of(nothing, nothing, nothing, nothing.bool(), NO_CORRECTION)
        return cls(
            sums=sum(torch.stack([part.sums for part in parts]).cpu().unbind(), torch.zeros(len(SUMS), dtype=torch.float64)),
            largest=torch.stack([part.largest for part in parts]).amax(dim=0).cpu(),
            sizes=torch.cat([part.sizes for part in parts]).cpu(),
        )

    def metrics(self, total: Total = alone) -> dict[str, float | None]:
        """Returns the diagnostics of a train batch; a value is None if there is nothing to average.

        `sampler/*` are over tokens that the engine scored. Tokens come from the sampler, so plain means estimate
        KL(sampler || policy): `kl_k1`, and `kl`, its k3; `kl_reverse_*` estimate KL(policy || sampler) by the ratio.
        `is/*` are over what the correction weighs, masked tokens or rows: `raw` the ratio, `weight` what the loss uses.
        `clipped_frac` counts ratios that a truncation changed, `masked_frac` weights of 0. `ess` is the effective share of
        samples, (sum w)^2 / (N sum w^2): of the weights, of the ratios (`ess_raw`), and of whole rows' ratios (`ess_seq`),
        because the share over tokens can be high while that over rows collapses.

        Args:
            total: reduction over all processes that hold rows of the train batch.
        """
        of = dict(zip(SUMS, total(self.sums, "sum").tolist(), strict=True))
        largest = dict(zip(LARGEST, total(self.largest, "max").tolist(), strict=True))
        scored, weighed, known = of["scored"], of["weighed"], self.sizes[~self.sizes.isnan()]
        p999 = kth_smallest(known, [math.ceil(0.999 * scored) - 1], total)[0] if scored else None  # nearest rank
        return {
            Metric.SAMPLER_DELTA_MEAN: share(of["size"], scored),
            Metric.SAMPLER_DELTA_MAX: largest["size"] if scored else None,
            Metric.SAMPLER_DELTA_P999: p999,
            Metric.SAMPLER_KL: share(of["k3"], scored),
            Metric.SAMPLER_KL_K1: share(-of["d"], scored),
            Metric.SAMPLER_KL_REVERSE_K1: share(of["ratio_d"], scored),
            Metric.SAMPLER_KL_REVERSE_K3: share(of["reverse_k3"], scored),
            Metric.IS_RATIO_MIN: -largest["-raw"] if weighed else None,
            Metric.IS_RATIO_MEAN: share(of["raw"], weighed),
            Metric.IS_RATIO_MAX: largest["raw"] if weighed else None,
            Metric.IS_WEIGHT_MIN: -largest["-weight"] if weighed else None,
            Metric.IS_WEIGHT_MEAN: share(of["weight"], weighed),
            Metric.IS_WEIGHT_MAX: largest["weight"] if weighed else None,
            Metric.IS_CLIPPED: share(of["clipped"], weighed),
            Metric.IS_MASKED: share(of["masked"], weighed),
            Metric.IS_UNSCORED: 1 - scored / of["tokens"] if weighed else None,
            Metric.IS_ESS: effective_share(of["weight"], of["weight_square"], weighed),
            Metric.IS_ESS_RAW: effective_share(of["raw"], of["raw_square"], weighed),
            Metric.IS_ESS_SEQ: effective_share(of["row_ratio"], of["row_ratio_square"], of["rows"]),
        }


def log_ratio(old_logp: Tensor, sampler_logp: Tensor, mask: Tensor) -> Tensor:
    """Returns d [B, T], detached; 0 outside the mask and where the engine reported no log-prob."""
    scored = mask & sampler_logp.isfinite()
    return select(scored, old_logp.detach()) - select(scored, sampler_logp)


def ratio_of(d: Tensor, correction: Correction) -> Tensor:
    return capped_exp(d.sum(dim=1, keepdim=True) if correction.of_rows else d)


def share(total: float, count: float) -> float | None:
    return total / count if count else None


def effective_share(total: float, squares: float, count: float) -> float | None:
    """Returns (sum w)^2 / (N sum w^2), in [0, 1]; 0 if all weights are 0, None if there are none."""
    return share(total**2, count * squares) if squares or not count else 0.0


def largest(values: Tensor, counted: Tensor) -> Tensor:
    lowest = values.new_full((1,), -math.inf)
    return torch.cat([torch.where(counted, values, lowest).flatten(), lowest]).amax()
