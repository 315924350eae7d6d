"""Shards a policy over the processes (FSDP2): each process holds a shard of every tensor and of its gradient."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from rlgen.models.half import HALF, compute_as_held
from rlgen.models.policy import Policy
from rlgen.processes import Processes


def shard(policy: Policy, processes: Processes) -> None:
    """Shards the policy in place: each layer, then the rest (embedding, last norm and head).

    A tied head shares its embedding's parameter. A layer's tensors are gathered only while it computes: every process must run
    the same number of forward passes. Outside of `forward` and `logits` all parameters are DTensors. A forward pass in bfloat16
    gathers them in bfloat16. Gradients are averaged over the processes, in float32.
    """
    precision = MixedPrecisionPolicy(cast_forward_inputs=False)
    if policy.dtype == HALF:
        compute_as_held(policy.model)
        precision = MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=torch.float32, cast_forward_inputs=False)
    mesh = init_device_mesh(processes.device.type, (processes.world,))
    layers = set(policy.model._no_split_modules or ())
    for module in list(policy.modules()):
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, reshard_after_forward=True, mp_policy=precision)
    register_fsdp_forward_method(policy, "logits")
