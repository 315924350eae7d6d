"""Errors that mean too little memory, and what is said about them."""

from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from rlgen.errors import EngineError, SetupError
from rlgen.models.memory_errors import Phase, memory_advice, memory_for
from rlgen.out_of_memory import failure_reason, is_out_of_memory, peak_memory
from rlgen.recipe import load_recipe

GIB = 1 << 30


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("no room"), False),
    ],
)
def test_what_means_too_little_memory(error: Exception, is_one: bool) -> None:
    assert is_out_of_memory(error) is is_one
    said = failure_reason(error, "a test", ["less", "more"])
    assert ("does not suffice for a test: " in said and "most: less or more;" in said) if is_one else said == str(error)
    with pytest.raises(SetupError if is_one else type(error)) as caught, memory_for("a test", ["less"], SetupError):
        raise error
    assert (caught.value.__cause__ is error) is is_one


def test_an_error_without_words_has_a_name_and_a_told_one_is_not_told_again() -> None:
    assert failure_reason(MemoryError(), "a test", ["less"]).startswith(
        "the memory does not suffice for a test: MemoryError; peak "
    )
    told = EngineError("the memory does not suffice for its wake-up: CUDA out of memory")
    with pytest.raises(EngineError) as caught, memory_for("the model", ["less"], SetupError):
        raise told
    assert caught.value is told


def test_the_peak_is_that_of_the_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    resident = float(peak_memory().split()[1])
    assert peak_memory().startswith("peak ") and " GiB resident, of " in peak_memory() and 0.05 < resident < 100
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 12 * GIB)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 13 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * GIB))
    assert peak_memory() == "peak 12.00 GiB allocated, 13.00 GiB reserved, of 80.00 GiB"


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("lora", [[], ["model.lora.rank=8"]])
def test_what_is_advised_can_be_said(recipe_file: Path, monkeypatch: pytest.MonkeyPatch, lora: list[str], on_gpu: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    recipe = load_recipe(recipe_file, lora).recipe
    settings: dict[str, list[str]] = {}
    for phase in get_args(Phase):
        helps = memory_advice(recipe, phase)
        assert len(helps) == 2, phase
        settings[phase] = [setting.removeprefix("--set ").split()[0] for setting in helps if setting.startswith("--set ")]
        for setting in settings[phase]:
            load_recipe(recipe_file, [*lora, setting])
    assert settings["forward"] == ["optim.micro_batch_tokens=8192", "model.gradient_checkpointing=true"] == settings["backward"]
    held = ["model.quantization=nf4" if on_gpu else ""] if lora else ["model.lora.rank=16"]
    assert settings["load"] == [setting for setting in held if setting]
    assert settings["optimizer"] == [*filter(None, held), *(["engine.sleep=true"] if on_gpu else [])]
