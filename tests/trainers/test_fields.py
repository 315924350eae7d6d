"""No field of `trainer` is inert: each changes what is learned in every recipe that accepts it.

Generated from the models: a field without an alternative here fails, and so does one that a recipe takes without effect.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any, get_args

import pytest
import torch
from helpers.entropy import entropy_threshold
from helpers.samples import make_sample
from pydantic import BaseModel, ValidationError
from torch import Tensor

from rlgen.algorithms.base import Advantages, Scores
from rlgen.algorithms.registry import build_algorithm
from rlgen.losses.correction import importance_weight
from rlgen.losses.inputs import LossInputs, Totals
from rlgen.losses.kl import reward_kl
from rlgen.losses.masking import entropy_kept
from rlgen.processes import Processes
from rlgen.recipe.inert import inert
from rlgen.recipe.models import Recipe
from rlgen.recipe.rules import contradictions
from rlgen.recipe.trainers import GRPORecipe, OnlineDPORecipe, RLOORecipe
from rlgen.rollout.samples import Samples
from rlgen.rollout.table import RowTable

GRPO_LOSSES, DPO_LOSSES = (get_args(model.model_fields["loss"].annotation) for model in (GRPORecipe, OnlineDPORecipe))
# A value other than the default, and other than what the contexts below set. bnpo is left out: it is another name of dapo.
ALTERNATIVES: dict[str, list[Any]] = {
    "loss": [loss for loss in (*GRPO_LOSSES, *DPO_LOSSES) if loss != "bnpo"],
    "aggregation": ["token_mean", "seq_mean", "fixed", "seq_sum", "prompt_mean"],
    "scale_rewards": ["group", "batch", "batch_centered", "none"],
    "combine_rewards": ["normalize_then_sum"],
    "beta": [0.7],
    "kl": ["k3_is", "k2", "k3", "k1_in_reward"],
    "kl_use_weight": [True],
    "clip_low": [0.05],
    "clip_high": [0.9],
    "delta": [2.0],
    "off_policy_max": [0.01],
    "top_entropy": [0.3],
    "entropy_bonus": [0.2],
    "mask_truncated": [True],
    "zero_variance": ["drop"],
    "updates_per_rollout": [3],
    "cispo_max": [1.1],
    "sapo_tau_positive": [3.0],
    "sapo_tau_negative": [3.0],
    "vespo_k_positive": [1.0],
    "vespo_lambda_positive": [1.0],
    "vespo_k_negative": [1.0],
    "vespo_lambda_negative": [1.0],
    "ratio": ["sequence"],
    "reward_clip": [(0.0, 1.5)],
    "normalize_advantages": [True],
    "length": ["mean"],
    "pairing": ["outside_in", "best_random"],
    "min_margin": [1.5],
    "ties": ["first"],
    "missing_eos_penalty": [3.0],
    "correction.mode": ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "icepop", "none"],
    "correction.min": [0.97],
    "correction.max": [1.04],
    "correction.geometric": [{}],
    "correction.geometric.min": [0.999],
    "correction.geometric.max": [1.001],
}
MODELS = {"grpo": GRPORecipe, "rloo": RLOORecipe, "online_dpo": OnlineDPORecipe}


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """ "beta", "correction", "correction.mode", ...: all fields below a model."""
    for name, field in model.model_fields.items():
        if name == "kind":
            continue
        inner = [kind for kind in (field.annotation, *get_args(field.annotation)) if isinstance(kind, type)]
        models = [kind for kind in inner if issubclass(kind, BaseModel)]
        if not models or type(None) in inner:  # a section that can be left out is a choice itself
            yield prefix + name
        for kind in models:
            yield from fields(kind, f"{prefix}{name}.")


def contexts(kind: str) -> list[dict[str, Any]]:
    if kind == "online_dpo":
        updates = (1, 2)
        modes: tuple[dict[str, Any], ...] = ({"mode": "none"}, {"mode": "sequence_mask", "max": 1.1})
        return [
            {"loss": loss, "updates_per_rollout": u, "correction": mode}
            for loss, u, mode in itertools.product(DPO_LOSSES, updates, modes)
        ]
    # bnpo is dapo, and grpo too but for its aggregation.
    losses = [loss for loss in GRPO_LOSSES if loss not in ("bnpo", "grpo")] if kind == "grpo" else [None]
    kls = ({}, {"beta": 0.1}, {"beta": 0.1, "kl": "k1_in_reward"}, {"beta": 0.1, "kl": "k3"})
    corrections = ({"mode": "none"}, {"mode": "token_truncate", "max": 1.06}, {"mode": "sequence_mask"})
    return [
        {**({"loss": loss} if loss else {}), **kl, "updates_per_rollout": updates, "correction": correction}
        for loss, kl, updates, correction in itertools.product(losses, kls, (1, 2), corrections)
    ]


def changed(context: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    *parents, name = path.split(".")
    outcome = node = {**context}
    for parent in parents:
        node[parent] = {**node.get(parent, {})}
        node = node[parent]
    node[name] = value
    return outcome


def accepted(kind: str, trainer: dict[str, Any], written: str) -> Any:
    """The trainer's recipe, or None: refused because of what is `written`."""
    sections = {"run": {"name": "x"}, "model": {"path": "tiny:qwen3"}, "data": {"source": "task:sort"}}
    try:
        recipe = Recipe(**sections, rewards=[{"use": "length", "args": {"target": 3}}], trainer={"kind": kind, **trainer})
    except ValidationError:
        return None
    unsound = contradictions(recipe) or [finding for finding in inert(recipe) if finding.path == f"trainer.{written}"]
    return None if unsound else recipe.trainer


# Sixteen groups of four, with ties; the first constant, the second with a single scorable row. Every fifth row is truncated.
ROWS, WIDTH = 64, 6
GROUPS = torch.arange(ROWS) // 4
REWARDS = torch.randint(-2, 4, (ROWS,), generator=torch.Generator().manual_seed(1)).double() / 2
REWARDS[:4], REWARDS[5:8] = 1.0, float("nan")
TRUNCATED = torch.arange(ROWS) % 5 == 3
LENGTHS = torch.where(TRUNCATED, WIDTH, 1 + torch.arange(ROWS) % WIDTH)
MASK = torch.arange(WIDTH) < LENGTHS[:, None]


LEARNED: dict[str, list[Tensor]] = {}


def learned(trainer: Any) -> list[Tensor]:
    """What `learn` says, computed once for each recipe."""
    key = trainer.model_dump_json()
    if key not in LEARNED:
        LEARNED[key] = learn(trainer)
    return LEARNED[key]


def learn(trainer: Any) -> list[Tensor]:
    """Loss and gradients with respect to log-probs and entropies, update by update."""
    generator = torch.Generator().manual_seed(0)
    draw = [torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) for _ in range(6)]
    # Some rows are far off the sampler, others after an update.
    far, moved = ((torch.arange(ROWS) % n == 5)[:, None].double() for n in (11, 13))
    old, ref = draw[0] - 2, draw[0] - 2 + 0.5 * draw[2]
    sampler = old + 0.03 * draw[1] - 0.8 * far
    algorithm = build_algorithm(trainer)
    second = torch.arange(ROWS).double() % 7
    scores = Scores(
        rewards=REWARDS,
        columns=torch.stack([REWARDS - second, second], dim=1),
        column_weights=torch.ones(2, dtype=torch.float64),
        group_ids=GROUPS,
        sample_index=torch.arange(ROWS) % 4,
        truncated=TRUNCATED,
        kl=reward_kl(sampler, ref, MASK) if algorithm.reference == "reward" else None,
    )
    advantages = algorithm.advantages(scores)
    mask = MASK & advantages.trained[:, None]
    of_group = torch.stack([mask[group == GROUPS].sum() for group in range(ROWS // 4)])
    outcome: list[Tensor] = []
    for update in range(trainer.updates_per_rollout):
        policy = (old + update * (0.4 * draw[3] + moved)).requires_grad_()
        entropy = draw[4].abs().requires_grad_()
        kept = mask
        if algorithm.top_entropy < 1:
            kept = entropy_kept(entropy.detach(), mask, entropy_threshold(entropy.detach(), mask, algorithm.top_entropy))
        x = LossInputs(
            policy_logp=policy,
            old_logp=old,
            sampler_logp=sampler,
            ref_logp=ref,
            entropy=entropy,
            mask=mask,
            kept=kept,
            advantages=advantages.advantages,
            weight=importance_weight(old, sampler, mask, algorithm.correction),
            group_tokens=of_group[GROUPS],
            pair_id=advantages.pair_id,
            totals=Totals(
                sequences=int(advantages.counted.sum()),
                tokens=int(mask.sum()),
                kept=int(kept.sum()),
                prompts=len(GROUPS[advantages.counted].unique()),
                pairs=len(advantages.pair_id.unique()) - 1,
            ),
            max_tokens=8,
            epoch=0.0,
        )
        loss = algorithm.loss(x)[0]
        loss.backward()
        outcome += [loss.detach(), policy.grad, torch.zeros(()) if entropy.grad is None else entropy.grad]
    return outcome


def differ(one: list[Tensor], other: list[Tensor]) -> bool:
    if [part.shape for part in one] != [part.shape for part in other]:
        return True
    return any(not torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(one, other, strict=True))


CASES = [(kind, path) for kind, model in MODELS.items() for path in fields(model)]


@pytest.mark.parametrize("kind, path", CASES, ids=[f"{kind}.{path}" for kind, path in CASES])
def test_a_field_changes_what_is_learned_or_is_refused(kind: str, path: str) -> None:
    effects, checked = 0, 0
    for context, value in itertools.product(contexts(kind), ALTERNATIVES[path]):
        if (
            path == "loss"
            and kind == "grpo"
            and (context["updates_per_rollout"] == 1 or context["correction"]["mode"] != "token_truncate")
        ):
            continue  # on policy cispo and vespo are one, without weights of tokens gspo and gspo_token
        if path.startswith("correction.geometric."):
            context = changed(context, "correction.geometric", {"min": 0.98, "max": 1.02})
        base = accepted(kind, context, written="")
        assert base is not None, context
        other = accepted(kind, changed(context, path, value), path)
        if other is None or other == base:
            continue
        checked += 1
        effect = differ(learned(base), learned(other))
        assert effect, f"trainer.{path}: {value} is accepted without effect in {context}"
        effects += effect
    assert effects, f"no recipe of {checked} shows an effect of trainer.{path}"


def test_every_field_is_covered() -> None:
    assert {path for _, path in CASES} == set(ALTERNATIVES)


def test_an_inert_field_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_fields.LEARNED", {})
    monkeypatch.setattr("rlgen.algorithms.grpo.GRPO.top_entropy", property(lambda self: 1.0))
    with pytest.raises(AssertionError, match=r"trainer.top_entropy: 0.3 is accepted without effect"):
        test_a_field_changes_what_is_learned_or_is_refused("grpo", "top_entropy")


def test_a_reward_that_is_only_watched_gives_a_group_no_signal() -> None:
    """Its weight is 0: where nothing else differs there is nothing to learn, and nothing to count."""
    advantages = of_watched([(1.0, 1.0), (0.0, 1.0)], [[0.0, 1.0]] * 2)
    assert advantages.counted.tolist() == advantages.trained.tolist() == [False, False, True, True]
    assert advantages.advantages.sign().tolist() == [0.0, 0.0, -1.0, 1.0]


def test_a_reward_that_is_only_watched_leaves_the_others_as_they_are() -> None:
    """Where it fails, and where no other reward applies."""
    right = [(0.0, 1.0), (0.0, 3.0), (None, None)]
    alone, watched, failed = (of_watched(right, [values] * 3).advantages for values in ([None, None], [0.0, 1.0], [None, 1.0]))
    assert alone.abs().tolist() == pytest.approx([math.sqrt(3) / 2] * 4 + [0.0, 0.0], abs=2e-4)
    assert watched.tolist() == failed.tolist() == alone.tolist()


def of_watched(right: list[tuple[float | None, ...]], watched: list[list[float | None]]) -> Advantages:
    """Of `normalize_then_sum`, group by group, with a reward of weight 1 and one of weight 0, which fails where it is None."""
    samples = [
        make_sample(
            group_id=group,
            sample_index=index,
            rewards={"right": value, "watched": seen},
            reward=value,
            reward_errors={} if seen is not None else {"watched": "error: f raised"},
        )
        for group, pairs in enumerate(zip(right, watched, strict=True))
        for index, (value, seen) in enumerate(zip(*pairs, strict=True))
    ]
    table = RowTable.gather(Samples.of(samples), Processes.alone())
    recipe = GRPORecipe(combine_rewards="normalize_then_sum", zero_variance="drop")
    return build_algorithm(recipe).advantages(table.scores({"right": 1.0, "watched": 0.0}))
