"""Log-probs of samples without gradient: those of the reference, and those of the policy for the sentinel."""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from rlgen.errors import SetupError
from rlgen.models.memory_errors import memory_for
from rlgen.models.policy import BasePolicy, Policy
from rlgen.processes import Processes
from rlgen.rollout.batch import Prompts, collate, deal, plan, unpad
from rlgen.types import Sample, Samples

Scored: TypeAlias = Policy | BasePolicy


def score(policy: Scored, samples: Sequence[Sample], temperature: float, budget: int, processes: Processes) -> list[Tensor]:
    """Returns the log-prob of each token, one [L] float32 tensor per sample, in their order, on the CPU; 0 where not sampled."""
    return [logp_KL[0] for logp_KL in score_at(policy, samples, (temperature,), budget, processes)]


def score_at(
    policy: Scored, samples: Sequence[Sample], temperatures: tuple[float, ...], budget: int, processes: Processes
) -> list[Tensor]:
    """Returns log-probs at K temperatures from one forward pass: one [K, L] tensor per sample, otherwise as `score`.

    Meant for the few samples of a probe: all processes pass the same samples, each scores a share of them, and all get
    bit-identical results.

    Raises:
        SetupError: not enough memory.
    """
    columns = Samples.of(samples, ())
    scored: list[tuple[int, Tensor]] = []
    for rows in deal([(row,) for row in range(len(samples))], columns.lengths.tolist(), budget, processes.world)[processes.rank]:
        values = forward(policy, columns, rows, temperatures, budget, processes).cpu().transpose(0, 1)
        # A copy, because sending a view would send the whole padded tensor.
        scored += [(row, values[place][:, : len(samples[row].completion_ids)].clone()) for place, row in enumerate(rows)]
    return [logp for _, logp in sorted(processes.gather(scored), key=lambda item: item[0])]


def score_own(
    policy: Scored,
    samples: Samples,
    temperature: float,
    budget: int,
    processes: Processes,
    micro_batches: Sequence[Sequence[int]] | None = None,
    packed: bool = False,
) -> Tensor:
    """Returns the log-prob of each token of this process's samples: [N] float32 on the CPU, row after row; 0 where not sampled.

    Args:
        micro_batches: rows of each forward pass, the same number of micro-batches in every process; None: planned here.
        packed: whether `policy` computes rows without padding.

    Raises:
        SetupError: not enough memory.
    """
    if micro_batches is None:
        prompts = Prompts(samples.group_id, samples.prompt_ids.lengths) if packed else None
        planned = plan([(row,) for row in range(len(samples))], samples.lengths.tolist(), budget, prompts)
        # With sharded weights every forward pass is a collective, so all ranks need the same number of them.
        most = int(processes.total(torch.tensor(len(planned)), "max"))
        micro_batches = [*planned, *([] for _ in range(most - len(planned)))]
    scored = [(rows, forward(policy, samples, rows, (temperature,), budget, processes)[0]) for rows in micro_batches]
    return unpad([(rows, values) for rows, values in scored if rows], samples.completion_ids.offsets)


@torch.no_grad()
def forward(
    policy: Scored,
    samples: Samples,
    rows: Sequence[int],
    temperatures: tuple[float, ...],
    budget: int,
    processes: Processes,
) -> Tensor:
    """Returns [K, B, T] log-probs of one micro-batch, on its device. Raises SetupError if the memory does not suffice."""
    less = [f"an optim.micro_batch_tokens below {budget} (the same result, more slowly)", "a lower rollout.max_completion_tokens"]
    batch = collate(samples, rows, processes.device)
    with memory_for(f"log-probs of {len(rows)} rows of {batch.input_ids.shape[1]} tokens", less, SetupError):
        return policy(batch, temperatures).logp
