"""The models and batches that the rows measure: random weights, so that no network is needed."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gpu_rows.record import Place

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Qwen3Config

    from rlgen.types import MicroBatch

# As in the config.json of Qwen/Qwen3-0.6B: 596,049,920 parameters.
LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 320,
    "max_position_embeddings": 4096,
}


def config_of(place: Place, **changes: int) -> Qwen3Config:
    """Returns the config of Qwen3-0.6B; in a rehearsal that of a model of 0.1 million parameters."""
    from transformers import Qwen3Config

    shape = {**(LARGE if place.gpu else SMALL), **changes}
    return Qwen3Config(**shape, tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e6})


def random_model(config: Qwen3Config, device: str) -> PreTrainedModel:
    """Returns a model with random float32 weights, the same on each call, whose logits are not flat: they differ by some nats."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_(std=0.06)
    return model.eval()


def random_batch(rows: int, length: int, prompt: int, vocabulary: int, device: str) -> MicroBatch:
    """Returns `rows` rows of `length` random ids, the same on each call and device, of which all but the prompt count."""
    from rlgen.types import MicroBatch

    ids = torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(0)).to(device)
    counted = torch.ones_like(ids[:, prompt:], dtype=torch.bool)
    return MicroBatch(
        rows=tuple(range(rows)),
        input_ids=ids,
        lengths=(length,) * rows,
        prompt_lengths=(prompt,) * rows,
        same_prompt=tuple(range(rows)),
        completion_ids=ids[:, prompt:],
        mask=counted,
        places=counted.nonzero().T,
        sampler_logp=torch.zeros(rows, length - prompt, device=device),
    )


def saved_model(place: Place) -> Path:
    """Returns a folder with the model of `config_of` and a byte tokenizer; makes it on first use.

    Of its ids only the tokenizer's are ever looked up, so the vocabulary is as small as 32,768 to save time.
    """
    folder = Path(place.folder) / "model"
    if folder.is_dir():
        return folder
    from transformers import GenerationConfig

    from rlgen.models.tiny import byte_tokenizer

    tokenizer = byte_tokenizer()
    config = config_of(place, vocab_size=32_768) if place.gpu else config_of(place)
    config.eos_token_id, config.pad_token_id, config.bos_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id, None
    model = random_model(config, "cpu")
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    aside = Path(tempfile.mkdtemp(dir=place.folder))
    model.save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    try:
        os.rename(aside, folder)
    except OSError:  # another row was faster
        shutil.rmtree(aside)
    return folder
