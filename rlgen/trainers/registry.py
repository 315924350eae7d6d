"""The algorithms by the `trainer.kind` of a recipe."""

from rlgen.recipe.trainers import GRPORecipe, OnlineDPORecipe, RLOORecipe
from rlgen.trainers.base import Algorithm
from rlgen.trainers.grpo import GRPO
from rlgen.trainers.online_dpo import OnlineDPO
from rlgen.trainers.rloo import RLOO

TRAINERS: dict[str, type] = {"grpo": GRPO, "rloo": RLOO, "online_dpo": OnlineDPO}


def build_algorithm(recipe: GRPORecipe | RLOORecipe | OnlineDPORecipe) -> Algorithm:
    algorithm: Algorithm = TRAINERS[recipe.kind](recipe)
    return algorithm
