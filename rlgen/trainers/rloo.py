"""RLOO (Ahmadian et al. 2024, 2402.14740): the other completions of a prompt are its baseline."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from rlgen.losses.advantages import normalized, rloo_advantages, without_signal
from rlgen.losses.correction import Correction
from rlgen.losses.inputs import LossInputs, Stats
from rlgen.losses.policy import Objective, policy_loss
from rlgen.losses.variants import Clip
from rlgen.recipe.trainers import RLOORecipe
from rlgen.trainers.base import Scores, Signal, correction_of, kl_of, reference_use, rewards_less_kl


@dataclass(frozen=True, slots=True)
class RLOO:
    """Leave-one-out advantages; the loss is summed over each completion."""

    recipe: RLOORecipe

    @property
    def reference(self) -> Literal["none", "reward", "loss"]:
        return reference_use(self.recipe)

    @property
    def correction(self) -> Correction:
        return correction_of(self.recipe.correction)

    @property
    def loss_temperature(self) -> None:
        return None

    @property
    def top_entropy(self) -> float:
        return self.recipe.top_entropy

    @property
    def entropy_gradient(self) -> bool:
        return self.recipe.entropy_bonus > 0

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
