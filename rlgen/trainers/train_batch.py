"""Builds the train batch: all rows of one optimizer step, with the values that stay fixed during it."""

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlgen.algorithms.base import Advantages, Algorithm, loss_distribution
from rlgen.errors import DivergedError
from rlgen.losses.correction import Mismatch
from rlgen.losses.inputs import Totals, onto
from rlgen.losses.kl import reward_kl
from rlgen.losses.masking import entropy_kept
from rlgen.losses.order import quantile
from rlgen.metrics import Metric
from rlgen.models.policy import BasePolicy, Policy
from rlgen.processes import Processes
from rlgen.rollout.batch import Prompts, deal, pad_rows, unpad, where_held
from rlgen.rollout.samples import Samples
from rlgen.rollout.score import score_own
from rlgen.rollout.table import RowTable
from rlgen.types import Distribution, MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """The trained rows of a rollout that this process computes, and what the loss must know about those of all processes.

    Totals are global: the loss does not depend on how the rows are split into micro-batches and processes. Values per token are
    flat [N], in the order of the rows of `samples`.
    """

    samples: Samples  # [b] the rows of this process
    rows: NDArray[np.int64]  # [b] their places in the table of the step
    advantages: Tensor  # [b] float32
    pair_id: Tensor  # [b]
    group_tokens: Tensor  # [b] tokens of the row's whole group
    totals: Totals
    epoch: float  # passes over the data before this step
    micro_batches: tuple[tuple[int, ...], ...]  # rows of each; empty if other processes have more micro-batches
    # Rows that have no gradient: they run forward for the metrics, and not backward.
    idle: tuple[tuple[int, ...], ...]
    frozen: dict[str, Tensor] = field(default_factory=dict)  # [N] on the CPU, by name: `ref_logp`, `kept`
    # By name and rows of a micro-batch, [B, T] on the device that computed them: `old_logp`, `old_at_sampling`, `entropy`.
    computed: dict[str, dict[tuple[int, ...], Tensor]] = field(default_factory=dict)
    mismatches: list[Mismatch] = field(default_factory=list)  # of engine and trainer by micro-batch, at the first update

    @classmethod
    def of(
        cls,
        table: RowTable,
        held: Samples,
        advantages: Advantages,
        epoch: float,
        budget: int,
        processes: Processes,
        learns_without_advantage: bool = True,
        packed: bool = False,
        attention: float = 0.0,
        sharing: int = 1,
    ) -> "TrainBatch":
        """Assigns the rows that `advantages` trains to processes, in micro-batches of at most `budget` tokens, and sends them.

        The rows of a group may go to several processes; those of a pair stay together. The tokens of each row are sent once, from
        the process that sampled it to the one that trains it.

        Args:
            table: rows of the whole step, the same in every process; `advantages` has an entry for each of them.
            held: the samples that this process holds, at `table.place`.
            learns_without_advantage: whether a row of advantage 0 has a gradient, for example from a KL in the loss.
            packed: whether the rows of a micro-batch are computed without padding.
            attention: see `Policy.attention_cost`.
            sharing: see `Policy.sharing`.
        """
        prompts = Prompts(table.group_id, table.prompt_tokens) if packed else None
        trained = advantages.trained.nonzero()[:, 0].numpy()
        lengths: list[int] = table.lengths.tolist()
        pairs = pairs_of(trained, advantages.pair_id.numpy())
        units = pairs or [[row] for row in trained.tolist()]
        has_gradient = np.ones(len(table), dtype=bool) if learns_without_advantage else (advantages.advantages != 0).numpy()
        how = lengths, budget, processes.world, prompts, attention, sharing
        hands = deal([unit for unit in units if has_gradient[unit].any()], *how)
        idle = deal([unit for unit in units if not has_gradient[unit].any()], *how)
        trainer = np.full(len(table), -1)
        for rank in range(processes.world):
            trainer[[row for rows in (*hands[rank], *idle[rank]) for row in rows]] = rank
        mine = (trainer == processes.rank).nonzero()[0]
        at = {row: place for place, row in enumerate(mine.tolist())}
        groups, group = np.unique(table.group_id, return_inverse=True)
        of_groups = np.bincount(group[trained], weights=table.sampled_tokens[trained], minlength=len(groups)).astype(np.int64)
        tokens = int(table.sampled_tokens[trained].sum())
        return cls(
            samples=sent(table, held, trainer, processes),
            rows=mine,
            advantages=advantages.advantages[mine].float(),
            pair_id=advantages.pair_id[mine],
            group_tokens=torch.from_numpy(of_groups[group[mine]]),
            totals=Totals(
                sequences=int(advantages.counted.sum()),
                tokens=tokens,
                kept=tokens,
                prompts=len(np.unique(table.group_id[advantages.counted.numpy()])),
                pairs=len(pairs),
            ),
            epoch=epoch,
            micro_batches=tuple(tuple(at[row] for row in rows) for rows in hands[processes.rank]),
            idle=tuple(tuple(at[row] for row in rows) for rows in idle[processes.rank]),
        )

    def flat(self, name: str) -> Tensor:
        """Returns the fixed values `name`, [N] on the CPU; zeros if this process has no rows. Waits for the device."""
        if name in self.frozen:
            return self.frozen[name]
        return unpad(list(self.computed.get(name, {}).items()), self.samples.completion_ids.offsets)

    def put(self, name: str, batch: MicroBatch, values: Tensor) -> None:
        """Stores [B, T] values of the rows of `batch` as fixed values `name`, where they are."""
        if batch.rows:  # none if other processes have more micro-batches
            self.computed.setdefault(name, {})[batch.rows] = values.detach()

    def get(self, name: str, batch: MicroBatch) -> Tensor:
        """Returns the fixed values `name` of the rows of `batch`, [B, T], padded with 0 or False.

        Computed values can be read only for the micro-batches in which they were computed.
        """
        if name in self.computed:
            return self.computed[name][batch.rows]
        flat, offsets = self.frozen[name], self.samples.completion_ids.offsets
        rows = [flat[offsets[row] : offsets[row + 1]] for row in batch.rows]
        return onto(pad_rows(rows, 0), batch.input_ids.device)

    def select_tokens(self, share: float, processes: Processes) -> "TrainBatch":
        """Returns a copy that trains the `share` of tokens with the highest entropy (`frozen["entropy"]`) of all processes."""
        entropy, mask = self.flat("entropy"), torch.from_numpy(self.samples.loss_mask.values)
        kept = entropy_kept(entropy, mask, quantile(entropy[mask], 1.0 - share, processes.total))
        count = int(processes.total(kept.sum()))
        self.frozen["kept"] = kept
        return replace(self, totals=replace(self.totals, kept=count))


def pairs_of(trained: NDArray[np.int64], pair_id: NDArray[np.int64]) -> list[list[int]]:
    """Returns the rows of each preference pair among the rows `trained`, in the order of their first rows; [] without pairs."""
    pairs: dict[int, list[int]] = {}
    for row in trained[pair_id[trained] >= 0].tolist():
        pairs.setdefault(int(pair_id[row]), []).append(row)
    return list(pairs.values())


def sent(table: RowTable, held: Samples, trainer: NDArray[np.int64], processes: Processes) -> Samples:
    """Sends each row to the process that trains it, and returns those of this process, in the order of the table.

    `trainer` has the rank of that process, [B]; -1: no process trains the row.
    """
    own = table.holder == processes.rank
    parts = [held.take(table.place[own & (trainer == rank)]) for rank in range(processes.world)]
    if processes.world == 1:
        return parts[0]
    packed = [b"" if rank == processes.rank else pickle.dumps(part, protocol=5) for rank, part in enumerate(parts)]
    received = processes.exchange(packed)
    rows = Samples.join([parts[rank] if rank == processes.rank else pickle.loads(part) for rank, part in enumerate(received)])
    # Rows arrive ordered by process; the order of the table does not depend on the number of processes.
    places = by_holder(table, processes.world)
    return rows.take(np.argsort(places[trainer[places] == processes.rank], kind="stable"))


def by_holder(table: RowTable, world: int) -> NDArray[np.int64]:
    """Returns the indices of the rows of the table, [B], ordered by the rank of the process that holds their samples."""
    return np.concatenate([(table.holder == rank).nonzero()[0] for rank in range(world)])


# The train batch of a step, the advantages of its rows, and the metrics that were measured on the way.
Planned: TypeAlias = tuple[TrainBatch, Advantages, dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatchBuilder:
    """Runs rewards -> train batch: advantages, and log-probs of the reference policy if the algorithm needs them."""

    processes: Processes
    algorithm: Algorithm
    weights: Mapping[str, float]  # of the rewards, by label
    reference: Policy | BasePolicy | None
    distribution: Distribution  # that the run samples from
    budget: int  # tokens of a micro-batch
    packed: bool = False  # whether the policy computes the rows of a micro-batch without padding
    attention: float = 0.0  # see `Policy.attention_cost`
    sharing: int = 1  # see `Policy.sharing`

    def build(self, table: RowTable, held: Samples, epoch: float) -> Planned:
        planned = self.plan(table, held, epoch, self.kl(table, held))
        self.add_reference(planned[0])
        return planned

    def plan(self, table: RowTable, held: Samples, epoch: float, kl: Tensor | None) -> Planned:
        """Does what `build` does, but runs no model: `kl` is known, and the log-probs of the reference are left out."""
        advantages = self.algorithm.advantages(table.scores(self.weights, kl))
        alone = self.algorithm.learns_without_advantage
        train_batch = TrainBatch.of(
            table, held, advantages, epoch, self.budget, self.processes, alone, self.packed, self.attention, self.sharing
        )
        if kl is None:
            return train_batch, advantages, {}
        tokens = int(table.sampled_tokens.sum())
        return train_batch, advantages, {Metric.KL_REF_K1: kl.sum().item() / tokens if tokens else None}

    def add_reference(self, train_batch: TrainBatch) -> None:
        """Computes the reference's log-probs for the rows of a train batch, if the loss takes them."""
        if self.algorithm.reference == "loss":
            train_batch.frozen["ref_logp"] = self.reference_logp(
                train_batch.samples, (*train_batch.micro_batches, *train_batch.idle)
            )

    def reference_logp(self, samples: Samples, micro_batches: Sequence[Sequence[int]]) -> Tensor:
        """Returns the reference policy's log-probs, [N] float32, of the distribution of the loss."""
        assert self.reference is not None  # exists whenever the algorithm uses a reference
        distribution = loss_distribution(self.algorithm, self.distribution)
        return score_own(self.reference, samples, distribution, self.budget, self.processes, micro_batches)

    def kl(self, table: RowTable, held: Samples) -> Tensor | None:
        """Returns the sampled KL of each completion to the reference, [B]; None if the algorithm takes none from the reward.

        Each process computes it for the samples that it holds.

        Raises DivergedError if a value is not finite: NaN in a reward would be taken for a reward that does not apply.
        """
        if self.algorithm.reference != "reward":
            return None
        mine = table.holder == self.processes.rank
        own, at = held.take(table.place[mine]), np.cumsum(mine) - 1
        prompts = Prompts(table.group_id, table.prompt_tokens) if self.packed else None
        planned = where_held(table.holder, table.lengths, self.budget, self.processes.world, prompts, self.sharing)
        ref_logp = self.reference_logp(own, [at[rows].tolist() for rows in planned[self.processes.rank]])
        rows = [slice(first, last) for first, last in pairwise(own.completion_ids.offsets)]
        mask, sampler = torch.from_numpy(own.loss_mask.values), torch.from_numpy(own.sampler_logp.values)
        values = [reward_kl(sampler[row][None], ref_logp[row][None], mask[row][None]) for row in rows]
        gathered = torch.cat(self.processes.gather([torch.cat([torch.zeros(0).double(), *values])]))
        kl = torch.empty_like(gathered)
        kl[torch.from_numpy(by_holder(table, self.processes.world))] = gathered
        if not kl.isfinite().all():
            raise DivergedError(
                "the KL to the reference (trainer.kl k1_in_reward) is not finite: the reference overflows in model.dtype; set"
                " model.dtype to float32, or trainer.beta to 0"
            )
        return kl
