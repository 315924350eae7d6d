"""Compiles the layers of a model by `torch.compile`, each in its place, so that no weight has another name."""

from dataclasses import replace
from functools import partial

import torch
from transformers import PreTrainedModel

from rlgen.errors import SetupError
from rlgen.models.decoder import decoder_of
from rlgen.models.half import HalfForward, units
from rlgen.models.memory_errors import refused_with

# Largest distance of hidden states, compiled and not, relative to their size.
BOUND, BOUND_HALF = 1e-4, 0.05


def compile_layers(model: PreTrainedModel) -> None:
    """Makes the layers of `model` run compiled, and compares hidden states of two batches before and after.

    Layers of one class share the compiled code. Numbers of rows and tokens are variables in it, so that batches of other sizes
    compile nothing new; only a batch of one row does, because torch treats that size as a constant.

    Raises:
        SetupError: the model cannot be compiled here, or compiled layers compute something else.
    """
    layers = [layer for _, layer, whole in units(model) if whole]
    with torch.no_grad():
        before = hidden_states(model)
    runs = {kind: torch.compile(kind.forward, dynamic=True) for kind in {type(layer) for layer in layers}}
    for layer in layers:
        run, half = runs[type(layer)], vars(layer).get("forward")
        layer.forward = replace(half, run=run) if isinstance(half, HalfForward) else partial(run, layer)
    name = type(model).__name__
    with refused_with(f"model.compile: {name} cannot be compiled here ({{}}); remove it"):
        with torch.enable_grad():  # as in training: what fails in the backward pass fails here
            computed = hidden_states(model)
            torch.stack([states.float().sum() for states in computed]).sum().backward()
        after = [states.detach() for states in computed]
        model.zero_grad()
    for one, other in zip(before, after, strict=True):
        gap = ((other.float() - one.float()).norm() / one.float().norm()).item()
        if not gap <= (BOUND if one.dtype == torch.float32 else BOUND_HALF):
            raise SetupError(
                f"model.compile: {name} gives different results when compiled: the relative error of hidden states is"
                f" {gap:.2g}; remove it"
            )


def hidden_states(model: PreTrainedModel) -> list[torch.Tensor]:
    """Returns the last hidden states of two batches of different sizes."""
    sizes = ((2, 9), (3, 14))
    ids = [(torch.arange(rows * length, device=model.device) % 11 + 3).view(rows, length) for rows, length in sizes]
    return [decoder_of(model)(input_ids=some, use_cache=False).last_hidden_state for some in ids]
