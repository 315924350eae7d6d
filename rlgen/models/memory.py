"""Estimates how much device memory a run needs, from the model's config only: no weights are loaded, nothing is allocated.

Parameters and activations are counted on fake tensors, which have shapes but no values: the count of what autograd keeps for the
backward pass of a micro-batch is exact for every architecture. The rest is arithmetic, in `needs`.
"""

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from rlgen.errors import SetupError
from rlgen.losses.logp import CHUNK_LOGITS
from rlgen.models.decoder import attention_of, decoder_of, one_sequence_a_row
from rlgen.models.memory_errors import refused_with
from rlgen.models.parallel import SPLIT, plan_of_layers

GIB = 1 << 30
FLOAT32 = 4  # bytes of a weight that is trained
ADAMW, ADAMW_8BIT = 8, 2  # bytes of the two moments of a weight
QUANTIZED = {"nf4": 1 / 2 + 4 / 64, "int8": 1.0}  # bytes of a weight; nf4 has a float32 scale for each block of 64
CHUNKS = 2  # tensors of the size of a chunk's logits that the head holds at a time: logits, and probabilities for the entropy
OVERHEAD = GIB  # assumed: CUDA's context, libraries' workspaces and fragmentation of the allocator
SERVING = GIB // 2  # assumed: what vLLM needs beside weights and cache, if no share of the device limits it


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Sizes that are counted from a model's config, in elements unless a field says bytes."""

    parameters: int
    largest: int  # elements of the largest tensor
    matrices: int  # elements of the weight matrices of the layers: without embedding and head
    linear: int  # elements of those that belong to linear modules, which `model.quantization` can hold
    sides: int  # sum of rows and columns of these matrices: an adapter of rank r has r times as many elements
    layers: int
    hidden: int
    vocabulary: int
    cache_token: int  # elements of the KV cache per token
    kept: int  # bytes that autograd keeps of a micro-batch, without copies of weights
    kept_checkpointed: int  # the same with gradient checkpointing


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The settings of a recipe and the properties of a device that decide the memory need."""

    rows: int  # per micro-batch
    length: int  # tokens per row
    trainer_bytes: int  # bytes per element of the trainer's activations: 4 or 2
    fp32_head: bool
    checkpointing: bool
    offload_activations: bool = False
    offload_moments: bool = False
    reference: bool
    adapter_rank: int | None  # of LoRA; None: all weights are trained
    quantized: float | None = None  # bytes of a frozen weight of a linear module; None: as the other frozen weights
    processes: int  # number of trainer processes
    first: bool = True  # of the process of rank 0, which saves what each process holds whole; False: of another one
    moment_bytes: int = ADAMW  # of a trained weight
    sharded: bool  # whether weights, gradients and moments are sharded over the processes
    shard: int | None = None  # processes that share the weights among them; None: all
    defer_sync: bool = False  # whether sharded training adds up whole gradients
    streams: bool = False  # whether training adds up gradients in float64, in any order (`rollout.stream`)
    engine: str  # colocated, beside (a server on the same GPU), transformers, or elsewhere
    engine_bytes: int  # bytes per weight of the engine
    sequences: int  # decoded at the same time
    model_len: int  # tokens of the longest sequence
    cache_gib: float | None
    share: float | None  # of the device, for the engine's weights and cache
    tensor_parallel: int
    sleeps: bool
    device: int | None  # bytes of the GPU's memory; None: there is no GPU


KV_HEADS = ("num_key_value_heads", "num_kv_heads", "num_attention_heads")  # keys of configs; the first that exists counts
STATE_LAYERS = {"linear_attention", "hybrid", "conv", "recurrent"}  # transformers' names

Parts = dict[str, int]  # bytes by part

# How each part is determined: counted from the config, computed, measured once on tiny models, or assumed.
HOW = {
    "trainer weights": "4 bytes a parameter (counted); with adapters those of its dtype, or of model.quantization",
    "reference": "4 bytes a parameter (counted); none with adapters, which are switched off for it",
    "Adam moments": "8 bytes a trained parameter; 2 with optim.kind adamw_8bit; with optim.offload only in an optimizer step",
    "copy to save": "without a GPU: weights and moments of trained parameters, from the first checkpoint on; of shards in each"
    " process, otherwise in the first alone",
    "gradients": "4 bytes a trained parameter",
    "sums of gradients": "8 bytes a trained parameter: what rollout.stream adds up in any order",
    "buckets to send": "4 bytes a trained parameter, after the last backward pass: what sending all gradients takes (assumed)",
    "gathered tensor": "2 x bytes of the trainer's dtype x elements of the largest tensor: a forward pass of eight tokens, which"
    " gathers it through a buffer of its size",
    "whole gradients": "4 bytes a parameter: what processes.defer_sync adds up until the last micro-batch",
    "gathered layers": "bytes of the trainer's dtype x (elements of the head + matrices of two layers: one in use, one on"
    " its way)",
    "activations": "what autograd keeps of a micro-batch of rows x length tokens (counted on fake tensors); with gradient"
    " checkpointing what it keeps then (with model.offload_activations one layer's share), and a layer that is computed again",
    "bfloat16 weights": "2 bytes an element of a layer's matrices, which are rounded while it runs; backward as much for their"
    " gradients",
    "dequantised weights": "bytes of the trainer's dtype an element of a layer's linear weights (an upper bound)",
    "gradients of states": "8 bytes x tokens x hidden size",
    "head's states": "2 x width of the head's product x tokens x hidden size",
    "head's gradient": "4 bytes x vocabulary x hidden size",
    "chunk of logits": f"{CHUNKS} x 4 bytes x {CHUNK_LOGITS:,} logits, or fewer if there are fewer tokens",
    "engine weights": "bytes of the engine's dtype a parameter, / tensor_parallel_size",
    "KV cache": "engine.kv_cache_gib; or gpu_memory_utilization x device - engine weights; or, without a device, 2 x layers x"
    " kv_heads x head_dim x bytes x sequences x max_model_len",
    "engine's own": "0.5 GiB (assumed)",
    "tensor to load": "bytes of the engine's dtype x elements of the largest tensor",
    "overhead": "1 GiB (assumed): CUDA's context, libraries' workspaces, what the allocator cannot use",
}


def count(
    config: PreTrainedConfig, rows: int, length: int, dtype: torch.dtype, attention: str, tensor: int | None = None
) -> Counts:
    """Counts the sizes of a model of `config`, trained in `dtype` on micro-batches of `rows` rows of `length` tokens.

    Args:
        tensor: processes that split each layer (`models.parallel`). None: nobody splits them.

    Raises SetupError if transformers has no causal language model for this config.
    """
    text, cache = config.get_text_config(), cache_elements(config)  # the engine splits its cache by a number of its own
    # flash_attention_2 keeps what sdpa's kernel keeps
    attention = attention_of(config, "sdpa" if attention == "flash_attention_2" else attention)
    with FakeTensorMode():
        model = fake_model(config, attention, torch.float32)
        tensors = list(model.parameters())
        outer = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
        matrices = [tensor for tensor in tensors if tensor.ndim > 1 and id(tensor) not in outer]
        vocabulary = model.get_output_embeddings().weight.shape[0]
        if tensor is not None:
            plan_of_layers(model, tensor, dtype)
    if tensor is not None:  # a process computes its part of each layer, for the rows of the whole group
        config, rows = one_part(config, tensor), rows * tensor
    return Counts(
        parameters=sum(tensor.numel() for tensor in tensors),
        largest=max(tensor.numel() for tensor in tensors),
        matrices=sum(matrix.numel() for matrix in matrices) // (tensor or 1),
        linear=sum(matrix.numel() for matrix in matrices if matrix.ndim == 2),  # those of experts are one tensor
        sides=sum(matrix.numel() // matrix.shape[-1] + matrix.shape[-1] for matrix in matrices),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        vocabulary=vocabulary,
        cache_token=cache,
        kept=kept_bytes(config, attention, rows, length, dtype, checkpointing=False),
        kept_checkpointed=kept_bytes(config, attention, rows, length, dtype, checkpointing=True),
    )


def one_part(config: PreTrainedConfig, tensor: int) -> PreTrainedConfig:
    """Returns the config of a model whose layers are as large as one of `tensor` parts of a layer of `config`."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    for name in SPLIT:
        if getattr(text, name, None):
            setattr(text, name, getattr(text, name) // tensor)
    return config


def fake_model(config: PreTrainedConfig, attention: str, dtype: torch.dtype) -> PreTrainedModel:
    """Returns the model without values. Must be called in a FakeTensorMode. Raises SetupError if transformers cannot build it."""
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    except (ValueError, ImportError) as error:
        raise SetupError(f"model.path: no causal language model can be made from its config: {error}") from error
    return model.eval()


def cache_elements(config: PreTrainedConfig, heads: Sequence[str] = KV_HEADS) -> int:
    """Returns the KV-cache elements per token: 2 * kv_heads * head_dim of each layer with attention. Ignores sliding windows.

    `heads`: keys of configs with the number of heads. Raises SetupError if the config does not say how many layers there are.
    """
    text = config.get_text_config()
    if not getattr(text, "num_hidden_layers", None):
        raise SetupError(
            f"model.path: {type(config).__name__} has no num_hidden_layers, so the size of vLLM's KV cache is unknown;"
            " set engine.kind to transformers"
        )
    # In some models (Gemma 4) the sizes differ by layer, and only the layers' own configs have them.
    found = 0
    for layer in getattr(text, "per_layer_config", None) or [text] * text.num_hidden_layers:
        if count := next((count for name in heads if (count := getattr(layer, name, None))), 0):
            found += 2 * count * (getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads)
    return int(found)


def keeps_states(config: PreTrainedConfig) -> bool:
    """Returns whether a model keeps states of a fixed size for each sequence, in some layers or instead of keys and values."""
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ())
    return not cache_elements(config) or bool(kinds & STATE_LAYERS)


@refused_with("model.path: what autograd keeps of this model cannot be counted without values ({}); `rlgen doctor` tries a step")
def kept_bytes(config: PreTrainedConfig, attention: str, rows: int, length: int, dtype: torch.dtype, checkpointing: bool) -> int:
    """Returns the bytes that autograd keeps of a decoder: of its parameters, their copies in `dtype`, and its buffers none."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True  # torch logs a traceback when it refuses a fake product; it raises it, too
    try:
        return run_fake(config, attention, rows, length, dtype, checkpointing)
    except RuntimeError:
        # The grouped matrix product of experts has no fake float32 version. In bfloat16 all tensors have half the bytes.
        return 2 * run_fake(config, attention, rows, length, torch.bfloat16, checkpointing)
    finally:
        log.disabled = before


def run_fake(config: PreTrainedConfig, attention: str, rows: int, length: int, dtype: torch.dtype, checkpointing: bool) -> int:
    """Returns `kept_bytes` of a model whose parameters have the dtype in which it computes."""
    found: dict[int, Any] = {}  # storages by address, held, so that no other storage gets its address

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own and not of_a_parameter(tensor.grad_fn):
            found[storage._cdata] = storage
        return tensor

    # transformers detects packed rows from values, which fake tensors lack; without them sdpa needs no mask.
    with FakeTensorMode(), one_sequence_a_row():
        model = fake_model(config, attention, dtype)
        if checkpointing:
            model.gradient_checkpointing_enable()
            model.train()
        own = {tensor.untyped_storage()._cdata for tensor in [*model.parameters(), *model.buffers()]}
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            decoder_of(model)(input_ids=torch.zeros(rows, length, dtype=torch.long), use_cache=False)
        return sum(storage.nbytes() for storage in found.values())


def of_a_parameter(node: Any) -> bool:
    """Returns whether a tensor with this `grad_fn` is a cast or transposed parameter, which is counted elsewhere."""
    casts = ("ToCopyBackward0", "TBackward0", "TransposeBackward0", "ViewBackward0", "UnsafeViewBackward0")
    while node is not None and type(node).__name__ in casts:
        node = node.next_functions[0][0]
    return node is not None and type(node).__name__ == "AccumulateGrad"


def needs(counts: Counts, plan: MemoryPlan) -> dict[str, Parts]:
    """Returns the peak bytes of one process, by phase of a step and by part."""
    shards = (plan.shard or plan.processes) if plan.sharded else 1
    adapters = counts.sides * (plan.adapter_rank or 0)
    trained = adapters or counts.parameters // shards
    held = plan.trainer_bytes if adapters else FLOAT32  # frozen weights need no room for small updates
    spared = 0 if plan.quantized is None else int((held - plan.quantized) * counts.linear)
    base = {"trainer weights": (held * counts.parameters - spared) // shards + FLOAT32 * adapters}  # adapters are whole
    load = dict(base)
    if plan.reference and not adapters:  # adapters are switched off for it
        base["reference"] = FLOAT32 * counts.parameters // shards
    if plan.sharded:  # otherwise the reference is copied later
        load = base | {"gathered tensor": 2 * plan.trainer_bytes * counts.largest}
    moments, stepping = {"Adam moments": plan.moment_bytes * trained}, {}
    if plan.offload_moments and plan.device is not None:
        moments, stepping = {}, moments
    base = base | moments
    if plan.device is None:  # no GPU: the copy of a checkpoint, from which a thread writes, is in the same memory
        writes = plan.first or (plan.sharded and not adapters)  # what is whole everywhere, the first process writes
        base = base | {"copy to save": FLOAT32 * trained + sum(moments.values()) if writes else 0}
    if plan.streams:
        base = base | {"sums of gradients": 2 * FLOAT32 * trained}
    gradients, sent = {"gradients": FLOAT32 * trained}, {}
    added_up = {"whole gradients": FLOAT32 * counts.parameters} if plan.sharded and plan.defer_sync and not adapters else {}
    if plan.sharded:
        layer = counts.matrices // counts.layers
        added_up["gathered layers"] = plan.trainer_bytes * (counts.vocabulary * counts.hidden + 2 * layer)
    elif plan.processes > 1:
        sent["buckets to send"] = FLOAT32 * trained
    engine = engine_parts(counts, plan)
    # transformers makes its cache anew for each batch
    stays = {part: size for part, size in engine.items() if part != "KV cache" or plan.engine != "transformers"}
    training = base | gradients | ({} if plan.sleeps else stays)
    found = {
        "load": load,
        "generate": base | engine,
        "reference": base | ({} if plan.sleeps else stays) | reference_parts(counts, plan),
        "forward": training | added_up | forward_parts(counts, plan),
        "backward": training | added_up | backward_parts(counts, plan),
        "optimizer": training | sent | stepping,
        "sync": base | stays | ({"tensor to load": plan.engine_bytes * counts.largest} if engine else {}),
    }
    if not plan.reference:
        del found["reference"]
    return {phase: parts | {"overhead": OVERHEAD} for phase, parts in found.items()}


def engine_parts(counts: Counts, plan: MemoryPlan) -> Parts:
    """Returns the bytes of an engine that is awake on this device; empty if the engine is elsewhere."""
    if plan.engine == "elsewhere":
        return {}
    weights = plan.engine_bytes * counts.parameters // plan.tensor_parallel
    if plan.engine == "transformers":
        return {"engine weights": weights, "KV cache": cache_needed(counts, plan)}
    if plan.cache_gib is not None:
        return {"engine weights": weights, "KV cache": int(plan.cache_gib * GIB), "engine's own": SERVING}
    if plan.device is None or plan.share is None:
        return {"engine weights": weights, "KV cache": cache_needed(counts, plan), "engine's own": SERVING}
    # vLLM uses its whole share: weights, temporary tensors of a forward pass, and the rest for the cache.
    return {"engine weights": weights, "KV cache": max(0, int(plan.share * plan.device) - weights)}


def cache_needed(counts: Counts, plan: MemoryPlan) -> int:
    """Returns the bytes of a KV cache for `plan.sequences` sequences of `plan.model_len` tokens."""
    return plan.engine_bytes * counts.cache_token * plan.sequences * plan.model_len // plan.tensor_parallel


def passing_bytes(counts: Counts) -> int:
    """Returns three quarters of what autograd would keep of a layer: its temporary tensors take 25 to 75 % of that (measured)."""
    return counts.kept // counts.layers * 3 // 4


def rounded_layer(counts: Counts, plan: MemoryPlan, gradients: bool = False) -> Parts:
    """Returns the bytes of a layer's matrices, rounded while it runs; empty if they are held as they are computed with."""
    if plan.quantized is not None:
        return {"dequantised weights": plan.trainer_bytes * counts.linear // counts.layers}
    if plan.trainer_bytes == FLOAT32 or plan.adapter_rank is not None:
        return {}
    return {"bfloat16 weights": (2 if gradients else 1) * plan.trainer_bytes * counts.matrices // counts.layers}


def kept_checkpointed(counts: Counts, plan: MemoryPlan) -> int:
    """Returns the bytes that layers with gradient checkpointing keep on the device."""
    return counts.kept_checkpointed // (counts.layers if plan.offload_activations and plan.device is not None else 1)


def forward_parts(counts: Counts, plan: MemoryPlan) -> Parts:
    """Returns the bytes at the end of a forward pass."""
    kept = kept_checkpointed(counts, plan) + passing_bytes(counts) if plan.checkpointing else counts.kept
    return {"activations": kept} | rounded_layer(counts, plan) | head_parts(counts, plan)


def backward_parts(counts: Counts, plan: MemoryPlan) -> Parts:
    """Returns the bytes in the backward pass of the last layer, which runs first.

    Hardly any activation is freed by then, and gradients are added.
    """
    again = counts.kept // counts.layers  # activations of one layer, recomputed
    return {
        "activations": kept_checkpointed(counts, plan) + again if plan.checkpointing else counts.kept,
        **rounded_layer(counts, plan, gradients=True),
        "gradients of states": 2 * FLOAT32 * plan.rows * plan.length * counts.hidden,
        **head_parts(counts, plan),
        # before it is added to the total; under an adapter the head is frozen
        "head's gradient": 0 if plan.adapter_rank else FLOAT32 * counts.vocabulary * counts.hidden,
    }


def reference_parts(counts: Counts, plan: MemoryPlan) -> Parts:
    """Returns the bytes of a forward pass without gradient, which keeps no layer's tensors: in its layers or in its head."""
    layer, head = {"activations": passing_bytes(counts)} | rounded_layer(counts, plan), head_parts(counts, plan)
    return max(layer, head, key=lambda parts: sum(parts.values()))


def head_parts(counts: Counts, plan: MemoryPlan) -> Parts:
    """Returns the bytes of the chunked head (`losses.logp`): its inputs and one chunk of logits."""
    width = FLOAT32 if plan.fp32_head else plan.trainer_bytes
    tokens = plan.rows * plan.length  # an upper bound: counts prompt tokens too
    positions = min(tokens, max(1, CHUNK_LOGITS // counts.vocabulary))
    parts = {
        "head's states": 2 * width * tokens * counts.hidden,
        "chunk of logits": CHUNKS * FLOAT32 * positions * counts.vocabulary,
    }
    if plan.trainer_bytes < FLOAT32 and plan.adapter_rank is None:
        parts["head's states"] += plan.trainer_bytes * counts.vocabulary * counts.hidden  # its weight, rounded
    return parts


def peak(phases: dict[str, Parts]) -> tuple[str, int]:
    """Returns the phase that needs most memory, and its bytes."""
    name = max(phases, key=lambda phase: sum(phases[phase].values()))
    return name, sum(phases[name].values())


class Hint(NamedTuple):
    """One setting that lowers the memory need, and by how much."""

    setting: str
    why: str
    saves: int  # bytes at the peak of the whole step
    of_phase: int  # bytes in the phase that is the peak now


def hints(counts: Counts, smaller: Counts | None, plan: MemoryPlan, offers: frozenset[str]) -> list[Hint]:
    """Returns settings that would lower the memory need, ordered by how much they lower the peak, largest first.

    Args:
        smaller: counts of a micro-batch of half as many rows; None: it has one row.
        offers: further settings that this recipe allows: `adapters`, `shards`, `no reference`.
    """
    now = needs(counts, plan)
    phase, most = peak(now)
    found: list[Hint] = []

    def hint(setting: str, why: str, of: Counts = counts, **changes: Any) -> None:
        after = needs(of, replace(plan, **changes))
        in_phase = sum(now[phase].values()) - sum(after.get(phase, {}).values())
        found.append(Hint(setting, why, most - peak(after)[1], in_phase))

    if not plan.checkpointing:
        why = "activations are computed again instead of kept: a step takes longer"
        hint("model.gradient_checkpointing=true", why, checkpointing=True)
    elif plan.device is not None and not plan.offload_activations:
        hint("model.offload_activations=true", "in the machine's memory: a step takes longer", offload_activations=True)
    if plan.device is not None and not plan.offload_moments:
        hint("optim.offload=true", "moments are on the GPU only in an optimizer step, which takes longer", offload_moments=True)
    if smaller is not None:
        why = "smaller micro-batches, more of them: the same result"
        hint(f"optim.micro_batch_tokens={plan.rows // 2 * plan.length}", why, smaller, rows=plan.rows // 2)
    if plan.sharded and plan.defer_sync:
        hint("processes.defer_sync=false", "gradients are sent after each micro-batch, and none is held whole", defer_sync=False)
    if plan.streams:
        hint("rollout.stream=false", "training begins after sampling, and adds gradients up in place", streams=False)
    if plan.engine == "colocated" and not plan.sleeps:
        hint("engine.sleep=true", "the engine's memory is free while the trainer works", sleeps=True)
    if plan.engine in ("colocated", "beside"):
        why = "a smaller KV cache: fewer completions are decoded together"
        if plan.share is not None and plan.share > 0.2:
            share = round(plan.share - 0.1, 2)
            hint(f"engine.gpu_memory_utilization={share}", why, share=share)
        elif plan.cache_gib is not None:
            hint(f"engine.kv_cache_gib={plan.cache_gib / 2}", why, cache_gib=plan.cache_gib / 2)
        elif plan.share is None and plan.sequences > 1:
            hint(f"engine.max_num_seqs={plan.sequences // 2}", why, sequences=plan.sequences // 2)
    if plan.reference and "no reference" in offers:
        hint("trainer.beta=0", "no reference model; another objective", reference=False)
    if "adapters" in offers and plan.adapter_rank is None:
        why = "gradients and moments only of small adapters; another parametrisation"
        hint("model.lora.rank=16", why, adapter_rank=16)
    if plan.adapter_rank is not None and plan.quantized is None and plan.device is not None and not plan.sharded:
        hint("model.quantization=nf4", "frozen weights of four bits; needs bitsandbytes", quantized=QUANTIZED["nf4"])
    if plan.moment_bytes == ADAMW and not plan.sharded:
        hint("optim.kind=adamw_8bit", "moments of 8 bits; needs bitsandbytes", moment_bytes=ADAMW_8BIT)
    if "shards" in offers and not plan.sharded:
        count = max(2, plan.processes)
        why = f"weights, gradients and moments are spread over {count} processes"
        hint("processes.strategy=fsdp", why, processes=count, sharded=True)
    useful = [one for one in found if one.saves > 0 or one.of_phase > 0]
    return sorted(useful, key=lambda one: (-one.saves, -one.of_phase))
