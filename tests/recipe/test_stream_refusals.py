"""What a recipe with `rollout.stream` is refused beside, each with its sentence, and what it goes with."""

from pathlib import Path

import conftest
import pytest
from helpers.recipes import problems, written

from rlgen.recipe import load_recipe

RECIPE = conftest.RECIPE.replace("max_completion_tokens: 12", "max_completion_tokens: 12, stream: true")
SERVER = "engine={kind: server, launch: true}"
REFUSED = {
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


@pytest.mark.parametrize("path", REFUSED)
def test_it_is_refused_beside_what_needs_the_whole_batch(tmp_path: Path, path: str) -> None:
    overrides, why, hint = REFUSED[path]
    recipe = written(tmp_path, RECIPE)
    said = " ".join(problems(recipe, *overrides))
    assert f"{path} cannot be used with rollout.stream, which trains on groups while others are sampled" in said
    assert why in said and hint in said
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
def test_it_goes_with_what_stays_within_a_group(tmp_path: Path, overrides: list[str]) -> None:
    load_recipe(written(tmp_path, RECIPE), overrides)
