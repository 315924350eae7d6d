"""The KL to a frozen reference, as a term of the loss or of the reward. u = policy - ref."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor

from rlgen.losses.correction import log_ratio
from rlgen.losses.inputs import Measured
from rlgen.losses.masking import capped_exp, select
from rlgen.metrics import Metric

# Without k1, whose expected gradient in a loss is 0.
Estimator: TypeAlias = Literal["k3_is", "k3", "k2"]


@dataclass(frozen=True, slots=True)
class KL:
    """The KL term of the loss. Its gradient should be that of KL(policy || reference), estimated on samples of the policy.

    `k3_is`: k3 = exp(-u) + u - 1 times the differentiable ratio policy / old (arXiv 2512.02556), unbiased in value and gradient.
    `k2`: u^2 / 2, the same gradient while the ratio is 1. `k3` alone: gradient 1 - exp(-u), that of KL(reference || policy),
    biased.
    """

    beta: float
    estimator: Estimator
    weighted: bool  # multiplied by the importance weight, like the rest of the loss

    def loss(self, policy_logp: Tensor, old_logp: Tensor, ref_logp: Tensor, mask: Tensor) -> tuple[Tensor, Measured]:
        """Returns the KL of each token, [B, T] without `beta`, 0 outside the mask; and the plain k1 and k3 for the metrics."""
        u_BT, k3_BT = to_reference(policy_logp, ref_logp, mask)
        measured: Measured = {Metric.KL_REF_K1: u_BT.detach(), Metric.KL_REF_K3: k3_BT.detach()}
        if self.estimator == "k2":
            return u_BT.square() / 2, measured
        if self.estimator == "k3":
            return k3_BT, measured
        # k3 exp(policy - old), without a product of two extremes: one capped, and the other nearly 0.
        of_policy_BT, of_ref_BT = (
            capped_exp(select(mask, logp) - select(mask, old_logp.detach())) for logp in (policy_logp, ref_logp.detach())
        )
        return of_ref_BT + of_policy_BT * (u_BT - 1), measured


def to_reference(policy_logp: Tensor, ref_logp: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Returns k1 = u and k3 = exp(-u) + u - 1 of each token [B, T], 0 outside the mask."""
    u_BT = select(mask, policy_logp) - select(mask, ref_logp.detach())
    return u_BT, capped_exp(-u_BT) + u_BT - 1


def reward_kl(sampler_logp: Tensor, ref_logp: Tensor, mask: Tensor) -> Tensor:
    """Returns the KL of each completion to the reference for use in a reward: the sum of k1 = sampler - ref over its tokens.

    Args:
        sampler_logp: [B, T] of the true behaviour policy; NaN counts as 0.

    Returns:
        [B] float64, detached.
    """
    return -log_ratio(ref_logp.double(), sampler_logp.double(), mask).sum(dim=1)
