"""Builds tiny random models for smoke runs and tests, from a config and a byte-level tokenizer, without a network.

`tiny:qwen3` names a folder in the cache that transformers and vLLM open like any other. The same name gives the same bytes.
`tiny:qwen3-untied` and `tiny:llama-tied` set whether embedding and head are tied; by default `tiny:qwen3` is tied and
`tiny:llama` is not, like their large relatives.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerFast

from rlgen.errors import SetupError
from rlgen.models.weights import own_tensors

PAD, END_OF_TEXT, TURN_START, TURN_END = "<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# head_dim 32 is the smallest that vLLM's CPU attention kernel supports.
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    # Larger than the usual 0.02, with which the logits at this width are so flat that a test cannot detect a stale weight.
    "initializer_range": 0.06,
}

BUILD = 2  # must be increased when a change of `build_tiny` changes the weights of a model

EXPERTS: dict[str, object] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
# Shorter than a probe's samples, so that the probe detects if trainer and vLLM use different windows.
WINDOW: dict[str, object] = {"sliding_window": 16}


@dataclass(frozen=True, slots=True)
class Architecture:
    """The settings in which a tiny model of one architecture differs from SHAPE."""

    special: str  # what is special about it, shown in tables
    tied: bool  # whether embedding and head are tied by default, as in its large relatives
    settings: dict[str, object] = field(default_factory=dict)
    both: bool = True  # whether the other tying is allowed; not where vLLM would then serve another model


# By transformers' model type. `scripts/parity.py` measures each of them against vLLM.
ARCHITECTURES: dict[str, Architecture] = {
    "qwen3": Architecture("queries and keys normed", tied=True),
    "llama": Architecture("the plain form", tied=False),
    "qwen2": Architecture("biases of queries, keys, values", tied=True),
    "mistral": Architecture("window", tied=False, settings=WINDOW),
    "gemma3_text": Architecture(
        "window, scaled embeddings, norms before and after blocks", tied=True, settings={"query_pre_attn_scalar": 32, **WINDOW}
    ),
    "olmo3": Architecture("window, norms after blocks", tied=False, settings=WINDOW),
    "smollm3": Architecture("layers without positions", tied=True),
    "ernie4_5": Architecture("interleaved rotation", tied=True),
    "exaone4": Architecture("window, norms after blocks", tied=False, settings=WINDOW),
    "glm4": Architecture("norms before and after blocks, half rotated", tied=False),
    "phi3": Architecture("packed projections", tied=False),
    "nemotron": Architecture("layer norms that add one to the weight, squared ReLU", tied=False),
    "stablelm": Architecture("layer norms, quarter rotated", tied=False),
    "starcoder2": Architecture("layer norms, biases everywhere", tied=True),
    # Every head has its own key and value; vLLM reads num_key_value_heads, which the model itself ignores.
    "gpt_neox": Architecture("parallel blocks, packed projections", tied=False, settings={"num_key_value_heads": 4}),
    "gpt2": Architecture("learned positions, transposed weights", tied=True, settings={"n_inner": 384}),
    # Output heads with a bias, a scale or a cap.
    # The bias of a tied head does not change in a sync: vLLM's reload restores the old one.
    "phi": Architecture("head with a bias", tied=False, both=False),
    "granite": Architecture(
        "scaled logits, attention, residuals, embeddings",
        tied=False,
        settings={"logits_scaling": 4.0, "attention_multiplier": 0.25, "residual_multiplier": 0.5, "embedding_multiplier": 3.0},
    ),
    # vLLM ignores an untied head of cohere. Its successor cohere2 is left out: vLLM's window is one token longer.
    "cohere": Architecture("scaled logits, parallel blocks", tied=True, settings={"logit_scale": 0.25}, both=False),
    # The caps are 50 and 30 in its large relatives; these are low enough to affect a random model. vLLM has no untied head of it.
    "gemma2": Architecture(
        "soft-capped logits and attention, window",
        tied=True,
        settings={"final_logit_softcapping": 1.0, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 32, **WINDOW},
        both=False,
    ),
    "qwen3_moe": Architecture(
        "8 experts, weights sum to one", tied=False, settings={**EXPERTS, "num_experts": 8, "norm_topk_prob": True}
    ),
    "qwen2_moe": Architecture(
        "8 experts and a shared one", tied=False, settings={**EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 128}
    ),
    "mixtral": Architecture("4 experts", tied=False, settings={"num_local_experts": 4}),
    # vLLM does not load the weights of tied heads of olmoe and glm4_moe.
    "olmoe": Architecture("8 experts", tied=False, settings={"num_experts": 8, "num_experts_per_tok": 2}, both=False),
    "granitemoe": Architecture(
        "4 experts, scaled logits", tied=True, settings={"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 4.0}
    ),
    "glm4_moe": Architecture(
        "4 experts and a shared one, router with a correction bias, first layer dense",
        tied=False,
        settings={**EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1},
        both=False,
    ),
}


def names() -> list[str]:
    """Returns the full names of all tiny models, such as "qwen3-tied" and "qwen3-untied"."""
    tyings = {base: (True, False) if one.both else (one.tied,) for base, one in ARCHITECTURES.items()}
    return [f"{base}-{'tied' if tied else 'untied'}" for base, allowed in tyings.items() for tied in allowed]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token per byte, four special tokens and Qwen's chat template.

    Ids 0-255 are the characters of the byte-level alphabet in sorted order.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([PAD, END_OF_TEXT, TURN_START, TURN_END])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=TURN_END,
        additional_special_tokens=[END_OF_TEXT, TURN_START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=SHAPE["max_position_embeddings"],
    )


def special_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int | None]:
    """Returns the settings of a model's config that follow from its tokenizer, besides the size of the vocabulary."""
    return {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}


def cache_dir() -> Path:
    """Returns the folder for tiny models: $RLGEN_CACHE, else ~/.cache/rlgen."""
    return Path(os.environ.get("RLGEN_CACHE") or Path.home() / ".cache" / "rlgen")


def parse_name(name: str) -> tuple[str, bool]:
    """Returns architecture and whether embedding and head are tied: "qwen3-untied" -> ("qwen3", False).

    Raises:
        SetupError: there is no such tiny model.
    """
    base, _, tying = name.partition("-")
    if base not in ARCHITECTURES or tying not in ("", "tied", "untied"):
        raise SetupError(
            f"model.path: tiny:{name} is not a tiny model; there are "
            + ", ".join(f"tiny:{known}" for known in ARCHITECTURES)
            + ", each also with -tied or -untied, and tiny:idefics3, which reads images"
        )
    architecture = ARCHITECTURES[base]
    tied = architecture.tied if not tying else tying == "tied"
    if tied != architecture.tied and not architecture.both:
        raise SetupError(f"model.path: tiny:{name}: vLLM serves {base} {'tied' if architecture.tied else 'untied'} only")
    return base, tied


def build_tiny(name: str) -> Path:
    """Returns the folder of the tiny model `name` (without "tiny:"), built on first use. Raises SetupError if there is none."""
    base, tied = parse_name(name)
    tokenizer = byte_tokenizer()
    settings = {**SHAPE, **ARCHITECTURES[base].settings, "vocab_size": len(tokenizer), "tie_word_embeddings": tied}
    config = CONFIG_MAPPING[base](**settings, **special_ids(tokenizer))
    made_from = [config.to_diff_dict(), CHAT_TEMPLATE, torch.__version__, BUILD]
    name = f"{base}-{'tied' if tied else 'untied'}"
    return in_cache(name, made_from, lambda folder: save_random(config, tokenizer, folder))


def in_cache(name: str, made_from: list[Any], save: Callable[[Path], None]) -> Path:
    """Returns the folder of a tiny model, which `save` writes unless it is there.

    Args:
        made_from: all that decides its bytes.
    """
    digest = hashlib.sha256(json.dumps(made_from, default=str).encode())
    folder = cache_dir() / "tiny" / f"{name}-{digest.hexdigest()[:12]}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Atomic rename: another process never sees an incomplete model.
    aside = Path(tempfile.mkdtemp(dir=folder.parent))
    save(aside)
    try:
        aside.rename(folder)
    except OSError:  # another process was faster: the bytes are the same
        shutil.rmtree(aside)
    return folder


def save_random(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast, folder: Path, kind: Any = AutoModelForCausalLM
) -> None:
    """Writes a random model of `config` and its tokenizer into `folder`. The same config gives the same bytes.

    Args:
        kind: transformers' class that makes a model of a config.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind.from_config(config, dtype=torch.float32)
        for tensor in own_tensors(model).values():
            if tensor.is_floating_point() and not tensor.any():
                tensor.normal_(std=0.1)  # biases start at zero, and a test could not detect a missing one
    end_ids = tokenizer.convert_tokens_to_ids([TURN_END, END_OF_TEXT])
    model.generation_config = GenerationConfig(eos_token_id=end_ids, pad_token_id=tokenizer.pad_token_id, do_sample=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
