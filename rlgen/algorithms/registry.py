"""Maps `trainer.kind` of a recipe to its algorithm."""

from rlgen.algorithms.base import Algorithm
from rlgen.algorithms.grpo import GRPO
from rlgen.algorithms.online_dpo import OnlineDPO
from rlgen.algorithms.rloo import RLOO
from rlgen.recipe.trainers import GRPORecipe, OnlineDPORecipe, RLOORecipe

TRAINERS: dict[str, type] = {"grpo": GRPO, "rloo": RLOO, "online_dpo": OnlineDPO}


def build_algorithm(recipe: GRPORecipe | RLOORecipe | OnlineDPORecipe) -> Algorithm:
    """Builds the algorithm of a recipe."""
    algorithm: Algorithm = TRAINERS[recipe.kind](recipe)
    return algorithm
