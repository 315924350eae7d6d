"""Online DPO (Guo et al. 2024, arXiv 2402.04792): preferences between the model's own completions of one prompt.

The default recipe minimises, over the P pairs of a step:

    loss = -1/P sum_pairs log sigmoid(0.1 h)

    h = sum_t (policy_logp - ref_logp) of the chosen - sum_t (policy_logp - ref_logp) of the rejected completion

The pair of a prompt is its completion of the highest and that of the lowest reward; a prompt whose rewards are all equal has
none. `ref_logp` is of the model that the run began with. Both log-probs are at temperature 1, whatever the temperature of
sampling, and no importance weight is applied (`correction: {mode: none}`).
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from rlgen.algorithms.base import Advantages, Denominator, Scores, correction_of
from rlgen.losses.correction import Correction
from rlgen.losses.inputs import LossInputs, Stats
from rlgen.losses.preference import dpo_loss, select_pairs
from rlgen.recipe.trainers import OnlineDPORecipe


@dataclass(frozen=True, slots=True)
class OnlineDPO:
    """Online DPO: preference pairs within each group, by default the best and the worst, against a frozen reference."""

    recipe: OnlineDPORecipe

    reference: ClassVar[Literal["loss"]] = "loss"
    loss_temperature: ClassVar[float] = 1.0  # the preference is about the model, not about how it was sampled
    top_entropy: ClassVar[float] = 1.0
    entropy_gradient: ClassVar[bool] = False
    learns_without_advantage: ClassVar[bool] = True  # the rows of a pair have an advantage, the others are not trained
    divides_by: ClassVar[Denominator] = "pairs"

    @property
    def correction(self) -> Correction:
        return correction_of(self.recipe.correction)

    def advantages(self, scores: Scores) -> Advantages:
        """Returns +1 for the chosen row of a pair and -1 for the rejected; rows without a pair are not trained."""
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
        return Advantages(advantages=advantages, counted=pair_id >= 0, trained=pair_id >= 0, pair_id=pair_id)

    def loss(self, x: LossInputs) -> tuple[Tensor, Stats]:
        return dpo_loss(x, beta=self.beta(x.epoch), loss=self.recipe.loss, lengths=self.recipe.length)

    def beta(self, epoch: float) -> float:
        betas = self.recipe.beta if isinstance(self.recipe.beta, list) else [self.recipe.beta]
        return betas[min(int(epoch), len(betas) - 1)]
