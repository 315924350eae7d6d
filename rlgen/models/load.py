"""From `model.path` to a tokenizer, a policy's weights and the ids that end a completion."""

import importlib.util
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rlgen.errors import SetupError
from rlgen.models.tiny import build_tiny

SHAPE = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "tie_word_embeddings"),
)


def locate(path: str) -> str:
    """The folder or hub id behind `model.path`; a tiny model is built on first use.

    Raises:
        SetupError: an unknown tiny model, or a folder that is not there.
    """
    if path.startswith("tiny:"):
        return str(build_tiny(path.removeprefix("tiny:")))
    if path.startswith("/") and not (Path(path) / "config.json").is_file():
        hint = "name a folder that save_pretrained wrote, or a hub id"
        if (Path(path) / "adapter_config.json").is_file():
            hint = "it is an adapter: `rlgen export` merges it into a model"
        raise SetupError(f"model.path: {path} holds no config.json; {hint}")
    return path


def load_tokenizer(location: str, revision: str | None) -> PreTrainedTokenizerBase:
    """Raises SetupError where there is none to load."""
    try:
        return AutoTokenizer.from_pretrained(location, revision=revision)
    except (OSError, ValueError) as error:
        raise SetupError(f"model.path: no tokenizer can be loaded from {location}: {error}") from error


def load_model(
    location: str,
    revision: str | None,
    dtype: torch.dtype,
    attention: str,
    device: torch.device,
    quantization: str | None = None,
) -> PreTrainedModel:
    """A causal language model in evaluation mode: no dropout, so that a forward is a function of ids and weights.

    Args:
        quantization: hold the linear layers but the head as `nf4` or `int8`, frozen.

    Raises:
        SetupError: missing files, unknown architecture, or weights that are neither safetensors nor complete; for
            `quantization`, no GPU or no bitsandbytes.
    """
    packed = None if quantization is None else quantized(quantization, dtype, device)
    try:
        config = AutoConfig.from_pretrained(location, revision=revision)
        # torch's fused attention cannot cap its logits and leaves the cap out, silently: another model than vLLM serves.
        caps = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
        model, report = AutoModelForCausalLM.from_pretrained(
            location,
            revision=revision,
            dtype=dtype,
            attn_implementation="eager" if caps and attention == "sdpa" else attention,
            use_safetensors=True,  # pickled weights are never opened
            output_loading_info=True,
            **({} if packed is None else packed),
        )
    except (OSError, ValueError, ImportError) as error:
        raise SetupError(f"model.path: {location} cannot be loaded: {error}") from error
    if missing := sorted(report["missing_keys"]):
        raise SetupError(f"model.path: {location} has no weights for {', '.join(missing[:5])}: they would be random")
    return (model.to(device) if packed is None else model).eval()


def quantized(kind: str, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """What `from_pretrained` is told in addition. Raises SetupError where bitsandbytes cannot run."""
    if device.type != "cuda":
        raise SetupError(f"model.quantization: {kind} needs an NVIDIA GPU; remove it, it saves memory on GPUs only")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise SetupError(f"model.quantization: {kind} needs the package bitsandbytes; install it, or remove the key")
    if kind == "int8":
        config = BitsAndBytesConfig(load_in_8bit=True)
    else:
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    return {"quantization_config": config, "device_map": {"": device}}


def model_shape(config: PreTrainedConfig) -> dict[str, Any]:
    """What two copies of a model must have in common before weights can go from one to the other."""
    text = config.get_text_config()
    return {name: getattr(text, name, None) for name in SHAPE}


def stop_ids(tokenizer: PreTrainedTokenizerBase, location: str, revision: str | None) -> tuple[int, ...]:
    """Every id that ends a completion: the tokenizer's and those of the checkpoint's generation config.

    Raises:
        SetupError: there is none, so that no completion could end.
    """
    try:
        configured = GenerationConfig.from_pretrained(location, revision=revision).eos_token_id
    except OSError:  # many checkpoints have no generation config
        configured = None
    listed = [configured] if isinstance(configured, int) else list(configured or [])
    found = sorted({tokenizer.eos_token_id, *listed} - {None})
    if not found:
        raise SetupError(f"model.path: neither tokenizer nor generation config of {location} names an EOS token")
    return tuple(found)
