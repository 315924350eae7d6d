"""The token losses of the GRPO family. Each is a frozen set of settings with one method, from `Terms` to a loss.

r is the ratio policy / old of a token, s that of a completion, A the advantage. `loss` returns the loss, [B, T], or [B, 1] if all
tokens of a completion share it, and values for metrics. The caller applies importance weights, unless the variant has `weighs`
set and uses them in its own formula.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from rlgen.losses.inputs import LossInputs, Measured, onto
from rlgen.losses.masking import capped_exp, select
from rlgen.metrics import Metric

RatioLevel: TypeAlias = Literal["token", "sequence", "sequence_token", "sequence_sum"]


@dataclass(frozen=True, slots=True)
class Terms:
    """Inputs that the variants share; log-probs and their differences are 0 outside the mask."""

    policy_logp: Tensor  # [B, T] with gradient
    log_ratio: Tensor  # [B, T] policy - old, with gradient
    advantages: Tensor  # [B, 1]
    weight: Tensor  # [B, T] or [B, 1]
    mask: Tensor  # [B, T]

    @classmethod
    def of(cls, x: LossInputs) -> "Terms":
        policy_BT = select(x.mask, x.policy_logp)
        return cls(
            policy_logp=policy_BT,
            log_ratio=policy_BT - select(x.mask, x.old_logp.detach()),
            advantages=onto(x.advantages.detach()[:, None].to(policy_BT.dtype), policy_BT.device),
            weight=select(x.mask if x.weight.shape == x.mask.shape else x.mask.any(dim=1, keepdim=True), x.weight.detach()),
            mask=x.mask,
        )

    def ratio(self, level: RatioLevel) -> Tensor:
        """Returns exp of the log-ratio of each token [B, T], or of a whole completion [B, 1].

        `sequence`: s, from the mean log-ratio over the completion's tokens (GSPO, arXiv 2507.18071, eq. 7). `sequence_token`: s
        in value, but each token's own gradient (eq. 14), [B, T]. `sequence_sum`: from the sum of the log-ratios.
        """
        if level == "token":
            return capped_exp(self.log_ratio)
        total_B1 = self.log_ratio.sum(dim=1, keepdim=True)
        if level == "sequence_sum":
            return capped_exp(total_B1)
        mean_ratio_B1 = capped_exp(total_B1 / self.mask.sum(dim=1, keepdim=True).clamp(min=1))
        if level == "sequence":
            return mean_ratio_B1
        return mean_ratio_B1.detach() * (self.policy_logp - self.policy_logp.detach()).exp()


class Variant(Protocol):
    """Interface of a token loss."""

    weighs: ClassVar[bool]  # uses the importance weights in its own formula

    def loss(self, terms: Terms) -> tuple[Tensor, Measured]: ...


@dataclass(frozen=True, slots=True)
class Clip:
    """PPO's clipped ratio (arXiv 1707.06347): -min(r A, clamp(r, 1 - low, 1 + high) A)."""

    low: float
    high: float
    delta: float | None  # upper bound of r where A < 0, against huge ratios (INTELLECT-2, arXiv 2505.07291); above 1 + high
    ratio: RatioLevel
    weighs: ClassVar[bool] = False

    def loss(self, terms: Terms) -> tuple[Tensor, Measured]:
        ratio, advantages_B1 = terms.ratio(self.ratio), terms.advantages
        bounded = ratio if self.delta is None else ratio.clamp(max=self.delta)
        clipped = ratio.clamp(1 - self.low, 1 + self.high)
        loss = -torch.minimum(bounded * advantages_B1, clipped * advantages_B1)
        too_low = (ratio < 1 - self.low) & (advantages_B1 < 0)
        too_high = (ratio > 1 + self.high) & (advantages_B1 > 0)
        return loss, {Metric.CLIP_LOW: too_low, Metric.CLIP_HIGH: too_high, Metric.CLIP_REGION: too_low | too_high}


@dataclass(frozen=True, slots=True)
class Cispo:
    """CISPO (MiniMax-M1, arXiv 2506.13585): -min(r, max) A policy_logp, the ratio detached. No token loses its gradient."""

    max: float
    weighs: ClassVar[bool] = False

    def loss(self, terms: Terms) -> tuple[Tensor, Measured]:
        ratio_BT = terms.ratio("token").detach()
        return -ratio_BT.clamp(max=self.max) * terms.advantages * terms.policy_logp, {Metric.CISPO_CLIPPED: ratio_BT > self.max}


@dataclass(frozen=True, slots=True)
class Sapo:
    """SAPO (arXiv 2511.20347): a soft gate instead of a clip, -sigmoid(tau (r - 1)) (4 / tau) A, of slope 1 at r = 1."""

    tau_positive: float  # where A > 0
    tau_negative: float
    weighs: ClassVar[bool] = False

    def loss(self, terms: Terms) -> tuple[Tensor, Measured]:
        tau_B1 = chosen(terms.advantages > 0, self.tau_positive, self.tau_negative, terms.policy_logp)
        gate_BT = torch.sigmoid(tau_B1 * (terms.ratio("token") - 1)) * 4 / tau_B1
        return -gate_BT * terms.advantages, {}


@dataclass(frozen=True, slots=True)
class Vespo:
    """VESPO (arXiv 2602.10693): -phi A policy_logp, phi = W^k exp(lambda (1 - W)), detached.

    W is the ratio policy / sampler of the whole completion, in [1e-8, e^20]; phi goes to 0 for a completion far off the policy.
    """

    k_positive: float  # where A >= 0
    lambda_positive: float
    k_negative: float
    lambda_negative: float
    weighs: ClassVar[bool] = True

    def loss(self, terms: Terms) -> tuple[Tensor, Measured]:
        phi_B1 = self.phi(terms)
        return -phi_B1 * terms.advantages * terms.policy_logp, {Metric.VESPO_PHI_MEAN: phi_B1}

    @torch.no_grad()
    def phi(self, terms: Terms) -> Tensor:
        lowest = math.log(1e-8)
        rows_B1 = terms.mask.any(dim=1, keepdim=True)
        counted = terms.mask if terms.weight.shape == terms.mask.shape else rows_B1
        log_weight = select(counted, terms.weight.log().clamp(lowest, 20.0)).sum(dim=1, keepdim=True)
        log_w_B1 = (terms.log_ratio.clamp(-20.0, 20.0).sum(dim=1, keepdim=True) + log_weight).clamp(lowest, 20.0)
        positive_B1 = terms.advantages >= 0
        k_B1 = chosen(positive_B1, self.k_positive, self.k_negative, log_w_B1)
        lambda_B1 = chosen(positive_B1, self.lambda_positive, self.lambda_negative, log_w_B1)
        return (k_B1 * log_w_B1 + lambda_B1 * (1 - log_w_B1.exp())).exp()


def chosen(condition: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    """Returns `yes` where `condition`, else `no`, in the dtype of `like`; torch.where would round both numbers to float32."""
    return torch.full_like(condition, no, dtype=like.dtype).masked_fill(condition, yes)
