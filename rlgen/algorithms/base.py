"""Interface of an algorithm: two pure functions, `advantages` and `loss`, and properties that say what they need computed."""

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from rlgen.losses.correction import Correction
from rlgen.losses.inputs import LossInputs, Stats
from rlgen.losses.kl import KL
from rlgen.losses.policy import Aggregation, policy_loss
from rlgen.losses.variants import Variant
from rlgen.recipe.trainers import CorrectionRecipe, PolicyRecipe
from rlgen.types import Distribution

Denominator: TypeAlias = Literal["sequences", "tokens", "prompts", "pairs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Rewards and groups of the samples of a step, one row per sample, in any order."""

    rewards: Tensor  # [B] float64, NaN: not scorable
    columns: Tensor  # [B, K] float64, the single rewards, NaN: does not apply
    column_weights: Tensor  # [K] float64
    group_ids: Tensor  # [B]
    sample_index: Tensor  # [B] within the group
    truncated: Tensor  # [B] bool, ended by the token limit
    kl: Tensor | None  # [B] KL of each completion to the reference, if the algorithm takes it from the reward


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    """The advantages of the samples of a step, and which rows count and train."""

    advantages: Tensor  # [B] float64
    counted: Tensor  # [B] bool: rows in the denominators of the loss
    trained: Tensor  # [B] bool: of these, rows whose tokens go through the model
    pair_id: Tensor  # [B] the two rows of a pair share it; -1: in no pair

    @classmethod
    def of_policy(cls, advantages: Tensor, silent: Tensor, scores: Scores, recipe: PolicyRecipe) -> "Advantages":
        """Returns the advantages of a policy-gradient algorithm, in which no rows are paired.

        Args:
            advantages: [B] float64.
            silent: [B] bool, rows of groups without signal; `recipe.zero_variance` decides whether they count.
            recipe: decides also whether truncated rows are trained (`mask_truncated`).
        """
        counted = ~silent if recipe.zero_variance == "drop" else torch.ones_like(silent)
        trained = counted & ~scores.truncated if recipe.mask_truncated else counted
        return cls(advantages=advantages, counted=counted, trained=trained, pair_id=torch.full_like(scores.group_ids, -1))


Signal = Advantages  # the old name, for algorithms that import it


def loss_distribution(algorithm: "Algorithm", sampled: Distribution) -> Distribution:
    """Returns the distribution whose log-probs the loss takes, for samples of the distribution `sampled`."""
    return sampled if algorithm.loss_temperature is None else Distribution(temperature=algorithm.loss_temperature)


class Algorithm(Protocol):
    """The two functions of an algorithm, and properties that say which inputs to compute for them."""

    @property
    def reference(self) -> Literal["none", "reward", "loss"]: ...  # what needs its log-probs; "none": none is loaded

    @property
    def correction(self) -> Correction: ...

    @property
    def loss_temperature(self) -> float | None: ...  # of the log-probs in the loss, over all ids; None: as sampled

    @property
    def top_entropy(self) -> float: ...  # share of tokens to train on, those of the highest; below 1 it costs a forward pass

    @property
    def entropy_gradient(self) -> bool: ...  # whether the loss differentiates the entropy

    @property
    def learns_without_advantage(self) -> bool: ...  # whether a row of advantage 0 has a gradient; else it only runs forward

    @property
    def divides_by(self) -> Denominator: ...  # the count of `Totals` under the loss; an entropy bonus divides by the tokens

    def advantages(self, scores: Scores) -> Advantages: ...

    def loss(self, x: LossInputs) -> tuple[Tensor, Stats]: ...


def correction_of(recipe: CorrectionRecipe) -> Correction:
    """Builds the settings of the importance weight from a recipe; `icepop` is `token_mask`."""
    geometric = None if recipe.geometric is None else (recipe.geometric.min, recipe.geometric.max)
    mode = "token_mask" if recipe.mode == "icepop" else recipe.mode
    return Correction(mode=mode, low=recipe.min, high=recipe.max, geometric=geometric)


@dataclass(frozen=True, slots=True)
class PolicyGradient:
    """The properties that GRPO and RLOO share, from the fields that both recipes have."""

    recipe: PolicyRecipe
    loss_temperature: ClassVar[float | None] = None

    @property
    def reference(self) -> Literal["none", "reward", "loss"]:
        if self.recipe.beta == 0:
            return "none"
        return "reward" if self.recipe.kl == "k1_in_reward" else "loss"

    @property
    def correction(self) -> Correction:
        return correction_of(self.recipe.correction)

    @property
    def top_entropy(self) -> float:
        return self.recipe.top_entropy

    @property
    def entropy_gradient(self) -> bool:
        return self.recipe.entropy_bonus > 0

    @property
    def learns_without_advantage(self) -> bool:
        """Returns whether the loss has a KL term or an entropy bonus; all other terms are multiplied by the advantage."""
        return self.reference == "loss" or self.entropy_gradient


def rewards_less_kl(rewards: Tensor, scores: Scores, recipe: PolicyRecipe) -> Tensor:
    """Returns the rewards, less the KL to the reference if the recipe puts it there."""
    return rewards if scores.kl is None else rewards - recipe.beta * scores.kl


def recipe_loss(
    x: LossInputs, recipe: PolicyRecipe, variant: Variant, aggregation: Aggregation, kl_aggregation: Aggregation | None = None
) -> tuple[Tensor, Stats]:
    """Returns `policy_loss` with the terms that both recipes have: KL, masking of off-policy completions, entropy bonus."""
    return policy_loss(
        x,
        variant=variant,
        aggregation=aggregation,
        kl=None if recipe.beta == 0 or recipe.kl == "k1_in_reward" else KL(recipe.beta, recipe.kl, recipe.kl_use_weight),
        kl_aggregation=kl_aggregation,
        off_policy_max=recipe.off_policy_max,
        entropy_bonus=recipe.entropy_bonus,
    )
