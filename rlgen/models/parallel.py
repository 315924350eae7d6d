"""Lets neighbouring processes compute their rows together: they split each layer, or share out the tokens.

Every process keeps its own rows: sampling, losses and metrics do not change. For a forward pass, the processes of a group join
their rows, and compute the hidden states of all of them together. Each then takes the states of its own rows, and computes the
head alone. The backward pass joins the gradients of these states again.
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig, PreTrainedModel

from rlgen.errors import SetupError
from rlgen.models.routing import is_mixture
from rlgen.types import MicroBatch

HEADS = ("num_attention_heads", "num_key_value_heads")  # keys of configs
SPLIT = (*HEADS, "intermediate_size")  # what tensor parallelism splits
PLANS = "transformers.distributed.tensor_parallel"  # since transformers 5.19
# What plans of dense layers ask for. Experts are left out: a part of them is not a slice, as checkpoints need.
STYLES = {"colwise", "rowwise", "replicated_with_grad_allreduce", "colwise_gather_output", "rowwise_split_input"}


def join_rows(batch: MicroBatch, mesh: DeviceMesh) -> MicroBatch:
    """Returns a batch with the rows of all processes of `mesh`, whose `places` are those of this process's own tokens.

    Of other rows it has only what their hidden states need.
    """
    experts = None if batch.experts is None else batch.experts.cpu()
    own = batch.input_ids.cpu(), experts, batch.lengths, batch.prompt_lengths
    gathered: list[Any] = [None] * mesh.size()
    dist.all_gather_object(gathered, own, mesh.get_group())
    ids, routes, *columns = zip(*gathered, strict=True)
    firsts = [sum(map(len, ids[:place])) for place in range(len(ids))]
    lengths, prompt_lengths = (sum(map(tuple, column), ()) for column in columns)
    rows, first_of = [row for own in ids for row in own], dict[bytes, int]()
    prompts = [row[:length].numpy().tobytes() for row, length in zip(rows, prompt_lengths, strict=True)]
    before = torch.tensor([[firsts[mesh.get_local_rank()]], [0]], device=batch.places.device)
    known = next((one for one in routes if one is not None), None)
    joined = None
    if known is not None:  # a process without rows has none
        unknown = known.new_full((1, 1, *known.shape[2:]), -1)
        given = [unknown.expand(*of.shape, -1, -1) if one is None else one for of, one in zip(ids, routes, strict=True)]
        joined = pad_sequence([row for one in given for row in one], batch_first=True, padding_value=-1)
    device = batch.input_ids.device
    return replace(
        batch,
        places=batch.places + before,
        input_ids=pad_sequence(rows, batch_first=True).to(device),
        experts=None if joined is None else joined.to(device),
        lengths=lengths,
        prompt_lengths=prompt_lengths,
        same_prompt=tuple(first_of.setdefault(prompt, place) for place, prompt in enumerate(prompts)),
    )


@dataclass(frozen=True, slots=True, eq=False)
class TensorParallel:
    """Processes that split each layer of a policy, by transformers' own plans (tensor parallelism)."""

    mesh: DeviceMesh  # [tensor]

    @classmethod
    def of(cls, model: PreTrainedModel, mesh: DeviceMesh, dtype: torch.dtype) -> "TensorParallel":
        """Splits the layers of a model without values, which computes in `dtype`. Raises SetupError as `plan_of_layers`."""
        plan, size = plan_of_layers(model, mesh.size(), dtype), mesh.size()
        import_module(PLANS).apply_tensor_parallelism(model, mesh, plan)
        # It advises to gather in another order whenever a weight that is split twice is gathered.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        # The embedding looks up the rows of the whole group, and its gradient is summed over all processes.
        model.get_input_embeddings().register_forward_hook(lambda *given: divided(given[-1], size))
        return cls(mesh)

    def add_gradients(self, states: Tensor) -> Tensor:
        """Returns `states` as they are. In the backward pass their gradient is the sum over the processes of the group."""
        held = DTensor.from_local(states, self.mesh, [Replicate()], run_check=False)
        return held.to_local(grad_placements=[Partial()])


@dataclass(frozen=True, slots=True, eq=False)
class ContextParallel:
    """Processes that share out the tokens of their packed rows (context parallelism; Jacobs et al., DeepSpeed Ulysses,
    arXiv:2309.14509).

    Each computes its tokens through all layers. For the attention, tokens are exchanged for heads: each process then computes
    some heads for all tokens.
    """

    mesh: DeviceMesh  # [context]

    @classmethod
    def of(cls, model: PreTrainedModel, mesh: DeviceMesh) -> "ContextParallel":
        """Raises SetupError if heads cannot be divided among the processes, or the rotation depends on all tokens of a pass."""
        config, name = model.config.get_text_config(), type(model).__name__
        check_sizes(f"processes.context: the heads of {name} cannot be divided", config, HEADS, mesh.size())
        rotation = getattr(config, "rope_parameters", None) or {}
        if {"dynamic", "longrope"} & {one.get("rope_type") for one in (rotation, *rotation.values()) if isinstance(one, dict)}:
            raise SetupError(f"processes.context: the rotation of {name} depends on the longest row of a pass; remove it")
        return cls(mesh)

    def mine(self, packed: Tensor, dim: int) -> Tensor:
        """Returns this process's tokens of a packed sequence, whose tokens are along `dim`; zeros make up the last ones."""
        missing = -packed.shape[dim] % self.mesh.size()
        padded = pad(packed, [0, 0] * (packed.ndim - 1 - dim) + [0, missing])
        return padded.chunk(self.mesh.size(), dim)[self.mesh.get_local_rank()]

    def whole(self, states: Tensor) -> Tensor:
        """Returns the states [1, N, H] of all tokens. In the backward pass their gradients are summed over the processes."""
        return DTensor.from_local(states, self.mesh, [Shard(1)], run_check=False).full_tensor(grad_placements=[Partial()])

    def by_heads(self, own: Tensor, tokens: int) -> Tensor:
        """Returns some heads of all tokens [N, heads / n, D], given all heads of the own ones."""
        held = DTensor.from_local(own, self.mesh, [Shard(0)], run_check=False)
        return held.redistribute(placements=[Shard(1)]).to_local()[:tokens]

    def by_tokens(self, some: Tensor) -> Tensor:
        """Undoes `by_heads`."""
        some = pad(some, [0, 0, 0, 0, 0, -len(some) % self.mesh.size()])
        return DTensor.from_local(some, self.mesh, [Shard(1)], run_check=False).redistribute(placements=[Shard(0)]).to_local()


def plan_of_layers(model: PreTrainedModel, count: int, dtype: torch.dtype) -> dict[str, str]:
    """Returns how transformers splits the modules of a model's layers over `count` processes, by name with `*` for numbers.

    The embedding and the head are left out: each process computes the head of its own rows.

    Raises:
        SetupError: the installed transformers cannot split this model, or its gradients would be wrong.
    """
    config, name = model.config.get_text_config(), type(model).__name__
    why = f"processes.tensor: transformers {transformers.__version__} cannot split the layers of {name}"
    instead = "remove it: strategy fsdp divides any weights, and processes.experts those of experts"
    plan = {key: style for key, style in (getattr(model, "tp_plan", None) or {}).items() if ".layers." in f".{key}"}
    apply = getattr(import_module(PLANS), "apply_tensor_parallelism", None) if find_spec(PLANS) else None
    if not apply or "tp_plan" not in signature(apply).parameters or not plan or is_mixture(config):
        raise SetupError(f"{why}; {instead}")
    if not STYLES.issuperset(plan.values()):
        raise SetupError(f"{why}: rlgen does not know {', '.join(sorted({*plan.values()} - STYLES))}; {instead}")
    check_sizes(why, config, SPLIT, count)
    # modules that have a part of the states
    halves = {key.rpartition(".")[0] for key, style in plan.items() if style == "colwise"}
    for key, _ in model.named_parameters():
        module = re.sub(r"\.\d+(?=\.)", ".*", key).rpartition(".")[0]
        if module not in plan and any(f"{module}.".startswith(f"{half}.") for half in halves):
            raise SetupError(f"{why}: its plan leaves out {key}, which would get a part of its gradient; {instead}")
        if dtype != torch.float32 and key.endswith(".bias") and plan.get(module, "").startswith("rowwise"):
            raise SetupError(f"{why}: in half precision {key} would be added before or after rounding; {instead}")
    return plan


def check_sizes(why: str, config: PreTrainedConfig, names: Sequence[str], count: int) -> None:
    """Raises SetupError if `count` processes cannot divide one of these numbers of a config equally."""
    for name in names:
        try:
            held = getattr(config, name, count)
        except RuntimeError as error:  # transformers: it differs by layer
            raise SetupError(f"{why} over {count} processes: {name} is not the same in all layers; remove it") from error
        if not isinstance(held, int) or held % count:
            raise SetupError(f"{why} over {count} processes: {name} is {held}; set it to a divisor of that, or remove it")


def divided(states: Tensor, count: int) -> Tensor:
    """Returns `states` as they are. In the backward pass their gradient is divided by `count`."""
    if states.requires_grad:
        states.register_hook(lambda gradient: gradient / count)
    return states
