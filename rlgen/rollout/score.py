"""Log-probs of samples without a gradient: of the reference, and of the policy when the sentinel asks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rlgen.models.policy import Policy
from rlgen.rollout.batch import collate, plan
from rlgen.types import Sample


def score(policy: Policy, samples: Sequence[Sample], temperature: float, budget: int, device: torch.device) -> list[Tensor]:
    """Log-prob of each sampled token: one [L] float32 tensor a sample, in their order, on the CPU; 0 where not sampled."""
    return [logp_KL[0] for logp_KL in score_at(policy, samples, (temperature,), budget, device)]


@torch.no_grad()
def score_at(
    policy: Policy, samples: Sequence[Sample], temperatures: tuple[float, ...], budget: int, device: torch.device
) -> list[Tensor]:
    """As `score`, at K temperatures from one forward: one [K, L] tensor a sample."""
    logp: list[Tensor] = [torch.empty(0)] * len(samples)
    lengths = [len(s.prompt_ids) + len(s.completion_ids) for s in samples]
    for rows in plan([(row,) for row in range(len(samples))], lengths, budget):
        batch = collate(samples, rows, device)
        for row, values_KT in zip(rows, policy(batch, temperatures).logp.cpu().unbind(1), strict=True):
            logp[row] = values_KT[:, : len(samples[row].completion_ids)]
    return logp
