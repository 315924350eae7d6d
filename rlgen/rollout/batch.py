"""Samples to micro-batches with little padding: sorted by length, cut where cutting pays, within the token budget."""

from collections.abc import Sequence

import numpy
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlgen.types import Batch, Sample

# A micro-batch more is counted as this many tokens, so that cutting finer must save more than that; for large windows as a
# share of all tokens, so that the number of micro-batches stays bounded. With lengths exponential, log-normal or uniform up
# to 480, padding then stays below 10 % of the completion tokens (tests/rollout/test_batch.py).
LAUNCH_TOKENS = 48
LAUNCH_SHARE = 0.005


def plan(units: Sequence[Sequence[int]], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Splits rows into micro-batches so that padding and launches together cost least.

    Denominators are global, so the gradient does not depend on this split.

    Args:
        units: rows that must stay together: single rows, or the two rows of a preference pair. All of one size.
        lengths: tokens of each row, prompt included.
        budget: most tokens of a micro-batch, padding included (`optim.micro_batch_tokens`). A single unit may exceed it.

    Returns:
        The rows of each micro-batch; every row of `units` once.
    """
    if not units:
        return []
    size = len(units[0])
    ordered = sorted(units, key=lambda unit: max(lengths[row] for row in unit))
    width = numpy.array([max(lengths[row] for row in unit) for unit in ordered])
    launch = max(LAUNCH_TOKENS, LAUNCH_SHARE * size * width.sum())
    # best[e]: least cost of the first e units; the last micro-batch of that solution starts at cut[e].
    best, cut = numpy.zeros(len(ordered) + 1), numpy.zeros(len(ordered) + 1, dtype=int)
    for end in range(1, len(ordered) + 1):
        first = max(0, end - max(1, budget // int(size * width[end - 1])))
        starts = numpy.arange(first, end)
        cost = best[starts] + (end - starts) * size * width[end - 1] + launch
        best[end], cut[end] = cost.min(), starts[cost.argmin()]
    micro_batches: list[list[int]] = []
    end = len(ordered)
    while end:
        micro_batches.append([row for unit in ordered[cut[end] : end] for row in unit])
        end = cut[end]
    return micro_batches


def deal(units: Sequence[Sequence[int]], lengths: Sequence[int], budget: int, world: int) -> list[list[list[int]]]:
    """The micro-batches of each of `world` processes: every unit goes to one, and all have about as many tokens.

    Each process has as many micro-batches as any other, because with sharded weights every forward needs all of them. What is
    missing is filled up with empty ones. A function of its arguments: each process computes the plans of all.

    Args:
        units, lengths, budget: as in `plan`.
    """
    by_length = sorted(range(len(units)), key=lambda unit: -sum(lengths[row] for row in units[unit]))
    hands: list[list[int]] = [[] for _ in range(world)]
    for place, unit in enumerate(by_length):
        turn, seat = divmod(place, world)
        hands[seat if turn % 2 == 0 else world - 1 - seat].append(unit)  # there and back: who had the longest has the shortest
    plans = [plan([units[unit] for unit in sorted(hand)], lengths, budget) for hand in hands]
    most = max(map(len, plans))
    return [[*mine, *([] for _ in range(most - len(mine)))] for mine in plans]


def collate(samples: Sequence[Sample], rows: Sequence[int], device: torch.device) -> Batch:
    """Pads the samples at `rows` on the right. Without rows: a row of two ids, of which none counts."""
    if not rows:
        return Batch(
            rows=(),
            input_ids=torch.zeros(1, 2, dtype=torch.long, device=device),
            prompt_lengths=torch.ones(1, dtype=torch.long, device=device),
            completion_ids=torch.zeros(1, 1, dtype=torch.long, device=device),
            mask=torch.zeros(1, 1, dtype=torch.bool, device=device),
            sampler_logp=torch.zeros(1, 1, device=device),
        )
    chosen = [samples[row] for row in rows]
    return Batch(
        rows=tuple(rows),
        input_ids=pad_rows([torch.tensor(s.prompt_ids + s.completion_ids) for s in chosen], 0).to(device),
        prompt_lengths=torch.tensor([len(s.prompt_ids) for s in chosen], device=device),
        completion_ids=pad_rows([torch.tensor(s.completion_ids) for s in chosen], 0).to(device),
        mask=pad_rows([torch.tensor(s.loss_mask) for s in chosen], False).to(device),
        sampler_logp=pad_rows([torch.tensor(s.sampler_logp) for s in chosen], 0.0).to(device),
    )


def pad_rows(rows: Sequence[Tensor], value: float) -> Tensor:
    """[L] tensors of unequal lengths to one [B, longest]."""
    return pad_sequence(list(rows), batch_first=True, padding_value=value)
