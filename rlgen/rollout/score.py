"""Log-probs of samples without gradient: those of the reference, and those of the policy for the sentinel."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from rlgen.errors import SetupError
from rlgen.models.memory_errors import memory_for
from rlgen.models.policy import BasePolicy, Policy
from rlgen.processes import Processes
from rlgen.rollout.batch import collate, deal, unpad
from rlgen.rollout.samples import Samples
from rlgen.types import Distribution, MicroBatch, Sample

Scored: TypeAlias = Policy | BasePolicy


def score(
    policy: Policy, samples: Sequence[Sample], distribution: Distribution, budget: int, processes: Processes
) -> list[Tensor]:
    """Returns the log-prob of each token, one [L] float32 tensor per sample, in their order, on the CPU; 0 where not sampled."""
    found = shared_out(samples, budget, processes, lambda batch: policy(batch, (distribution,)).logp, policy.sharing)
    return [logp_KL[0] for logp_KL in found]


def shared_out(
    samples: Sequence[Sample], budget: int, processes: Processes, compute: Callable[[MicroBatch], Tensor], sharing: int
) -> list[Tensor]:
    """Has each process compute a share of the samples, which are few and the same in all of them. `compute`: [K, B, T] of a
    micro-batch. `sharing`: see `Policy.sharing`.

    Returns one [K, L] tensor per sample, bit-identical in all processes. Raises SetupError if the memory does not suffice.
    """
    columns = Samples.of(samples, ())
    scored: list[tuple[int, Tensor]] = []
    units, lengths = [(row,) for row in range(len(samples))], columns.lengths.tolist()
    for rows in deal(units, lengths, budget, processes.world, sharing=sharing)[processes.rank]:
        values = forward(compute, columns, rows, budget, processes).cpu().transpose(0, 1)
        # A copy, because sending a view would send the whole padded tensor.
        scored += [(row, values[place][:, : len(samples[row].completion_ids)].clone()) for place, row in enumerate(rows)]
    return [logp for _, logp in sorted(processes.gather(scored), key=lambda item: item[0])]


def score_own(
    policy: Scored,
    samples: Samples,
    distribution: Distribution,
    budget: int,
    processes: Processes,
    micro_batches: Sequence[Sequence[int]],
) -> Tensor:
    """Returns the log-prob of each token of this process's samples: [N] float32 on the CPU, row after row; 0 where not sampled.

    `micro_batches`: rows of each forward pass. All processes have the same number of them: with sharded weights every forward
    pass is a collective.
    """
    scored = [
        (rows, forward(lambda batch: policy(batch, (distribution,)).logp, samples, rows, budget, processes)[0])
        for rows in micro_batches
    ]
    return unpad([(rows, values) for rows, values in scored if rows], samples.completion_ids.offsets)


@torch.no_grad()
def forward(
    compute: Callable[[MicroBatch], Tensor], samples: Samples, rows: Sequence[int], budget: int, processes: Processes
) -> Tensor:
    """Returns what `compute` makes of one micro-batch, on its device. Raises SetupError if the memory does not suffice."""
    less = [f"an optim.micro_batch_tokens below {budget} (the same result, more slowly)", "a lower rollout.max_completion_tokens"]
    batch = collate(samples, rows, processes.device)
    with memory_for(f"log-probs of {len(rows)} rows of {batch.input_ids.shape[1]} tokens", less, SetupError):
        return compute(batch)
