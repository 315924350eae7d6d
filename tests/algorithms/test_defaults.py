"""What the default recipes minimise: the formulas in the modules' docstrings, written out a token at a time."""

import math

import pytest
import torch
from torch.testing import assert_close

from rlgen.algorithms.base import Scores
from rlgen.algorithms.registry import build_algorithm
from rlgen.losses.correction import importance_weight
from rlgen.losses.inputs import LossInputs, Totals
from rlgen.recipe.trainers import GRPORecipe, OnlineDPORecipe, RLOORecipe

REWARDS = [1.0, 0.0, 0.25, 3.0, 1.0, 2.0, 5.0, 5.0, 5.0]  # three prompts, three completions each; the last learns nothing
GROUPS = [4, 4, 4, 7, 7, 7, 2, 2, 2]
LENGTHS = [3, 1, 4, 2, 4, 1, 2, 3, 4]


def scores() -> Scores:
    return Scores(
        rewards=torch.tensor(REWARDS, dtype=torch.float64),
        columns=torch.tensor(REWARDS, dtype=torch.float64)[:, None],
        column_weights=torch.ones(1, dtype=torch.float64),
        group_ids=torch.tensor(GROUPS),
        sample_index=torch.arange(len(REWARDS)) % 3,
        truncated=torch.tensor([True, *[False] * (len(REWARDS) - 1)]),  # changes nothing by default
        kl=None,
    )


def inputs(recipe: GRPORecipe | RLOORecipe | OnlineDPORecipe) -> LossInputs:
    """The rows that the algorithm trains, with ratios and weights on both sides of every bound."""
    algorithm, generator = build_algorithm(recipe), torch.Generator().manual_seed(3)
    advantages = algorithm.advantages(scores())
    rows = advantages.trained.nonzero()[:, 0]
    shape = len(rows), max(LENGTHS)
    mask = torch.arange(shape[1]) < torch.tensor(LENGTHS)[rows, None]

    def logp(spread: float) -> torch.Tensor:
        return torch.where(mask, -2 + spread * torch.randn(shape, generator=generator, dtype=torch.float64), math.nan)

    policy, old, sampler, ref = logp(0.5).requires_grad_(), logp(0.5), logp(1.0), logp(0.5)
    return LossInputs(
        policy_logp=policy,
        old_logp=old,
        sampler_logp=sampler,
        ref_logp=ref if algorithm.reference == "loss" else None,
        entropy=torch.ones(shape, dtype=torch.float64),
        mask=mask,
        kept=mask,
        advantages=advantages.advantages[rows],
        weight=importance_weight(old, sampler, mask, algorithm.correction),
        group_tokens=torch.ones(len(rows), dtype=torch.long),
        pair_id=advantages.pair_id[rows],
        totals=Totals(
            sequences=int(advantages.counted.sum()), tokens=int(mask.sum()), kept=int(mask.sum()), prompts=3, pairs=len(rows) // 2
        ),
        max_tokens=99,
        epoch=0.0,
    )


def tokens(x: LossInputs, row: int) -> list[tuple[float, float, float]]:
    """policy, old and sampler log-prob of each token of a row."""
    return [(x.policy_logp[row, t].item(), x.old_logp[row, t].item(), x.sampler_logp[row, t].item()) for t in range(LENGTHS[row])]


def clipped(x: LossInputs, advantages: list[float], low: float, high: float) -> tuple[float, int, set[str]]:
    """sum_i sum_t w min(r A, clamp(r) A), the number of tokens, and which bounds were met."""
    total, count, met = 0.0, 0, set()
    for row, advantage in enumerate(advantages):
        for policy, old, sampler in tokens(x, row):
            ratio, raw = math.exp(policy - old), math.exp(old - sampler)
            bounded = min(max(ratio, 1 - low), 1 + high)
            total += min(raw, 2.0) * min(ratio * advantage, bounded * advantage)
            count += 1
            met |= {
                name for name, is_met in (("weight", raw > 2), ("low", ratio < 1 - low), ("high", ratio > 1 + high)) if is_met
            }
    return total, count, met


def of_group(row: int) -> list[float]:
    return [reward for reward, group in zip(REWARDS, GROUPS, strict=True) if group == GROUPS[row]]


def test_grpo() -> None:
    x = inputs(GRPORecipe())
    advantages = []
    for row, reward in enumerate(REWARDS):
        group = of_group(row)
        mean = sum(group) / 3
        std = math.sqrt(sum((other - mean) ** 2 for other in group) / 2)
        advantages.append((reward - mean) / (std + 1e-4))
    total, count, met = clipped(x, advantages, 0.2, 0.28)
    assert met == {"weight", "low", "high"} and count == sum(LENGTHS)
    loss, _ = build_algorithm(GRPORecipe()).loss(x)
    assert loss.item() == pytest.approx(-total / count, rel=1e-12)


def test_rloo() -> None:
    x = inputs(RLOORecipe(kind="rloo"))
    advantages = [reward - (sum(of_group(row)) - reward) / 2 for row, reward in enumerate(REWARDS)]
    total, _, met = clipped(x, advantages, 0.2, 0.2)
    assert met == {"weight", "low", "high"}
    loss, _ = build_algorithm(RLOORecipe(kind="rloo")).loss(x)
    assert loss.item() == pytest.approx(-total / len(REWARDS), rel=1e-12)


def test_online_dpo() -> None:
    recipe = OnlineDPORecipe(kind="online_dpo")
    algorithm = build_algorithm(recipe)
    advantages = algorithm.advantages(scores())
    # Best and worst of the two prompts whose rewards differ: rows 0 and 1 of prompt 4, rows 3 and 4 of prompt 7.
    assert advantages.trained.nonzero()[:, 0].tolist() == [0, 1, 3, 4]
    x = inputs(recipe)
    assert x.ref_logp is not None and x.advantages.tolist() == [1.0, -1.0, 1.0, -1.0]
    gaps = torch.where(x.mask, x.policy_logp - x.ref_logp, 0.0).sum(1).tolist()
    total = sum(-math.log(1 / (1 + math.exp(-0.1 * (gaps[chosen] - gaps[rejected])))) for chosen, rejected in ((0, 1), (2, 3)))
    loss, _ = algorithm.loss(x)
    assert loss.item() == pytest.approx(total / 2, rel=1e-12)
    assert_close(x.weight, torch.ones_like(x.weight))
    assert algorithm.loss_temperature == 1.0
