"""Small reward models, made from a config."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from rlgen.models.tiny import build_tiny


def make_reward_model(folder: Path, labels: int = 1, pad: bool = False) -> Path:
    """Writes a random sequence-classification model with the tokenizer of tiny:qwen3; its config declares no padding unless
    `pad`.
    """
    source = build_tiny("qwen3")
    config, tokenizer = AutoConfig.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    config.num_labels, config.num_hidden_layers, config.layer_types = labels, 2, config.layer_types[:2]
    config.pad_token_id = tokenizer.pad_token_id if pad else None
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    torch.random.set_rng_state(state)
    tokenizer.save_pretrained(folder)
    return folder
