"""Places float32 weights at random among the numbers that round to the same bfloat16, so that small updates are not lost.

A checkpoint in bfloat16 puts each float32 weight in the middle of the numbers that round to it. Near 0.1 the numbers of bfloat16
are 0.0005 apart, and a step of Adam at a learning rate of 5e-6 moves a weight by a hundredth of that. So it takes fifty such
steps until the weight rounds to another number: at first only very small weights change, and the model learns much slower than in
float32.

With dither, a weight that has moved by a hundredth of this distance rounds to another number with a probability of a hundredth.
So the rounded weights move as far as the float32 ones, on average (non-subtractive dither: Wannamaker et al., "A theory of
nonsubtractive dither", IEEE Trans. Signal Processing 48, 2000). At the start the rounded weights are those of the checkpoint.
"""

from collections.abc import Sequence
from zlib import crc32

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlgen.models.half import never_rounded
from rlgen.models.parts import extent_of, part

LOW = 0xFFFF  # the bits of a float32 that bfloat16 lacks
AT_A_TIME = 1 << 20  # numbers, whose random ones take 8 bytes each
MASK = 0xFFFFFFFF


@torch.no_grad()
def dither(model: PreTrainedModel, seed: int) -> None:
    """Moves the trained float32 weights of `model` that are exact in bfloat16, in place; each by less than its rounding allows.

    What is drawn depends on the seed, the weight's name and its place in the whole tensor: it is the same for any sharding.
    """
    kept = never_rounded(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype == torch.float32 and not kept.search(name):
            local, (_, first) = part(parameter.detach()), extent_of(parameter)
            if local.numel():
                move(local, first, parameter.shape, crc32(name.encode(), seed & MASK))


def move(weight: Tensor, first: Sequence[int], whole: Sequence[int], key: int) -> None:
    """Moves the part `weight` of a tensor of the shape `whole`, which begins at the index `first`."""
    weight, first, whole = torch.atleast_1d(weight), first or (0,), whole or (1,)
    rows = max(1, AT_A_TIME * len(weight) // weight.numel())
    for begin in range(0, len(weight), rows):
        bits = weight[begin : begin + rows].view(torch.int32)
        place = torch.zeros((), dtype=torch.int64, device=weight.device)
        for size, offset, length in zip(bits.shape, (first[0] + begin, *first[1:]), whole, strict=True):
            place = place[..., None] * length + torch.arange(offset, offset + size, device=weight.device)
        exact = ((bits & LOW) == 0) & (bits & 0x7FFFFFFF != 0)  # 0 is at the edge of negative numbers, and needs no dither
        bits += torch.where(exact, random_16(place, key) - LOW // 2, 0).int()


def random_16(place: Tensor, key: int) -> Tensor:
    """Returns numbers from 0 to 65,534, a function of `place` and `key` that looks random (the mixing steps of MurmurHash3)."""
    mixed = (place * 0x9E3779B1 + key) & MASK
    for factor, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & MASK
    return (mixed ^ (mixed >> 16)) % LOW
