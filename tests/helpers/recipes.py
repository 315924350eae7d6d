"""Recipes that tests write, and what the loader says about them."""

from pathlib import Path

import pytest

from rlgen.errors import RecipeError
from rlgen.recipe import load_recipe


def written(folder: Path, text: str, name: str = "recipe.yaml") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def problems(path: Path, *overrides: str) -> list[str]:
    """A line for each problem with a recipe, which must have some."""
    with pytest.raises(RecipeError) as error:
        load_recipe(path, overrides)
    return str(error.value).splitlines()
