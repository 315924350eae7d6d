"""The options of TRL: complete, each of its answers true of the recipe, and given to whoever writes one."""

import dataclasses
import re
from pathlib import Path

import pytest

from rlgen.errors import RecipeError
from rlgen.recipe import load_recipe
from rlgen.recipe.keys import places_of_keys
from rlgen.recipe.models import Recipe
from rlgen.recipe.trl import DERIVED, DIFFERS, NOT_NEEDED, NOT_SUPPORTED, OPTIONS, RENAMED

PATHS = {path for paths in places_of_keys().values() for path in paths}


@pytest.mark.slow  # imports trl
def test_every_option_of_trl_has_an_answer() -> None:
    from trl import GRPOConfig, ModelConfig, RLOOConfig, ScriptArguments
    from trl.experimental.online_dpo import OnlineDPOConfig

    classes = (GRPOConfig, RLOOConfig, OnlineDPOConfig, ModelConfig, ScriptArguments)
    options = {field.name for kind in classes for field in dataclasses.fields(kind)}
    assert len(options) > 200 and options - set(OPTIONS) == set()


def test_every_option_has_one_answer() -> None:
    groups = (RENAMED, DERIVED, NOT_NEEDED, NOT_SUPPORTED)
    names = [name for group in groups for listed in group.values() for name in listed.split()]
    assert sorted(names) == sorted(set(names)) == list(OPTIONS)
    assert set(DIFFERS) <= {name for listed in RENAMED.values() for name in listed.split()}


def test_what_is_renamed_is_there() -> None:
    without = {path for path in RENAMED if path not in PATHS and path.partition(".")[0] in Recipe.model_fields}
    assert without == set()
    assert {path.partition(".")[0] for path in RENAMED} <= {*Recipe.model_fields}


def test_answers_name_only_keys_that_are_there() -> None:
    sections = "|".join(Recipe.model_fields)
    for option in OPTIONS.values():
        named = re.findall(rf"\b(?:{sections})\.[a-z_0-9]+(?:\.[a-z_]+)*", option.said)
        assert [path for path in named if path not in PATHS and path not in ("rewards.py",)] == [], option


@pytest.mark.parametrize("name", sorted(set(OPTIONS) - {"optim", "eval"}))
def test_an_option_as_a_key_is_answered(recipe_file: Path, name: str) -> None:
    """At the top and in the section where a user of TRL would put it, unless it is a key there."""
    for path in (name, f"trainer.{name}"):
        if path in PATHS:
            continue
        with pytest.raises(RecipeError) as caught:
            load_recipe(recipe_file, [f"{path}=1"])
        (problem,) = (one for one in caught.value.problems if "is not a key of" in one.what)
        assert problem.hint == OPTIONS[name].hint
        assert OPTIONS[name].said in problem.hint and problem.where.startswith("--set 1: ")


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("num_generations", "renamed to `rollout.group_size`"),
        ("learning_rate", "here it is `optim.learning_rate`"),
        ("kl_coef", "renamed to `trainer.beta`"),
        ("scale_rewards", "here it is `trainer.scale_rewards` (true is group, false is none)"),
        (
            "gradient_accumulation_steps",
            "derived from rollout.prompts_per_step × rollout.group_size; optim.micro_batch_tokens splits",
        ),
        ("remove_unused_columns", "not needed: every column of the data reaches the rewards"),
        ("fp16", "not supported: model.dtype is bfloat16 or float32"),
    ],
)
def test_the_words_of_an_answer(key: str, hint: str) -> None:
    assert OPTIONS[key].hint.startswith(hint)
