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
from transformers.utils.hub import is_offline_mode, try_to_load_from_cache

from rlgen.errors import Problem, RecipeError, SetupError
from rlgen.models.tiny import build_tiny
from rlgen.models.weights import non_finite, own_tensors

CONVERT = (
    "convert it once where that does no harm: `AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)` writes"
    " safetensors"
)
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
        return AutoTokenizer.from_pretrained(location, revision=revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise SetupError(why(location, revision, "a tokenizer", error)) from error


def load_config(location: str, revision: str | None) -> PreTrainedConfig:
    """Raises SetupError where there is none, or one that only the repository's own code understands."""
    try:
        return AutoConfig.from_pretrained(location, revision=revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise SetupError(why(location, revision, "a config", error)) from error


def why(location: str, revision: str | None, what: str, error: Exception) -> str:
    """One message for what transformers and the hub say in many ways; their long advice is left out."""
    named = location if revision is None else f"{location} (revision {revision})"
    said = " ".join(str(error).split())
    if "trust_remote_code" in said:
        return (
            f"model.path: {named} needs Python code of its own repository, which rlgen never runs; take a model whose"
            " architecture transformers has built in"
        )
    if location.startswith("/"):
        return f"model.path: {named} holds no {what.removeprefix('a ')} that can be loaded: {said[:500]}"
    return (
        f"model.path: the hub gives no {what.removeprefix('a ')} of {named}: {bottom(error)}. Check name, revision and"
        " network; for a gated model accept its terms and log in with `hf auth login`"
    )


def bottom(error: BaseException) -> str:
    """The network's or the hub's own word, which stands first in the chain of causes."""
    seen: list[BaseException] = [error]
    while (below := seen[-1].__cause__ or seen[-1].__context__) is not None and below not in seen:
        seen.append(below)
    said = " ".join(str(seen[-1]).split()) or type(seen[-1]).__name__
    return said.partition(" For more information check")[0][:300]


def cached_model(location: str, revision: str | None) -> str | None:
    """What is said of a model of the hub while the environment forbids the network (HF_HUB_OFFLINE, TRANSFORMERS_OFFLINE)."""
    if Path(location).is_dir() or not is_offline_mode():
        return None
    config = try_to_load_from_cache(location, "config.json", revision=revision)
    commit = f", commit {Path(config).parent.name}" if isinstance(config, str) else ""
    return f"offline: model.path {location} is taken from the cache{commit}"


def check_model(location: str, revision: str | None, tokenizer: PreTrainedTokenizerBase, longest: int) -> None:
    """What can be known before any weight is read.

    Args:
        longest: tokens of a prompt and its completion.

    Raises:
        RecipeError: the model has not so many positions.
        SetupError: no config, code of the repository's own, a tokenizer that is larger than the embedding, or weights that only
            pickle can open.
    """
    config = load_config(location, revision)
    held, used = getattr(config.get_text_config(), "vocab_size", None), max(tokenizer.get_vocab().values(), default=-1) + 1
    if held is not None and used > held:
        raise SetupError(
            f"model.path: the tokenizer of {location} has ids up to {used - 1}, but the model has embeddings of {held} only: ids"
            " beyond cannot be looked up; take the tokenizer that belongs to the model, or resize the embedding"
        )
    if (most := positions(config)) is not None and longest > most:
        both = f"data.max_prompt_tokens + rollout.max_completion_tokens = {longest}"
        what, hint = f"{both}, but model.path {location} has {most} positions", f"lower one of them: {most} together at most"
        raise RecipeError([Problem("rollout.max_completion_tokens", what, hint)])
    folder = Path(location)
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        pickled = sorted(file.name for file in folder.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        raise SetupError(
            f"model.path: {location} holds no weights in safetensors"
            + (f", only {pickled[0]}: that is a pickle, which can run code when it is opened; {CONVERT}" if pickled else "")
        )


def positions(config: PreTrainedConfig) -> int | None:
    """How many positions a model has, at most; None: its config does not say.

    Where a rotation is stretched, some configs say the number before and some the one after: the larger is meant here.
    """
    text = config.get_text_config()
    most, rotation = getattr(text, "max_position_embeddings", None), getattr(text, "rope_parameters", None) or {}
    kinds = [rotation, *(kind for kind in rotation.values() if isinstance(kind, dict))]  # one, or one for each kind of layer
    return int(most * max(1, *(kind.get("factor") or 1 for kind in kinds))) if isinstance(most, int) and most > 0 else None


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
        SetupError: missing files, unknown architecture, or weights that are not safetensors, not complete or not finite; for
            `quantization`, no GPU or no bitsandbytes.
    """
    packed = None if quantization is None else quantized(quantization, dtype, device)
    try:
        config = load_config(location, revision)
        # torch's fused attention cannot cap its logits and leaves the cap out, silently: another model than vLLM serves.
        caps = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
        model, report = AutoModelForCausalLM.from_pretrained(
            location,
            revision=revision,
            dtype=dtype,
            attn_implementation="eager" if caps and attention == "sdpa" else attention,
            use_safetensors=True,  # pickled weights are never opened
            trust_remote_code=False,
            output_loading_info=True,
            **({} if packed is None else packed),
        )
    except (OSError, ValueError, ImportError) as error:
        hint = f"; if it has pickled weights only, {CONVERT}" if "safetensors" in str(error) else ""
        raise SetupError(f"model.path: {location} cannot be loaded: {' '.join(str(error).split())}{hint}") from error
    if missing := sorted(report["missing_keys"]):
        raise SetupError(f"model.path: {location} has no weights for {', '.join(missing[:5])}: they would be random")
    if packed is None:
        model = model.to(device)
    if name := non_finite(own_tensors(model).items()):
        raise SetupError(
            f"model.path: {location}: {name} has values that are not finite, and so would be all that is computed with it; take"
            " another model, or an earlier checkpoint"
        )
    return model.eval()


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
