"""Attention of packed rows, part by part, against one row after the other by a plain softmax, in float64."""

from collections.abc import Callable
from itertools import product
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
from conftest import CPU
from torch import Tensor, nn
from torch.nn.attention import varlen

from rlgen.models.packed_attention import PackedAttention, PackedRows, attention, by_kernel

# Lengths of rows, of their prompts, and the first row with each prompt: in no order, rows of one token, prompts of one token,
# a row without others, rows of many lengths.
LENGTHS, PROMPTS, SAME = (9, 3, 40, 5, 4, 31, 30), (4, 2, 4, 4, 3, 30, 4), (0, 1, 0, 0, 4, 5, 0)
HEADS, SIZE = 4, 8


def plain(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """[L, heads, D] of one row."""
    length = len(query)
    back = torch.arange(length)[:, None] - torch.arange(length)
    seen = (back >= 0) & (back < (window or length))
    scores = torch.einsum("qhd,khd->hqk", query, key) * 0.3
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)


def expected(rows: PackedRows, query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    parts = [slice(start, end) for start, end in zip(rows.ends[:-1].tolist(), rows.ends[1:].tolist(), strict=True)]
    count = len(rows.prompts)
    found = [plain(query[part], key[part], value[part], window) for part in parts[:count]]
    for prompt, part in zip(rows.prompt_of, parts[count:], strict=True):
        whole = [torch.cat([tensor[parts[prompt]], tensor[part]]) for tensor in (query, key, value)]
        found.append(plain(*whole, window)[rows.prompts[prompt] :])
    return torch.cat(found)


@pytest.mark.parametrize(("window", "dtype"), list(product((None, 1, 3, 17, 500), (torch.float64, torch.float32))))
def test_attention_and_its_gradients_are_those_of_rows_by_themselves(window: int | None, dtype: torch.dtype) -> None:
    rows = PackedRows.of(LENGTHS, PROMPTS, SAME, CPU)
    assert rows.prompts == (4, 2, 3, 30) and rows.row_of == (0, 2, 3, 6, 1, 4, 5) and rows.own == (4, 35, 0, 25, 0, 0, 0)
    draw = torch.Generator().manual_seed(3)
    total = int(rows.ends[-1])
    # Scores of several hundred: where what a token sees of its prompt weighs nothing, or everything, nothing overflows.
    of_plain = [torch.randn(total, HEADS, SIZE, generator=draw, dtype=torch.float64).mul(12).requires_grad_() for _ in range(3)]
    packed = [tensor.detach().to(dtype).requires_grad_() for tensor in of_plain]
    slope = torch.randn(total, HEADS, SIZE, generator=draw, dtype=torch.float64)
    wanted = expected(rows, *of_plain, window)
    mixed = PackedAttention.apply(*packed, rows, 0.3, window)
    wanted.backward(slope)
    mixed.backward(slope.to(dtype))
    close = 1e-12 if dtype == torch.float64 else 1e-4
    assert (mixed - wanted).abs().max() < close * wanted.abs().max()
    slopes, of_rows = (torch.stack([t.grad for t in tensors if t.grad is not None]) for tensors in (packed, of_plain))
    assert slopes.shape == of_rows.shape == (3, total, HEADS, SIZE)
    assert (slopes - of_rows).abs().max() < close * of_rows.abs().max()


def test_a_head_of_keys_serves_several_of_queries() -> None:
    rows = PackedRows.of((9, 7), (4, 4), (0, 0), CPU)
    draw = torch.Generator().manual_seed(0)
    total = int(rows.ends[-1])
    query, key, value = (torch.randn(1, heads, total, SIZE, generator=draw) for heads in (4, 2, 2))
    mixed = attention(nn.Module(), query, key, value, None, scaling=0.3, packed_rows=rows)[0]
    own = [tensor[0].transpose(0, 1).double() for tensor in (query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1))]
    assert mixed.shape == (1, total, 4, SIZE) and (mixed[0] - expected(rows, *own, None)).abs().max() < 1e-6


def test_heads_of_two_sizes_are_refused() -> None:
    rows = PackedRows.of((9, 7), (4, 4), (0, 0), CPU)
    key, value = torch.zeros(1, 2, int(rows.ends[-1]), 8), torch.zeros(1, 2, int(rows.ends[-1]), 4)
    with pytest.raises(ValueError, match="differ in size"):
        attention(nn.Module(), key, key, value, None, packed_rows=rows)


def documented(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    key_ends: Tensor,
    most: int,
    most_keys: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
) -> Tensor:
    """What torch says of its kernel for rows of many lengths: the last query of a part sees the last key of the part."""
    assert ends.dtype == key_ends.dtype == torch.int32 and (most, most_keys) == (ends.diff().max(), key_ends.diff().max())
    assert (
        enable_gqa == (len(key[0]) < len(query[0]))
        and scale == 0.3
        and all(tensor.stride(-1) == 1 for tensor in (query, key, value))
    )
    found = torch.zeros_like(query)
    for part in range(len(ends) - 1):
        own, seen = slice(*ends[part : part + 2].tolist()), slice(*key_ends[part : part + 2].tolist())
        shared = len(query[0]) // len(key[0])
        keys, values = (tensor[seen].repeat_interleave(shared, dim=1) for tensor in (key, value))
        before = len(keys) - len(query[own])
        back = torch.arange(before, len(keys))[:, None] - torch.arange(len(keys))
        left, right = window_size
        out = (back < -right) | ((back > left) & (left >= 0))
        scores = torch.einsum("qhd,khd->hqk", query[own], keys).mul(scale).masked_fill(out, -torch.inf)
        found[own] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    return found


def varlen_of_211(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: None = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """The signature in torch 2.11, which shares no keys among heads."""
    raise NotImplementedError


@pytest.mark.parametrize("kernel", [varlen.varlen_attn, varlen_of_211], ids=["torch", "torch 2.11"])
@pytest.mark.parametrize("window", [None, 1, 3, 17, 500])
def test_what_a_gpu_kernel_is_told_gives_the_attention_of_rows(
    window: int | None, kernel: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", create_autospec(kernel, side_effect=documented))
    rows, draw = PackedRows.of(LENGTHS, PROMPTS, SAME, CPU), torch.Generator().manual_seed(3)
    heads = [torch.randn(count, int(rows.ends[-1]), SIZE, generator=draw, dtype=torch.float64) for count in (4, 2, 2)]
    query, key, value = (tensor.transpose(0, 1) for tensor in heads)
    wanted = expected(rows, query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1), window)
    assert (by_kernel(query, key, value, rows, 0.3, window) - wanted).abs().max() < 1e-12
