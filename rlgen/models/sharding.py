"""Shards a policy over the processes (FSDP2): each process holds a shard of every tensor and of its gradient.

The policy is sharded before its model has values. transformers then reads only this process's slice of each tensor, so that no
process ever holds the whole model: its peak is its shards, and the largest tensor where one is gathered or converted.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, ConversionOps, MergeModulelist, WeightConverter

from rlgen.errors import ProcessError, SetupError
from rlgen.models.decoder import decoder_of
from rlgen.models.half import HALF, compute_as_held
from rlgen.models.parallel import ContextParallel, TensorParallel
from rlgen.models.parts import part
from rlgen.models.policy import Policy
from rlgen.processes import Processes

# Methods of `Policy` that compute with its weights, besides `forward`: FSDP2 gathers them for these calls only.
GATHERING = ("logits", "check", "pack", "scores_in")


@dataclass(frozen=True, slots=True)
class Meshes:
    """The processes, as the layouts that divide a policy."""

    shard: DeviceMesh  # [shard], or [replicate, shard] where neighbouring processes hold the weights once
    experts: DeviceMesh | None = None  # [shard, experts]: neighbours divide the experts of a layer. None: nobody does
    tensor: DeviceMesh | None = None  # [shard, tensor]: neighbours split each layer. None: nobody does
    context: DeviceMesh | None = None  # [shard, context]: neighbours share out the tokens of their rows. None: nobody does

    @classmethod
    def of(cls, processes: Processes, shard: int | None = None, **neighbours: int | None) -> "Meshes":
        """Returns the layouts, given keys of `processes`. All processes must call this together. Raises as `in_groups`."""
        if shard is None or shard == processes.world:
            whole = init_device_mesh(processes.device.type, (processes.world,), mesh_dim_names=("shard",))
        else:
            whole = in_groups(processes, shard, ("replicate", "shard"))
        return cls(whole, **{key: in_groups(processes, n, ("shard", key)) for key, n in neighbours.items() if n is not None})


def in_groups(processes: Processes, count: int, names: tuple[str, str]) -> DeviceMesh:
    """Returns the processes as a mesh [groups, `count` neighbours] with these names; the last one is a key of `processes`.

    Raises:
        ProcessError: the processes cannot be divided into groups of `count`.
    """
    world, key = processes.world, names[1]
    if world % count:
        raise ProcessError(
            f"processes.{key} {count} needs a multiple of {count} processes, but {world} run: start them with `torchrun"
            f" --nproc-per-node {count}`, or set processes.{key} to a divisor of {world}"
        )
    mesh = init_device_mesh(processes.device.type, (world // count, count), mesh_dim_names=names)
    for group in mesh.get_all_groups():  # torch gives new groups a timeout of its own
        _set_pg_timeout(timedelta(seconds=processes.timeout), group)
    return mesh


def shard(policy: Policy, meshes: Meshes) -> None:
    """Shards the policy in place: each layer, an embedding that is not tied, then the rest (last norm and head).

    With a mesh for `experts`, each process keeps its experts while layers compute, and tokens travel to them. With one for
    `tensor`, it keeps its part of each layer, and the processes of a group compute the rows of all of them together.

    A tied head shares its embedding's parameter. A layer's tensors are gathered only while it computes: every process must run
    the same number of forward passes. Outside of `forward` and the methods of `GATHERING` all parameters are DTensors. A
    forward pass in bfloat16 gathers them in bfloat16. Gradients are sums over the processes, in float32.
    """
    precision = MixedPrecisionPolicy(cast_forward_inputs=False)
    if policy.dtype == HALF:
        compute_as_held(policy.model)
        precision = MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=torch.float32, cast_forward_inputs=False)
    if meshes.experts is not None:
        for module in divide_experts(policy.model, meshes.experts["experts"]):
            fully_shard(module, mesh=meshes.experts["shard"], mp_policy=precision)
    layers, embedding = set(policy.model._no_split_modules or ()), policy.model.get_input_embeddings()
    tied = embedding.weight is policy.model.get_output_embeddings().weight
    of_layers = meshes.shard
    if meshes.tensor is not None:
        of_layers, policy.tensor = meshes.tensor["shard"], TensorParallel.of(policy.model, meshes.tensor["tensor"], policy.dtype)
    if meshes.context is not None:
        policy.context = ContextParallel.of(policy.model, meshes.context["context"])
    for module in list(policy.modules()):
        if type(module).__name__ in layers:
            fully_shard(module, mesh=of_layers, mp_policy=precision)
        elif module is embedding and not tied:
            fully_shard(module, mesh=meshes.shard, mp_policy=precision)
    if meshes.tensor is not None:  # the last norm sees the rows of the whole group, as layers do
        outside = {embedding.weight} if tied else None
        fully_shard(decoder_of(policy.model), mesh=of_layers, mp_policy=precision, ignored_params=outside)
    fully_shard(policy, mesh=meshes.shard, reshard_after_forward=True, mp_policy=precision)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # losses have global denominators
            module.set_force_sum_reduction_for_comms(True)
    for method in GATHERING:
        register_fsdp_forward_method(policy, method)


def divide_experts(model: PreTrainedModel, mesh: DeviceMesh) -> list[nn.Module]:
    """Gives each process of `mesh` its experts of each layer, by the model's own plan, and returns what holds them.

    The plan sends each token to the processes of its experts, and back (`all_to_all`). An expert's gradient is there the sum over
    the tokens of all of them.

    Raises:
        SetupError: the installed transformers cannot do it for this model.
    """
    before = {module: vars(module).get("forward") for module in model.modules()}
    plan: dict[str, str] = getattr(model, "ep_plan", {})  # since transformers 5.19
    why = f"processes.experts: transformers {transformers.__version__} cannot divide the experts of {type(model).__name__}"
    if "ep_dispatch_experts" not in plan.values():
        raise SetupError(f"{why}; remove it, and each process gathers all experts")
    from transformers.distributed.tensor_parallel import apply_expert_parallelism

    try:
        apply_expert_parallelism(model, mesh, None, plan)
    except ValueError as error:
        raise SetupError(f"{why}: {error}; set it to another number of processes, or remove it") from error
    return [module for module, forward in before.items() if vars(module).get("forward") is not forward]


def send_gradients(policy: Policy, now: bool, defer: bool) -> None:
    """Sets whether the next backward pass is the last one of an update, after which the gradients must have been sent.

    Args:
        defer: nothing is sent before, and each process adds up whole gradients. Otherwise each backward pass sends the other
            processes of the group their shards; only groups that hold the same shards add theirs up after the last one.
    """
    if isinstance(policy, FSDPModule):
        if defer:
            policy.set_requires_gradient_sync(now)
        else:
            policy.set_requires_all_reduce(now)


def move_buffers(policy: Policy) -> None:
    """Moves the buffers, which are whole in each process and were read to the CPU, to the device of the shards."""
    device = next(part(parameter).device for parameter in policy.parameters())
    for module in policy.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


def read_by_slices(model: PreTrainedModel, count: int) -> bool:
    """Returns whether a slice of each weight of `model` can be read from slices of the checkpoint, when `count` processes share
    each tensor.

    Most mixtures of experts are stacked while they are loaded, and a process reads its experts only. Other conversions need whole
    tensors, and so does a stack of which a process would hold no expert.
    """

    def keeps_rows(step: ConversionOps) -> bool:
        """Returns whether a slice of the first dimension of what is made needs only that slice of what is taken."""
        if isinstance(step, MergeModulelist):
            return bool(step.dim == 0)
        return isinstance(step, Concatenate) and bool(step.dim > 0)

    converters = [one for one in get_model_conversion_mapping(model) if isinstance(one, WeightConverter)]
    by_slices = all(keeps_rows(step) for converter in converters for step in converter.operations)
    stacks = [len(parameter) for parameter in model.parameters() if parameter.ndim == 3] if converters else []
    # torch gives each process as many rows, rounded up, and the last ones what is left.
    return by_slices and all((count - 1) * -(-rows // count) < rows for rows in stacks)
