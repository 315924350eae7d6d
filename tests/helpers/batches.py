"""Batches of random ids, and what a policy computes from a batch."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from helpers.samples import make_sample
from rlgen.models.policy import Policy
from rlgen.rollout.batch import collate
from rlgen.rollout.samples import Samples
from rlgen.types import Distribution, MicroBatch


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inside the block, tensors are made of lists, in the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def random_batch(prompt: int, completions: Sequence[int]) -> MicroBatch:
    """Rows of `prompt` ids that no other row has, each with a completion of its own length."""
    draw = torch.Generator().manual_seed(0)
    rows = []
    for row, length in enumerate(completions):
        ids = torch.randint(3, 200, (prompt + length,), generator=draw).tolist()
        logp = (0.0,) * length
        rows.append(make_sample(group_id=row, prompt_ids=ids[:prompt], completion_ids=ids[prompt:], sampler_logp=logp))
    return collate(Samples.of(rows, ()), range(len(rows)), torch.device("cpu"))


def gradients(policy: Policy, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Log-probs [B, T], and the gradient of a sum of them that weighs every token differently, as one vector."""
    policy.zero_grad()
    logp = policy(batch, (Distribution(temperature=0.9),), "value").logp[0]
    (logp * torch.linspace(0.5, 1.5, logp.numel()).view_as(logp)).sum().backward()
    return logp.detach(), torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
