"""Splits samples into micro-batches with little padding: sorted by length, within the token budget, cut where it saves time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlgen.losses.inputs import onto
from rlgen.rollout.samples import Samples
from rlgen.types import MicroBatch, Sample

# Fixed cost of a micro-batch, in tokens: one more micro-batch must save more padding than that. For large train batches it is a
# share of all tokens, so that the number of micro-batches stays bounded. With lengths exponential, log-normal or uniform up
# to 480, padding then stays below 10 % of the completion tokens (tests/rollout/test_batch.py).
LAUNCH_TOKENS = 48
LAUNCH_SHARE = 0.005
IN_ORDER = 1.03  # the most that processes compute or wait, as a share of the mean, for which groups stay in order
TRIED = 8  # units for each move
MOVES = 16  # of single rows for each process, at most, after that
BALANCE = 1.02  # the most that a process computes, as a share of the mean, for which packed groups are not divided further


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
    units: Sequence[Sequence[int]],
    lengths: Sequence[int],
    budget: int,
    world: int,
    prompts: Prompts | None = None,
    attention: float = 0.0,
    sharing: int = 1,
) -> list[list[list[int]]]:
    """Returns the micro-batches of each of `world` processes; each unit goes to one process, and all compute about as much.

    With sharded weights every forward pass is a collective. So all processes get the same number of micro-batches, the costliest
    first; empty ones only where there are fewer units than that. The result depends on the arguments only: each process computes
    the plans of all.

    Args:
        units, lengths, budget, prompts: as in `plan`.
        attention: what it costs a token to attend to another, in costs of all else that is computed for a token.
        sharing: see `Policy.sharing`. Neighbouring processes compute a pass together, and it has the budgets of all of them.
    """
    if not units:
        return [[] for _ in range(world)]
    size, together = len(units[0]), deal_alone(units, lengths, budget * sharing, world // sharing, prompts, attention)
    return [
        [[row for at in range(first * size, len(rows), sharing * size) for row in rows[at : at + size]] for rows in passes]
        for passes in together
        for first in range(sharing)
    ]


def deal_alone(
    units: Sequence[Sequence[int]], lengths: Sequence[int], budget: int, world: int, prompts: Prompts | None, attention: float
) -> list[list[list[int]]]:
    """Does what `deal` does, for processes that compute their passes alone."""
    if world == 1:
        return [plan(units, lengths, budget, prompts)]

    size, cost = len(units[0]), partial(cost_of, lengths=lengths, prompts=prompts, attention=attention)

    def passes(hands: Sequence[Sequence[Sequence[int]]]) -> list[list[list[int]]]:
        most = max(len(plan(hand, lengths, budget, prompts)) for hand in hands)
        while True:  # every process waits for the slowest in each pass
            # Without packing they are sorted by cost: neighbours need little padding.
            divided = [
                balanced(hand, most, cost, prompts) if prompts else neighbours(sorted(hand, key=cost), most, cost)
                for hand in hands
            ]
            full = [[[row for unit in part for row in unit] for part in mine if part] for mine in divided]
            if all(len(rows) <= size or cost(rows, attention=0.0) <= budget for mine in full for rows in mine):
                break
            most += 1
        plans = [even(mine, most, size) for mine in full]
        return [sorted(mine, key=lambda rows: -cost(rows)) for mine in plans]

    if prompts is not None:  # groups that stay in order stay, for the most part, in the process that has sampled them
        found = passes(neighbours(units, world, cost))
        costs = [[cost(rows) for rows in mine] for mine in found]
        if sum(map(max, zip(*costs, strict=True))) <= IN_ORDER * sum(map(sum, costs)) / world:
            return found
    return passes(balanced(units, world, cost, prompts))


def cost_of(rows: Sequence[int], lengths: Sequence[int], prompts: Prompts | None, attention: float) -> float:
    """Returns what a micro-batch costs, in costs of a token without attention; the arguments are those of `deal`."""
    if prompts is None:
        longest = max((lengths[row] for row in rows), default=0)
        return len(rows) * longest * (1 + attention * longest / 2)
    of_prompt = {prompts.group[row]: int(prompts.tokens[row]) for row in rows}
    own = [(lengths[row] - int(prompts.tokens[row]), int(prompts.tokens[row])) for row in rows]
    once = sum(tokens * (1 + attention * tokens / 2) for tokens in of_prompt.values())
    return once + sum(tokens * (1 + attention * (prompt + tokens / 2)) for tokens, prompt in own)


def where_held(
    holder: NDArray[np.int64], lengths: NDArray[np.int64], budget: int, world: int, prompts: Prompts | None, sharing: int
) -> list[list[list[int]]]:
    """Returns the micro-batches of each process, as `deal` does, if each row stays in its process: `holder`, [B] ranks."""
    units = [[[row] for row in np.flatnonzero(holder // sharing == group).tolist()] for group in range(world // sharing)]
    planned = [plan(own, lengths.tolist(), budget * sharing, prompts) for own in units]
    together = [even(passes, max(map(len, planned))) for passes in planned]
    return [[[row for row in rows if holder[row] == rank] for rows in together[rank // sharing]] for rank in range(world)]


def neighbours(units: Sequence[Sequence[int]], count: int, cost: Callable[[Sequence[int]], float]) -> list[list[Sequence[int]]]:
    """Divides units into `count` shares of about equal cost, each of which follows the one before it."""
    shares: list[list[Sequence[int]]] = [[] for _ in range(count)]
    costs = list(map(cost, units))
    share, before = sum(costs) / count, 0.0
    for unit, own in zip(units, costs, strict=True):
        shares[min(int((before + own / 2) / share), count - 1)].append(unit)
        before += own
    return shares


def balanced(
    units: Sequence[Sequence[int]], world: int, cost: Callable[[Sequence[int]], float], prompts: Prompts | None
) -> list[list[Sequence[int]]]:
    """Divides units among processes by cost. Packed groups stay whole, or as whole as the balance allows.

    Where one unit costs more than a share, nothing lowers the highest cost, so the next ones decide: the others are balanced too.
    """
    of_group: dict[int, list[Sequence[int]]] = {}
    for place, unit in enumerate(units):
        of_group.setdefault(place if prompts is None else int(prompts.group[unit[0]]), []).append(unit)
    pieces, best, least = list(of_group.values()), [list(units)], [np.inf]
    while True:
        shares = differencing([cost([row for unit in piece for row in unit]) for piece in pieces], world)
        found = [[unit for place in sorted(share) for unit in pieces[place]] for share in shares]
        found = found if prompts is None else levelled(found, cost)
        costs = [cost([row for unit in share for row in unit]) for share in found]  # pieces of a group share their prompt again
        if (highest := sorted(costs, reverse=True)) < least:
            best, least = found, highest
        halves = [half for piece in pieces for half in (piece[: len(piece) // 2], piece[len(piece) // 2 :]) if half]
        if max(costs) <= BALANCE * sum(costs) / world or len(halves) == len(pieces):
            return best
        pieces = halves


def levelled(shares: Sequence[Sequence[Sequence[int]]], cost: Callable[[Sequence[int]], float]) -> list[list[Sequence[int]]]:
    """Moves single units from the costliest share to the cheapest while that lowers the cost of the costliest."""
    found = [list(share) for share in shares]

    def of(share: Sequence[Sequence[int]]) -> float:
        return cost([row for unit in share for row in unit])

    costs = [of(share) for share in found]
    for _ in range(MOVES * len(found)):
        most, least = int(np.argmax(costs)), int(np.argmin(costs))
        half, tried = (costs[most] - costs[least]) / 2, []
        for place in sorted(range(len(found[most])), key=lambda place: abs(cost(found[most][place]) - half))[:TRIED]:
            giver, taker = found[most][:place] + found[most][place + 1 :], [*found[least], found[most][place]]
            tried.append((max(of(giver), of(taker)), place, giver, taker))
        highest, _, giver, taker = min(tried, default=(np.inf, 0, [], []))
        if highest >= costs[most]:
            break
        found[most], found[least], costs[most], costs[least] = giver, taker, of(giver), of(taker)
    return found


def differencing(costs: Sequence[float], count: int) -> list[list[int]]:
    """Divides items into `count` shares of nearly equal cost, by Karmarkar and Karp's largest differencing (1982).

    Each partition of the heap lists its shares from the costliest to the cheapest. The two whose shares differ most become one:
    the costliest share of one joins the cheapest of the other.
    """
    if not costs:
        return [[] for _ in range(count)]
    empty: list[tuple[float, list[int]]] = [(0.0, [])] * (count - 1)
    heap = [(-cost, place, [(cost, [place]), *empty]) for place, cost in enumerate(costs)]
    heapify(heap)
    while len(heap) > 1:
        (_, place, first), (_, _, second) = heappop(heap), heappop(heap)
        joined = [(ours + theirs, mine + others) for (ours, mine), (theirs, others) in zip(first, reversed(second), strict=True)]
        joined.sort(key=lambda share: -share[0])
        heappush(heap, (joined[-1][0] - joined[0][0], place, joined))
    return [share for _, share in heap[0][2]]


def even(micro_batches: Sequence[Sequence[int]], count: int, size: int = 1) -> list[list[int]]:
    """Returns `count` micro-batches of the same rows: the longest are halved; empty ones are added if there are too few units.
    `size`: rows of a unit, which stay together.
    """
    found = [list(rows) for rows in micro_batches]
    while len(found) < count:
        longest = max(found, key=len, default=[])
        half = len(longest) // size // 2 * size
        found.append(longest[half:] if half else [])
        if half:
            del longest[half:]
    return found


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
        experts=onto(experts_of(own, max(map(len, whole))), device) if samples.experts else None,
    )


def experts_of(own: Sequence[Sample], width: int) -> Tensor:
    """Returns the experts of rows of `width` tokens with padding, [B, S, layers, k] int16; -1 where they are not known."""
    shape = max(sample.experts.shape[1:] for sample in own)
    experts = torch.full((len(own), width, *shape), -1, dtype=torch.int16)
    for row, sample in zip(experts, own, strict=True):
        if len(sample.experts):
            row[: len(sample.experts)] = torch.from_numpy(sample.experts.astype(np.int16))
    return experts


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
