"""The same random tensors for both sides, and rlgen's side: its train batches and updater, with a model that replays log-probs.

Each row's prompt is its number, by which model and reference, here and in `trl_oracle.py`, find what they have to answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from helpers.batches import default_dtype
from helpers.samples import make_sample
from torch import Tensor

from rlgen.algorithms.base import Advantages
from rlgen.algorithms.registry import build_algorithm
from rlgen.models.policy import PolicyScores
from rlgen.processes import Processes
from rlgen.recipe.trainers import TrainerRecipe
from rlgen.rewards.score import weighted_sums
from rlgen.rollout.samples import Ragged, Samples
from rlgen.rollout.table import RowTable
from rlgen.trainers.train_batch import TrainBatch, TrainBatchBuilder
from rlgen.trainers.update import Updater, UpdateResult
from rlgen.types import WHOLE, Distribution, MicroBatch

ROWS, WIDTH, GROUP = 24, 8, 4
MAX_TOKENS = 10
PATTERNS = ("full", "ragged", "holes")
TOKEN, STOP, PADDING = 5, 2, 0
WEIGHTS = {"first": 1.0, "second": 0.5}  # of the rewards


def oracle(name: str) -> type[Any]:
    """The class of `trl_oracle` of that name. TRL imports vLLM and trackers, for ten seconds: only where one is asked for."""
    import trl_oracle

    return getattr(trl_oracle, name)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """What was sampled, what the models say about it, and what it earned. Hashable: what follows from one can be cached."""

    policy_logp: Tensor  # [B, T] after some update
    old_logp: Tensor  # [B, T] before it
    sampler_logp: Tensor  # [B, T]
    ref_logp: Tensor  # [B, T]
    entropy: Tensor  # [B, T]
    lengths: tuple[int, ...]  # [B] of the completions
    mask: Tensor  # [B, T] bool, within `lengths`
    truncated: tuple[bool, ...]  # [B]
    group_ids: tuple[int, ...]  # [B]
    rewards: tuple[dict[str, float | None], ...]  # [B]

    @property
    def completions(self) -> list[list[int]]:
        """Ids; a completion that is not truncated ends with the stop token."""
        last = [TOKEN if truncated else STOP for truncated in self.truncated]
        return [[TOKEN] * (length - 1) + [end] for length, end in zip(self.lengths, last, strict=True)]

    @property
    def reward_table(self) -> Tensor:
        """[B, K], NaN: does not apply."""
        return torch.tensor([[float("nan") if r is None else r for r in row.values()] for row in self.rewards])


class Outcome(NamedTuple):
    """A loss and its gradients."""

    value: Tensor
    policy_gradient: Tensor  # [B, T]
    entropy_gradient: Tensor  # [B, T]

    @classmethod
    def of(cls, value: Tensor, policy_logp: Tensor, entropy: Tensor) -> "Outcome":
        gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in (policy_logp, entropy)]
        return cls(value.detach(), *gradients)


class Replay:
    """The model and the optimizer of an Updater: answers with the given log-probs, update by update."""

    param_groups = ({"lr": 0.0},)

    def __init__(self, updates: Sequence[Tensor], entropy: Tensor) -> None:
        self.logp = [logp.clone().requires_grad_() for logp in updates]
        self.entropy = [entropy.clone().requires_grad_() for _ in updates]
        self.losses = [torch.zeros((), dtype=entropy.dtype)]  # of nothing, then of each update
        self.update = 0

    def __call__(self, batch: MicroBatch, distributions: Sequence[Distribution], entropy: str) -> PolicyScores:
        rows, width = batch.input_ids[:, 0], batch.mask.shape[1]
        logp, of_tokens = self.logp[self.update][rows, :width], self.entropy[self.update][rows, :width]
        found = of_tokens if entropy == "gradient" else of_tokens.detach()
        return PolicyScores(logp.expand(len(distributions), -1, -1), found, None)

    def padding(self, batch: MicroBatch) -> int:
        return 0

    def parameters(self) -> list[Tensor]:
        return []

    def zero_grad(self) -> None:
        """The end of an update. Each has log-probs, hence gradients, of its own."""
        self.update += 1

    def outcome(self) -> Outcome:
        """Of the last update."""
        return Outcome.of(self.losses[-1], self.logp[-1], self.entropy[-1])


class RecordedUpdater(Updater):
    """Keeps the loss of each update."""

    def _run(self, train_batch: TrainBatch, update: int) -> UpdateResult:
        part = super()._run(train_batch, update)
        self.policy.losses.append(torch.tensor(part.loss))
        return part


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineTrainBatches(TrainBatchBuilder):
    """What rlgen learns from samples, without a model: the reference replays."""

    rollout: Rollout

    @classmethod
    def of(cls, recipe: TrainerRecipe, rollout: Rollout, micro_batch_tokens: int) -> "OfflineTrainBatches":
        return cls(
            processes=Processes.alone(),
            algorithm=build_algorithm(recipe),
            weights=WEIGHTS,
            reference=None,
            distribution=WHOLE,
            budget=micro_batch_tokens,
            rollout=rollout,
        )

    def built(self) -> tuple[TrainBatch, Advantages]:
        """What is learned from the rollout."""
        held = samples_of(self.rollout)
        return self.build(RowTable.gather(held, self.processes), held, epoch=0.0)[:2]

    def reference_logp(self, samples: Samples, micro_batches: Sequence[Sequence[int]] | None = None) -> Tensor:
        rows, lengths = samples.prompt_ids.values.tolist(), samples.completion_ids.lengths.tolist()
        of_rows = [self.rollout.ref_logp[row, :length] for row, length in zip(rows, lengths, strict=True)]
        return torch.cat([torch.zeros(0), *of_rows])


def rlgen_outcome(recipe: TrainerRecipe, rollout: Rollout, micro_batch_tokens: int = 120) -> Outcome:
    """What rlgen learns from a rollout: at its only update, or after another one that has moved old to policy log-probs."""
    dtype = rollout.old_logp.dtype
    with default_dtype(dtype):
        builder = OfflineTrainBatches.of(recipe, rollout, micro_batch_tokens)
        train_batch, advantages = builder.built()
        # A train batch keeps them in float32; comparing in float64 would see that.
        train_batch = replace(train_batch, advantages=advantages.advantages[train_batch.rows].to(dtype))
        replay = Replay([rollout.old_logp, rollout.policy_logp][: recipe.updates_per_rollout], rollout.entropy)
        updater = RecordedUpdater(
            processes=Processes.alone(),
            sharded=False,
            policy=replay,
            optimizer=replay,
            algorithm=builder.algorithm,
            updates=recipe.updates_per_rollout,
            max_grad_norm=1.0,
            distribution=WHOLE,
            max_tokens=MAX_TOKENS,
            watch=None,
            less_memory=lambda phase: [],
            deterministic=False,
        )
        updater(train_batch, step=1)
    return replay.outcome()


@cache
def samples_of(rollout: Rollout) -> Samples:
    sums: list[float | None] = [None] * len(rollout.lengths)
    for group in set(rollout.group_ids):
        rows = [row for row, of_row in enumerate(rollout.group_ids) if of_row == group]
        for row, total in zip(rows, weighted_sums([rollout.rewards[row] for row in rows], WEIGHTS), strict=True):
            sums[row] = total
    samples = [
        make_sample(
            group_id=rollout.group_ids[row],
            sample_index=rollout.group_ids[:row].count(rollout.group_ids[row]),
            prompt_ids=(row,),
            completion_ids=ids,
            sampler_logp=rollout.sampler_logp[row, : len(ids)].tolist(),
            loss_mask=rollout.mask[row, : len(ids)].tolist(),
            finish_reason="length" if rollout.truncated[row] else "stop",
            rewards=rollout.rewards[row],
            reward=sums[row],
        )
        for row, ids in enumerate(rollout.completions)
    ]
    columns = Samples.of(samples)
    # A run has them in float32; comparing in float64 would see that.
    exact = torch.cat([rollout.sampler_logp[row, :length] for row, length in enumerate(rollout.lengths)])
    return replace(columns, sampler_logp=Ragged(exact.numpy(), columns.completion_ids.offsets))


def random_rollout(pattern: str, dtype: torch.dtype, **changes: Any) -> Rollout:
    """Six groups of four: the third is constant, one row of the second has no reward at all. Every fifth row is truncated.

    Args:
        pattern: `full`: all completions have all tokens. `ragged`: of any length. `holes`: ragged, and some tokens inside are
            not the model's own; the completion of row 6 has none that is.
    """
    generator = torch.Generator().manual_seed(0)
    draw = [torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) for _ in range(5)]
    old = -2 + 0.8 * draw[0]
    lengths = (WIDTH,) * ROWS if pattern == "full" else tuple(WIDTH - (3 * row) % WIDTH for row in range(ROWS))
    mask = torch.arange(WIDTH) < torch.tensor(lengths)[:, None]
    if pattern == "holes":
        mask &= draw[4] < 1
        mask[6] = False
    first = torch.tensor([1.0, 0, 0, 1, 0, 0, 2, 1, 1, 1, 1, 1, 0, 0.5, 3, 1, 0, 0, 1, 0, 1, 1, 0.5, 2])
    second = torch.tensor([0.0, 2, 1, 0, 3, 0, 1, 1, 2, 2, 2, 2, 0, 1, 0, 2, 1, 0, 0, 0, 0, 1, 3, 1])
    rewards = [{"first": f, "second": s} for f, s in zip(first.tolist(), second.tolist(), strict=True)]
    rewards[5] = {"first": None, "second": None}
    values: dict[str, Any] = {
        # tokens move by themselves and rows as a whole: both kinds of ratios meet their bounds
        "policy_logp": old + 0.4 * draw[1] + 0.3 * draw[1].roll(1, 0)[:, :1],
        "old_logp": old,
        "sampler_logp": old + 0.45 * draw[2],
        "ref_logp": old + 0.5 * draw[3],
        # representable in float32, in which TRL takes quantiles
        "entropy": draw[4].abs().float().double(),
        "lengths": lengths,
        "mask": mask,
        "truncated": tuple(row % 5 == 2 for row in range(ROWS)),
        "group_ids": tuple(row // GROUP for row in range(ROWS)),
        "rewards": tuple(rewards),
        **changes,
    }
    return Rollout(**{key: value.to(dtype) if key.endswith(("logp", "entropy")) else value for key, value in values.items()})
