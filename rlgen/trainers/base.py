"""What an algorithm is: two pure hooks, and what it needs computed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from rlgen.losses.correction import Correction
from rlgen.losses.inputs import LossInputs, Stats
from rlgen.losses.kl import KL
from rlgen.recipe.trainers import CorrectionRecipe, PolicyRecipe
from rlgen.types import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What the samples of a step earned, one row a sample; rows stand in any order."""

    rewards: Tensor  # [B] float64, NaN: not scorable
    columns: Tensor  # [B, K] float64, the single rewards, NaN: does not apply
    column_weights: Tensor  # [K] float64
    group_ids: Tensor  # [B]
    sample_index: Tensor  # [B] within the group
    truncated: Tensor  # [B] bool, ended by the token limit
    kl: Tensor | None  # [B] KL of each completion to the reference, if the algorithm takes it from the reward

    @classmethod
    def of(cls, samples: Sequence[Sample], weights: Mapping[str, float], kl: Tensor | None = None) -> "Scores":
        """One row a sample, in their order.

        Args:
            weights: of the rewards, by label.
        """
        single = [[_number(None if sample.failed else sample.rewards[label]) for sample in samples] for label in weights]
        return cls(
            rewards=torch.tensor([_number(sample.reward) for sample in samples], dtype=torch.float64),
            columns=torch.tensor(single, dtype=torch.float64).T,
            column_weights=torch.tensor(list(weights.values()), dtype=torch.float64),
            group_ids=torch.tensor([sample.group_id for sample in samples], dtype=torch.long),
            sample_index=torch.tensor([sample.sample_index for sample in samples], dtype=torch.long),
            truncated=torch.tensor([sample.finish_reason == "length" for sample in samples], dtype=torch.bool),
            kl=kl,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """What the samples are to teach."""

    advantages: Tensor  # [B] float64
    counted: Tensor  # [B] bool: rows in the denominators of the loss
    trained: Tensor  # [B] bool: of these, rows whose tokens go through the model
    pair_id: Tensor  # [B] the two rows of a pair share it; -1: in no pair

    @classmethod
    def of_policy(cls, advantages: Tensor, silent: Tensor, scores: Scores, recipe: PolicyRecipe) -> "Signal":
        """Each row on its own; the recipe says what becomes of truncated rows and of those in `silent` [B] groups."""
        counted = ~silent if recipe.zero_variance == "drop" else torch.ones_like(silent)
        trained = counted & ~scores.truncated if recipe.mask_truncated else counted
        alone = torch.full_like(scores.group_ids, -1)
        return cls(advantages=advantages, counted=counted, trained=trained, pair_id=alone)


class Algorithm(Protocol):
    """A few values say what is computed for the hooks; the hooks say what is done with it."""

    @property
    def reference(self) -> Literal["none", "reward", "loss"]:
        """Who needs log-probs of the reference: nobody, `advantages`, or `loss`. Only then is a reference held."""
        ...

    @property
    def correction(self) -> Correction: ...

    @property
    def loss_temperature(self) -> float | None:
        """Temperature of the log-probs in the loss; None: that of sampling."""
        ...

    @property
    def top_entropy(self) -> float:
        """Share of the tokens that the loss learns from, those of the highest entropy. Below 1 it costs a forward pass."""
        ...

    @property
    def entropy_gradient(self) -> bool:
        """Whether the loss differentiates the entropy."""
        ...

    def advantages(self, scores: Scores) -> Signal: ...

    def loss(self, x: LossInputs) -> tuple[Tensor, Stats]: ...


def correction_of(recipe: CorrectionRecipe) -> Correction:
    geometric = None if recipe.geometric is None else (recipe.geometric.min, recipe.geometric.max)
    mode = "token_mask" if recipe.mode == "icepop" else recipe.mode
    return Correction(mode=mode, low=recipe.min, high=recipe.max, geometric=geometric)


@dataclass(frozen=True, slots=True)
class PolicyGradient:
    """What GRPO and RLOO have in common: everything that the recipes of both say in the same words."""

    recipe: PolicyRecipe

    @property
    def reference(self) -> Literal["none", "reward", "loss"]:
        if self.recipe.beta == 0:
            return "none"
        return "reward" if self.recipe.kl == "k1_in_reward" else "loss"

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


def rewards_less_kl(rewards: Tensor, scores: Scores, recipe: PolicyRecipe) -> Tensor:
    """The rewards, less the KL to the reference where the recipe puts it there."""
    return rewards if scores.kl is None else rewards - recipe.beta * scores.kl


def kl_of(recipe: PolicyRecipe) -> KL | None:
    """The KL in the loss, if it belongs there."""
    if recipe.beta == 0 or recipe.kl == "k1_in_reward":
        return None
    return KL(recipe.beta, recipe.kl, recipe.kl_use_weight)


def _number(reward: float | None) -> float:
    """A reward in a tensor: NaN where it does not apply."""
    return float("nan") if reward is None else reward
