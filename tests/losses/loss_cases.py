"""Loss inputs for tests, in float64, and every loss of the recipes that the invariants must hold for."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, get_args

import torch
from helpers.entropy import entropy_threshold
from torch import Tensor

from rlgen.algorithms.base import Algorithm
from rlgen.algorithms.registry import build_algorithm
from rlgen.losses.correction import importance_weight
from rlgen.losses.inputs import LossInputs, Stats, Totals
from rlgen.losses.masking import entropy_kept
from rlgen.recipe.trainers import GRPORecipe, OnlineDPORecipe, RLOORecipe

LOG_PROBS = ("old_logp", "sampler_logp", "ref_logp")
FIELDS = ("policy_logp", *LOG_PROBS, "entropy", "mask", "kept", "advantages", "weight", "group_tokens", "pair_id")
GRPO_LOSSES = get_args(GRPORecipe.model_fields["loss"].annotation)


def grpo(**fields: Any) -> Algorithm:
    return build_algorithm(GRPORecipe(**{"updates_per_rollout": 2, "clip_low": 0.2, "clip_high": 0.28, "beta": 0.3, **fields}))


ALGORITHMS: dict[str, Algorithm] = {
    **{loss: grpo(loss=loss) for loss in GRPO_LOSSES},
    **{
        f"{loss}, {mode}": grpo(loss=loss, correction={"mode": mode})
        for loss in ("dapo", "gspo", "vespo")
        for mode in ("token_mask", "sequence_truncate", "sequence_mask", "icepop", "none")
    },
    "prompt_mean": grpo(aggregation="prompt_mean"),
    "geometric": grpo(correction={"geometric": {"min": 0.7, "max": 1.3}}),
    "delta": grpo(delta=1.5),
    "off_policy_max": grpo(off_policy_max=0.05),
    "top_entropy": grpo(top_entropy=0.4),
    "entropy_bonus": grpo(entropy_bonus=0.1, top_entropy=0.6),
    "k2": grpo(kl="k2"),
    "k3": grpo(kl="k3"),
    "kl_use_weight": grpo(kl_use_weight=True),
    "rloo": build_algorithm(RLOORecipe(kind="rloo", beta=0.3, kl="k3_is")),
    "rloo, sequence": build_algorithm(RLOORecipe(kind="rloo", ratio="sequence", correction={"mode": "sequence_mask"})),
    "sigmoid": build_algorithm(OnlineDPORecipe(kind="online_dpo", beta=0.4)),
    "ipo": build_algorithm(OnlineDPORecipe(kind="online_dpo", beta=0.4, loss="ipo", length="mean")),
    "hinge": build_algorithm(OnlineDPORecipe(kind="online_dpo", beta=0.4, loss="hinge")),
    "sigmoid, geometric": build_algorithm(
        OnlineDPORecipe(kind="online_dpo", beta=0.4, correction={"geometric": {"min": 0.8, "max": 1.5}})
    ),
}


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def case(policy_logp: Tensor, **given: Any) -> LossInputs:
    """On-policy rows with A = 1, weight 1, no reference and no padding, but for what is given."""
    rows, width = policy_logp.shape
    mask = given.get("mask", torch.ones(rows, width, dtype=torch.bool))
    kept = given.get("kept", mask)
    pair_id = given.get("pair_id", torch.full((rows,), -1))
    fields: dict[str, Any] = {
        "policy_logp": policy_logp,
        "old_logp": policy_logp.detach().clone(),
        "sampler_logp": policy_logp.detach().clone(),
        "ref_logp": None,
        "entropy": torch.ones_like(policy_logp.detach()),
        "mask": mask,
        "kept": kept,
        "advantages": torch.ones(rows, dtype=policy_logp.dtype),
        "weight": torch.ones_like(policy_logp.detach()),
        "group_tokens": mask.sum(dim=1),
        "pair_id": pair_id,
        "totals": Totals(
            sequences=rows, tokens=int(mask.sum()), kept=int(kept.sum()), prompts=rows, pairs=len(pair_id[pair_id >= 0].unique())
        ),
        "max_tokens": width,
        "epoch": 0.0,
    }
    return LossInputs(**(fields | given))


def random_window(seed: int) -> LossInputs:
    """Eight ragged rows in three pairs and two rows without; rows 2 and 6 have an empty mask, one token is masked inside."""
    generator = torch.Generator().manual_seed(seed)
    rows, width = 8, 6

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mask = torch.arange(width) < torch.tensor([6, 1, 0, 4, 3, 6, 0, 2])[:, None]
    mask[0, 2] = False
    policy_logp = -2 + 0.5 * random(rows, width)
    return case(
        policy_logp.requires_grad_(),
        **{name: policy_logp.detach() + 0.5 * random(rows, width) for name in LOG_PROBS},
        entropy=random(rows, width).abs(),
        mask=mask,
        advantages=tensor([1.0, -2.0, 0.5, -1.0, 3.0, -0.2, -1.5, 0.7]),
        group_tokens=torch.tensor([5, 11, 11, 11, 5, 6, 6, 6]),
        pair_id=torch.tensor([4, 9, 9, 4, 0, 0, -1, -1]),
        totals=Totals(sequences=8, tokens=int(mask.sum()), kept=int(mask.sum()), prompts=3, pairs=3),
        max_tokens=10,
    )


def prepared(algorithm: Algorithm, x: LossInputs) -> LossInputs:
    """`x` as the algorithm wants it: with its importance weights and its selection of tokens, over the whole window."""
    weight = importance_weight(x.old_logp, x.sampler_logp, x.mask, algorithm.correction).to(x.policy_logp.dtype)
    kept = x.mask
    if algorithm.top_entropy < 1:
        kept = entropy_kept(x.entropy, x.mask, entropy_threshold(x.entropy.detach(), x.mask, algorithm.top_entropy))
    return replace(x, weight=weight, kept=kept, totals=replace(x.totals, kept=int(kept.sum())))


def take(x: LossInputs, rows: Sequence[int]) -> LossInputs:
    """Some rows of `x`, in that order, with the totals of all; gradients flow back to `x`."""
    index = torch.tensor(rows)
    return replace(x, **{name: getattr(x, name)[index] for name in FIELDS if getattr(x, name) is not None})


def value_and_gradient(loss: Callable[[LossInputs], tuple[Tensor, Stats]], x: LossInputs) -> tuple[Tensor, Tensor, Stats]:
    """Loss, its gradient with respect to `x.policy_logp`, and stats."""
    value, stats = loss(x)
    (gradient,) = torch.autograd.grad(value, x.policy_logp)
    return value.detach(), gradient, stats
