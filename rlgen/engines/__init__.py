"""Engines sample: ids in, ids out. `build_engine` opens the one that the recipe names."""

import torch

from rlgen.engines.base import Engine
from rlgen.engines.colocated import ColocatedEngine
from rlgen.engines.transformers import TransformersEngine
from rlgen.models.load import load_model
from rlgen.recipe import Recipe
from rlgen.recipe.models import ColocatedEngineRecipe

__all__ = ["Engine", "build_engine"]


def build_engine(recipe: Recipe, location: str, device: torch.device, wait: float | None) -> Engine:
    """Opens the engine of `recipe` on the model at `location` (a folder or hub id).

    Args:
        wait: seconds that processes which open theirs at the same time wait for each other; None: there is one.

    Raises:
        SetupError: what the engine needs is not installed.
        EngineError: the engine did not start.
    """
    settings = recipe.engine
    dtype = settings.dtype or recipe.model.dtype
    if isinstance(settings, ColocatedEngineRecipe):
        return ColocatedEngine(
            model=location,
            revision=recipe.model.revision,
            dtype=dtype,
            fp32_head=recipe.model.fp32_head,
            max_model_len=settings.max_model_len or recipe.max_row_tokens,
            max_num_seqs=min(settings.max_num_seqs, recipe.samples_per_step),
            kv_cache_gib=settings.kv_cache_gib,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            tensor_parallel_size=settings.tensor_parallel_size,
            wait=wait,
            sleep=settings.sleep,
            model_impl=settings.model_impl,
            quantization=settings.quantization,
            structured_outputs=settings.structured_regex is not None,
            enforce_eager=settings.enforce_eager,
            extra=settings.extra,
        )
    model = load_model(location, recipe.model.revision, getattr(torch, dtype), recipe.model.attention, device)
    return TransformersEngine(model=model, fp32_head=recipe.model.fp32_head, max_num_seqs=settings.max_num_seqs)
