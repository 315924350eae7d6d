"""What an algorithm is: two pure hooks, and what it needs computed."""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from rlgen.losses.inputs import LossInputs, Stats


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What the samples of a step earned, one row a sample; rows stand in any order."""

    rewards: Tensor  # [B] float64, NaN: not scorable
    group_ids: Tensor  # [B]
    sample_index: Tensor  # [B] within the group
    kl: Tensor | None  # [B] KL of each completion to the reference, if the algorithm takes it from the reward


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """What the samples are to teach."""

    advantages: Tensor  # [B] float64
    trained: Tensor  # [B] bool: rows that go through the model
    pair_id: Tensor  # [B] the two rows of a pair share it; -1: in no pair

    @classmethod
    def of_all(cls, advantages: Tensor) -> "Signal":
        """Every row is trained, each on its own."""
        alone = torch.full_like(advantages, -1, dtype=torch.long)
        return cls(advantages=advantages, trained=torch.ones_like(advantages, dtype=torch.bool), pair_id=alone)


class Algorithm(Protocol):
    """Three numbers say what is computed for the hooks; the hooks say what is done with it."""

    @property
    def reference(self) -> Literal["none", "reward", "loss"]:
        """Who needs log-probs of the reference: nobody, `advantages`, or `loss`. Only then is a reference held."""
        ...

    @property
    def cap(self) -> float | None:
        """Cap of the token-level importance weight; None: no correction."""
        ...

    @property
    def loss_temperature(self) -> float | None:
        """Temperature of the log-probs in the loss; None: that of sampling."""
        ...

    def advantages(self, scores: Scores) -> Signal: ...

    def loss(self, x: LossInputs) -> tuple[Tensor, Stats]: ...
