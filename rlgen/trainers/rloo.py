"""RLOO (Ahmadian et al. 2024, 2402.14740): the other completions of a prompt are its baseline."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from rlgen.losses.advantages import rloo_advantages
from rlgen.losses.inputs import LossInputs, Stats
from rlgen.losses.policy import policy_loss
from rlgen.recipe.models import RLOORecipe
from rlgen.trainers.base import Scores, Signal


@dataclass(frozen=True, slots=True)
class RLOO:
    """Leave-one-out advantages, the KL to a reference taken from the reward; the loss is summed over each completion."""

    recipe: RLOORecipe

    @property
    def reference(self) -> Literal["none", "reward"]:
        return "reward" if self.recipe.beta > 0 else "none"

    @property
    def cap(self) -> float | None:
        return self.recipe.correction.cap

    @property
    def loss_temperature(self) -> None:
        return None

    def advantages(self, scores: Scores) -> Signal:
        rewards = scores.rewards if scores.kl is None else scores.rewards - self.recipe.beta * scores.kl
        return Signal.of_all(rloo_advantages(rewards, scores.group_ids))

    def loss(self, x: LossInputs) -> tuple[Tensor, Stats]:
        return policy_loss(x, self.recipe.clip_low, self.recipe.clip_high, "seq_sum", beta=0.0)
