"""Recorded kernels compute from what stands in memory when they are called again, and nothing else is recorded."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rlgen.engines.cpu_decode.recording import record

WEIGHT, BIAS = torch.randn(6, 4), torch.randn(6)


def layers(x: Tensor, other: Tensor) -> tuple[Tensor, ...]:
    """Views, copies, kernels that change what they are given, and kernels that have no variant that writes into memory."""
    rows = torch.nn.functional.linear(x.view(3, 4), WEIGHT, BIAS)
    first, second = rows.chunk(2, dim=-1)
    gated = torch.nn.functional.silu(first) * second.contiguous()
    gated.mul_(other)
    values, places = gated.softmax(-1).topk(2)
    return torch.nn.functional.layer_norm(gated, (3,)), values.float(), places, torch.cat([gated, first.cos()], dim=1)


@torch.inference_mode()
def test_repeated_kernels_compute_from_what_stands_in_memory() -> None:
    draw = torch.Generator().manual_seed(0)
    x, other = torch.randn(12, generator=draw), torch.randn(3, 3, generator=draw)
    told, recording = record(lambda: layers(x, other), [other])
    assert recording is not None and all(map(torch.equal, told, layers(x, other)))
    for _ in range(3):
        x.normal_(generator=draw)
        other = torch.randn(3, 3, generator=draw)  # in other memory
        expected = layers(x, other)
        repeated = recording.repeat([other])
        assert all(map(torch.equal, expected, repeated)) and all(one is two for one, two in zip(repeated, told, strict=True))
    assert not any(call.kernel is torch.ops.aten.view.default for call in recording.calls)


@pytest.mark.parametrize(
    "step",
    [
        lambda x: (x.exp(),),
        lambda x: (x * float(x[0]),),  # a number that the program reads
        lambda x: (x * (2.0 if x.sum() > 0 else 1.0),),
        lambda x: (x + torch.tensor([1.0]),),  # a tensor that the program makes
        lambda x: (x.fill_(1.0),),
    ],
)
@torch.inference_mode()
def test_a_step_with_another_kernel_is_not_recorded(step: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
    x = torch.arange(4.0)
    expected = step(x.clone())
    told, recording = record(lambda: step(x), [])
    assert recording is None and torch.equal(told[0], expected[0])
