"""Finds the decoder of a causal language model, and the attention that computes it."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
    masking_utils,
)


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """Returns the part of a model whose last hidden states go into its head."""
    # `get_decoder` returns the whole model where its class has the name prefix of a larger model (Llama 4), and the head
    # where that is called decoder (ModernBERT).
    found: list[nn.Module] = [model.get_decoder(), model.base_model, getattr(model, "model", model)]
    return next((part for part in found if isinstance(part, PreTrainedModel) and part is not model), model)


def attention_of(config: PreTrainedConfig, asked: str) -> str:
    """Returns the attention for a model of `config`: `eager` if torch's fused one, `sdpa`, would compute another model.

    Args:
        asked: `model.attention` of the recipe.
    """
    if asked != "sdpa":
        return asked
    other = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), PreTrainedModel)
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), other)
    # The fused attention ignores a cap of its logits without an error. transformers handles the others itself (sinks, ALiBi).
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    return "sdpa" if kind._supports_sdpa and not capped else "eager"


@contextmanager
def one_sequence_a_row() -> Iterator[None]:
    """Tells transformers inside the block that no row holds several sequences.

    Otherwise it checks the position ids on the device, and so waits for the device in every forward pass.
    """
    looks = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = looks
