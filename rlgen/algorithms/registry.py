"""Maps `trainer.kind` of a recipe to its algorithm."""

from collections.abc import Callable

from rlgen.algorithms.base import Algorithm
from rlgen.algorithms.grpo import GRPO
from rlgen.algorithms.online_dpo import OnlineDPO
from rlgen.algorithms.own import OwnAlgorithm
from rlgen.algorithms.rloo import RLOO
from rlgen.recipe.trainers import TrainerRecipe

TRAINERS: dict[str, Callable[..., Algorithm]] = {"grpo": GRPO, "rloo": RLOO, "online_dpo": OnlineDPO, "own": OwnAlgorithm.load}


def build_algorithm(settings: TrainerRecipe) -> Algorithm:
    """Builds the algorithm of a recipe's section `trainer`. Raises CodeError if it is the user's, and cannot be loaded."""
    return TRAINERS[settings.kind](settings)
