"""What images, `rollout.stream`, sinks, a regular expression and ratios of completions do not go with, and what they go with."""

import re
from pathlib import Path
from typing import Any

import conftest
import pytest
from helpers.recipes import problems, written

from rlgen.cli.docs import page_text
from rlgen.recipe import dump_recipe, load_recipe
from rlgen.setup.reopen import MAY_CHANGE, changes

STREAM = conftest.RECIPE.replace("max_completion_tokens: 12", "max_completion_tokens: 12, stream: true")
IMAGES = """\
model: {path: "tiny:idefics3", dtype: float32}
data: {source: rows.jsonl, columns: {images: images}}
rewards: [{use: exact_match}]
"""
SERVER = "engine={kind: server, launch: true}"
STREAMED = "cannot be used with rollout.stream, which trains on groups while others are sampled"
UNTESTED = "data.columns.images: prompts with images are not tested with"

# Path -> overrides, why, and what to do.
NOT_STREAMED = {
    "engine.kind": (["engine={kind: transformers}"], "samples batch by batch", "set engine.kind to colocated or server"),
    "engine.sleep": (["engine.sleep=true"], "an engine that sleeps cannot sample", "set engine.kind to server"),
    "run.deterministic": (["run.deterministic=true"], "for the whole process", "set engine.kind to server"),
    "model.compile": (["model.compile=true"], "while vLLM runs in the same process", "set engine.kind to server"),
    "rollout.async_steps": ([SERVER, "rollout.async_steps=1"], "are complete before the step begins", "remove one of them"),
    "rollout.dynamic_sampling": (["rollout.dynamic_sampling=1"], "once the rewards of all are known", "remove one of them"),
    "processes.count": (["processes.count=2"], "several processes divide the rows of a whole step", "run one process"),
    "processes.strategy": (["processes.strategy=fsdp"], "several processes divide the rows", "run one process"),
    "trainer.updates_per_rollout": (["trainer.updates_per_rollout=2"], "the second update needs all samples", "set it to 1"),
    "trainer.top_entropy": (["trainer.top_entropy=0.5"], "the quantile of the entropies is over the whole batch", "remove it"),
    "trainer.scale_rewards": (["trainer.scale_rewards=batch"], "scale_rewards batch is over the whole batch", "to group or none"),
    "trainer.combine_rewards": (["trainer.combine_rewards=normalize_then_sum"], "normalises the sum", "set it to sum"),
    "trainer.normalize_advantages": (["trainer={kind: rloo, normalize_advantages: true}"], "centres and scales", "remove it"),
    "trainer.entropy_bonus": (
        ["trainer={kind: grpo, loss: grpo, entropy_bonus: 0.1}"],
        "divides by tokens and the loss by another count (seq_mean)",
        "or trainer.aggregation to token_mean",
    ),
}


@pytest.mark.parametrize("path", NOT_STREAMED)
def test_a_stream_is_refused_beside_what_needs_the_whole_batch(tmp_path: Path, path: str) -> None:
    overrides, why, hint = NOT_STREAMED[path]
    recipe = written(tmp_path, STREAM)
    said = " ".join(problems(recipe, *overrides))
    assert f"{path} {STREAMED}" in said and why in said and hint in said
    load_recipe(recipe, [*overrides, "rollout.stream=false"])


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [SERVER, "run.deterministic=true"],
        ["trainer={kind: grpo, entropy_bonus: 0.1, zero_variance: drop, beta: 0.1}"],
        ["trainer={kind: rloo, beta: 0.1}"],
        ["trainer={kind: online_dpo}", "model.lora={rank: 4}"],
        ["trainer.scale_rewards=none", "processes.count=1"],
    ],
)
def test_a_stream_goes_with_what_stays_within_a_group(tmp_path: Path, overrides: list[str]) -> None:
    load_recipe(written(tmp_path, STREAM), overrides)


def test_streaming_in_one_process_is_noted(recipe_file: Path) -> None:
    said = "rollout.stream with engine.kind colocated: engine and trainer share one Python interpreter"
    for engine, noted in (("{kind: colocated}", True), ("{kind: server, launch: true}", False)):
        loaded = load_recipe(recipe_file, [f"engine={engine}", "rollout.stream=true"])
        assert any(note.startswith(said) for note in loaded.notices) == noted


@pytest.mark.parametrize(
    "override",
    [
        SERVER,
        "engine.tensor_parallel_size=2",
        "engine.model_impl=transformers",
        "tools=[{use: 't.py:f'}]",
        "model.lora={}",
        "model.compile=true",
        "optim.packing=true",
        "processes.strategy=fsdp",
        "run.probe_max=true",
    ],
)
def test_images_are_refused_beside_what_was_not_shown_to_be_right(tmp_path: Path, override: str) -> None:
    recipe = written(tmp_path, IMAGES)
    (said,) = problems(recipe, override)
    assert f"{UNTESTED} {override.partition('=')[0]}" in said.replace("engine.kind", "engine")
    load_recipe(recipe, [override, "data={source: rows.jsonl}"])


def test_images_need_their_column_in_training(tmp_path: Path) -> None:
    recipe = written(tmp_path, IMAGES)
    held = "eval={source: held.jsonl, columns: {images: images}}"
    (said,) = problems(recipe, "data={source: 'task:colours', chat: true}")
    assert "asks about pictures" in said
    (said,) = problems(recipe, "data={source: rows.jsonl}", held)
    assert "eval.columns.images names a column, but data.columns.images none" in said
    for overrides in ([], [held], ["data={source: 'task:colours', chat: true, columns: {images: images}}"]):
        load_recipe(recipe, overrides)


@pytest.mark.parametrize(
    ("sinks", "said"),
    [
        ("[{kind: wandb, projct: x}]", "`projct` is not a key of `sinks.0` (kind: wandb); did you mean `project`?"),
        ("[{kind: mlflow}, {kind: wandb, folder: x}]", "`folder` is not a key of `sinks.1` (kind: wandb)"),
        ("[{kind: wandb, uri: x}]", "it is a key of kind mlflow"),
        ("[{kind: wandbb}]", "sinks.0.kind: 'wandbb' is not one of trackio, wandb, tensorboard, mlflow; did you mean `wandb`?"),
        ("[{project: x}]", "`sinks.0.kind` is missing; such as `kind: wandb`"),
        ("wandb", "write `sinks: [{kind: wandb}]`"),
        ("[wandb]", "write `{kind: wandb}`"),
        ("[{kind: wandb}, {kind: wandb}]", "sinks has a second entry of kind wandb"),
        ("[{kind: wandb, mode: disabled}]", "sinks.0.mode: 'disabled' is not one of online, offline"),
        ("[{kind: mlflow, uri: 'https://me:word@host/'}]", "sinks.0.uri holds a secret"),
        ("[{kind: wandb, samples: -1}]", "sinks.0.samples: must be greater than or equal to 0"),
    ],
)
def test_a_mistake_in_sinks(recipe_file: Path, sinks: str, said: str) -> None:
    recipe_file.write_text(f"{conftest.RECIPE}sinks: {sinks}\n")
    assert any(said in line for line in problems(recipe_file))


def test_tables_of_sinks_without_rollouts(recipe_file: Path) -> None:
    recipe_file.write_text(f"{conftest.RECIPE}rollouts: {{every: 0}}\nsinks: [{{kind: wandb}}]\n")
    assert "samples" not in dump_recipe(load_recipe(recipe_file).recipe)
    assert "samples has no effect with" in problems(recipe_file, "sinks.0.samples=3")[0]


def test_a_resumed_run_may_have_other_sinks() -> None:
    without: dict[str, Any] = {"sinks": []}
    other = {"sinks": [{"kind": "wandb", "tags": ["a"]}]}
    assert changes(without, other, MAY_CHANGE) == changes(other, without, MAY_CHANGE) == []
    assert changes(without, other, ()) != []


def test_the_examples_of_the_page_of_sinks_are_valid(recipe_file: Path) -> None:
    blocks = re.findall(r"```yaml\n(sinks:.*?)```", page_text("sinks"), re.DOTALL)
    kinds: set[str] = set()
    for block in blocks:
        recipe_file.write_text(f"{conftest.RECIPE}{block}")
        kinds |= {sink.kind for sink in load_recipe(recipe_file).recipe.sinks}
    assert len(blocks) == 5 and kinds == {"trackio", "wandb", "tensorboard", "mlflow"}


@pytest.mark.parametrize(
    ("trainer", "wrong"),
    [
        ("kind: rloo, beta: 0.1, correction: {mode: none}", "trainer.kl k1_in_reward"),
        ("off_policy_max: 0.5, correction: {mode: none}", "trainer.off_policy_max"),
        ("kind: online_dpo, correction: {geometric: {}}", "trainer.correction"),
        ("kind: rloo, beta: 0.1, kl: k3_is, correction: {mode: none}", None),
        ("kind: online_dpo", None),
    ],
)
def test_log_probs_of_a_regular_expression_are_compared_with_no_others(
    recipe_file: Path, trainer: str, wrong: str | None
) -> None:
    """They are of fewer ids: a KL to them is above 0 for the policy itself, and their gap to the policy's is not staleness."""
    overrides = ["engine.structured_regex='[0-9]+'", f"trainer={{{trainer}}}"]
    if wrong is None:
        assert load_recipe(recipe_file, overrides).recipe.structured_regex == "[0-9]+"
    else:
        (found,) = problems(recipe_file, *overrides)
        assert f"the engine's log-probs are not the policy's, so {wrong} would be wrong" in found


@pytest.mark.parametrize("trainer", ["loss: gspo", "loss: luspo", "kind: rloo, ratio: sequence", "loss: gspo_token"])
def test_what_weighs_a_whole_completion_is_noted(recipe_file: Path, trainer: str) -> None:
    said = "has one ratio for a completion; trainer."

    def noted(rest: str) -> list[str]:
        found = load_recipe(recipe_file, [f"trainer={{{trainer}, updates_per_rollout: 2, {rest}}}"]).notices
        return [note.partition(said)[2].split()[0] for note in found if said in note]

    whole = "gspo_token" not in trainer
    assert noted("correction: {mode: none}") == []
    assert noted("correction: {mode: sequence_mask}, top_entropy: 0.5") == ["top_entropy"] * whole
    if "rloo" not in trainer:  # it refuses weights of tokens
        assert noted("correction: {mode: icepop}") == noted("clip_low: 1.0e-4") == ["correction.mode"] * whole


def test_a_ratio_of_completions_has_an_effect_where_some_tokens_are_kept(recipe_file: Path) -> None:
    """In a single update, too: it decides whether only those tokens or all of the completion are learned from."""
    ratio = "kind: rloo, ratio: sequence, correction: {mode: none}"
    load_recipe(recipe_file, [f"trainer={{{ratio}, top_entropy: 0.5}}"])
    (found,) = problems(recipe_file, f"trainer={{{ratio}}}")
    assert "trainer.ratio has no effect when trainer.updates_per_rollout is 1" in found
