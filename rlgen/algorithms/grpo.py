"""GRPO (Shao et al. 2024, arXiv 2402.03300) and the losses that grew out of it, each a variant with an aggregation.

The default recipe (`loss: dapo`, arXiv 2503.14476) minimises, over the N sampled tokens of all completions i of a step:

    loss = -1/N sum_i sum_t w_it min(r_it A_i, clamp(r_it, 1 - 0.2, 1 + 0.28) A_i)

    r_it = exp(policy_logp - old_logp)            differentiated; 1 in value on the first update, the only one by default
    w_it = min(exp(old_logp - sampler_logp), 2)   a constant: correction {mode: token_truncate, max: 2.0}
    A_i  = (R_i - mean R) / (std R + 1e-4)        over the completions of the same prompt, with n - 1 in the std

A_i is exactly 0 in a group of equal rewards and for a completion without a reward; their tokens count in N. There is no KL to a
reference (`beta: 0`), no entropy bonus, and no token, completion or group is left out.
"""

from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from rlgen.algorithms.base import Advantages, Denominator, PolicyGradient, Scores, recipe_loss, rewards_less_kl
from rlgen.losses.advantages import gdpo_advantages, group_advantages, without_signal
from rlgen.losses.inputs import LossInputs, Stats
from rlgen.losses.variants import Cispo, Clip, RatioLevel, Sapo, Variant, Vespo
from rlgen.recipe.trainers import GRPORecipe

DENOMINATORS: dict[str, Denominator] = {"token_mean": "tokens", "prompt_mean": "prompts"}  # by aggregation; others: sequences
SEQUENCE_RATIOS: dict[str, RatioLevel] = {"gspo": "sequence", "luspo": "sequence", "gspo_token": "sequence_token"}


@dataclass(frozen=True, slots=True)
class GRPO(PolicyGradient):
    """GRPO and its variants: advantages are centred within the group."""

    recipe: GRPORecipe

    def advantages(self, scores: Scores) -> Advantages:
        """Returns the advantages of the rows; rewards are combined before or after normalisation, as the recipe says."""
        settings, ids = self.recipe, scores.group_ids
        if settings.combine_rewards == "normalize_then_sum":
            weighed = scores.column_weights != 0  # the others are only measured
            columns = scores.columns[:, weighed]
            advantages = gdpo_advantages(columns, scores.column_weights[weighed], ids)
            silent = torch.stack([without_signal(column, ids) for column in columns.unbind(1)]).all(0)
        else:
            rewards = rewards_less_kl(scores.rewards, scores, settings)
            advantages = group_advantages(rewards, ids, settings.scale_rewards)
            silent = without_signal(rewards, ids)
        return Advantages.of_policy(advantages, silent, scores, settings)

    @property
    def divides_by(self) -> Denominator:
        return DENOMINATORS.get(self.recipe.aggregation, "sequences")

    def loss(self, x: LossInputs) -> tuple[Tensor, Stats]:
        return recipe_loss(x, self.recipe, variant_of(self.recipe), self.recipe.aggregation)


def variant_of(settings: GRPORecipe) -> Variant:
    """Builds the token loss that the recipe names."""
    match settings.loss:
        case "cispo":
            return Cispo(settings.cispo_max)
        case "sapo":
            return Sapo(settings.sapo_tau_positive, settings.sapo_tau_negative)
        case "vespo":
            return Vespo(
                k_positive=settings.vespo_k_positive,
                lambda_positive=settings.vespo_lambda_positive,
                k_negative=settings.vespo_k_negative,
                lambda_negative=settings.vespo_lambda_negative,
            )
        case "dapo" | "grpo" | "dr_grpo" | "bnpo" | "gspo" | "gspo_token" | "luspo":
            return Clip(settings.clip_low, settings.clip_high, settings.delta, SEQUENCE_RATIOS.get(settings.loss, "token"))
        case forgotten:  # mypy: a loss of the recipe that has no case
            assert_never(forgotten)
