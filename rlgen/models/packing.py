"""Lays the rows of a micro-batch end to end in one sequence without padding, in which each prompt of a group stands once.

The sequence has each prompt, and after all of them what each row alone has: its completion without the last token, which
predicts nothing. So each token is computed once. Only attention looks at others (`models.packed_attention`); everything else in a
decoder is computed from one token alone, or the model is not packed.
"""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from rlgen.models.decoder import decoder_of, one_sequence_a_row
from rlgen.models.half import HALF
from rlgen.models.memory import keeps_states
from rlgen.models.packed_attention import NAME, Rows
from rlgen.out_of_memory import is_out_of_memory, one_line

KNOWN_LAYERS = {"full_attention", "sliding_attention"}  # kinds of layers, as configs name them, that this attention computes
MOST_CHECKED = 8192  # tokens of the longest prompt that `pack` tries
# Largest distance of hidden states, packed and by themselves, relative to their size: in float32, and in half precision, in which
# two kernels round differently in every layer.
BOUND, BOUND_HALF = 1e-4, 0.05
# The same of rows of few tokens when the row before them is another one.
SEEN, SEEN_HALF = 1e-5, 0.01


def packed_states(decoder: nn.Module, padded: Tensor, rows: Rows) -> Tensor:
    """Computes the last hidden states [N, H] of the packed sequence of `rows`, whose ids are padded on the right, [B, S]."""
    states: Tensor = decoder(
        input_ids=rows.packed(padded), position_ids=rows.positions, use_cache=False, packed_rows=rows
    ).last_hidden_state
    return states[0]


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether there are kernels for packed rows: on the CPU; on a GPU of compute capability 8.0 or more in bfloat16."""
    return device.type == "cpu" or (dtype == HALF and torch.cuda.get_device_capability(device) >= (8, 0))


@torch.no_grad()
def pack(model: PreTrainedModel) -> str | None:
    """Makes `model` compute packed rows, after a comparison of three packed rows with the same rows by themselves.

    Returns:
        None; or why the model is not packed. It is then left as it was.
    """
    before, name, config = model.config._attn_implementation, type(model).__name__, model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if keeps_states(config) or kinds - KNOWN_LAYERS:
        return f"{name} has layers that carry what they have read from one row into the next one"
    if before != "sdpa":
        return f"{name} computes its attention by `{before}`, and rows are packed for `sdpa` alone"
    decoder, device = decoder_of(model), model.device
    window = getattr(config, "sliding_window", None) or 0
    most = getattr(config, "max_position_embeddings", None) or MOST_CHECKED
    prompt = min(max(window, 3) + 1, MOST_CHECKED, most - 4)  # longer than the window, so that the window shows
    ids = [(torch.arange(length, device=device) * step) % 7 + 3 for length, step in ((prompt + 4, 1), (prompt + 3, 1), (7, 2))]
    ids[1][prompt:] += 1  # the second row has the prompt of the first
    rows = Rows.of([len(row) for row in ids], (prompt, prompt, 3), (0, 0, 2), device)
    counts = [own + 1 for own in rows.own]
    places = rows.places(
        rows.on_device([np.repeat(np.arange(3), counts)]), rows.on_device([np.arange(count) for count in counts])
    )
    with one_sequence_a_row():
        alone = [decoder(input_ids=row[None], use_cache=False).last_hidden_state[0] for row in ids]
        expected = torch.cat([states[-1 - count : -1] for states, count in zip(alone, counts, strict=True)]).float()
        model.set_attn_implementation(NAME)
        reason = None
        try:
            together = packed_states(decoder, pad_sequence(ids, batch_first=True), rows)[places].float()
            ids[0][:prompt] += 1
            beside_others = packed_states(decoder, pad_sequence(ids, batch_first=True), rows)[places].float()
        except Exception as error:  # each architecture has code of its own, and may fail in any way
            if is_out_of_memory(error):
                raise
            reason = f"{name} cannot compute packed rows ({one_line(error)})"
    if reason is None:
        gap = ((together - expected).norm() / expected.norm()).item()
        exact, others = alone[0].dtype == torch.float32, slice(-counts[2], None)
        if not gap <= (BOUND if exact else BOUND_HALF):
            reason = f"{name} computes other hidden states for packed rows: they differ by {gap:.2g} of their size"
        # Experts multiply the tokens of all rows together, in matrices of other sizes: the last bits may differ.
        elif not (together[others] - beside_others[others]).norm() <= (SEEN if exact else SEEN_HALF) * expected[others].norm():
            reason = f"{name} lets a packed row see the row before it"
    if reason is not None:
        model.set_attn_implementation(before)
    return reason
