"""RLOO (Ahmadian et al. 2024, arXiv 2402.14740): the baseline of a completion is the mean of the prompt's other completions.

The default recipe minimises, over the N completions i of a step and their tokens t:

    loss = -1/N sum_i sum_t w_it min(r_it A_i, clamp(r_it, 1 - 0.2, 1 + 0.2) A_i)

    r_it = exp(policy_logp - old_logp)            differentiated; 1 in value on the first update, the only one by default
    w_it = min(exp(old_logp - sampler_logp), 2)   a constant: correction {mode: token_truncate, max: 2.0}
    A_i  = R_i - mean of the R of the other completions of the same prompt

A_i is exactly 0 in a group of equal rewards and for a completion without a reward; both count in N. Against GRPO's default: the
tokens of a completion are summed, not averaged, the advantage is not divided by a standard deviation, and the clip is symmetric.
There is no KL (`beta: 0`); with one, it is taken from R (`kl: k1_in_reward`).
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rlgen.algorithms.base import Advantages, Denominator, PolicyGradient, Scores, recipe_loss, rewards_less_kl
from rlgen.losses.advantages import normalized, rloo_advantages, without_signal
from rlgen.losses.inputs import LossInputs, Stats
from rlgen.losses.variants import Clip
from rlgen.recipe.trainers import RLOORecipe


@dataclass(frozen=True, slots=True)
class RLOO(PolicyGradient):
    """RLOO: leave-one-out advantages, with the loss summed over each completion."""

    recipe: RLOORecipe
    divides_by: ClassVar[Denominator] = "sequences"

    def advantages(self, scores: Scores) -> Advantages:
        """Returns leave-one-out advantages of the rewards, after clipping and KL, normalised if the recipe says so."""
        settings, clip = self.recipe, self.recipe.reward_clip
        rewards = rewards_less_kl(scores.rewards if clip is None else scores.rewards.clamp(*clip), scores, settings)
        advantages = rloo_advantages(rewards, scores.group_ids)
        if settings.normalize_advantages:
            advantages = normalized(advantages, ~rewards.isnan())
        return Advantages.of_policy(advantages, without_signal(rewards, scores.group_ids), scores, settings)

    def loss(self, x: LossInputs) -> tuple[Tensor, Stats]:
        settings, of_tokens = self.recipe, self.recipe.ratio == "token"
        variant = Clip(settings.clip_low, settings.clip_high, settings.delta, "token" if of_tokens else "sequence_sum")
        # A ratio of the whole completion counts once: all its tokens have the same loss, of which `seq_mean` takes the mean.
        # The KL is a sum over tokens with either ratio.
        return recipe_loss(x, settings, variant, "seq_sum" if of_tokens else "seq_mean", kl_aggregation="seq_sum")
