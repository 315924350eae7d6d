"""Batches of random ids."""

from collections.abc import Sequence

import torch

from helpers.samples import make_sample
from rlgen.rollout.batch import collate
from rlgen.rollout.samples import Samples
from rlgen.types import Batch


def random_batch(prompt: int, completions: Sequence[int]) -> Batch:
    """Rows of `prompt` ids that no other row has, each with a completion of its own length."""
    draw = torch.Generator().manual_seed(0)
    rows = []
    for row, length in enumerate(completions):
        ids = torch.randint(3, 200, (prompt + length,), generator=draw).tolist()
        logp = (0.0,) * length
        rows.append(make_sample(group_id=row, prompt_ids=ids[:prompt], completion_ids=ids[prompt:], sampler_logp=logp))
    return collate(Samples.of(rows, ()), range(len(rows)), torch.device("cpu"))
