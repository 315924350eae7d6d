"""Computes a step with the settings of its run and with changed ones, from the same weights, and compares the two."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from rlgen.algorithms.base import Algorithm, loss_distribution
from rlgen.errors import UsageError
from rlgen.metrics import Metric
from rlgen.recipe import Recipe, load_recipe
from rlgen.rollout.score import score_own
from rlgen.run.directory import without_nonfinite
from rlgen.run.state import optimizer_tensors, place_optimizer
from rlgen.setup.reopen import changed_values
from rlgen.setup.settings import TrainSettings
from rlgen.setup.train_state import TrainState, move_moments, open_optimizer
from rlgen.trainers.collect import Collected
from rlgen.trainers.loop import Learning
from rlgen.trainers.results import StepResult
from rlgen.trainers.train_batch import TrainBatch

Gradient = dict[int, Tensor]  # by index of the parameter, on the CPU
FREE = ("trainer.", "optim.")
# Why a change of another section is refused.
FIXED = {
    "data": "it decides the prompts, but the recorded completions answer the run's prompts",
    **dict.fromkeys(("rewards", "scoring"), "the rewards are those that the run has recorded"),
    **dict.fromkeys(("rollout", "engine"), "it decides what is sampled, and nothing is sampled again"),
    "model": "the weights are those of the run",
    "optim": "the moments are those of the run's optimizer",
}
NO_PART = "it is not part of the computation of a step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What other settings would have done to a step. Pairs are (with the run's settings, with the changed ones)."""

    metrics: Mapping[str, Any]  # with the changed settings
    metrics_changed: Mapping[str, tuple[Any, Any]]  # those that are not the same
    rows: int  # samples of the step
    rows_trained: tuple[int, int]
    advantages_changed: int  # rows
    advantages_flipped: int  # rows whose advantage has the other sign
    advantages_largest_change: float
    ratio: Mapping[str, tuple[float | None, float | None]]  # min, mean, max of exp(log-prob after the step - before it)
    cosine: float | None  # of the gradients of the last update, as in `grad_norm`; None: one side made no update
    cosine_first: float | None  # of those of the first update
    relative_norm: float | None  # of the last update's gradients: changed divided by the run's; None: one is missing, or 0


@contextmanager
def gradients(optimizer: Optimizer) -> Iterator[list[Gradient]]:
    """Yields a list that gets the gradients of the first and of the last update in the block."""
    seen: list[Gradient] = []

    def take(one: Optimizer, _args: Any, _kwargs: Any) -> None:
        parameters = [parameter for group in one.param_groups for parameter in group["params"]]
        grads = {place: parameter.grad for place, parameter in enumerate(parameters) if parameter.grad is not None}
        seen[1:] = [{place: grad.detach().to("cpu", copy=True) for place, grad in grads.items()}]

    handle = optimizer.register_step_pre_hook(take)
    try:
        yield seen
    finally:
        handle.remove()


def with_changes(resolved: Path, recipe: Recipe, overrides: Sequence[str]) -> tuple[Recipe, dict[str, tuple[Any, Any]]]:
    """Returns the recipe of a run with other settings, and the old and new values of what differs, by key.

    Keys that `overrides` do not name keep their values, even if another default would follow from the overrides.
    """
    before, changed = (load_recipe(resolved, given, resolved=True).recipe for given in ((), overrides))
    was, now = (one.model_dump(mode="json") for one in (before, changed))
    differing = changed_values(was, now)
    if refused := next((key for key in differing if not key.startswith(FREE) or key == "optim.kind"), None):
        section = refused.partition(".")[0]
        raise UsageError(
            f"--set {refused}: {FIXED.get(section, NO_PART)}; a replay can change {' and '.join(f'{key}*' for key in FREE)}"
        )
    if not differing:
        raise UsageError(f"--set {', '.join(overrides)}: the run used this already; change a value, or leave --set out")
    return recipe.model_copy(update={"trainer": changed.trainer, "optim": changed.optim}), differing


def changed_state(state: TrainState, settings: TrainSettings, algorithm: Algorithm, step: int) -> TrainState:
    """Returns a state of the same models with another algorithm, learning rate and weight decay.

    Its optimizer has no moments yet.
    """
    optimizer, schedule = open_optimizer(settings.optim, settings.run.steps, state.policy)
    assert isinstance(schedule, LambdaLR)  # as transformers makes all that a recipe can ask for
    for group, rate, factor in zip(optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
        group["lr"] = rate * factor(step - 1)
    return replace(state, settings=settings, algorithm=algorithm, optimizer=optimizer, schedule=schedule)


def compare_settings(
    own: Learning, other: Learning, got: Collected, step: int, offloads: bool
) -> tuple[Mapping[str, Any], Change]:
    """Computes a step with two settings, from the same weights. Returns the metrics of `own`, and how `other` differs.

    `offloads`: whether moments are in the machine's memory between steps.
    """
    policy = own.update.policy
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    weights = [parameter.detach().to("cpu", copy=True) for parameter in trained]
    moments = {name: one.to("cpu", copy=True) for name, one in optimizer_tensors(policy.model, own.update.optimizer).items()}
    with gradients(own.update.optimizer) as of_own:
        before = own(got, step)
    ratio = ratio_after(own, before.train_batch)
    with torch.no_grad():
        for parameter, value in zip(trained, weights, strict=True):
            parameter.copy_(value)
    place_optimizer(moments, policy.model, other.update.optimizer)
    if offloads:
        move_moments(other.update.optimizer, torch.device("cpu"))
    with gradients(other.update.optimizer) as of_other:
        after = other(got, step)
    change = change_of(before, after, of_own, of_other, (ratio, ratio_after(other, after.train_batch)))
    return without_nonfinite(before.metrics), change


def change_of(
    before: StepResult, after: StepResult, one: list[Gradient], other: list[Gradient], ratio: tuple[Tensor, Tensor]
) -> Change:
    was, now = without_nonfinite(before.metrics), without_nonfinite(after.metrics)
    pairs = {key: (was.get(key), now.get(key)) for key in {**was, **now}}
    advantage, changed = (torch.where(side.advantages.trained, side.advantages.advantages, 0.0) for side in (before, after))
    norm, changed_norm = pairs[Metric.GRAD_NORM]
    ratios = [
        {"min": side.min().item(), "mean": side.mean().item(), "max": side.max().item()} if len(side) else {} for side in ratio
    ]
    return Change(
        metrics=now,
        metrics_changed={key: pair for key, pair in pairs.items() if pair[0] != pair[1]},
        rows=len(advantage),
        rows_trained=(int(before.advantages.trained.sum()), int(after.advantages.trained.sum())),
        advantages_changed=int((advantage != changed).sum()),
        advantages_flipped=int((advantage * changed < 0).sum()),
        advantages_largest_change=(changed - advantage).abs().max().item() if len(advantage) else 0.0,
        ratio={name: (ratios[0].get(name), ratios[1].get(name)) for name in ("min", "mean", "max")},
        cosine=cosine(one[-1:], other[-1:]),
        cosine_first=cosine(one[:1], other[:1]),
        relative_norm=changed_norm / norm if norm and changed_norm is not None else None,
    )


def ratio_after(learning: Learning, train_batch: TrainBatch) -> Tensor:
    """Returns [N] float64, of all processes: the probability of each trained token after the step, divided by that before."""
    update, processes = learning.update, learning.update.processes
    distribution = loss_distribution(update.algorithm, update.distribution)
    rows = (*train_batch.micro_batches, *train_batch.idle)
    now = score_own(update.policy, train_batch.samples, distribution, learning.builder.budget, processes, rows)
    mask = torch.from_numpy(train_batch.samples.loss_mask.values)
    own = (now - train_batch.flat("old_logp")).double().exp()[mask]
    return torch.cat(processes.gather([own]))


def cosine(one: list[Gradient], other: list[Gradient]) -> float | None:
    """Returns the cosine of the angle between two gradients, 1.0 exactly if they are equal; None if one is missing."""
    if not one or not other:
        return None
    product = sum(dot(grad, other[0][place]) for place, grad in one[0].items() if place in other[0])
    squares = [sum(dot(grad, grad) for grad in side[0].values()) for side in (one, other)]
    return product / math.sqrt(squares[0] * squares[1])


def dot(one: Tensor, other: Tensor) -> float:
    return torch.dot(one.flatten().double(), other.flatten().double()).item()
