"""Adds low-rank adapters (LoRA, arXiv 2106.09685) to a model: W x becomes W x + s B (A x), and only A and B are trained.

The layers are peft's and replace the model's own, so that the model keeps the class that transformers gave it. B starts at zero,
so the adapted model equals the base model at first. A checkpoint contains only the adapter, in peft's format.
"""

import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners import tuners_utils
from peft.tuners.lora import LoraLayer
from peft.utils.integrations import dequantize_module_weight
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlgen.errors import CheckpointError, SetupError
from rlgen.models.half import Place, replaced
from rlgen.models.parts import whole

if TYPE_CHECKING:
    from rlgen.recipe.models import LoraRecipe

ALL_LINEAR = "all-linear"
NAME = "default"  # the adapter's name within peft's layers
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
# The prefix of each name in peft's files, which come from a model wrapped in two of peft's classes.
PREFIX = "base_model.model."
# What peft refuses by a name's last part, in models with Mamba layers; a function of its own modules that may go.
PEFT_CHECK = getattr(tuners_utils, "_check_lora_target_modules_mamba", lambda *_: None)
PACKED = {"Params4bit": "nf4", "Int8Params": "int8"}  # classes of bitsandbytes


def add_adapter(model: PreTrainedModel, recipe: "LoraRecipe", seed: int, revision: str | None = None) -> None:
    """Freezes `model` and adds a new adapter to it, in place.

    The adapter is float32 whatever the dtype of the model. Its initial values depend only on `seed`; no global random state is
    used.

    Args:
        revision: revision of the model's hub id, saved for programs that open the adapter later.

    Raises:
        SetupError: a target is no linear layer of the model.
    """
    config = LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,  # type: ignore[arg-type]  # peft divides it by the rank, and accepts any number
        use_rslora=recipe.use_rslora,
        target_modules=targets(model, recipe.targets),
        base_model_name_or_path=model.name_or_path,
        revision=revision,
    )
    inject(model, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in adapted_layers(model).values():
            first, second = factors(layer)
            # As peft does by default: A is initialised as a linear layer, B with zeros.
            first.copy_(nn.init.kaiming_uniform_(torch.empty(first.shape), a=math.sqrt(5), generator=generator))
            second.zero_()


def inject(model: PreTrainedModel, config: LoraConfig) -> None:
    """Replaces the layers that `config` names by adapted ones and freezes `model`. The adapter's values are arbitrary.

    Raises:
        SetupError: peft adapted other layers.
    """
    assert isinstance(config.target_modules, list | set)
    wanted = set(config.target_modules)
    devices = list(range(torch.cuda.device_count()))
    with torch.random.fork_rng(devices), warnings.catch_warnings(), as_if_whole(model):
        warnings.filterwarnings("ignore", message="fan_in_fan_out")  # peft sets it for transposed layers and warns
        inject_adapter_in_model(config, model, NAME)
    adapted = {name.removesuffix(".weight") for name in adapted_layers(model)}
    if adapted != wanted:
        raise SetupError(f"model.lora: peft adapts other layers than requested: {', '.join(sorted(adapted ^ wanted)[:5])}")
    # peft shortens the names to common endings; full names can be read and compared.
    config.target_modules = sorted(wanted)
    for layer in adapted_layers(model).values():
        for factor in factors(layer):
            factor.data = factor.data.float()
            factor.requires_grad_(True)


def as_if_whole(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Replaces sharded weights inside the block by tensors of the whole shape, which take no memory: peft would make adapters for
    the shards.
    """

    def empty(_: Place, shard: Tensor) -> Tensor:
        one = torch.empty(1, dtype=shard.dtype, device=shard.device)
        return nn.Parameter(one.expand(shard.shape), requires_grad=False)

    parameters = [(module, name, own) for module in model.modules() for name, own in module._parameters.items()]
    return replaced([(module, name) for module, name, own in parameters if isinstance(own, DTensor)], empty)


def targets(model: PreTrainedModel, chosen: str | Sequence[str]) -> list[str]:
    """Returns the full names of the layers that `model.lora.targets` selects.

    Raises:
        SetupError: a name matches no linear layer, or peft would treat a layer as an expert.
    """
    layers = linear_layers(model)
    if chosen == ALL_LINEAR:
        return [name for name in layers if not redirected(model, name)]
    endings = [chosen] if isinstance(chosen, str) else list(chosen)
    for ending in endings:
        if not any(ends_with(name, ending) for name in layers):
            raise SetupError(f"model.lora.targets: {no_such_layer(model, ending, layers)}")
    found = [name for name in layers if any(ends_with(name, ending) for ending in endings)]
    if taken := [name for name in found if redirected(model, name)]:
        raise SetupError(
            f"model.lora.targets: peft takes {taken[0]} of {type(model).__name__} for a part of an expert or of a kernel, which"
            " rlgen does not adapt; leave it out"
        )
    return found


def ends_with(name: str, ending: str) -> bool:
    """Returns whether the last dotted parts of `name` are `ending`."""
    return f".{name}".endswith(f".{ending}")


def linear_layers(model: PreTrainedModel) -> list[str]:
    """Returns the names of all linear layers except the head; a router that inherits from one returns more than a product."""
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    head = model.get_output_embeddings()
    return [name for name, module in found if module is not head and not type(module).__name__.endswith("Router")]


def no_such_layer(model: PreTrainedModel, ending: str, layers: Sequence[str]) -> str:
    """Returns the error text for a target that matches no linear layer, with the nearest name."""
    leaves = list(dict.fromkeys(name.rpartition(".")[2] for name in layers))
    near = get_close_matches(ending.rpartition(".")[2], leaves, n=1)
    hint = f"did you mean {near[0]}?" if near else f"they are called {', '.join(leaves)}"
    experts = any(ends_with(name, ending) or ends_with(name.rpartition(".")[0], ending) for name in packed_experts(model))
    why = " (experts are held as one tensor, which rlgen does not adapt)" if experts else ""
    return f"{type(model).__name__} has no linear layer besides its head whose name ends with {ending}{why}; {hint}"


def redirected(model: PreTrainedModel, name: str) -> bool:
    """Returns whether peft, by the last part of its name, refuses the layer `name`, or treats it as an expert of a mixture."""
    config = LoraConfig(target_modules=[name])
    try:
        PEFT_CHECK(config, model, name.rpartition(".")[2])
        convert_peft_config_for_transformers(config, model, None)
    except ValueError:  # raised for one of two layers that peft treats as a packed pair
        return True
    return not config.target_modules


def packed_experts(model: PreTrainedModel) -> list[str]:
    """Returns the names of parameters that hold all experts of a layer in one tensor."""
    return [name for name, parameter in model.named_parameters() if parameter.ndim == 3]


def adapted_layers(model: nn.Module) -> dict[str, LoraLayer]:
    """Returns the adapted layers by the name of their weight in the base model: {"layers.0.self_attn.q_proj.weight": ...}."""
    return {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def is_adapted(model: nn.Module) -> bool:
    return bool(adapted_layers(model))


def factors(layer: LoraLayer) -> tuple[nn.Parameter, nn.Parameter]:
    """Returns A [rank, in] and B [out, rank]."""
    return layer.lora_A[NAME].weight, layer.lora_B[NAME].weight  # type: ignore[return-value]


def adapter_names(name: str) -> tuple[str, str]:
    """Returns the parameter names of A and B, given the name of the adapted weight in the base model."""
    layer = name.removesuffix(".weight")
    return f"{layer}.lora_A.{NAME}.weight", f"{layer}.lora_B.{NAME}.weight"


def scale(layer: LoraLayer) -> float:
    """Returns s in W + s B A."""
    return float(layer.scaling[NAME])


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns all trained tensors of the adapter, detached: {"layers.0.self_attn.q_proj.lora_A.default.weight": ...}."""
    return {name: parameter.detach() for name, parameter in model.named_parameters() if in_adapter(name)}


def in_adapter(name: str) -> bool:
    """Returns whether a parameter with this name belongs to an adapter."""
    return f".lora_A.{NAME}." in name or f".lora_B.{NAME}." in name


def base_name(name: str) -> str:
    """Returns the name in the base model: "layers.0.mlp.up_proj.base_layer.weight" -> "layers.0.mlp.up_proj.weight"."""
    return name.replace(".base_layer.", ".")


@torch.no_grad()
def merged_weight(layer: LoraLayer) -> Tensor:
    """Returns W + s B A in float32 as a new tensor, or W in float32 if the adapter is switched off. W is not changed."""
    weight = base_weight(layer).float()
    # Not in place: a float32 base weight would be changed itself.
    return weight if layer.disable_adapters else weight + layer.get_delta_weight(NAME)  # type: ignore[attr-defined]


def base_weight(layer: LoraLayer) -> Tensor:
    """Returns W, dequantised if bitsandbytes holds it quantised; gathered if it is sharded, by all processes together."""
    weight: Tensor = dequantize_module_weight(layer.get_base_layer()).detach()
    return whole(weight)


def is_packed(weight: object) -> bool:
    """Returns whether bitsandbytes holds this weight quantised."""
    return type(weight).__name__ in PACKED


def quantization_of(model: nn.Module) -> str | None:
    """Returns the `model.quantization` that `model` was loaded with, or None."""
    return next((PACKED[type(weight).__name__] for weight in model.parameters() if is_packed(weight)), None)


@contextmanager
def without_adapter(model: nn.Module, only: Sequence[str] | None = None) -> Iterator[None]:
    """Switches the adapter off inside the block: `model` then computes as the frozen base model, without a copy of it.

    Args:
        only: names of `adapted_layers` to switch off; the others keep their adapter. None: all.
    """
    layers = [layer for name, layer in adapted_layers(model).items() if only is None or name in only]
    before = [layer._disable_adapters for layer in layers]
    try:
        for layer in layers:
            # Sets only the flag: peft's own method also changes requires_grad of the adapter's parameters.
            layer._disable_adapters = True
        yield
    finally:
        for layer, flag in zip(layers, before, strict=True):
            layer._disable_adapters = flag


def describe(model: PreTrainedModel) -> str:
    """Returns one line about the adapter, such as

    `rank 32 in 28 linear layers, 1,310,720 of 9,000,000 parameters are trained; not adapted: 8 packed tensors of experts`
    """
    layers = adapted_layers(model)
    rank = next(iter(layers.values())).r[NAME]
    trained = sum(tensor.numel() for tensor in adapter_tensors(model).values())
    all_of_them = sum(parameter.numel() for parameter in model.parameters())
    text = f"rank {rank} in {len(layers)} linear layers, {trained:,} of {all_of_them:,} parameters are trained"
    others = [name for name in linear_layers(model) if not in_adapter(f"{name}.") and not name.endswith(".base_layer")]
    counts = {"linear layers": len(others), "packed tensors of experts": len(packed_experts(model))}
    left_out = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    return f"{text}; not adapted: {left_out}" if left_out else text


def save_adapter(model: PreTrainedModel, weights: Mapping[str, Tensor], folder: Path, base: str) -> None:
    """Writes an adapter of `model` into an existing folder, in the format that `PeftModel.from_pretrained` reads.

    Args:
        weights: `adapter_tensors`, on the CPU, as they are to be written.
        base: digest of the base model's weights, written into the file's metadata.
    """
    tensors = {file_name(name): tensor.contiguous() for name, tensor in weights.items()}
    dtype = str(model.dtype).removeprefix("torch.")
    facts = {"format": "pt", "base_sha256": base, "base_dtype": dtype, "quantization": quantization_of(model) or ""}
    save_file(tensors, folder / WEIGHTS, metadata=facts)
    config_of(model).save_pretrained(str(folder))


@torch.no_grad()
def load_adapter(folder: Path, model: PreTrainedModel, base: str) -> None:
    """Copies the adapter in `folder` into that of `model`, in place, so that an optimizer keeps its parameters.

    Raises:
        CheckpointError: the adapter has another rank, scale or base model, or adapts other layers.
        OSError, SafetensorError: it cannot be read.
    """
    if not (folder / WEIGHTS).is_file():
        raise CheckpointError(f"{folder} holds no adapter: it is a checkpoint of a run that trained all weights")
    saved, now = json.loads((folder / CONFIG).read_text(encoding="utf-8")), config_of(model).to_dict()
    for key, said in (("r", "rank"), ("lora_alpha", "alpha"), ("use_rslora", "use_rslora")):
        if saved[key] != now[key]:
            raise CheckpointError(f"{folder}: model.lora.{said} was {saved[key]} and is {now[key]}")
    tensors, own = load_file(folder / WEIGHTS), {file_name(name): tensor for name, tensor in adapter_tensors(model).items()}
    if other := sorted(set(tensors) ^ set(own)):
        had = "adapts" if other[0] in tensors else "does not adapt"
        name = other[0].removeprefix(PREFIX).rpartition(".lora_")[0]
        raise CheckpointError(f"{folder} {had} {name}, unlike model.lora.targets: it is a checkpoint of another run")
    for name, tensor in own.items():
        if tensor.shape != tensors[name].shape:
            raise CheckpointError(f"{folder}: {name} has another shape than in the adapter of model.path")
    if (known := adapter_metadata(folder).get("base_sha256")) != base:
        raise CheckpointError(
            f"{folder} does not fit the weights of model.path (SHA-256 was {known}, is {base}): set the model, the revision"
            " and the dtype that the run began with"
        )
    for name, tensor in own.items():
        tensor.copy_(tensors[name])


def adapter_metadata(folder: Path) -> dict[str, str]:
    """Returns the metadata that `save_adapter` wrote into the file of tensors."""
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        return dict(file.metadata() or {})


def config_of(model: PreTrainedModel) -> LoraConfig:
    """Returns peft's configuration of the model's adapter."""
    return model.peft_config[NAME]


def file_name(name: str) -> str:
    """Returns the name of an adapter's tensor in peft's files."""
    return PREFIX + name.replace(f".{NAME}.", ".")
