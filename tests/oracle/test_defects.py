"""What TRL 1.16.0 does otherwise, shown by its own code, and what rlgen does. A defect keeps its number everywhere.

1 means over micro-batches · 2 denominators of other steps · 6 the default correction drops long rows · 7 cap of cispo ·
9 rounding of equal rewards · 10 constant groups uncounted · 11 a missing reward is 0 · 13 entropy by micro-batch ·
14 masked rows lose their KL · 15 token KL times row ratio · 16 masks by multiplication · 17 ties, lists of beta.
"""

import math
from typing import Any

import pytest
import torch
from matrix import relative_error
from replay import ROWS, OfflineTrainBatches, Outcome, Rollout, oracle, random_rollout, rlgen_outcome
from torch import Tensor
from torch.testing import assert_close

from rlgen.losses.advantages import zero_variance
from rlgen.recipe.trainers import GRPORecipe, OnlineDPORecipe, RLOORecipe, TrainerRecipe

UNCORRECTED = {"mode": "none"}
TWO_MICRO_BATCHES = {"gradient_accumulation_steps": 2, "steps_per_generation": 2}


def rollout(pattern: str = "ragged", dtype: torch.dtype = torch.float64, **changes: Any) -> Rollout:
    return random_rollout(pattern, dtype, **changes)


def on_policy(pattern: str = "ragged") -> Rollout:
    return rollout(pattern, policy_logp=rollout(pattern).old_logp)


def rewards(*first: float | None) -> tuple[dict[str, float | None], ...]:
    """The given rewards, over and over, and 0 of the second kind."""
    return tuple({"first": first[row % len(first)], "second": 0.0} for row in range(ROWS))


def advantages(recipe: TrainerRecipe, of: Rollout) -> Tensor:
    return OfflineTrainBatches.of(recipe, of, 120).built()[1].advantages


def grpo(**fields: Any) -> GRPORecipe:
    return GRPORecipe(**{"updates_per_rollout": 2, "clip_low": 0.2, "clip_high": 0.28, "correction": UNCORRECTED, **fields})


def trl(of: Rollout, **settings: Any) -> Any:
    return oracle("GRPO")(of, **{"num_iterations": 2, "epsilon": 0.2, "epsilon_high": 0.28, "beta": 0.0, **settings})


def split(recipe: GRPORecipe, of: Rollout) -> float:
    """How far rlgen's micro-batches are from its train batch as a whole."""
    return relative_error(rlgen_outcome(recipe, of, micro_batch_tokens=20), rlgen_outcome(recipe, of, micro_batch_tokens=10**6))


@pytest.mark.parametrize(
    "settings, fields",
    [
        # 1: each micro-batch is a mean over its own tokens
        ({"loss_type": "bnpo"}, {"loss": "bnpo"}),
        # 13: and so is the entropy; the threshold of the entropy is that of the micro-batch
        ({"loss_type": "dapo", "entropy_coef": 0.1}, {"loss": "dapo", "entropy_bonus": 0.1}),
        ({"loss_type": "dapo", "top_entropy_quantile": 0.3}, {"loss": "dapo", "top_entropy": 0.3}),
    ],
    ids=["1 bnpo", "13 entropy bonus", "13 entropy threshold"],
)
def test_trl_depends_on_the_split_into_micro_batches(settings: dict[str, Any], fields: dict[str, Any]) -> None:
    of = rollout()
    whole = trl(of, **settings).outcome()
    assert relative_error(trl(of, **settings, **TWO_MICRO_BATCHES).outcome(), whole) > 1e-3
    assert relative_error(rlgen_outcome(grpo(**fields), of), whole) < 1e-12
    assert split(grpo(**fields), of) < 1e-12


def test_2_trl_divides_a_step_by_the_tokens_of_other_steps() -> None:
    # One rollout, an optimizer step on each half. A = -1, r = 1: the mean over a step's tokens is 1.
    lengths = (8,) * 12 + (2,) * 12
    mask = torch.arange(8) < torch.tensor(lengths)[:, None]
    ones = rollout("full", lengths=lengths, mask=mask, policy_logp=rollout("full").old_logp)
    oracle = trl(ones, loss_type="dapo", steps_per_generation=2)
    scored = oracle.scored() | {"advantages": -torch.ones(ROWS, dtype=torch.float64)}
    oracle.scored = lambda: scored
    # 12 * 8 and 12 * 2 tokens, each by their average 60
    assert [loss.item() for loss in oracle.losses()] == pytest.approx([1.6, 0.4])


def test_6_trl_by_default_drops_long_rows_whole() -> None:
    # .2 nats a token, 8 tokens: exp(1.6) = 4.95 is above the default cap of the row's ratio, 3. Nothing is learned.
    of = rollout("full", sampler_logp=rollout("full").old_logp - 0.2)
    oracle = trl(of, loss_type="dapo", use_vllm=True).outcome()
    assert oracle.value == 0 and not oracle.policy_gradient.any()
    assert rlgen_outcome(GRPORecipe(updates_per_rollout=2), of).policy_gradient.abs().max() > 0.01


def test_7_cispo_inherits_a_clip_range_as_its_cap() -> None:
    # On policy r = 1 is capped at epsilon = .2: a fifth of the policy gradient is left.
    of = on_policy()
    policy_gradient = trl(of, loss_type="dapo").outcome().policy_gradient
    assert_close(oracle("GRPO")(of, loss_type="cispo").outcome().policy_gradient, 0.2 * policy_gradient)
    assert_close(rlgen_outcome(GRPORecipe(loss="cispo", correction=UNCORRECTED), of).policy_gradient, policy_gradient)


def test_9_trl_learns_from_the_rounding_of_equal_rewards() -> None:
    of = rollout(dtype=torch.float32, rewards=rewards(100.3), group_ids=tuple(row // 6 for row in range(ROWS)))
    assert (trl(of, num_generations=6).scored()["advantages"].abs() > 0.01).all()  # measured: .0704
    assert advantages(grpo(), of).tolist() == [0.0] * ROWS
    assert not rlgen_outcome(grpo(), of).policy_gradient.any()


def test_10_trl_counts_no_constant_group_when_it_scales_by_the_batch() -> None:
    of = rollout(rewards=rewards(1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 2.0, 3.0))
    oracle = trl(of, scale_rewards="batch")
    oracle.scored()
    assert oracle._metrics["train"]["frac_reward_zero_std"] == [0.0]
    assert zero_variance(of.reward_table[:, 0], torch.tensor(of.group_ids)).double().mean() == 0.5


def test_11_trl_takes_a_reward_that_does_not_apply_for_0() -> None:
    # The first reward is missing for one row of each group: 0 is the worst of [1, 2, 3, 0].
    of = rollout(rewards=rewards(1.0, 2.0, 3.0, None))
    assert trl(of).scored()["advantages"][3] < -1
    assert advantages(grpo(), of)[:4].tolist() == pytest.approx([-1 / (1 + 1e-4), 0, 1 / (1 + 1e-4), 0])


def test_14_a_masked_truncated_row_loses_its_kl_and_stays_in_the_baseline() -> None:
    of = rollout()
    kept, masked = (
        oracle("RLOO")(of, beta=0.1, mask_truncated_completions=masks).scored()["advantages"] for masks in (False, True)
    )
    assert (kept - masked).abs().max() > 0.01
    ours = [advantages(RLOORecipe(kind="rloo", beta=0.1, mask_truncated=masks), of) for masks in (False, True)]
    assert_close(ours[0], ours[1], rtol=0, atol=0)


@pytest.mark.parametrize("loss, level", [("dapo", "token"), ("gspo", "sequence"), ("luspo", "sequence")])
def test_15_at_the_sequence_level_trl_weighs_the_kl_of_a_token_by_the_whole_row(loss: str, level: str) -> None:
    # On policy the gradient of k3 times the token's ratio is u, that of k2: the unbiased reverse KL.
    of, loss_type = on_policy(), {"gspo": "grpo"}.get(loss, loss)

    def kl_part(with_kl: Outcome, without: Outcome) -> Tensor:
        return with_kl.policy_gradient - without.policy_gradient

    oracle = kl_part(*(trl(of, loss_type=loss_type, importance_sampling_level=level, beta=beta).outcome() for beta in (0.1, 0.0)))
    plain = rlgen_outcome(grpo(loss=loss, updates_per_rollout=1), of)
    k2, ours = (
        kl_part(rlgen_outcome(grpo(loss=loss, updates_per_rollout=1, beta=0.1, kl=kl), of), plain) for kl in ("k2", "k3_is")
    )
    assert_close(ours, k2, rtol=1e-9, atol=1e-15)
    difference = (oracle - k2).abs().max() / k2.abs().max()
    assert difference < 1e-9 if level == "token" else difference > 0.1


def test_16_trl_multiplies_what_is_masked_and_nan_stays_nan() -> None:
    clean = rollout("holes")
    dirty = rollout("holes", ref_logp=torch.where(clean.mask, clean.ref_logp, math.nan))
    assert trl(dirty, loss_type="dapo", beta=0.1).outcome().value.isnan()
    ours, expected = (rlgen_outcome(grpo(beta=0.1), of) for of in (dirty, clean))
    assert relative_error(ours, expected) == 0


def pairs(**changes: Any) -> Rollout:
    return rollout(group_ids=tuple(row % (ROWS // 2) for row in range(ROWS)), **changes)


def test_17_trl_prefers_the_first_of_equal_completions() -> None:
    equal = pairs(rewards=rewards(1.0))
    assert oracle("OnlineDPO")(equal).outcome().policy_gradient.any()
    assert not rlgen_outcome(OnlineDPORecipe(kind="online_dpo"), equal).policy_gradient.any()


def test_17_trl_takes_no_beta_for_each_epoch() -> None:
    theirs = oracle("OnlineDPO")(pairs(), beta=[0.2, 0.1])
    theirs.state = type("State", (), {"epoch": 0.5})()
    with pytest.raises(TypeError, match="list indices must be integers"):
        theirs.outcome()
    of = pairs(rewards=rewards(1.0, 2.0, 0.0, 3.0, 4.0))
    ours, first = (rlgen_outcome(OnlineDPORecipe(kind="online_dpo", beta=beta), of) for beta in ([0.2, 0.1], 0.2))
    assert first.policy_gradient.any()
    assert relative_error(ours, first) == 0
