"""Splits samples into micro-batches with little padding: sorted by length, within the token budget, cut where it saves time."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlgen.types import Batch, Samples

# Fixed cost of a micro-batch, in tokens: one more micro-batch must save more padding than that. For large windows it is a
# share of all tokens, so that the number of micro-batches stays bounded. With lengths exponential, log-normal or uniform up
# to 480, padding then stays below 10 % of the completion tokens (tests/rollout/test_batch.py).
LAUNCH_TOKENS = 48
LAUNCH_SHARE = 0.005


def plan(units: Sequence[Sequence[int]], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Splits rows into micro-batches that minimise padding plus the fixed cost of each micro-batch.

    The loss uses denominators of the whole window, so the gradient does not depend on this split.

    Args:
        units: rows that must stay together: single rows, or the two rows of a preference pair. All units have the same size.
        lengths: tokens of each row, prompt included.
        budget: most tokens of a micro-batch, padding included (`optim.micro_batch_tokens`). A single unit may exceed it.

    Returns:
        The rows of each micro-batch; every row of `units` occurs once.
    """
    if not units:
        return []
    size = len(units[0])
    ordered = sorted(units, key=lambda unit: max(lengths[row] for row in unit))
    width = np.array([max(lengths[row] for row in unit) for unit in ordered])
    launch = max(LAUNCH_TOKENS, LAUNCH_SHARE * size * width.sum())
    # best[e]: least cost of the first e units; the last micro-batch of that solution starts at cut[e].
    best, cut = np.zeros(len(ordered) + 1), np.zeros(len(ordered) + 1, dtype=int)
    for end in range(1, len(ordered) + 1):
        first = max(0, end - max(1, budget // int(size * width[end - 1])))
        starts = np.arange(first, end)
        cost = best[starts] + (end - starts) * size * width[end - 1] + launch
        best[end], cut[end] = cost.min(), starts[cost.argmin()]
    micro_batches: list[list[int]] = []
    end = len(ordered)
    while end:
        micro_batches.append([row for unit in ordered[cut[end] : end] for row in unit])
        end = cut[end]
    return micro_batches


def deal(units: Sequence[Sequence[int]], lengths: Sequence[int], budget: int, world: int) -> list[list[list[int]]]:
    """Returns the micro-batches of each of `world` processes; each unit goes to one process, and all get about as many tokens.

    All processes get the same number of micro-batches, padded with empty ones, because with sharded weights every forward pass is
    a collective. The result depends on the arguments only: each process computes the plans of all.

    Args:
        units, lengths, budget: as in `plan`.
    """
    by_length = sorted(range(len(units)), key=lambda unit: -sum(lengths[row] for row in units[unit]))
    hands: list[list[int]] = [[] for _ in range(world)]
    for place, unit in enumerate(by_length):
        turn, hand = divmod(place, world)
        hands[hand if turn % 2 == 0 else world - 1 - hand].append(unit)  # directions alternate, to balance the tokens
    plans = [plan([units[unit] for unit in sorted(hand)], lengths, budget) for hand in hands]
    most = max(map(len, plans))
    return [[*mine, *([] for _ in range(most - len(mine)))] for mine in plans]


def collate(samples: Samples, rows: Sequence[int], device: torch.device) -> Batch:
    """Pads the samples at `rows` on the right to one batch; for no rows, returns one two-token row with an empty mask."""
    if not len(rows):
        return Batch(
            rows=(),
            input_ids=torch.zeros(1, 2, dtype=torch.long, device=device),
            prompt_lengths=torch.ones(1, dtype=torch.long, device=device),
            completion_ids=torch.zeros(1, 1, dtype=torch.long, device=device),
            mask=torch.zeros(1, 1, dtype=torch.bool, device=device),
            sampler_logp=torch.zeros(1, 1, device=device),
        )
    whole = [np.concatenate([samples.prompt_ids[row], samples.completion_ids[row]]) for row in rows]
    return Batch(
        rows=tuple(rows),
        input_ids=pad_rows([torch.from_numpy(ids) for ids in whole], 0).to(device).long(),
        prompt_lengths=torch.from_numpy(samples.prompt_ids.lengths[list(rows)]).to(device),
        completion_ids=pad_rows([torch.from_numpy(samples.completion_ids[row]) for row in rows], 0).to(device).long(),
        mask=pad_rows([torch.from_numpy(samples.mask_of(row)) for row in rows], False).to(device),
        sampler_logp=pad_rows([torch.from_numpy(samples.sampler_logp[row]) for row in rows], 0.0).to(device),
    )


def pad_rows(rows: Sequence[Tensor], value: float) -> Tensor:
    """Pads [L] tensors of unequal lengths on the right with `value` to one [B, longest] tensor."""
    return pad_sequence(list(rows), batch_first=True, padding_value=value)
