"""Memory that does not suffice: how it is recognised, what was held, and which settings help."""

import re
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, TypeAlias

import psutil
import torch

from rlgen.errors import RlgenError
from rlgen.recipe import Recipe
from rlgen.recipe.models import ColocatedEngineRecipe

GIB = 1 << 30
# The CPU's allocator, the system, vLLM and NVIDIA's libraries say it in words; torch has a class of its own on a GPU.
NO_MEMORY = re.compile(r"out of memory|not enough memory|an(no|')t allocate memory|_ALLOC_FAILED")
ADVICE = " If reserved but unallocated"  # torch's own, about its allocator

Phase: TypeAlias = Literal["load", "forward", "backward", "optimizer"]


@contextmanager
def memory_for(what: str, helps: Sequence[str], told: type[RlgenError]) -> Iterator[None]:
    """For work that may find too little memory: "the backward pass of 4 rows of 72 tokens".

    Raises:
        RlgenError: of the class `told`, where it does; with the peak so far, and what helps.
    """
    try:
        yield
    except Exception as error:  # what lacks memory says so in many classes; all else goes on as it is
        if isinstance(error, RlgenError) or not is_out_of_memory(error):
            raise
        raise told(reason(error, what, helps)) from error


def reason(error: Exception, what: str, helps: Sequence[str]) -> str:
    """What `error` says; if memory is out, that `what` lacks it, the peak so far, and what helps."""
    if not is_out_of_memory(error):
        return str(error)
    said = " ".join(str(error).partition(ADVICE)[0].split()).rstrip(".") or type(error).__name__
    return (
        f"the memory does not suffice for {what}: {said}; {peak()}. What helps most: {' or '.join(helps)};"
        " `rlgen estimate` has the whole table"
    )


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or bool(NO_MEMORY.search(str(error)))


def peak() -> str:
    """The most memory that this process has held: of its GPU, or without one of the machine."""
    if torch.cuda.is_initialized():
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        return f"peak {allocated / GIB:.2f} GiB allocated, {reserved / GIB:.2f} GiB reserved, of {total / GIB:.2f} GiB"
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return f"peak {resident / GIB:.2f} GiB resident, of {psutil.virtual_memory().total / GIB:.2f} GiB"


def what_helps(recipe: Recipe, phase: Phase) -> list[str]:
    """The two settings that save most of what a phase of the trainer needs."""
    if phase in ("forward", "backward"):
        return for_a_micro_batch(recipe)[:2]
    return for_what_is_held(recipe, phase)[:2]


def for_a_micro_batch(recipe: Recipe) -> list[str]:
    longest, budget = recipe.max_row_tokens, recipe.optim.micro_batch_tokens
    settings = []
    if budget > longest:
        settings.append(f"--set optim.micro_batch_tokens={max(longest, budget // 2)} (the same result, more slowly)")
    if not recipe.model.gradient_checkpointing:
        settings.append("--set model.gradient_checkpointing=true (the same result, more slowly)")
    settings.append(f"--set rollout.max_completion_tokens={max(1, recipe.rollout.max_completion_tokens // 2)}")
    settings.append("processes.strategy=fsdp in several processes")
    return settings


def for_what_is_held(recipe: Recipe, phase: Phase) -> list[str]:
    """Weights and the optimizer's state: no micro-batch makes them smaller."""
    on_gpu, settings = torch.cuda.is_available(), []
    if recipe.model.lora is None:
        settings.append("--set model.lora.rank=16 (trains small adapters alone)")
    elif recipe.model.quantization is None and on_gpu:
        settings.append("--set model.quantization=nf4 (frozen weights in four bits)")
    if phase == "optimizer":
        if on_gpu and isinstance(recipe.engine, ColocatedEngineRecipe) and not recipe.engine.sleep:
            settings.append("--set engine.sleep=true (the engine's memory is free while the trainer works)")
        if recipe.model.lora is None:
            settings.append("processes.strategy=fsdp in several processes")
    settings.append("a smaller model in model.path")
    settings.append("a machine with more memory")
    return settings
