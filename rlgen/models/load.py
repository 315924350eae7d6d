"""Loads the tokenizer, the config, the model and its stop ids from `model.path`, and explains why it cannot."""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.distributed import DistributedConfig
from transformers.utils.hub import is_offline_mode, try_to_load_from_cache

from rlgen.errors import SetupError
from rlgen.models.decoder import attention_of
from rlgen.models.tiny import build_tiny
from rlgen.models.tiny_vision import NAME, build_tiny_vision
from rlgen.models.vision import reads_images
from rlgen.models.weights import non_finite, own_tensors
from rlgen.recipe.paths import like

WEIGHT_SHARDS = "state/weights"  # the folder in a checkpoint of sharded weights
CONVERT = (
    "convert it once where it can do no harm: `AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)`"
    " writes safetensors"
)


def locate(path: str) -> str:
    """Returns the folder or hub id that `model.path` names; builds a tiny model on first use.

    Raises:
        SetupError: there is no such tiny model, or the folder has no config.json.
    """
    if path.startswith("tiny:"):
        name = path.removeprefix("tiny:")
        return str(build_tiny_vision() if name == NAME else build_tiny(name))
    hint = "name a folder that save_pretrained wrote, or a hub id"
    if path.startswith("/") and not Path(path).is_dir():
        hint = like(path) or f"{hint}; for a demo `rlgen recipes warm-start RECIPE` makes it"
        raise SetupError(f"model.path: there is no folder {path}; {hint}")
    if path.startswith("/") and not (Path(path) / "config.json").is_file():
        if (Path(path) / "adapter_config.json").is_file():
            hint = "it is an adapter: `rlgen export` merges it into a model"
        raise SetupError(f"model.path: {path} holds no config.json; {hint}")
    if (Path(path) / WEIGHT_SHARDS).is_dir():
        raise SetupError(f"model.path: {path} is a checkpoint of shards; `rlgen export` makes a model of them")
    return path


def load_tokenizer(location: str, revision: str | None) -> PreTrainedTokenizerBase:
    """Loads the tokenizer. Raises SetupError if there is none or it cannot be loaded."""
    tokenizer: PreTrainedTokenizerBase = from_files(transformers.AutoTokenizer, "tokenizer", location, revision)
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):  # what transformers makes of a config alone
        raise SetupError(f"model.path: {location} holds no tokenizer; copy the files of the one that its model was trained with")
    return tokenizer


def load_config(location: str, revision: str | None) -> PreTrainedConfig:
    """Loads the config. Raises SetupError if there is none, or if it needs the repository's own code."""
    return from_files(transformers.AutoConfig, "config", location, revision)


def from_files(kind: Any, what: str, location: str, revision: str | None) -> Any:
    try:
        return kind.from_pretrained(location, revision=revision, trust_remote_code=False)
    except (OSError, ValueError, StrictDataclassError) as error:
        raise SetupError(why(location, revision, what, error)) from error


def why(location: str, revision: str | None, what: str, error: Exception) -> str:
    """Returns one error message for the many errors of transformers and the hub, without their long advice."""
    named = location if revision is None else f"{location} (revision {revision})"
    said = " ".join(str(error).split())
    if "trust_remote_code" in said:
        return (
            f"model.path: {named} needs Python code of its own repository, which rlgen never runs; take a model whose"
            " architecture transformers has built in"
        )
    if location.startswith("/"):
        return f"model.path: {named} holds no {what} that can be loaded: {said[:500]}"
    return (
        f"model.path: the hub did not provide the {what} of {named}: {bottom(error)}. Check name, revision and"
        " network; for a gated model accept its terms and log in with `hf auth login`"
    )


def bottom(error: BaseException) -> str:
    """Returns the message of the first error in the chain of causes, which is the network's or the hub's own."""
    seen: list[BaseException] = [error]
    while (below := seen[-1].__cause__ or seen[-1].__context__) is not None and below not in seen:
        seen.append(below)
    said = " ".join(str(seen[-1]).split()) or type(seen[-1]).__name__
    return said.partition(" For more information check")[0][:300]


def cached_model(location: str, revision: str | None) -> str | None:
    """Returns a line that names the cached model, or None if the network is allowed.

    HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE switch the network off.
    """
    if Path(location).is_dir() or not is_offline_mode():
        return None
    config = try_to_load_from_cache(location, "config.json", revision=revision)
    commit = f", commit {Path(config).parent.name}" if isinstance(config, str) else ""
    return f"offline: model.path {location} is taken from the cache{commit}"


def check_model(location: str, revision: str | None, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Checks everything that can be checked before any weight is read.

    Returns:
        The model's positions; None: its config names none.

    Raises:
        SetupError: no config, code of the repository's own, a tokenizer larger than the embedding, or weights that only pickle
            can open.
    """
    config = load_config(location, revision)
    held, used = getattr(config.get_text_config(), "vocab_size", None), max(tokenizer.get_vocab().values(), default=-1) + 1
    if held is not None and used > held:
        raise SetupError(
            f"model.path: the tokenizer of {location} has ids up to {used - 1}, but the model has only {held} embeddings;"
            " take the tokenizer that belongs to the model, or resize the embedding"
        )
    folder = Path(location)
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        pickled = sorted(file.name for file in folder.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        raise SetupError(
            f"model.path: {location} holds no weights in safetensors"
            + (f", only {pickled[0]}: that is a pickle, which can run code when it is opened; {CONVERT}" if pickled else "")
        )
    return positions(config)


def class_of(config: PreTrainedConfig) -> Any:
    """Returns the class of transformers, which has no type, that opens a model of this config."""
    return transformers.AutoModelForImageTextToText if reads_images(config) else transformers.AutoModelForCausalLM


def without_values(location: str, revision: str | None) -> PreTrainedModel:
    """Returns the model of a config on the meta device, in float32: names, shapes and layout are all that is asked of it."""
    config = load_config(location, revision)
    with torch.device("meta"):
        model: PreTrainedModel = class_of(config).from_config(config, dtype=torch.float32)
    return model


def positions(config: PreTrainedConfig) -> int | None:
    """Returns the model's maximum number of positions, or None if its config does not say.

    Where rotary embeddings are scaled, some configs give the number before and some the one after scaling: returns the larger.
    """
    text = config.get_text_config()
    most, rotation = getattr(text, "max_position_embeddings", None), getattr(text, "rope_parameters", None) or {}
    kinds = [rotation, *(kind for kind in rotation.values() if isinstance(kind, dict))]  # for all layers, or one for each kind
    return int(most * max(1, *(kind.get("factor") or 1 for kind in kinds))) if isinstance(most, int) and most > 0 else None


def load_model(
    location: str,
    revision: str | None,
    dtype: torch.dtype,
    attention: str,
    device: torch.device,
    quantization: str | None = None,
    divide: Callable[[PreTrainedModel], None] | None = None,
) -> PreTrainedModel:
    """Loads a causal language model in evaluation mode: no dropout, so that a forward pass depends only on ids and weights.

    Args:
        quantization: holds the linear layers except the head as `nf4` or `int8`, frozen.
        divide: called with the model on the meta device. It may shard it: of each DTensor only this process's shard is read.
            Whole tensors are read to the CPU, and not moved to `device`.

    Raises:
        SetupError: missing files, an unknown architecture, or weights that are not safetensors, incomplete or not finite; for
            `quantization`, no GPU or no bitsandbytes.
    """
    extra: dict[str, Any] = {} if quantization is None else quantized(quantization, dtype, device)
    if divide is not None:
        extra["distributed_config"] = DistributedConfig(tp_size=1)  # 5.17 computes with a size that is not given
    try:
        config = load_config(location, revision)
        kind = class_of(config)
        with nullcontext() if divide is None else before_values(divide):
            model, report = kind.from_pretrained(
                location,
                revision=revision,
                dtype=dtype,
                attn_implementation=attention_of(config, attention),
                use_safetensors=True,  # pickled weights are never opened
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # told below, in one line
                output_loading_info=True,
                **extra,
            )
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        hint = f"; if it has pickled weights only, {CONVERT}" if "safetensors" in str(error) else ""
        hint = "; a file of its weights is damaged or incomplete: fetch it again" if isinstance(error, SafetensorError) else hint
        said = " ".join(str(error).split()).partition(" Model type should be one of")[0]
        raise SetupError(f"model.path: {location} cannot be loaded: {said[:500]}{hint}") from error
    for name, *shapes in sorted(report["mismatched_keys"]):
        in_files, by_config = map(list, shapes)
        raise SetupError(f"model.path: {location}: {name} has the shape {in_files} in its files, {by_config} by its config.json")
    if missing := sorted(report["missing_keys"]):
        raise SetupError(f"model.path: {location} has no weights for {', '.join(missing[:5])}: they would be random")
    if divide is not None:
        del model.config.distributed_config
    elif quantization is None:
        model = model.to(device)
    if name := non_finite(own_tensors(model).items()):
        raise SetupError(
            f"model.path: {location}: {name} has values that are not finite, so that no result would be finite; take"
            " another model, or an earlier checkpoint"
        )
    return model.eval()


@contextmanager
def before_values(work: Callable[[PreTrainedModel], None]) -> Iterator[None]:
    """Makes `from_pretrained(distributed_config=...)` inside the block call `work` with the model on the meta device.

    That is where transformers shards a model by its own plans, which few architectures have and which leave out the head that
    rlgen computes itself.
    """

    def distribute(kind: type[PreTrainedModel], model: PreTrainedModel, *_: object) -> PreTrainedModel:
        work(model)
        return model

    PreTrainedModel.maybe_distribute_model = classmethod(distribute)
    try:
        yield
    finally:
        del PreTrainedModel.maybe_distribute_model  # the inherited one is in its place again


def quantized(kind: str, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Returns the quantisation arguments of `from_pretrained`. Raises SetupError where bitsandbytes cannot run."""
    if device.type != "cuda":
        raise SetupError(f"model.quantization: {kind} needs an NVIDIA GPU; remove it, it saves memory on GPUs only")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise SetupError(
            f'model.quantization: {kind} needs the package bitsandbytes: pip install "rlgen[bitsandbytes]", or remove the key'
        )
    four_bits = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype}
    settings = {"load_in_8bit": True} if kind == "int8" else four_bits
    return {"quantization_config": transformers.BitsAndBytesConfig(**settings), "device_map": {"": device}}


def stop_ids(tokenizer: PreTrainedTokenizerBase, location: str, revision: str | None) -> tuple[int, ...]:
    """Returns all ids that end a completion: the tokenizer's EOS id and those of the checkpoint's generation config.

    Raises:
        SetupError: there is none, so no completion could end.
    """
    try:
        configured = transformers.GenerationConfig.from_pretrained(location, revision=revision).eos_token_id
    except OSError:  # many checkpoints have no generation config
        configured = None
    listed = [configured] if isinstance(configured, int) else list(configured or [])
    found = sorted({tokenizer.eos_token_id, *listed} - {None})
    if not found:
        raise SetupError(f"model.path: neither tokenizer nor generation config of {location} names an EOS token")
    return tuple(found)
