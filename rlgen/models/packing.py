"""Lays the rows of a micro-batch end to end in one sequence without padding, in which each prompt of a group stands once.

The sequence has each prompt, and after all of them what each row alone has: its completion without the last token, which
predicts nothing. So each token is computed once. Only attention looks at others (`models.packed_attention`); everything else in a
decoder is computed from one token alone, or the model is not packed.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig, PreTrainedModel

from rlgen.errors import SetupError
from rlgen.models.decoder import decoder_of, one_sequence_a_row
from rlgen.models.half import HALF, WIDER, computed_in
from rlgen.models.memory import keeps_states
from rlgen.models.memory_errors import refused_with
from rlgen.models.packed_attention import NAME, PackedRows

KNOWN_LAYERS = {"full_attention", "sliding_attention"}  # kinds of layers, as configs name them, that this attention computes
MOST_CHECKED = 8192  # tokens of the longest prompt that `make_packed` tries
PROMPT, COMPLETION = 64, 16  # tokens of a prompt that is tried, and most of what follows it
# Packed hidden states may be FACTOR times as far from exact ones as those of the same rows by themselves; the bound is at least
# LEAST and at most MOST, relative to their size.
FACTOR, LEAST, MOST = 3.0, 1e-6, 0.2
SEEN = 1e-5  # least change of a row, relative to its size, that shows that it sees the row before it


def packed_states(decoder: nn.Module, padded: Tensor, rows: PackedRows) -> Tensor:
    """Computes the last hidden states [N, H] of the packed sequence of `rows`, whose ids are padded on the right, [B, S]."""
    ids, positions = rows.mine(rows.packed(padded)[None], 1), rows.mine(rows.positions, 1)
    states: Tensor = decoder(input_ids=ids, position_ids=positions, use_cache=False, packed_rows=rows).last_hidden_state
    return (states if rows.context is None else rows.context.whole(states))[0]


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether there are kernels for packed rows: on the CPU; on a GPU of compute capability 8.0 or more in bfloat16."""
    return device.type == "cpu" or (dtype == HALF and torch.cuda.get_device_capability(device) >= (8, 0))


@torch.no_grad()
def make_packed(model: PreTrainedModel, prompts: Sequence[NDArray[np.int32]], dtype: torch.dtype) -> str | None:
    """Makes `model` compute packed rows, after a comparison of three packed rows with the same rows by themselves.

    Both are compared with the same rows in a wider dtype: packing may round differently, but not by more.

    Args:
        prompts: ids of texts of the run. With ids that no text has, half precision is far from exact however it is computed.
        dtype: in which the model computes.

    Returns:
        None; or why the model is not packed. It is then left as it was.
    """
    before, name, config = model.config._attn_implementation, type(model).__name__, model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if keeps_states(config) or kinds - KNOWN_LAYERS:
        return f"{name} has layers that carry their state from one row into the next"
    if before != "sdpa":
        return f"{name} computes its attention by `{before}`, but rows can be packed for `sdpa` only"
    decoder = decoder_of(model)
    ids, prompt_lengths = rows_of_text(prompts, config, model.device)
    lengths = [len(row) for row in ids]
    rows = PackedRows.of(lengths, prompt_lengths, (0, 0, 2), model.device)
    counts = [length - prompt for length, prompt in zip(lengths, prompt_lengths, strict=True)]
    places = rows.places(
        rows.on_device([np.repeat(np.arange(3), counts)]), rows.on_device([np.arange(count) for count in counts])
    )

    def by_themselves() -> Tensor:
        alone = [decoder(input_ids=row[None], use_cache=False).last_hidden_state[0] for row in ids]
        return torch.cat([states[-1 - count : -1] for states, count in zip(alone, counts, strict=True)]).double()

    with one_sequence_a_row():
        alone = by_themselves()
        reason = None
        try:
            with refused_with(f"{name} cannot compute packed rows ({{}})"):
                with computed_in(model, dtype, WIDER[dtype]):
                    exact = by_themselves()
                model.set_attn_implementation(NAME)
                together = packed_states(decoder, pad_sequence(ids, batch_first=True), rows)[places].double()
                ids[0][: prompt_lengths[0]] = ids[0][: prompt_lengths[0]].flip(0)
                beside_others = packed_states(decoder, pad_sequence(ids, batch_first=True), rows)[places].double()
        except SetupError as error:
            reason = str(error)
    if reason is None:
        noise, gap = apart(alone, exact), apart(together, exact)
        bound = min(max(FACTOR * noise, LEAST), MOST)
        others = slice(-counts[2], None)
        if not gap <= bound:
            reason = (
                f"{name} computes other hidden states for packed rows: they are {gap:.2g} of their size from exact ones, the"
                f" bound is {bound:.2g} (rows by themselves: {noise:.2g})"
            )
        # Experts multiply the tokens of all rows together, in matrices of other sizes: the last bits may differ.
        elif not (seen := apart(beside_others[others], together[others])) <= max(noise, SEEN):
            reason = f"{name} lets a packed row see the row before it (its hidden states change by {seen:.2g} of their size)"
    if reason is not None:
        model.set_attn_implementation(before)
    return reason


def rows_of_text(
    prompts: Sequence[NDArray[np.int32]], config: PreTrainedConfig, device: torch.device
) -> tuple[list[Tensor], tuple[int, int, int]]:
    """Returns three rows of natural ids, and how many of each are the prompt: the first two rows have the same one.

    A prompt is longer than the window of the model's attention, so that the window shows.
    """
    text = np.concatenate(list(prompts)).astype(np.int64)
    window = getattr(config, "sliding_window", None) or 0
    most = min(getattr(config, "max_position_embeddings", None) or MOST_CHECKED, MOST_CHECKED)
    first = min(max(window + 1, min(PROMPT, len(text))), most - COMPLETION)
    second, after = max(min(first // 2, PROMPT), 1), text[len(text) // 2 :]
    parts = ((first, COMPLETION, 0), (first, COMPLETION - 1, 1), (second, COMPLETION - 3, 2))
    ids = [np.concatenate((np.resize(text, prompt), np.resize(np.roll(after, -turn), own))) for prompt, own, turn in parts]
    return [torch.from_numpy(row).to(device) for row in ids], (first, first, second)


def apart(one: Tensor, other: Tensor) -> float:
    """Returns the distance of two tensors, relative to the size of the second one."""
    return ((one - other).norm() / other.norm()).item()
