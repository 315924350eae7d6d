"""Builds what trains the policy: reference, optimizer and schedule; and restores their state from a checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from rlgen.algorithms.base import Algorithm
from rlgen.errors import SetupError
from rlgen.models.memory_errors import memory_for
from rlgen.models.parts import by_mesh
from rlgen.models.policy import BasePolicy, Policy
from rlgen.processes import Processes
from rlgen.recipe.models import OptimRecipe
from rlgen.run.checkpoint import load_checkpoint
from rlgen.sentinel.watch import Watch
from rlgen.setup.policy import Policies, build_reference
from rlgen.setup.settings import TrainSettings
from rlgen.trainers.groups import ExactSum, Groups, provisional_totals
from rlgen.trainers.loop import Learning
from rlgen.trainers.train_batch import TrainBatchBuilder
from rlgen.trainers.update import Updater
from rlgen.types import Position, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """The trainer's side of a run: the models, and what updates them."""

    settings: TrainSettings
    algorithm: Algorithm
    models: Policies
    reference: Policy | BasePolicy | None  # None: the algorithm needs none
    optimizer: Optimizer
    schedule: LRScheduler

    @property
    def policy(self) -> Policy:
        return self.models.policy


def open_train_state(settings: TrainSettings, algorithm: Algorithm, models: Policies) -> TrainState:
    policy, needed = models.policy, algorithm.reference != "none"
    reference = (models.reference or build_reference(settings, policy)) if needed else None
    optimizer, schedule = open_optimizer(settings.optim, settings.run.steps, policy)
    return TrainState(
        settings=settings, algorithm=algorithm, models=models, reference=reference, optimizer=optimizer, schedule=schedule
    )


def open_optimizer(optim: OptimRecipe, steps: int, policy: Policy) -> tuple[Optimizer, LRScheduler]:
    """Returns the optimizer of the trained parameters and the schedule of its learning rate, before the first step."""
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    if optim.kind == "adamw_8bit":
        optimizer = adamw_8bit(trained, optim.learning_rate, optim.weight_decay)
    else:
        # Fused: one kernel for all tensors, and no scratch of their size. A resumed run goes on with what its checkpoint says.
        groups = [{"params": some} for some in by_mesh(trained)]
        optimizer = torch.optim.AdamW(groups, lr=optim.learning_rate, weight_decay=optim.weight_decay, fused=True)
    if optim.offload:
        offload_moments(optimizer, policy.model.device)
    # With the name `constant`, transformers ignores the warm-up.
    name = "constant_with_warmup" if optim.schedule == "constant" and optim.warmup_steps else optim.schedule
    return optimizer, get_scheduler(name, optimizer, optim.warmup_steps, steps)


def offload_moments(optimizer: Optimizer, device: torch.device) -> None:
    """Makes an optimizer hold its moments in the machine's memory, and on `device` only while it steps."""
    optimizer.register_step_pre_hook(lambda *_: move_moments(optimizer, device))
    optimizer.register_step_post_hook(lambda *_: move_moments(optimizer, torch.device("cpu")))


def move_moments(optimizer: Optimizer, device: torch.device) -> None:
    for state in optimizer.state.values():
        state.update({name: value.to(device) for name, value in state.items() if isinstance(value, Tensor) and value.ndim})


def adamw_8bit(trained: Sequence[Parameter], learning_rate: float, weight_decay: float) -> Optimizer:
    """Returns AdamW with moments of 8 bits in blocks of 256 (Dettmers et al. 2021, arXiv 2110.02861). Small tensors keep 32 bits.

    Raises SetupError if bitsandbytes is not installed.
    """
    try:
        from bitsandbytes.optim import AdamW8bit  # slow to import
    except ImportError as error:
        raise SetupError(
            'optim.kind: adamw_8bit needs the package bitsandbytes: pip install "rlgen[bitsandbytes]", or set it to adamw'
        ) from error
    return AdamW8bit(trained, lr=learning_rate, weight_decay=weight_decay)


def restore(state: TrainState, checkpoint: Path | None, processes: Processes) -> Position:
    """Loads weights, optimizer, schedule and random states from `checkpoint`, and returns its position. None: returns the start.

    Raises CheckpointError if it is damaged, or of another model or version of rlgen.
    """
    if checkpoint is None:
        return Position()
    with memory_for("the checkpoint's optimizer state", state.settings.memory_advice("optimizer"), SetupError):
        policy, base = state.policy, state.models.base
        parts = policy.model, state.optimizer, state.schedule
        position = processes.run_all(lambda: load_checkpoint(checkpoint, *parts, processes.rank, base))
        if state.settings.optim.offload:
            move_moments(state.optimizer, torch.device("cpu"))  # an optimizer loads them to its device
        return position


def build_learning(
    state: TrainState, sampling: Sampling, processes: Processes, weights: Mapping[str, float], watch: Watch | None
) -> Learning:
    """Builds what learns from the samples of a step; `weights` are those of the rewards, by label."""
    builder = TrainBatchBuilder(
        processes=processes,
        algorithm=state.algorithm,
        weights=weights,
        reference=state.reference,
        distribution=sampling.distribution,
        budget=state.settings.optim.micro_batch_tokens,
        packed=state.policy.packed,
        attention=state.policy.attention_cost,
        sharing=state.policy.sharing,
    )
    update, groups = build_updater(state, sampling, processes, watch), None
    settings, rollout = state.settings, state.settings.rollout
    if rollout.stream:
        with memory_for("the sums of gradients of rollout.stream", ["rollout.stream: false"], SetupError):
            sums = ExactSum([parameter for parameter in state.policy.parameters() if parameter.requires_grad])
        groups = Groups(
            builder=builder,
            update=update,
            sums=sums,
            provisional=provisional_totals(rollout.prompts_per_step, rollout.group_size, rollout.max_completion_tokens),
            threads=max(1, torch.get_num_threads() // 2) if settings.shares_cores else None,
            late_from=settings.late_from,
        )
    return Learning(builder=builder, update=update, groups=groups)


def build_updater(state: TrainState, sampling: Sampling, processes: Processes, watch: Watch | None) -> Updater:
    """If `watch` is None, its batches are not compared with the engine."""
    settings = state.settings
    return Updater(
        processes=processes,
        sharded=state.models.sharded,
        defer_sync=settings.processes.defer_sync,
        policy=state.policy,
        optimizer=state.optimizer,
        algorithm=state.algorithm,
        updates=settings.trainer.updates_per_rollout,
        max_grad_norm=settings.optim.max_grad_norm,
        distribution=sampling.distribution,
        max_tokens=sampling.max_tokens,
        watch=watch,
        less_memory=settings.memory_advice,
        deterministic=settings.run.deterministic,
    )
