"""Loads the model that is trained, and the frozen reference that it is compared with."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from rlgen.algorithms.base import Algorithm
from rlgen.errors import SetupError, UsageError
from rlgen.models.compiled import compile_layers
from rlgen.models.dither import dither
from rlgen.models.half import HALF, compute_in_half
from rlgen.models.load import load_model
from rlgen.models.lora import add_adapter, is_adapted
from rlgen.models.memory_errors import memory_for, refused_with
from rlgen.models.packing import can_pack
from rlgen.models.policy import TRIED, BasePolicy, Policy
from rlgen.models.sharding import Meshes, move_buffers, read_by_slices, shard
from rlgen.models.vision import Vision, of_vision, reads_images
from rlgen.models.weights import base_digest, bits
from rlgen.processes import Processes
from rlgen.run.checkpoint import check_fit
from rlgen.setup.settings import TrainSettings

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """The models of the trainer, before anything else is allocated."""

    policy: Policy
    reference: Policy | None  # None: the algorithm needs none, or it needs no loading: see `build_reference`
    sharded: bool  # each process holds a part of every weight
    base: str | None  # digest of the frozen weights under an adapter
    held: str | None  # digest of this process's shards of them; None: they are not sharded
    weights: str  # digest of the weights in model.path


def open_policies(
    settings: TrainSettings, algorithm: Algorithm, checkpoint: Path | None, processes: Processes, began_with: str | None, say: Say
) -> Policies:
    """Loads the policy from model.path; if it is sharded, its reference too, since a sharded policy cannot be copied."""
    asked, meshes = settings.processes, None
    if sharded := asked.strategy == "fsdp" and processes.world > 1:
        meshes = Meshes.of(processes, asked.shard, experts=asked.experts, tensor=asked.tensor, context=asked.context)
        policy = open_shards(settings, meshes, processes, True, say)
    else:
        policy = processes.run_all(lambda: build_policy(settings, processes.device))
    pack_alike(policy, processes)
    if checkpoint:  # one of another model is refused early
        processes.run_all(lambda: check_fit(checkpoint, policy.model, settings.trainer.kind))
    needs_reference, reference, base = algorithm.reference != "none", None, None
    if is_adapted(policy.model):  # of shards the first process reads the whole tensors, and tells the others
        base = base_digest(policy.model, reads=not sharded or processes.is_main)
        base = processes.gather([base])[0] if sharded else base
    weights = base or bits(policy.model, processes)
    if needs_reference and base is None:  # an adapter's checkpoint stores the digest of its base itself
        processes.run_all(lambda: same_reference(settings.location, weights, began_with))
    if meshes is not None and needs_reference and base is None:
        reference = open_shards(settings, meshes, processes, False, say)
        pack_alike(reference, processes)
    held = None if base is None or not sharded else base_digest(policy.model, gather=False)
    if base is None and policy.dtype == HALF and settings.model.dither is not False:
        dither(policy.model, settings.run.seed)  # a checkpoint's weights take the place of these
    return Policies(policy=policy, reference=reference, sharded=sharded, base=base, held=held, weights=weights)


def open_shards(settings: TrainSettings, meshes: Meshes, processes: Processes, trained: bool, say: Say) -> Policy:
    """Loads this process's shards of the model, and checks that rlgen knows how it computes logits."""
    policy = processes.run_all(lambda: build_shards(settings, meshes, trained, say))
    with memory_for("a forward pass of eight tokens", settings.memory_advice("load"), SetupError):
        processes.run_all(lambda: policy.check(TRIED), has_collectives=True)
    processes.run_all(lambda: compile_and_pack(settings, policy), has_collectives=True)
    return policy


def build_policy(settings: TrainSettings, device: torch.device) -> Policy:
    """Loads the model that is trained, with float32 weights in any dtype of the forward: bfloat16 loses updates of 1e-6.

    Under an adapter the model's own weights are frozen, and held in the dtype of the forward.
    """
    wanted, location = settings.model, settings.location
    dtype = getattr(torch, wanted.dtype)
    held = torch.float32 if wanted.lora is None else dtype
    with memory_for("the model", settings.memory_advice("load"), SetupError):
        model = load_model(location, wanted.revision, held, wanted.attention, device, wanted.quantization)
        if wanted.lora is not None:
            add_adapter(model, wanted.lora, settings.run.seed, wanted.revision)
    vision = Vision.open(location, wanted.revision, model.config) if reads_images(model.config) else None
    if vision is not None and not wanted.train_vision:
        for parameter in of_vision(model):
            parameter.requires_grad_(False)
    if wanted.gradient_checkpointing:
        checkpoint_activations(model)
    policy = Policy(model, dtype, wanted.fp32_head, vision)
    policy.offload_activations = wanted.offload_activations
    compile_and_pack(settings, policy)
    return policy


def compile_and_pack(settings: TrainSettings, policy: Policy) -> None:
    wanted, compiled = settings.optim.packing, settings.model.compile
    possible = can_pack(policy.model.device, policy.dtype)
    if compiled:
        with memory_for("compiling the model", settings.memory_advice("forward"), SetupError):
            compile_layers(policy.model)
    if wanted or (wanted is None and not compiled and policy.vision is None and possible):
        if not possible:
            raise SetupError(
                "optim.packing: a GPU packs rows in bfloat16 only, from compute capability 8.0 on; remove it, or set model.dtype"
                " to bfloat16"
            )
        reason = policy.pack(settings.prompts)
        if reason and wanted:
            raise SetupError(f"optim.packing: {reason}; remove it: the result is the same, with padding")


def pack_alike(policy: Policy, processes: Processes) -> None:
    """Pads the rows in all processes if one of them cannot pack: on another GPU the same comparison may end differently, and
    processes that pack divide a step into other micro-batches. Raises SetupError if `processes.context` needs packed rows.
    """
    reasons = [reason for reason in processes.gather([policy.unpacked]) if reason is not None]
    if reasons:
        policy.unpack(reasons[0])
    if policy.context is not None and not policy.packed:
        raise SetupError(f"processes.context needs packed rows, but {policy.unpacked or 'they are padded'}; remove it")


def build_shards(settings: TrainSettings, meshes: Meshes, trained: bool, say: Say) -> Policy:
    """Loads this process's shards of the policy, in the dtypes of `build_policy`; with `trained` False of its frozen reference.

    Under an adapter the frozen weights are sharded, and each process holds the whole adapter.
    """
    wanted, location, made = settings.model, settings.location, list[Policy]()
    dtype = getattr(torch, wanted.dtype)
    held = torch.float32 if wanted.lora is None else dtype

    def sharded(model: PreTrainedModel) -> Policy:
        # transformers ties only what has values: FSDP2 would hold a tied weight twice, and an update would reach one of the two.
        model.tie_weights()
        policy = Policy(model.requires_grad_(trained and wanted.lora is None), dtype, wanted.fp32_head)
        policy.offload_activations = wanted.offload_activations
        shard(policy, meshes)
        return policy

    def divide(model: PreTrainedModel) -> None:
        if read_by_slices(model, meshes.shard["shard"].size()):
            made.append(sharded(model))

    with memory_for("the model" if trained else "the reference", settings.memory_advice("load"), SetupError):
        model = load_model(location, wanted.revision, held, wanted.attention, torch.device("cpu"), divide=divide)
        if not made:
            say(
                f"model: {type(model).__name__} is converted from whole tensors: each process reads all of them into its"
                " machine's memory, and keeps its shards"
            )
        policy = made[0] if made else sharded(model)
        move_buffers(policy)
        if wanted.lora is not None:
            add_adapter(model, wanted.lora, settings.run.seed, wanted.revision)
            if dtype == HALF:
                compute_in_half(model)  # rounds the adapter, which FSDP2 does not hold
    if wanted.gradient_checkpointing:
        checkpoint_activations(model)  # after loading, which ends in eval mode
    return policy


def build_reference(settings: TrainSettings, policy: Policy) -> Policy | BasePolicy:
    """Returns the frozen model in its present state: a copy of the policy; under an adapter its base, which needs no copy."""
    if settings.model.lora is not None:
        return BasePolicy(policy)
    with memory_for("the reference, a copy of the model", settings.memory_advice("load"), SetupError):
        reference = copy.deepcopy(policy).requires_grad_(False)
    reference.routes = None  # another model, which chooses its own experts
    return reference


def same_reference(location: str, weights: str, began_with: str | None) -> None:
    if began_with not in (None, weights):
        raise UsageError(
            f"--resume: the weights in model.path {location} have changed since the last attempt (digest {began_with}, now"
            f" {weights}): the policy would be compared with another reference. Bring them back, or start a new run with"
            " model.path at a checkpoint of this one"
        )


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Makes the layers of `model` compute their activations again in the backward pass.

    transformers does this only in layers in training mode. All other modules stay in eval mode, and dropout is set to 0 in those
    layers, so that a forward pass depends only on ids and weights. Raises SetupError if the model cannot do that.
    """
    with refused_with("model.gradient_checkpointing: {}; remove it"):
        model.gradient_checkpointing_enable()
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.training = True
            for name in [name for name, value in vars(module).items() if "dropout" in name and isinstance(value, float)]:
                setattr(module, name, 0.0)
