"""Turns a lack of memory, and other errors of an architecture's own code, into errors that name settings of the recipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

from rlgen.errors import RlgenError, SetupError
from rlgen.out_of_memory import failure_reason, is_out_of_memory, one_line

if TYPE_CHECKING:
    from rlgen.recipe import Recipe

Phase: TypeAlias = Literal["load", "forward", "backward", "optimizer"]


@contextmanager
def memory_for(what: str, helps: Sequence[str], told: type[RlgenError]) -> Iterator[None]:
    """Turns an out-of-memory error inside the block into an error of class `told`, which has the peak so far and what `helps`.

    Args:
        what: the work in the block, such as "the backward pass of 4 rows of 72 tokens".
        helps: settings that reduce the memory need.
    """
    try:
        yield
    except Exception as error:  # out-of-memory errors have many classes; others are raised unchanged
        if isinstance(error, RlgenError) or not is_out_of_memory(error):
            raise
        raise told(failure_reason(error, what, helps)) from error


@contextmanager
def refused_with(words: str) -> Iterator[None]:
    """Turns an error inside the block into a SetupError of these words, in which it takes the place of {}."""
    try:
        yield
    except Exception as error:  # each architecture, and each program that a compiler runs, may fail in its own way
        if is_out_of_memory(error):
            raise
        raise SetupError(words.format(one_line(error))) from error


def memory_advice(recipe: Recipe, phase: Phase) -> list[str]:
    """Returns the two settings that save most of the memory that a phase of the trainer needs."""
    return (for_a_micro_batch(recipe) if phase in ("forward", "backward") else for_what_is_held(recipe, phase))[:2]


def for_a_micro_batch(recipe: Recipe) -> list[str]:
    """Returns settings that reduce the memory of a micro-batch, the most effective first."""
    longest, budget = -(-recipe.max_row_tokens // recipe.processes.sharing), recipe.optim.micro_batch_tokens
    settings = []
    if budget > longest:
        settings.append(f"--set optim.micro_batch_tokens={max(longest, budget // 2)} (the same result, more slowly)")
    if not recipe.model.gradient_checkpointing:
        settings.append("--set model.gradient_checkpointing=true (the same result, more slowly)")
    elif torch.cuda.is_available() and not recipe.model.offload_activations:
        settings.append("--set model.offload_activations=true (the same result, more slowly)")
    settings.append(f"--set rollout.max_completion_tokens={max(1, recipe.rollout.max_completion_tokens // 2)}")
    settings.append("processes.strategy=fsdp in several processes")
    return settings


def for_what_is_held(recipe: Recipe, phase: Phase) -> list[str]:
    """Returns settings that reduce the memory of weights and optimizer state, which smaller micro-batches do not reduce."""
    on_gpu, settings = torch.cuda.is_available(), []
    if recipe.model.lora is None:
        settings.append("--set model.lora.rank=16 (trains small adapters only)")
    elif recipe.model.quantization is None and on_gpu:
        settings.append("--set model.quantization=nf4 (frozen weights in four bits)")
    if phase == "optimizer":
        if on_gpu and recipe.engine.memory == "colocated" and not recipe.engine.sleeps:
            settings.append("--set engine.sleep=true (the engine's memory is free while the trainer works)")
        if recipe.model.lora is None:
            settings.append("processes.strategy=fsdp in several processes")
    settings.append("a smaller model in model.path")
    settings.append("a machine with more memory")
    return settings
