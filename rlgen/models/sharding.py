"""Shards a policy over the processes (FSDP2): each process holds a shard of every tensor and of its gradient."""

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from rlgen.models.policy import Policy
from rlgen.processes import Processes


def shard(policy: Policy, processes: Processes) -> None:
    """Shards the policy in place: each layer, then the rest (embedding, last norm and head).

    A tied head shares its embedding's parameter. A layer's tensors are gathered only while it computes: every process must run
    the same number of forward passes. Outside of `forward` and `logits` all parameters are DTensors. Gradients are averaged over
    the processes.
    """
    mesh = init_device_mesh(processes.device.type, (processes.world,))
    layers = set(policy.model._no_split_modules or ())
    for module in list(policy.modules()):
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh)
    fully_shard(policy, mesh=mesh, reshard_after_forward=True)
    register_fsdp_forward_method(policy, "logits")
