"""Loads the model that is trained, and the frozen reference that it is compared with."""

import copy
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from rlgen.algorithms.base import Algorithm
from rlgen.errors import SetupError, UsageError
from rlgen.models.load import load_model
from rlgen.models.lora import add_adapter, is_adapted
from rlgen.models.memory_errors import memory_for, what_helps
from rlgen.models.policy import Policy
from rlgen.models.sharding import shard
from rlgen.models.weights import base_digest, bits
from rlgen.processes import Processes
from rlgen.recipe import Recipe
from rlgen.run.checkpoint import check_fit


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """The models of the trainer, before anything else is allocated."""

    policy: Policy
    reference: Policy | None  # None: the algorithm needs none, or it is copied after the engine is open
    sharded: bool  # each process holds a part of every weight
    base: str | None  # digest of the frozen weights under an adapter
    weights: str  # digest of the weights in model.path


def open_policies(
    recipe: Recipe, location: str, algorithm: Algorithm, checkpoint: Path | None, processes: Processes, began_with: str | None
) -> Policies:
    """Loads the policy from model.path. If it is to be sharded, its reference is made too, since a sharded policy cannot be
    copied.

    Args:
        location: of the model: folder or hub id.
        checkpoint: the one to resume from; checked here so that one of another model is refused early.
        began_with: digest of the weights that were in model.path when the run began; None: not known.

    Raises:
        SetupError: the memory does not suffice.
        CheckpointError: `checkpoint` is of another model or trainer.
        UsageError: the reference would differ from the one that the run began with.
    """
    policy = processes.agreed(lambda: build_policy(recipe, location, processes.device))
    if checkpoint:
        processes.agreed(lambda: check_fit(checkpoint, policy.model, recipe.trainer.kind))
    needs_reference, reference = algorithm.reference != "none", None
    base = base_digest(policy.model) if is_adapted(policy.model) else None
    weights = base or bits(policy.model, processes)
    if needs_reference and base is None:  # an adapter's checkpoint stores the digest of its base itself
        processes.agreed(lambda: same_reference(location, weights, began_with))
    sharded = recipe.processes.strategy == "fsdp" and processes.world > 1
    if sharded:
        reference = build_reference(recipe, policy) if needs_reference else None
        for one in [policy] if reference is None else [policy, reference]:
            shard(one, processes)
    return Policies(policy=policy, reference=reference, sharded=sharded, base=base, weights=weights)


def build_policy(recipe: Recipe, location: str, device: torch.device) -> Policy:
    """Loads the model that is trained, with float32 weights whatever the forward computes in: bfloat16 loses updates of 1e-6.

    Under an adapter the model's own weights are frozen, and held in the dtype of the forward.
    """
    settings = recipe.model
    dtype = getattr(torch, settings.dtype)
    held = torch.float32 if settings.lora is None else dtype
    with memory_for("the model", what_helps(recipe, "load"), SetupError):
        model = load_model(location, settings.revision, held, settings.attention, device, settings.quantization)
        if settings.lora is not None:
            add_adapter(model, settings.lora, recipe.run.seed, settings.revision)
    if settings.gradient_checkpointing:
        checkpoint_activations(model)
    return Policy(model, dtype, settings.fp32_head)


def build_reference(recipe: Recipe, policy: Policy) -> Policy:
    """Returns the frozen model in its present state: a copy of the policy; under an adapter its base, which needs no copy."""
    if recipe.model.lora is not None:
        return Policy(policy.model, policy.dtype, policy.fp32_head, adapter=False)
    with memory_for("the reference, a copy of the model", what_helps(recipe, "load"), SetupError):
        return copy.deepcopy(policy).requires_grad_(False)


def same_reference(location: str, weights: str, began_with: str | None) -> None:
    """Raises UsageError if the weights in model.path differ from those that the run began with."""
    if began_with not in (None, weights):
        raise UsageError(
            f"--resume: the weights in model.path {location} have changed since the last attempt (digest {began_with}, now"
            f" {weights}): the policy would be compared with another reference. Bring them back, or start a new run with"
            " model.path at a checkpoint of this one"
        )


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Makes the layers of `model` compute their activations again in the backward pass.

    transformers does this only in layers in training mode. All other modules stay in eval mode, and dropout is set to 0 in those
    layers, so that a forward pass depends only on ids and weights.
    """
    model.gradient_checkpointing_enable()
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.training = True
            for name in [name for name, value in vars(module).items() if "dropout" in name and isinstance(value, float)]:
                setattr(module, name, 0.0)
