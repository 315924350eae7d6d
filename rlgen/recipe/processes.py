"""Holds the models of the sections `processes` and `cluster`: the processes that train together, and where they are started."""

from typing import Annotated, Literal

from pydantic import Field, StrictInt

from rlgen.recipe.fields import Count, Strict, Text


class ProcessesRecipe(Strict):
    strategy: Literal["ddp", "fsdp"] = "ddp"
    """What each process holds: all weights (ddp), or a share of the weights and of the optimizer's state (fsdp)."""
    shard: Count | None = None
    """fsdp: number of processes that divide the weights among them, for example all processes of one machine. All processes form
    groups of this size, of neighbouring ranks, and each group holds all the weights. None: one group."""
    experts: Count | None = None
    """fsdp: number of processes that divide the experts of each layer (expert parallelism). None: nobody divides them."""
    tensor: Count | None = None
    """fsdp: number of processes that split each layer and compute it together (tensor parallelism). None: nobody splits them."""
    context: Count | None = None
    """fsdp: number of processes that share out the tokens of their rows (context parallelism). None: each process computes all
    tokens of its rows."""
    defer_sync: bool = False
    """fsdp: send gradients at the end of an update, not after each micro-batch. This takes 4 bytes more for each parameter."""
    count: Count | None = None
    """Processes that must run; torchrun or accelerate starts them. None: any number."""
    timeout: Annotated[float, Field(strict=True, ge=1, le=86400)] = 600.0
    """If a process gives no sign of life for this many seconds, all processes end."""

    @property
    def sharing(self) -> int:
        """Returns how many processes share out a micro-batch. It may have as many times optim.micro_batch_tokens."""
        return self.context or 1


class ClusterRecipe(Strict):
    kind: Literal["ray"]
    """Ray places, starts and watches the processes of the run (`rlgen docs cluster`)."""
    address: Text = "auto"
    """HOST:PORT of the cluster's head. auto: the cluster that this machine belongs to."""
    trainers: Count = 1
    """Processes that train."""
    servers: Annotated[StrictInt, Field(ge=0, le=1000)] = 0
    """vLLM servers to start for the run, with `engine: {kind: server}`; each gets engine.tensor_parallel_size GPUs."""
    gpus: Annotated[StrictInt, Field(ge=0, le=1)] | None = None
    """GPUs of each trainer. None: 1, if the cluster has GPUs."""
    cpus: Count = 1
    """Cores that Ray reserves for each trainer and each server."""
    restarts: Annotated[StrictInt, Field(ge=0, le=1000)] = 3
    """How often the run may restart from its newest checkpoint after losing a node or a process."""
