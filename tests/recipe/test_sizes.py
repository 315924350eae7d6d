"""Defaults that nobody wrote follow from the model and the data; what is written is kept, or refused."""

from pathlib import Path

import pytest
from helpers.recipes import written

from rlgen.engines.plan import EnginePlan
from rlgen.errors import RecipeError
from rlgen.recipe import Recipe, dump_recipe, load_recipe
from rlgen.recipe.rules import warnings
from rlgen.recipe.sizes import FOLLOWING, fitted, is_written, prompt_limit, what_follows

OPEN = "model: {path: org/model}\ndata: {source: rows.jsonl}\nrewards: [{use: exact_match}]\n"


def recipe(tmp_path: Path, *overrides: str) -> Recipe:
    return load_recipe(written(tmp_path, OPEN), overrides).recipe


def sizes(recipe: Recipe) -> tuple[int | None, int, int, int]:
    rollout = recipe.rollout
    return recipe.data.max_prompt_tokens, rollout.max_completion_tokens, rollout.prompts_per_step, recipe.optim.micro_batch_tokens


@pytest.mark.parametrize(
    ("overrides", "positions", "limit", "longest", "expected"),
    [
        ([], 4096, 3584, 100, (100, 512, 8, 16384)),
        ([], None, None, 20000, (20000, 512, 8, 20512)),
        ([], 512, 256, 60, (60, 452, 8, 16384)),  # completions give way, and then take what prompts leave
        ([], 512, 256, 256, (256, 256, 8, 16384)),
        (["rollout.max_completion_tokens=400"], 512, 112, 60, (60, 400, 8, 16384)),
        (["data.max_prompt_tokens=400"], 512, 400, 300, (300, 212, 8, 16384)),
        (["data.max_prompt_tokens=64"], 4096, 64, 60, (64, 512, 8, 16384)),
        (["rollout.max_completion_tokens=32768"], 40960, 8192, 100, (100, 32768, 8, 32868)),
        (["optim.micro_batch_tokens=600"], 4096, 300, 200, (200, 400, 8, 600)),
        (["processes={strategy: fsdp, context: 4}", "optim.micro_batch_tokens=600"], 4096, 1888, 200, (200, 512, 8, 600)),
        (["processes={strategy: fsdp, context: 4}"], None, None, 80000, (80000, 512, 8, 20128)),
        (["engine.max_model_len=100"], 4096, 50, 20, (20, 80, 8, 16384)),
        (["data.max_prompt_tokens=600", "rollout.max_completion_tokens=100"], 4096, 600, 500, (600, 100, 8, 16384)),
    ],
)
def test_sizes_that_follow(
    tmp_path: Path,
    overrides: list[str],
    positions: int | None,
    limit: int | None,
    longest: int,
    expected: tuple[int, int, int, int],
) -> None:
    before = recipe(tmp_path, *overrides)
    assert prompt_limit(before, positions).tokens == limit
    found = fitted(before, positions, longest, 100)
    assert sizes(found) == expected
    assert positions is None or found.max_row_tokens <= positions
    assert found.max_row_tokens <= found.optim.micro_batch_tokens * (found.processes.context or 1)


def test_fewer_prompts_than_a_step_has_by_default(tmp_path: Path) -> None:
    assert fitted(recipe(tmp_path), None, 10, 5).rollout.prompts_per_step == 5
    assert fitted(recipe(tmp_path, "rollout.prompts_per_step=8"), None, 10, 5).rollout.prompts_per_step == 8


def test_what_is_written_and_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"rollout.max_completion_tokens is 512, and a prompt comes before it, but model.path"):
        prompt_limit(recipe(tmp_path, "rollout.max_completion_tokens=512"), 512)
    with pytest.raises(RecipeError, match=r"= 600, but model.path org/model has 512 positions; lower one of them: 512 together"):
        prompt_limit(recipe(tmp_path, "data.max_prompt_tokens=100", "rollout.max_completion_tokens=500"), 512)
    for override in ("optim.micro_batch_tokens=1", "engine.max_model_len=1"):
        with pytest.raises(RecipeError, match=r"data.max_prompt_tokens is 1, and a completion follows"):
            recipe(tmp_path, override)


def test_every_size_that_followed_is_said(tmp_path: Path) -> None:
    before = recipe(tmp_path)
    assert what_follows(before, fitted(before, 512, 60, 5)) == [
        "data.max_prompt_tokens is 60: it follows from model and data",
        "rollout.prompts_per_step is 5 instead of 8: it follows from model and data",
        "rollout.max_completion_tokens is 452 instead of 512: it follows from model and data",
    ]


def test_open_sizes_stay_open_in_a_resolved_recipe_and_fitted_ones_are_written(tmp_path: Path) -> None:
    before = recipe(tmp_path)
    again = tmp_path / "again.yaml"
    again.write_text(dump_recipe(before))
    assert load_recipe(again).recipe == before
    assert [path for path in FOLLOWING if is_written(load_recipe(again).recipe, path)] == []
    found = fitted(before, 512, 60, 5)
    again.write_text(dump_recipe(found))
    assert load_recipe(again).recipe == found
    of_training = [path for path in FOLLOWING if not path.startswith("eval.")]
    assert [path for path in FOLLOWING if is_written(load_recipe(again).recipe, path)] == of_training


SERVED = "engine={kind: server, launch: true}"


@pytest.mark.parametrize(
    ("overrides", "oldest", "in_flight", "sequences"),
    [
        ([], 0, False, 64),
        ([SERVED], 0, False, 64),
        ([SERVED, "rollout.async_steps=1"], 1, False, 64),
        ([SERVED, "rollout={async_steps: 1, max_staleness: 3}", "engine.in_flight=true"], 3, True, 64),
        ([SERVED, "rollout={async_steps: 1}", "engine.in_flight={recompute: false}"], 1, True, 64),
        ([SERVED, "rollout.async_steps=4"], 4, True, 256),
        ([SERVED, "rollout={async_steps: 4, max_staleness: 2}"], 2, True, 256),
        ([SERVED, "rollout.async_steps=2", "engine.servers=2"], 2, True, 64),
    ],
)
def test_age_and_changes_of_weights_follow_from_how_far_ahead_is_sampled(
    tmp_path: Path, overrides: list[str], oldest: int, in_flight: bool, sequences: int
) -> None:
    found = recipe(tmp_path, *overrides)
    assert (found.oldest_sample, found.in_flight) == (oldest, in_flight)
    assert sum("all samples are dropped" in line for line in warnings(found)) == (oldest < found.rollout.async_steps)
    assert EnginePlan.of(found.engine_needs, "m").max_num_seqs == sequences


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([SERVED, "rollout.async_steps=2", "engine.in_flight=false"], "requests are always open"),
        ([SERVED, "rollout.async_steps=2", "engine.in_flight={allowed: false}"], "requests are always open"),
        ([SERVED, "rollout.async_steps=1", "engine.in_flight={allowed: false, recompute: false}"], "recompute has no effect"),
        (["rollout.async_steps=4"], "samples while a step trains, but an engine of kind colocated cannot do both"),
        ([SERVED, "rollout.async_steps=4", "trainer={kind: grpo, correction: {mode: none}}"], "corrects nothing"),
        ([SERVED, "rollout.async_steps=65"], "rollout.async_steps"),
        ([SERVED, "rollout.max_staleness=2"], "rollout.max_staleness has no effect when rollout.async_steps is 0"),
    ],
)
def test_what_sampling_ahead_cannot_do_is_refused(tmp_path: Path, overrides: list[str], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        recipe(tmp_path, *overrides)
