"""RLOO (Ahmadian et al. 2024, 2402.14740): the other completions of a prompt are its baseline."""

from dataclasses import dataclass

from torch import Tensor

from rlgen.losses.advantages import normalized, rloo_advantages, without_signal
from rlgen.losses.inputs import LossInputs, Stats
from rlgen.losses.policy import Objective, policy_loss
from rlgen.losses.variants import Clip
from rlgen.recipe.trainers import RLOORecipe
from rlgen.trainers.base import PolicyGradient, Scores, Signal, kl_of, rewards_less_kl


@dataclass(frozen=True, slots=True)
class RLOO(PolicyGradient):
    """Leave-one-out advantages; the loss is summed over each completion."""

    recipe: RLOORecipe

    def advantages(self, scores: Scores) -> Signal:
        clip = self.recipe.reward_clip
        rewards = rewards_less_kl(scores.rewards if clip is None else scores.rewards.clamp(*clip), scores, self.recipe)
        advantages = rloo_advantages(rewards, scores.group_ids)
        if self.recipe.normalize_advantages:
            advantages = normalized(advantages, ~rewards.isnan())
        return Signal.of_policy(advantages, without_signal(rewards, scores.group_ids), scores, self.recipe)

    def loss(self, x: LossInputs) -> tuple[Tensor, Stats]:
        recipe = self.recipe
        of_tokens = recipe.ratio == "token"
        objective = Objective(
            variant=Clip(recipe.clip_low, recipe.clip_high, recipe.delta, "token" if of_tokens else "sequence_sum"),
            # A ratio of the whole completion counts once, which is the mean of what each of its tokens says.
            aggregation="seq_sum" if of_tokens else "seq_mean",
            kl=kl_of(recipe),
            off_policy_max=recipe.off_policy_max,
            entropy_bonus=recipe.entropy_bonus,
        )
        return policy_loss(x, objective)
