"""Tiny random models for smoke runs and tests: built from a config and a byte-level tokenizer, without a network.

`tiny:qwen3` names a folder in the cache that transformers and vLLM open like any other. The same name gives the same bytes.
`tiny:qwen3-untied` and `tiny:llama-tied` turn the tying of embedding and head around; `tiny:qwen3` is tied,
`tiny:llama` is not, as their large relatives.
"""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from rlgen.errors import SetupError

PAD, END_OF_TEXT, TURN_START, TURN_END = "<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# head_dim 32 is the smallest that the CPU attention kernel of vLLM takes.
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    # Larger than the usual 0.02: at this width the logits of a fresh model would be flat, and a stale weight would not show.
    "initializer_range": 0.06,
}

# name -> (transformers' model type, tied by default, settings beyond SHAPE)
ARCHITECTURES: dict[str, tuple[str, bool, dict[str, object]]] = {
    "qwen3": ("qwen3", True, {}),
    "llama": ("llama", False, {}),
    "qwen2": ("qwen2", True, {}),
    # Logits are divided by 4 and capped at 30: what a head computes beyond a product.
    "granite": ("granite", False, {"logits_scaling": 4.0}),
    # Attention is not capped: torch's fused attention cannot, so trainer and engine would differ by 3e-4.
    "gemma2": (
        "gemma2",
        True,
        {
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": None,
            "query_pre_attn_scalar": 32,
            "sliding_window": 4096,
        },
    ),
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, four special tokens, the chat layout of Qwen. Ids 0-255 are bytes in the order of the alphabet."""
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


def cache_dir() -> Path:
    """Where tiny models are kept: $RLGEN_CACHE, else ~/.cache/rlgen."""
    return Path(os.environ.get("RLGEN_CACHE") or Path.home() / ".cache" / "rlgen")


def parse_name(name: str) -> tuple[str, bool]:
    """("qwen3-untied") -> ("qwen3", False): architecture and whether embedding and head are tied.

    Raises:
        SetupError: no such tiny model.
    """
    base, _, tying = name.partition("-")
    if base not in ARCHITECTURES or tying not in ("", "tied", "untied"):
        raise SetupError(
            f"model.path: tiny:{name} is not a tiny model; there are "
            + ", ".join(f"tiny:{known}" for known in ARCHITECTURES)
            + ", each also with -tied or -untied"
        )
    return base, ARCHITECTURES[base][1] if not tying else tying == "tied"


def build_tiny(name: str) -> Path:
    """Returns the folder of the tiny model `name` (without "tiny:"), building it on first use.

    Raises:
        SetupError: no such tiny model.
    """
    base, tied = parse_name(name)
    model_type, _, extra = ARCHITECTURES[base]
    tokenizer = byte_tokenizer()
    settings = {**SHAPE, **extra, "vocab_size": len(tokenizer), "tie_word_embeddings": tied}
    end_ids = [tokenizer.convert_tokens_to_ids(token) for token in (TURN_END, END_OF_TEXT)]
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": end_ids[0], "bos_token_id": None}
    config = CONFIG_MAPPING[model_type](**settings, **special)

    digest = hashlib.sha256(json.dumps([config.to_diff_dict(), CHAT_TEMPLATE, torch.__version__], default=str).encode())
    folder = cache_dir() / "tiny" / f"{base}-{'tied' if tied else 'untied'}-{digest.hexdigest()[:12]}"
    if folder.is_dir():
        return folder
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Written aside, then renamed: a second process never sees half a model.
    aside = Path(tempfile.mkdtemp(dir=folder.parent))
    model.generation_config = GenerationConfig(eos_token_id=end_ids, pad_token_id=tokenizer.pad_token_id, do_sample=True)
    model.save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    try:
        aside.rename(folder)
    except OSError:  # another process was faster: the bytes are the same
        shutil.rmtree(aside)
    return folder
