"""The recipe: models, reading with positions, rules across fields."""

from rlgen.recipe.load import LoadedRecipe, dump_recipe, load_recipe
from rlgen.recipe.models import Recipe

__all__ = ["LoadedRecipe", "Recipe", "dump_recipe", "load_recipe"]
