"""Holds the recipe: its models, the loader that keeps the position of every value, and rules across fields."""

from rlgen.recipe.load import LoadedRecipe, dump_recipe, effective, load_recipe
from rlgen.recipe.models import Recipe

__all__ = ["LoadedRecipe", "Recipe", "dump_recipe", "effective", "load_recipe"]
