"""What a recipe asks the model, opened before a weight is loaded."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import Proof
from helpers.rows import write_lines

from rlgen.errors import DataError, SetupError
from rlgen.models.tiny import build_tiny, byte_tokenizer
from rlgen.recipe import load_recipe
from rlgen.setup.data import check_stop_texts, open_data


@pytest.mark.fault(21)
def test_fewer_rows_than_a_step_asks_for(recipe_file: Path, proof: Proof) -> None:
    said = r"3 read, 0 empty, .* 3 used: fewer than rollout.prompts_per_step 4.* set it to 3 or less"
    with pytest.raises(DataError, match=said) as e:
        open_data(load_recipe(recipe_file, ["data.limit=3"]).recipe)
    assert e.value.exit_code == 4
    open_data(load_recipe(recipe_file, ["data.limit=3", "rollout.prompts_per_step=3"]).recipe)
    proof(str(e.value))


@pytest.mark.parametrize(
    ("stop", "said"),
    [
        ("<|im_start|>", "`<|im_start|>` is a special token"),
        ("a<|im_start|>", "`a<|im_start|>` has the special token `<|im_start|>`"),
    ],
)
def test_a_stop_text_that_no_text_shows_is_refused(recipe_file: Path, stop: str, said: str) -> None:
    given = [f"rollout.stop=['</answer>', '{stop}']"]
    with pytest.raises(SetupError) as e:
        open_data(load_recipe(recipe_file, given).recipe)
    assert str(e.value) == f"rollout.stop: {said}, which texts do not show; write its id in rollout.stop_token_ids: [258]"
    assert e.value.exit_code == 3
    assert open_data(load_recipe(recipe_file, [*given, "rollout.stop_token_ids=[258]"]).recipe).stop_ids == (257, 258, 259)
    open_data(load_recipe(recipe_file, ["rollout.stop=['</answer>', '<|im_end|>']"]).recipe)  # its id ends a completion anyway
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["</answer>"])  # a token of its own, and no special one: texts show it
    check_stop_texts(["</answer>"], tokenizer, (257, 259))


def test_a_recipe_that_says_no_sizes_fits_a_small_model_and_few_rows(tmp_path: Path) -> None:
    """512 positions are as many as the default of completions alone, and five rows are fewer than a step has by default."""
    model = shutil.copytree(build_tiny("qwen3"), tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 512}))
    write_lines(tmp_path / "rows.jsonl", [{"prompt": "a" * length} for length in (3, 60, 20, 9, 300)])
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {path: ./model}\ndata: {source: rows.jsonl}\nrewards: [{use: length, args: {target: 6}}]\n")
    data = open_data(load_recipe(recipe).recipe)
    found = data.recipe
    assert data.prompts.counts["used"] == 4 and data.prompts.counts["over_long"] == 1
    assert (found.data.max_prompt_tokens, found.rollout.max_completion_tokens) == (60, 452)
    assert found.rollout.prompts_per_step == 4 and found.max_row_tokens == 512
    assert "data.max_prompt_tokens is 60: it follows from model and data" in data.notices
    assert data.warnings[0] == (
        "1 of 5 rows are left out; the prompts that are too long have 300 tokens, and model.path"
        f" {model} has 512 positions, of which completions take 256: raise that, or shorten them"
    )
    assert "set data.chat to true, or to false to keep this" in data.warnings[1] and len(data.warnings) == 2
    said = open_data(load_recipe(recipe, ["data.chat=false", "data.limit=4"]).recipe)
    assert said.warnings == () and said.prompts.longest == 60
