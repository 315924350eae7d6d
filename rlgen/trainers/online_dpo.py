"""Online DPO (Guo et al. 2024, 2402.04792): preferences between the model's own completions of one prompt."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlgen.losses.correction import Correction
from rlgen.losses.inputs import LossInputs, Stats
from rlgen.losses.preference import dpo_loss, select_pairs
from rlgen.recipe.trainers import OnlineDPORecipe
from rlgen.trainers.base import Scores, Signal, correction_of


@dataclass(frozen=True, slots=True)
class OnlineDPO:
    """The best and the worst of each group, paired by group id, against a frozen reference."""

    recipe: OnlineDPORecipe

    @property
    def reference(self) -> Literal["loss"]:
        return "loss"

    @property
    def correction(self) -> Correction:
        return correction_of(self.recipe.correction)

    @property
    def loss_temperature(self) -> float:
        return 1.0  # the preference is about the model, not about how it was sampled

    @property
    def top_entropy(self) -> float:
        return 1.0

    @property
    def entropy_gradient(self) -> bool:
        return False

    def advantages(self, scores: Scores) -> Signal:
        """+1 for the chosen row of a pair, -1 for the rejected; groups without a pair train nothing."""
        chosen, rejected = select_pairs(
            scores.rewards - self.recipe.missing_eos_penalty * scores.truncated,
            scores.group_ids,
            scores.sample_index,
            pairing=self.recipe.pairing,
            min_margin=self.recipe.min_margin,
            ties=self.recipe.ties,
        )
        advantages = torch.zeros_like(scores.rewards)
        advantages[chosen], advantages[rejected] = 1.0, -1.0
        pair_id = torch.full_like(scores.group_ids, -1)
        pair_id[chosen] = pair_id[rejected] = torch.arange(len(chosen))
        return Signal(advantages=advantages, counted=pair_id >= 0, trained=pair_id >= 0, pair_id=pair_id)

    def loss(self, x: LossInputs) -> tuple[Tensor, Stats]:
        return dpo_loss(x, beta=self.beta(x.epoch), loss=self.recipe.loss, lengths=self.recipe.length)

    def beta(self, epoch: float) -> float:
        """Of the pass over the data that the step belongs to."""
        betas = self.recipe.beta if isinstance(self.recipe.beta, list) else [self.recipe.beta]
        return betas[min(int(epoch), len(betas) - 1)]
