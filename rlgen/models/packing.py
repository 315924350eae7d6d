"""Lays the rows of a micro-batch end to end in one sequence without padding, and computes attention within each row.

The attention is registered with transformers as `rlgen_rows`. It has no mask, whose size would be the square of all tokens: on a
GPU torch's kernel for rows of many lengths gets where each row ends (`torch.nn.attention.varlen`), elsewhere each row is computed
by itself. Everything else in a decoder is computed from one token alone, or the model is not packed.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rlgen.losses.inputs import onto
from rlgen.models.decoder import decoder_of, one_sequence_a_row
from rlgen.models.half import HALF
from rlgen.models.memory import keeps_states
from rlgen.out_of_memory import is_out_of_memory, one_line

NAME = "rlgen_rows"  # of the attention, among those of transformers
KNOWN_LAYERS = {"full_attention", "sliding_attention"}  # kinds of layers, as configs name them, that this attention computes
MOST_CHECKED = 8192  # tokens of the longest row that `pack` tries
# Largest distance of hidden states, packed and by themselves, relative to their size: in float32, and in half precision, in which
# two kernels round differently in every layer.
BOUND, BOUND_HALF = 1e-4, 0.05
# The same of a row of four tokens when the row before it is another one.
SEEN, SEEN_HALF = 1e-5, 0.01


@dataclass(frozen=True, slots=True)
class Rows:
    """Where each row is in a packed sequence of N tokens. The lengths are known to the program without asking the device."""

    lengths: tuple[int, ...]  # [B]
    device: torch.device

    @property
    def starts(self) -> Tensor:
        """Returns the place of each row's first token, [B] long."""
        return self.ends[:-1].long()

    @property
    def ends(self) -> Tensor:
        """Returns 0 and the place behind each row, [B + 1] int32."""
        return onto(torch.from_numpy(np.append(0, np.cumsum(self.lengths)).astype(np.int32)), self.device)

    @property
    def positions(self) -> Tensor:
        """Returns the position of each token in its row, [1, N] long."""
        return onto(torch.from_numpy(np.concatenate([np.arange(length) for length in self.lengths]))[None], self.device)

    def packed(self, padded: Tensor) -> Tensor:
        """Returns ids [1, N] of rows that are padded on the right, [B, S]."""
        width = padded.shape[1]
        own = [row * width + np.arange(length) for row, length in enumerate(self.lengths)]
        return padded.flatten()[onto(torch.from_numpy(np.concatenate(own)), self.device)][None]

    def hidden(self, decoder: nn.Module, padded: Tensor) -> Tensor:
        """Computes the last hidden states [N, H] of rows that are padded on the right, [B, S]."""
        ends, longest = self.ends, max(self.lengths)
        states: Tensor = decoder(
            input_ids=self.packed(padded),
            position_ids=self.positions,
            use_cache=False,
            # Names that transformers has for them, for its own flash attention; `row_lengths` is for `attention`.
            cu_seq_lens_q=ends,
            cu_seq_lens_k=ends,
            max_length_q=longest,
            max_length_k=longest,
            row_lengths=self.lengths,
        ).last_hidden_state
        return states[0]


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    row_lengths: tuple[int, ...] | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Computes causal attention within each row of a packed sequence, in the form that transformers calls.

    Args:
        query: [1, heads, N, D]; `key` and `value` may have fewer heads.
        sliding_window: tokens that each token sees, itself included.
        row_lengths: of the rows; None: the sequences are padded, each is one row, and any padding is on the right.
        others: what else a model gives; `pack` finds out whether its results need any of it.

    Returns:
        [1, N, heads, D].
    """
    if row_lengths is None:
        return one_row(module, query, key, value, dropout, scaling, sliding_window), None
    if query.is_cuda and cu_seq_lens_q is not None and max_length_q is not None:
        from torch.nn.attention.varlen import varlen_attn  # loads the kernels of a GPU

        # Tokens that are more than the window's size - 1 back are not seen.
        window = (-1 if sliding_window is None else sliding_window - 1, 0)
        query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        mixed: Tensor = varlen_attn(  # type: ignore[assignment]  # a pair only where more is asked for
            query,
            key,
            value,
            cu_seq_lens_q,
            cu_seq_lens_q,
            max_length_q,
            max_length_q,
            scale=scaling,
            window_size=window,
            enable_gqa=key.shape[1] != query.shape[1],
        )
        return mixed[None], None
    rows = zip(*(tensor.split(row_lengths, dim=2) for tensor in (query, key, value)), strict=True)
    return torch.cat([one_row(module, q, k, v, dropout, scaling, sliding_window) for q, k, v in rows], dim=1), None


def one_row(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, dropout: float, scaling: float | None, window: int | None
) -> Tensor:
    """Computes causal attention by torch's fused kernel: [B, heads, L, D] -> [B, L, heads, D]."""
    length, mask = query.shape[2], None
    if window is not None and length > window:
        place = torch.arange(length, device=query.device)
        back = place[:, None] - place
        mask = ((back >= 0) & (back < window))[None, None]
    mixed: Tensor = sdpa_attention_forward(module, query, key, value, mask, dropout, scaling, is_causal=True)[0]
    return mixed


AttentionInterface.register(NAME, attention)


def kernel_for(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether packing is faster than padding here: on a GPU of compute capability 8.0 or more, in half precision."""
    return device.type == "cuda" and dtype == HALF and torch.cuda.get_device_capability(device) >= (8, 0)


@torch.no_grad()
def pack(model: PreTrainedModel) -> str | None:
    """Makes `model` compute packed rows, after a comparison of two packed rows with the same rows by themselves.

    Returns:
        None; or why the model is not packed. It is then left as it was.
    """
    before, name, config = model.config._attn_implementation, type(model).__name__, model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if keeps_states(config) or kinds - KNOWN_LAYERS:
        return f"{name} has layers that carry what they have read from one row into the next one"
    if before not in ("sdpa", "flash_attention_2"):
        return f"{name} computes its attention by `{before}`, with a mask of all tokens by all tokens"
    decoder, device = decoder_of(model), model.device
    window = getattr(config, "sliding_window", None) or 0
    most = getattr(config, "max_position_embeddings", None) or MOST_CHECKED
    first, second = min(window + 5, MOST_CHECKED, most), 4  # the first is longer than the window, so that the window shows
    ids = torch.arange(first + second, device=device) % 7 + 3
    rows = Rows((first, second), device)
    padded = torch.zeros(2, first, dtype=torch.long, device=device)
    padded[0], padded[1, :second] = ids[:first], ids[first:]
    with one_sequence_a_row():
        alone = decoder(input_ids=padded, use_cache=False).last_hidden_state
        expected = torch.cat([alone[0], alone[1, :second]]).float()
        if before == "sdpa":
            model.set_attn_implementation(NAME)
        reason = None
        try:
            together = rows.hidden(decoder, padded).float()
            padded[0] = ids[:first] + 1
            beside_others = rows.hidden(decoder, padded).float()
        except Exception as error:  # each architecture has code of its own, and may fail in any way
            if is_out_of_memory(error):
                raise
            reason = f"{name} cannot compute packed rows ({one_line(error)})"
    if reason is None:
        gap = ((together - expected).norm() / expected.norm()).item()
        exact = alone.dtype == torch.float32
        if not gap <= (BOUND if exact else BOUND_HALF):
            reason = f"{name} computes other hidden states for packed rows: they differ by {gap:.2g} of their size"
        # Experts multiply the tokens of all rows together, in matrices of other sizes: the last bits may differ.
        elif not (together[first:] - beside_others[first:]).norm() <= (SEEN if exact else SEEN_HALF) * expected[first:].norm():
            reason = f"{name} lets a packed row see the row before it"
    if reason is not None and before == "sdpa":
        model.set_attn_implementation(before)
    return reason
