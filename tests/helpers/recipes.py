"""Recipes that tests write, and what the loader says about them."""

from pathlib import Path
from typing import Any

import pytest

from rlgen.errors import RecipeError
from rlgen.recipe import Recipe, load_recipe

# Rows of 80 tokens at most, for engines whose `max_model_len` is short: a server with shorter rows than the run's is refused.
SHORT: dict[str, Any] = {"data": {"source": "task:sort", "max_prompt_tokens": 40}, "rollout": {"max_completion_tokens": 40}}


def recipe_for(model: str, /, **sections: Any) -> Recipe:
    """The shortest recipe that trains this model in float32, with more sections, or with others in their place."""
    model_section = {"path": model, "dtype": "float32"}
    shortest = {"run": {"name": "test"}, "data": {"source": "task:sort"}, "rewards": [{"use": "exact_match"}]}
    return Recipe.model_validate({**shortest, **sections, "model": {**model_section, **sections.get("model", {})}})


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
