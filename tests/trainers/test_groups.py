"""A step that is trained on group by group: the gradient and the metrics of the whole step, whatever the order of the groups."""

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny_model
from helpers.learning import learning
from helpers.samples import make_sample
from torch import Tensor, nn

from rlgen.algorithms.base import Algorithm
from rlgen.algorithms.registry import build_algorithm
from rlgen.errors import SentinelError
from rlgen.models.policy import Policy
from rlgen.processes import Processes
from rlgen.recipe.trainers import GRPORecipe, OnlineDPORecipe, RLOORecipe
from rlgen.rollout.samples import Samples
from rlgen.rollout.score import score
from rlgen.rollout.table import RowTable
from rlgen.trainers.groups import ExactSum, Groups, provisional_totals
from rlgen.types import WHOLE, Sample

GROUPS, SIZE, LONGEST, BUDGET = 5, 4, 14, 60
ONE = Processes.alone()
ALGORITHMS = {
    "dapo": GRPORecipe(),
    "grpo": GRPORecipe(loss="grpo"),
    "dr_grpo": GRPORecipe(loss="dr_grpo"),
    "prompt_mean": GRPORecipe(aggregation="prompt_mean", zero_variance="drop"),
    "dropped": GRPORecipe(zero_variance="drop", mask_truncated=True),
    "entropy": GRPORecipe(entropy_bonus=0.01),
    "reference": GRPORecipe(loss="grpo", beta=0.2),
    "rloo": RLOORecipe(kind="rloo"),
    "rloo, KL in the reward": RLOORecipe(kind="rloo", beta=0.2),
    "online_dpo": OnlineDPORecipe(kind="online_dpo", pairing="outside_in"),
}


@cache
def models() -> tuple[nn.Module, nn.Module]:
    """A model, and one that is near it."""
    model = tiny_model("qwen3")
    other = deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.003 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return model, other


@cache
def samples() -> tuple[Sample, ...]:
    """Groups of unequal lengths: one without signal, one with a completion that no reward applies to."""
    draw = np.random.default_rng(5)
    rows = []
    for row in range(GROUPS * SIZE):
        group, length = row // SIZE, int(draw.integers(2, LONGEST + 1))
        reward = 0.5 if group == 2 else float(draw.integers(0, 5))
        rows.append(
            make_sample(
                group_id=10 * group + 3,
                sample_index=row % SIZE,
                prompt_ids=tuple(draw.integers(5, 200, 3 + group).tolist()),
                completion_ids=tuple(draw.integers(5, 200, length).tolist()),
                sampler_logp=(0.0,) * length,
                finish_reason="length" if length == LONGEST else "stop",
                rewards={"reward": reward},
                reward=None if row == 13 else reward,
                reward_errors={},
            )
        )
    logp = score(Policy(models()[0], torch.float32, fp32_head=True), rows, WHOLE, 10_000, ONE)  # type: ignore[arg-type]
    noise = [0.2 * torch.randn(len(one), generator=torch.Generator().manual_seed(7)) for one in logp]
    return tuple(replace(row, sampler_logp=(one + off).numpy()) for row, one, off in zip(rows, logp, noise, strict=True))


class Kept(torch.optim.SGD):
    """Keeps the gradient of a step, and moves nothing."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.gradient = torch.cat(
            [p.grad.flatten() for group in self.param_groups for p in group["params"] if p.grad is not None]
        )


def trained(algorithm: Algorithm, order: Sequence[int] | None) -> tuple[dict[str, Any], Tensor, Any, Any]:
    """Metrics, gradient, train batch and advantages of a step: as a whole, or (`order`) with some groups before the others."""
    model, near = (deepcopy(one) for one in models())
    policy, reference = (Policy(one, torch.float32, fp32_head=True) for one in (model, near))  # type: ignore[arg-type]
    optimizer = Kept(policy.parameters(), lr=0.0)
    learn = learning(algorithm, policy, reference, optimizer, BUDGET, updates=1, max_grad_norm=math.inf)
    builder, update = learn.builder, learn.update
    held = Samples.of(samples(), ["reward"])
    table = RowTable.gather(held, ONE)
    if order is None:
        train_batch, advantages, measured = builder.build(table, held, 0.25)
        learned, skipped = update(train_batch, 1)
    else:
        groups = Groups(
            builder=builder,
            update=update,
            sums=ExactSum(list(policy.parameters())),
            provisional=provisional_totals(GROUPS, SIZE, LONGEST),
            threads=None,
            late_from=None,
        )
        for group in order:
            own = Samples.of(samples()[group * SIZE : (group + 1) * SIZE], ["reward"])
            groups.learn(RowTable.gather(own, ONE), own, 0.25)
        (train_batch, advantages, measured), first = groups.finish(table, held, 0.25)
        learned, skipped = update(train_batch, 1, first)
        assert not groups.learned and not any(total.any() for total in groups.sums._sums)
    assert skipped is None and learned["updates/done"] == 1
    assert all(parameter.grad is None for parameter in policy.parameters())
    return {**measured, **learned}, optimizer.gradient, train_batch, advantages


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_gradient_is_that_of_the_whole_step_and_its_bits_are_those_of_any_order(name: str, one_thread: None) -> None:
    algorithm = build_algorithm(ALGORITHMS[name])
    metrics, gradient, train_batch, advantages = trained(algorithm, None)
    ours, grouped, of_groups, of_all = trained(algorithm, ())
    assert metrics.keys() == ours.keys() and len(metrics) > 25
    assert (grouped - gradient).norm() <= 1e-6 * gradient.norm() and gradient.norm() > 1e-3
    for key, value in metrics.items():
        if key != "tokens/padding":  # micro-batches are of one group each
            size = 1.0 if key.startswith(("sampler/", "kl/")) else abs(value or 0)
            assert ours[key] == pytest.approx(value, rel=2e-6, abs=2e-6 * max(size, 0.1)), key
    assert ours["tokens/padding"] >= 0
    close = 1e-5 if algorithm.reference == "reward" else 0.0  # log-probs of the reference, in other micro-batches
    assert torch.allclose(of_all.advantages, advantages.advantages, rtol=0, atol=close)
    assert torch.allclose(of_groups.advantages, train_batch.advantages, rtol=0, atol=close)
    assert torch.equal(of_all.counted, advantages.counted) and torch.equal(of_all.trained, advantages.trained)
    assert of_groups.totals == train_batch.totals and (of_groups.rows == train_batch.rows).all()
    assert of_groups.samples == train_batch.samples
    assert torch.allclose(of_groups.flat("old_at_sampling"), train_batch.flat("old_at_sampling"), atol=2e-5)
    pairs = [{tuple(sorted(rows)) for rows in rows_of(one.pair_id)} for one in (of_all, advantages)]
    assert pairs[0] == pairs[1] and bool(pairs[0]) == (name == "online_dpo")
    for order in ((4, 0, 2), (1, 3, 0, 2, 4), (2,)):
        again, other, *_ = trained(algorithm, order)
        assert torch.equal(other, grouped) and again == ours


def test_the_longest_groups_wait_and_have_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [Samples.of(samples()[group * SIZE : (group + 1) * SIZE], ["reward"]) for group in range(GROUPS)]
    longest = [int(own.sampled_tokens.max()) for own in held]
    late_from, all_threads = sorted(longest)[2], torch.get_num_threads()
    used: list[int] = []

    def note(*given: Any) -> Any:
        used.append(torch.get_num_threads())
        raise InterruptedError

    parts = {"update": None, "sums": None, "provisional": None, "builder": SimpleNamespace(kl=note)}
    groups = Groups(**parts, threads=1, late_from=late_from)  # type: ignore[arg-type]
    try:
        torch.set_num_threads(3)
        for own in held:
            with pytest.raises(InterruptedError):
                groups.learn(RowTable.gather(own, ONE), own, 0.25)
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(all_threads)
    assert [groups.waits(own) for own in held] == [tokens >= late_from for tokens in longest]
    assert used == [3 if tokens >= late_from else 1 for tokens in longest] and set(used) == {1, 3}
    assert not replace(groups, late_from=None).waits(held[longest.index(max(longest))])


def rows_of(pair_id: Tensor) -> list[list[int]]:
    """Rows of each pair."""
    return [(pair_id == pair).nonzero()[:, 0].tolist() for pair in pair_id.unique().tolist() if pair >= 0]


def test_a_group_whose_rewards_have_changed_is_noticed() -> None:
    held = Samples.of(samples(), ["reward"])
    changed = replace(held, reward=held.reward + 1)
    table = RowTable.gather(changed, ONE)
    algorithm = build_algorithm(GRPORecipe())
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SentinelError, match="group 3 was trained with other"):
        patch.setattr(RowTable, "gather", lambda *given: table if len(given[0]) == len(held) else gather(*given))
        trained(algorithm, (0,))


gather = RowTable.gather


def test_sums_do_not_depend_on_the_order_where_float32_and_float64_do() -> None:
    draw = torch.Generator().manual_seed(3)
    parts = [torch.randn(20_000, generator=draw) * 10.0 ** torch.randint(-9, 2, (20_000,), generator=draw) for _ in range(17)]
    found: dict[str, list[Tensor]] = {"exact": [], "float32": [], "float64": []}
    for turn in range(6):
        parameter, plain = nn.Parameter(torch.zeros(20_000)), nn.Parameter(torch.zeros(3))
        sums = ExactSum([parameter, plain])
        single, double = torch.zeros(20_000), torch.zeros(20_000, dtype=torch.float64)
        for place in torch.randperm(17, generator=torch.Generator().manual_seed(turn)).tolist():
            parameter.grad = parts[place].clone()
            sums.take()
            assert parameter.grad is None
            single, double = single + parts[place], double + parts[place]
        held = sums._sums[0].clone()
        sums.give(0.3)
        assert plain.grad is None, "it had no gradient in any part"
        assert parameter.grad is not None and torch.allclose(parameter.grad, (double * 0.3).float(), rtol=1e-6, atol=1e-12)
        for name, total in (("exact", held), ("float32", single), ("float64", double)):
            found[name].append(total)
        sums.give(1.0)
        assert plain.grad is None and not sums._sums[0].any(), "nothing is left"
    same = {name: all(torch.equal(totals[0], total) for total in totals) for name, totals in found.items()}
    assert same == {"exact": True, "float32": False, "float64": False}


def test_what_is_not_finite_stays_so() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    sums = ExactSum([parameter])
    parameter.grad = torch.tensor([1.0, math.inf, math.nan])
    sums.take()
    parameter.grad = torch.tensor([1.0, 1.0, 1.0])
    sums.take()
    sums.give(0.5)
    assert parameter.grad is not None and parameter.grad.tolist()[:2] == [1.0, math.inf] and parameter.grad[2].isnan()
    sums.drop()
    parameter.grad = torch.ones(3)
    sums.take()
    sums.give(1.0)
    assert parameter.grad.tolist() == [1.0, 1.0, 1.0]
