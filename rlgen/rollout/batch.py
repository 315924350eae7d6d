"""Splits samples into micro-batches with little padding: sorted by length, within the token budget, cut where it saves time."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlgen.losses.inputs import onto
from rlgen.types import MicroBatch, Samples

# Fixed cost of a micro-batch, in tokens: one more micro-batch must save more padding than that. For large train batches it is a
# share of all tokens, so that the number of micro-batches stays bounded. With lengths exponential, log-normal or uniform up
# to 480, padding then stays below 10 % of the completion tokens (tests/rollout/test_batch.py).
LAUNCH_TOKENS = 48
LAUNCH_SHARE = 0.005


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of rows that are packed: a micro-batch computes each of them once."""

    group: NDArray[np.int64]  # [B] rows of a group share their prompt
    tokens: NDArray[np.int64]  # [B]


def plan(units: Sequence[Sequence[int]], lengths: Sequence[int], budget: int, prompts: Prompts | None = None) -> list[list[int]]:
    """Splits rows into micro-batches that minimise padding plus the fixed cost of each micro-batch.

    Packed rows have no padding: their micro-batches are filled one after the other, group by group.

    The loss uses denominators of the whole train batch, so the gradient does not depend on this split.

    Args:
        units: rows that must stay together: single rows, or the two rows of a preference pair. All units have the same size.
        lengths: tokens of each row, prompt included.
        budget: most tokens that a micro-batch computes, padding included (`optim.micro_batch_tokens`). A unit may exceed it.
        prompts: of packed rows; None: rows are padded.

    Returns:
        The rows of each micro-batch; every row of `units` occurs once.
    """
    if not units:
        return []
    if prompts is not None:
        filled: list[list[int]] = []
        room, last = 0, None  # group of the last row of the micro-batch that is filled
        for unit in sorted(units, key=lambda unit: prompts.group[unit[0]]):
            group, prompt = prompts.group[unit[0]], int(prompts.tokens[unit[0]])
            tokens = sum(lengths[row] - prompt for row in unit)
            if not filled or tokens + prompt * (group != last) > room:
                filled.append([])
                room, last = budget, None
            filled[-1] += unit
            room, last = room - tokens - prompt * (group != last), group
        return filled
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


def deal(
    units: Sequence[Sequence[int]], lengths: Sequence[int], budget: int, world: int, prompts: Prompts | None = None
) -> list[list[list[int]]]:
    """Returns the micro-batches of each of `world` processes; each unit goes to one process, and all get about as many tokens.

    All processes get the same number of micro-batches, padded with empty ones, because with sharded weights every forward pass is
    a collective. The result depends on the arguments only: each process computes the plans of all.

    Args:
        units, lengths, budget, prompts: as in `plan`.
    """
    hands: list[list[int]] = [[] for _ in range(world)]
    if prompts is None:
        by_length = sorted(range(len(units)), key=lambda unit: -sum(lengths[row] for row in units[unit]))
        for place, unit in enumerate(by_length):
            turn, hand = divmod(place, world)
            hands[hand if turn % 2 == 0 else world - 1 - hand].append(unit)  # directions alternate, to balance the tokens
    else:  # groups stay together, except those in which the next process begins
        by_group = sorted(range(len(units)), key=lambda unit: prompts.group[units[unit][0]])
        ends = np.cumsum([sum(lengths[row] - prompts.tokens[row] for row in units[unit]) for unit in by_group])
        for unit, end in zip(by_group, ends.tolist(), strict=True):
            hands[-(-end * world // int(ends[-1])) - 1].append(unit)
    plans = [plan([units[unit] for unit in sorted(hand)], lengths, budget, prompts) for hand in hands]
    most = max(map(len, plans))
    return [[*mine, *([] for _ in range(most - len(mine)))] for mine in plans]


def collate(samples: Samples, rows: Sequence[int], device: torch.device) -> MicroBatch:
    """Pads the samples at `rows` on the right to one batch; for no rows, returns one two-token row with an empty mask."""
    if not len(rows):
        return MicroBatch(
            rows=(),
            input_ids=torch.zeros(1, 2, dtype=torch.long, device=device),
            lengths=(2,),
            prompt_lengths=(1,),
            same_prompt=(0,),
            completion_ids=torch.zeros(1, 1, dtype=torch.long, device=device),
            mask=torch.zeros(1, 1, dtype=torch.bool, device=device),
            places=torch.zeros(2, 0, dtype=torch.long, device=device),
            sampler_logp=torch.zeros(1, 1, device=device),
        )
    own = [samples[row] for row in rows]
    whole = [np.concatenate([sample.prompt_ids, sample.completion_ids]) for sample in own]
    mask = pad_rows([torch.from_numpy(sample.loss_mask) for sample in own], False)
    prompts = [(sample.group_id, sample.prompt_ids.tobytes()) for sample in own]
    first_of: dict[tuple[int, bytes], int] = {}
    return MicroBatch(
        rows=tuple(rows),
        input_ids=onto(pad_rows([torch.from_numpy(ids) for ids in whole], 0), device).long(),
        lengths=tuple(map(len, whole)),
        prompt_lengths=tuple(len(sample.prompt_ids) for sample in own),
        same_prompt=tuple(first_of.setdefault(prompt, place) for place, prompt in enumerate(prompts)),
        completion_ids=onto(pad_rows([torch.from_numpy(sample.completion_ids) for sample in own], 0), device).long(),
        mask=onto(mask, device),
        places=onto(torch.from_numpy(np.stack(mask.numpy().nonzero())), device),
        sampler_logp=onto(pad_rows([torch.from_numpy(sample.sampler_logp) for sample in own], 0.0), device),
        images=tuple(sample.images for sample in own) if samples.images else (),
    )


def unpad(padded: Sequence[tuple[Sequence[int], Tensor]], offsets: NDArray[np.int64]) -> Tensor:
    """Brings values of micro-batches from their device to the CPU, all at once, and takes off the padding.

    Args:
        padded: the rows of each micro-batch, and their values [B, T].
        offsets: where the values of each row begin in the result, and its length [rows + 1].

    Returns:
        [N] float32, row after row; 0 for rows that are in no micro-batch.
    """
    flat = torch.zeros(int(offsets[-1]))
    if not padded:
        return flat
    values = torch.cat([values.flatten() for _, values in padded]).float().cpu()
    for (rows, _), own in zip(padded, values.split([values.numel() for _, values in padded]), strict=True):
        for row, line in zip(rows, own.view(len(rows), -1), strict=True):
            flat[offsets[row] : offsets[row + 1]] = line[: offsets[row + 1] - offsets[row]]
    return flat


def pad_rows(rows: Sequence[Tensor], value: float) -> Tensor:
    """Pads [L] tensors of unequal lengths on the right with `value` to one [B, longest] tensor."""
    return pad_sequence(list(rows), batch_first=True, padding_value=value)
