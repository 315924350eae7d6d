"""Computes causal attention within each row of a packed sequence (`models.packing`), in which rows share their prompts.

What a token of a completion sees has two parts: its prompt, and its own row before it. Attention over both is the mean of the
attentions over each, weighted by how much each part weighs in the softmax, exp(logsumexp): so no prompt is copied to its rows,
and no score is computed that a mask would discard. Backward, each part has its own gradient of the whole, by the same kernel,
given the output and the logsumexp of the whole (Dao, FlashAttention-2, arXiv:2307.08691, section 3.1; Liu et al., Ring Attention,
arXiv:2310.01889).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AttentionInterface

from rlgen.losses.inputs import onto
from rlgen.models.parallel import ContextParallel

NAME = "rlgen_rows"  # of the attention, among those of transformers
# Parts are computed together if the longest has at most a quarter and so many tokens more than the shortest.
SIMILAR = 16
UNSEEN = -1e30  # score of a token outside of the window: finite, so that a token that sees nothing of a part has no NaN there

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, slots=True)
class Look:
    """Some queries and the keys that they see: places in the packed sequence, of one part [slice] or of G parts [G, n]."""

    queries: slice | Tensor
    keys: slice | Tensor
    stored: slice | Tensor  # where results go: `queries`, but N for the padding of parts that are computed together
    causal: bool  # the i-th query sees keys up to the i-th; False: it sees all of them
    behind: NDArray[np.int64]  # [n] how many tokens each query is behind the first key

    def options(self, like: Tensor, scaling: float | None, window: int | None) -> dict[str, Any]:
        """Returns the arguments of torch's kernel besides its tensors. It has a mask only if the window is shorter than rows."""
        if window is None or self.behind.max(initial=0) < window:
            return {"is_causal": self.causal, "attn_mask": None, "scale": scaling}
        count = len(self.behind) if self.causal else self.keys.stop - self.keys.start  # type: ignore[union-attr]  # a slice
        back = torch.from_numpy(self.behind[:, None] - np.arange(count))
        seen = (back >= 0) & (back < window)
        mask = torch.zeros(seen.shape, dtype=like.dtype).masked_fill(~seen, UNSEEN)[None, None]
        return {"is_causal": False, "attn_mask": mask, "scale": scaling}


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Where the tokens of B rows with P prompts are in a packed sequence of N. All of it is known without asking the device.

    The sequence has the prompts, and then what each row alone has, prompt by prompt.
    """

    prompts: tuple[int, ...]  # [P] tokens of each prompt
    own: tuple[int, ...]  # [B] tokens that each row alone has: those of its completion but the last one
    prompt_of: tuple[int, ...]  # [B] prompt of each row; does not fall
    row_of: tuple[int, ...]  # [B] place of each row in the batch
    first_of: tuple[int, ...]  # [P] place in the batch of the first row with each prompt
    device: torch.device
    context: ContextParallel | None = None  # the processes that share out the tokens

    @classmethod
    def of(
        cls, lengths: Sequence[int], prompt_lengths: Sequence[int], same_prompt: Sequence[int], device: torch.device
    ) -> "PackedRows":
        """Returns the places of rows with `lengths` tokens; `same_prompt` has the first row with the prompt of each, [B]."""
        order = sorted(range(len(lengths)), key=lambda row: same_prompt[row])
        firsts = sorted(set(same_prompt))
        return cls(
            prompts=tuple(prompt_lengths[row] for row in firsts),
            own=tuple(lengths[row] - prompt_lengths[row] - 1 for row in order),
            prompt_of=tuple(firsts.index(same_prompt[row]) for row in order),
            row_of=tuple(order),
            first_of=tuple(firsts),
            device=device,
        )

    def mine(self, packed: Tensor, dim: int) -> Tensor:
        """Returns the tokens that this process computes, of a packed tensor whose tokens are along `dim`."""
        return packed if self.context is None else self.context.mine(packed, dim)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Returns the tokens of each part: of prompts, and of what each row alone has, [P + B]."""
        return np.array((*self.prompts, *self.own))

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """Returns 0 and the place behind each part, [P + B + 1]."""
        return np.append(0, np.cumsum(self.lengths))

    @cached_property
    def before(self) -> NDArray[np.int64]:
        """Returns how many tokens a row has before each part, [P + B]."""
        return np.array((*(0 for _ in self.prompts), *(self.prompts[prompt] for prompt in self.prompt_of)))

    @cached_property
    def positions(self) -> Tensor:
        """Returns the position of each token in its row, [1, N] long."""
        return self.on_device(spans(self.before, self.lengths))[None]

    def packed(self, padded: Tensor) -> Tensor:
        """Returns what the tokens have, [N, ...], given rows that are padded on the right, [B, S, ...]."""
        rows = np.repeat(np.array((*self.first_of, *self.row_of)), self.lengths)  # of the batch
        places = np.concatenate(spans(self.before, self.lengths))
        return padded.flatten(0, 1)[self.on_device([rows * padded.shape[1] + places])]

    def places(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Returns where the states are that predict tokens of completions: those at `columns` [n] of `rows` [n].

        The state at a token predicts the next one, and the last one of the prompt the first of the completion.
        """
        own = np.argsort(self.row_of)  # part of each row of the batch
        ends_of_prompts = self.on_device([self.ends[1:][np.array(self.prompt_of)[own]] - 1])
        before_own = self.on_device([self.ends[:-1][len(self.prompts) + own] - 1])
        return torch.where(columns == 0, ends_of_prompts[rows], before_own[rows] + columns)

    @cached_property
    def queries(self) -> tuple[Tensor, int]:
        """Returns 0 and the place behind each part [P + B + 1] int32, and the tokens of the longest one."""
        return self.on_device([self.ends]).int(), int(self.lengths.max())

    @cached_property
    def keys(self) -> tuple[Tensor, Tensor, int]:
        """Returns what each part sees: the places of its keys, part after part; 0 and the end of each [P + B + 1] int32; most."""
        parts, prompts = spans(self.ends[:-1], self.lengths), len(self.prompts)
        seen = [*parts[:prompts], *(np.append(parts[p], own) for p, own in zip(self.prompt_of, parts[prompts:], strict=True))]
        counts = [len(one) for one in seen]
        return self.on_device(seen), self.on_device([np.append(0, np.cumsum(counts))]).int(), max(counts)

    @cached_property
    def looks(self) -> list[Look]:
        """Returns looks that cover all queries once: parts of similar lengths together, each with itself as keys."""
        found, total = [], self.ends[-1]
        for parts in self.similar():
            own, column = self.lengths[parts][:, None], np.arange(self.lengths[parts[0]])
            first = self.ends[parts][:, None]
            read = torch.from_numpy(first + np.minimum(column, own - 1))
            stored = torch.from_numpy(np.where(column < own, first + column, total))
            found.append(Look(read, read, stored, causal=True, behind=column))
        return found

    @cached_property
    def looks_at_prompts(self) -> list[Look]:
        """Returns looks that cover the queries of completions once more, with their prompts as keys."""
        found, begin = [], len(self.prompts)
        for prompt in range(len(self.prompts)):
            end = begin + self.prompt_of.count(prompt)
            own = slice(int(self.ends[begin]), int(self.ends[end]))
            if own.start < own.stop:
                positions = np.concatenate(spans(self.before[begin:end], self.lengths[begin:end]))
                seen = slice(int(self.ends[prompt]), int(self.ends[prompt + 1]))
                found.append(Look(own, seen, own, causal=False, behind=positions))
            begin = end
        return found

    def similar(self) -> list[list[int]]:
        """Returns the parts that have tokens, in sets of similar lengths, the longest first."""
        found: list[list[int]] = []
        for part in sorted(np.flatnonzero(self.lengths).tolist(), key=lambda part: -self.lengths[part]):
            if found and self.lengths[found[-1][0]] <= 1.25 * self.lengths[part] + SIMILAR:
                found[-1].append(part)
            else:
                found.append([part])
        return found

    def on_device(self, parts: Sequence[NDArray[np.int64]]) -> Tensor:
        """Returns the arrays, end to end, on the device."""
        return onto(torch.from_numpy(np.concatenate(parts)), self.device)


def spans(firsts: NDArray[np.int64], lengths: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Returns the numbers from each first one on, as many as its length."""
    return [np.arange(first, first + length) for first, length in zip(firsts, lengths, strict=True)]


def take(tensor: Tensor, where: slice | Tensor) -> Tensor:
    """Returns parts of a packed tensor [N, heads, D] as the kernel reads them, [G, heads, n, D]."""
    parts = tensor[where]
    return parts.transpose(0, 1)[None] if isinstance(where, slice) else parts.transpose(1, 2)


def scatter(tensor: Tensor, where: slice | Tensor, parts: Tensor) -> None:
    """Stores [G, heads, n, D] in a packed tensor [N, heads, D]."""
    tensor[where] = parts[0].transpose(0, 1) if isinstance(where, slice) else parts.transpose(1, 2)


class PackedAttention(torch.autograd.Function):
    """Causal attention of packed rows on the CPU: see the top of this file."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, scaling: float | None, window: int | None
    ) -> Tensor:
        """Computes [N, heads, D] from query, key and value of that shape.

        Args:
            window: tokens that each token sees, itself included.
        """
        mixed = query.new_empty(len(query) + 1, *query.shape[1:])
        weight = mixed.new_empty(*mixed.shape[:2], 1, dtype=torch.promote_types(query.dtype, torch.float32))
        for look in (*rows.looks, *rows.looks_at_prompts):
            seen = (take(query, look.queries), take(key, look.keys), take(value, look.keys))
            own, logsumexp = flash(*seen, **look.options(query, scaling, window))
            own_weight = logsumexp[..., None]
            if not look.causal:  # the queries have seen their own rows before
                before, both = take(weight, look.queries), torch.logaddexp(take(weight, look.queries), own_weight)
                own = take(mixed, look.queries) * (before - both).exp() + own * (own_weight - both).exp()
                own_weight = both
            scatter(mixed, look.stored, own.to(mixed.dtype))
            scatter(weight, look.stored, own_weight)
        ctx.save_for_backward(query, key, value, mixed, weight)
        ctx.rows, ctx.scaling, ctx.window = rows, scaling, window
        return mixed[:-1]

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mixed, weight = ctx.saved_tensors
        slope = torch.cat([slope, slope.new_zeros(1, *slope.shape[1:])])  # padding has none
        slopes = [torch.empty_like(slope) for _ in range(3)]
        for look in (*ctx.rows.looks, *ctx.rows.looks_at_prompts):
            seen = (take(query, look.queries), take(key, look.keys), take(value, look.keys))
            whole = (take(mixed, look.queries), take(weight, look.queries)[..., 0])
            options = look.options(query, ctx.scaling, ctx.window)
            own = flash_backward(take(slope, look.stored), *seen, *whole, 0.0, options.pop("is_causal"), **options)
            for total, where, part in zip(slopes, (look.stored, look.keys, look.keys), own, strict=True):
                if look.causal:
                    scatter(total, look.stored, part)
                else:
                    scatter(total, where, take(total, where) + part)
        return (*(total[:-1] for total in slopes), None, None, None)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_rows: PackedRows,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Computes causal attention within each row of a packed sequence, in the form that transformers calls.

    Args:
        query: [1, heads, N, D]; `key` and `value` may have fewer heads.
        dropout: 0, as in all that rlgen runs.
        sliding_window: tokens that each token sees, itself included.
        packed_rows: where they are.
        others: further arguments from a model; `make_packed` checks whether its results need any of them.

    Returns:
        [1, N, heads, D].
    """
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if (context := packed_rows.context) is not None:
        if query.shape[1] % context.mesh.size() or key.shape[1] % context.mesh.size():
            raise ValueError(f"{query.shape[1]} and {key.shape[1]} heads cannot be divided over {context.mesh.size()} processes")
        query, key, value = (context.by_heads(tensor, packed_rows.ends[-1]) for tensor in (query, key, value))
    compute = by_kernel if query.is_cuda else on_cpu
    mixed = compute(query, key, value, packed_rows, scaling, sliding_window)
    return (mixed if context is None else context.by_tokens(mixed))[None], None


def on_cpu(query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, scaling: float | None, window: int | None) -> Tensor:
    """Computes the attention [N, heads, D] of all parts on the CPU."""
    if query.shape[-1] != value.shape[-1]:
        raise ValueError("heads of keys and of values differ in size")  # as with latent attention
    queries_a_key = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(queries_a_key, dim=1) for tensor in (key, value))
    mixed: Tensor = PackedAttention.apply(query, key, value, rows, scaling, window)
    return mixed


def by_kernel(query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, scaling: float | None, window: int | None) -> Tensor:
    """Computes the attention [N, heads, D] of all parts by torch's kernel for rows of many lengths, on a GPU."""
    from torch.nn.attention.varlen import varlen_attn  # loads the kernels of a GPU

    (queries, most), (places, keys, most_keys) = rows.queries, rows.keys
    grouped: dict[str, Any] = {}
    if key.shape[1] != query.shape[1]:
        if "enable_gqa" in signature(varlen_attn).parameters:
            grouped["enable_gqa"] = True
        else:  # torch 2.11
            key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in (key, value))
    mixed: Tensor = varlen_attn(  # type: ignore[assignment]  # a pair only on request
        query,
        key[places],
        value[places],
        queries,
        keys,
        most,
        most_keys,
        scale=scaling,
        # The last query of a part sees the last key, and as many more as the window's size - 1 before it.
        window_size=(-1 if window is None else window - 1, 0),
        **grouped,
    )
    return mixed


AttentionInterface.register(NAME, attention)
