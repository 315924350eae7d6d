"""GRPO (Shao et al. 2024, 2402.03300), with the aggregation of DAPO (2503.14476) or Dr. GRPO (2503.20783)."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from rlgen.losses.advantages import group_advantages
from rlgen.losses.inputs import LossInputs, Stats
from rlgen.losses.policy import Aggregation, policy_loss
from rlgen.recipe.models import GRPORecipe
from rlgen.trainers.base import Scores, Signal

AGGREGATIONS: dict[str, Aggregation] = {"dapo": "token_mean", "grpo": "seq_mean", "dr_grpo": "fixed"}


@dataclass(frozen=True, slots=True)
class GRPO:
    """Advantages centred within the group; clipped ratio; KL to a reference in the loss."""

    recipe: GRPORecipe

    @property
    def reference(self) -> Literal["none", "loss"]:
        return "loss" if self.recipe.beta > 0 else "none"

    @property
    def cap(self) -> float | None:
        return self.recipe.correction.cap

    @property
    def loss_temperature(self) -> None:
        return None

    def advantages(self, scores: Scores) -> Signal:
        return Signal.of_all(group_advantages(scores.rewards, scores.group_ids, self.recipe.scale))

    def loss(self, x: LossInputs) -> tuple[Tensor, Stats]:
        clip = self.recipe.clip_low, self.recipe.clip_high
        return policy_loss(x, *clip, AGGREGATIONS[self.recipe.loss], self.recipe.beta)
