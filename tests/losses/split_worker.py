"""What the real train batch, updater and policy make of one global batch, however it is split: gradients of every loss.

As a script it is one of the processes of `torchrun`, and process 0 writes the gradients: `split_worker.py OUTPUT.pt`.
With whole weights and with sharded ones; of all rows, and of so few that some processes have none.
"""

import copy
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import TypeAlias

import loss_cases
import torch
from helpers.batches import default_dtype
from helpers.samples import make_sample
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config

from rlgen.algorithms.base import Algorithm
from rlgen.models.parts import part, whole
from rlgen.models.policy import Policy
from rlgen.models.sharding import Meshes, shard
from rlgen.processes import Processes
from rlgen.rollout.samples import Samples
from rlgen.rollout.score import score
from rlgen.rollout.table import RowTable
from rlgen.trainers.train_batch import TrainBatch
from rlgen.trainers.update import Updater
from rlgen.types import WHOLE, Sample

# Without a KL, rows without advantage go through no backward pass.
ALGORITHMS = {**loss_cases.ALGORITHMS, "no kl": loss_cases.grpo(beta=0.0)}
ONE = Processes.alone()
VOCABULARY, MAX_TOKENS = 40, 12
DTYPES = (torch.float64, torch.float32)
UPDATES = 2
BUDGET = 60  # of tokens in a micro-batch
# Group of each row, and its completion's length. Rows 3, 4 and 16 have no token of the model's own, row 7 has no reward,
# those of group 4 are equal.
GROUPS = (0, 0, 0, 1, 1, 2, 2, 1, 3, 3, 4, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 7)
LENGTHS = (3, 9, 5, 4, 1, 6, 12, 7, 2, 8, 5, 5, 10, 3, 1, 4, 6, 11, 2, 9, 7, 5)
ALL, FEW = range(len(GROUPS)), range(5, 7)  # rows; the few are one pair, for three processes
Dealt: TypeAlias = dict[str, list["TrainBatch"]]  # by loss: the train batch of each process
Found: TypeAlias = dict[tuple[str, torch.dtype, bool, int], Tensor]  # by loss, dtype, whether sharded, and number of rows


class UnitStep:
    """The optimizer of an updater: keeps gradients, and steps by unit length, so that the second update's ratios meet bounds."""

    param_groups = ({"lr": 0.2},)

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.gradients: list[Tensor] = []

    @torch.no_grad()
    def step(self) -> None:
        parameters = list(self.policy.parameters())
        self.gradients.append(torch.cat([whole(parameter.grad).flatten() for parameter in parameters]))
        move = self.param_groups[0]["lr"] / (self.gradients[-1].norm().item() or 1.0)
        for parameter in parameters:
            part(parameter).sub_(part(parameter.grad), alpha=move)

    def zero_grad(self) -> None:
        self.policy.zero_grad()


@cache
def policy_of(dtype: torch.dtype, seed: int) -> Policy:
    # Of the architectures in transformers one whose norms and positions stay in float64 when the weights are.
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=16,
        n_layer=1,
        n_head=2,
        initializer_range=0.3,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    with torch.random.fork_rng(devices=[]), default_dtype(torch.float64):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    return Policy(model.to(dtype), dtype, fp32_head=True)


@cache
def samples() -> tuple[Sample, ...]:
    """The rows of all processes; the engine that sampled them is a little off the policy."""
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(len(GROUPS), generator=generator, dtype=torch.float64).tolist()
    rewards[10:13], rewards[7] = [1.0] * 3, None
    rows = []
    for row, (group, length) in enumerate(zip(GROUPS, LENGTHS, strict=True)):
        ids = torch.randint(0, VOCABULARY, (1 + row % 3 + length,), generator=generator).tolist()
        own = torch.rand(length, generator=generator) < (0.0 if row in (3, 16) else 0.9)
        rows.append(
            make_sample(
                group_id=group,
                sample_index=GROUPS[:row].count(group),
                prompt_ids=tuple(ids[:-length]),
                completion_ids=tuple(ids[-length:]),
                sampler_logp=(0.0,) * length,
                loss_mask=tuple(own.tolist()),
                finish_reason="length" if row % 6 == 1 else "stop",
                seed=row,
                rewards={"reward": rewards[row]},
                reward=rewards[row],
            )
        )
    with default_dtype(torch.float64):
        policy_logp = score(policy_of(torch.float64, seed=0), rows, WHOLE, BUDGET, ONE)
    noise = [0.7 * torch.randn(len(logp), generator=generator, dtype=torch.float64) for logp in policy_logp]
    return tuple(
        replace(row, sampler_logp=(logp + of_row).float().numpy())
        for row, logp, of_row in zip(rows, policy_logp, noise, strict=True)
    )


@cache
def reference_logp(dtype: torch.dtype) -> list[Tensor]:
    """One [L] tensor a row, of weights near the policy's."""
    reference = copy.deepcopy(policy_of(torch.float64, seed=0))
    other = dict(policy_of(torch.float64, seed=1).named_parameters())
    with torch.no_grad(), default_dtype(torch.float64):
        for name, parameter in reference.named_parameters():
            parameter.lerp_(other[name], 0.1)
        return [logp.to(dtype) for logp in score(reference, samples(), WHOLE, BUDGET, ONE)]


def train_batch_of(algorithm: Algorithm, dtype: torch.dtype, rows: Sequence[int], processes: Processes = ONE) -> TrainBatch:
    """The train batch of a process that has sampled every `world`-th of these rows."""
    held = Samples.of([samples()[row] for row in rows[processes.rank :: processes.world]], ["reward"])
    table = RowTable.gather(held, processes)
    advantages = algorithm.advantages(table.scores({"reward": 1.0}))
    train_batch = TrainBatch.of(table, held, advantages, 0.0, BUDGET, processes, algorithm.learns_without_advantage)
    if algorithm.reference == "loss":
        own = [reference_logp(dtype)[seed] for seed in train_batch.samples.seed.tolist()]  # the seed is the row's number
        train_batch.frozen["ref_logp"] = torch.cat([torch.zeros(0, dtype=dtype), *own])
    # A train batch keeps them in float32; comparing in float64 would see that.
    return replace(train_batch, advantages=advantages.advantages[train_batch.rows].to(dtype))


def gradients(
    algorithm: Algorithm,
    dtype: torch.dtype,
    train_batch: TrainBatch,
    processes: Processes = ONE,
    sharded: bool = False,
    count: int | None = None,
    defer_sync: bool = False,
) -> Tensor:
    """[UPDATES, parameters] of each update that the updater makes on the train batch; `count` processes share the weights."""
    policy = copy.deepcopy(policy_of(dtype, seed=0))
    if sharded:
        shard(policy, Meshes.of(processes, count))
    optimizer = UnitStep(policy)
    updater = Updater(
        processes=processes,
        sharded=sharded,
        defer_sync=defer_sync,
        policy=policy,
        optimizer=optimizer,
        algorithm=algorithm,
        updates=UPDATES,
        max_grad_norm=float("inf"),
        distribution=WHOLE,
        max_tokens=MAX_TOKENS,
        watch=None,
        less_memory=lambda phase: [],
        deterministic=False,
    )
    updater(train_batch, step=1)
    return torch.stack(optimizer.gradients)


def relative_error(gradient: Tensor, whole: Tensor) -> float:
    """The largest difference in the gradient of an update, relative to that gradient's largest element."""
    return ((gradient - whole).abs().amax(dim=1) / whole.abs().amax(dim=1).clamp(min=1e-30)).max().item()


def main(output: str) -> None:
    torch.set_num_threads(1)
    processes = Processes.open(timeout=60)
    found: Found = {}
    dealt: Dealt = {}
    for name, algorithm in ALGORITHMS.items():
        # Two processes share what there is; of three some have nothing.
        of_this_world = [(torch.float64, True, ALL)] if processes.world == 2 else [(torch.float64, s, FEW) for s in (False, True)]
        for dtype, sharded, rows in [*((dtype, False, ALL) for dtype in DTYPES), *of_this_world]:
            with default_dtype(dtype):
                train_batch = train_batch_of(algorithm, dtype, rows, processes)
                if rows is ALL and name in ("dapo", "no kl", "sigmoid"):
                    dealt[name] = processes.gather([train_batch])
                found[name, dtype, sharded, len(rows)] = gradients(algorithm, dtype, train_batch, processes, sharded)
    if processes.is_main:
        torch.save((found, dealt), output)
    processes.close()


if __name__ == "__main__":
    main(sys.argv[1])
