"""GRPO (Shao et al. 2024, 2402.03300) and the losses that grew out of it, each a variant with an aggregation."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlgen.losses.advantages import gdpo_advantages, group_advantages, without_signal
from rlgen.losses.inputs import LossInputs, Stats
from rlgen.losses.policy import Objective, policy_loss
from rlgen.losses.variants import Cispo, Clip, RatioLevel, Sapo, Variant, Vespo
from rlgen.recipe.trainers import GRPORecipe
from rlgen.trainers.base import PolicyGradient, Scores, Signal, kl_of, rewards_less_kl

SEQUENCE_RATIOS: dict[str, RatioLevel] = {"gspo": "sequence", "luspo": "sequence", "gspo_token": "sequence_token"}


@dataclass(frozen=True, slots=True)
class GRPO(PolicyGradient):
    """Advantages centred within the group."""

    recipe: GRPORecipe

    def advantages(self, scores: Scores) -> Signal:
        recipe, ids = self.recipe, scores.group_ids
        if recipe.combine_rewards == "normalize_then_sum":
            advantages = gdpo_advantages(scores.columns, scores.column_weights, ids)
            weighed = scores.columns[:, scores.column_weights != 0]
            silent = torch.stack([without_signal(column, ids) for column in weighed.unbind(1)]).all(0)
        else:
            rewards = rewards_less_kl(scores.rewards, scores, recipe)
            advantages = group_advantages(rewards, ids, recipe.scale_rewards)
            silent = without_signal(rewards, ids)
        return Signal.of_policy(advantages, silent, scores, recipe)

    def loss(self, x: LossInputs) -> tuple[Tensor, Stats]:
        recipe = self.recipe
        objective = Objective(
            variant=variant_of(recipe),
            aggregation=recipe.aggregation,
            kl=kl_of(recipe),
            off_policy_max=recipe.off_policy_max,
            entropy_bonus=recipe.entropy_bonus,
        )
        return policy_loss(x, objective)


def variant_of(recipe: GRPORecipe) -> Variant:
    match recipe.loss:
        case "cispo":
            return Cispo(recipe.cispo_max)
        case "sapo":
            return Sapo(recipe.sapo_tau_positive, recipe.sapo_tau_negative)
        case "vespo":
            return Vespo(
                k_positive=recipe.vespo_k_positive,
                lambda_positive=recipe.vespo_lambda_positive,
                k_negative=recipe.vespo_k_negative,
                lambda_negative=recipe.vespo_lambda_negative,
            )
        case clipped:
            return Clip(recipe.clip_low, recipe.clip_high, recipe.delta, SEQUENCE_RATIOS.get(clipped, "token"))
