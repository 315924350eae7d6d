"""Log-probs of samples without a gradient: of the reference, and of the policy when the sentinel asks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rlgen.errors import SetupError
from rlgen.models.policy import Policy
from rlgen.models.shortage import memory_for
from rlgen.processes import Processes
from rlgen.rollout.batch import collate, deal
from rlgen.types import Sample


def score(policy: Policy, samples: Sequence[Sample], temperature: float, budget: int, processes: Processes) -> list[Tensor]:
    """Log-prob of each sampled token: one [L] float32 tensor a sample, in their order, on the CPU; 0 where not sampled."""
    return [logp_KL[0] for logp_KL in score_at(policy, samples, (temperature,), budget, processes)]


@torch.no_grad()
def score_at(
    policy: Policy, samples: Sequence[Sample], temperatures: tuple[float, ...], budget: int, processes: Processes
) -> list[Tensor]:
    """As `score`, at K temperatures from one forward: one [K, L] tensor a sample.

    All processes have the same samples; each scores a part of them, and all have the same answer to the last bit.

    Raises:
        SetupError: the memory does not suffice.
    """
    less = [f"an optim.micro_batch_tokens below {budget} (the same result, more slowly)", "a lower rollout.max_completion_tokens"]
    scored: list[tuple[int, Tensor]] = []
    lengths = [len(s.prompt_ids) + len(s.completion_ids) for s in samples]
    for rows in deal([(row,) for row in range(len(samples))], lengths, budget, processes.world)[processes.rank]:
        batch = collate(samples, rows, processes.device)
        with memory_for(f"log-probs of {len(rows)} rows of {batch.input_ids.shape[1]} tokens", less, SetupError):
            values = policy(batch, temperatures).logp.cpu().unbind(1)
        # Copies: of a view its whole rectangle would be sent.
        scored += [(row, values[place][:, : len(samples[row].completion_ids)].clone()) for place, row in enumerate(rows)]
    return [logp for _, logp in sorted(processes.gather(scored), key=lambda item: item[0])]
