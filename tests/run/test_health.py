"""Rules over metrics: when they are broken, when they are well, and what the recipe makes of it."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Proof, read_jsonl
from helpers.recipes import recipe_for
from helpers.rollouts import records_but_times

from rlgen.algorithms.base import correction_of
from rlgen.cli.train import train_command
from rlgen.errors import DivergedError, RecipeError
from rlgen.files import read_json
from rlgen.losses.correction import Mismatch, importance_weight
from rlgen.recipe import Recipe, dump_recipe, load_recipe
from rlgen.recipe.health import HealthRecipe, HealthRule
from rlgen.run.health import Health, rules_of

# What every trainer of policies measures where nothing is wrong.
WELL = {
    **{"reward/mean": 0.5, "reward/std": 0.4, "reward/exact_match/failed": 0, "groups/zero_std": 0.2, "updates/done": 2},
    **{"entropy": 1.0, "kl/ref_k3": 0.1, "grad_norm": 1.0, "clip/region": 0.1, "completions/truncated": 0.1},
    **{"completions/mean_tokens": 40.0, "tokens/generated": 64 * 40},
    **{"sampler/delta_mean": 0.01, "sampler/kl": 0.001, "is/ess_raw": 0.9},
}
# By rule: what breaks it, and what is as close to that as can be without breaking it.
EDGES: dict[str, tuple[str, float, float]] = {
    "reward": ("reward/mean", 0.0, 1e-6),
    "reward_std": ("reward/std", 0.0, 1e-6),
    "reward_failed": ("reward/exact_match/failed", 1, 0),
    "unscored": ("reward/unscored", 64, 63),
    "zero_std": ("groups/zero_std", 0.8, 0.799),
    "no_update": ("updates/done", 0, 1),
    "entropy": ("entropy", 0.0099, 0.01),
    "ref_kl": ("kl/ref_k3", 2.001, 2.0),
    "grad_norm": ("grad_norm", 10.01, 10.0),
    "clipped": ("clip/region", 0.31, 0.3),
    "truncated": ("completions/truncated", 0.81, 0.8),
    "length": ("completions/mean_tokens", 91.0, 90.0),
    "sampler_delta": ("sampler/delta_mean", 0.11, 0.1),
    "sampler_kl": ("sampler/kl", 0.0151, 0.015),
    "ess": ("is/ess_raw", 0.299, 0.3),
}


def recipe(**sections: Any) -> Recipe:
    trainer = {"kind": "grpo", "beta": 0.1, "updates_per_rollout": 2}
    return recipe_for("tiny:qwen3", **{"rollout": {"max_completion_tokens": 100}, "trainer": trainer, **sections})


def fired(health: Health, values: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The broken rules after each of the steps."""
    checkups = [health({**WELL, **changes, "step": step}) for step, changes in enumerate(values, 1)]
    return [tuple(name.removeprefix("health/") for name, broken in one.metrics.items() if broken) for one in checkups]


def test_every_rule_has_an_edge() -> None:
    assert {name for name, rule in HealthRecipe() if isinstance(rule, HealthRule)} == set(EDGES)


@pytest.mark.fault(49)
@pytest.mark.parametrize("rule", [rule for rule in EDGES if rule != "reward_std"])
def test_a_rule_is_broken_after_its_steps_and_well_after_one(rule: str, proof: Proof) -> None:
    key, wrong, close = EDGES[rule]
    steps = getattr(HealthRecipe(), rule).steps
    bad, good = {key: wrong}, {key: close}
    assert fired(Health(rules_of(recipe())), [good] * 3 * steps) == [()] * 3 * steps
    broken = fired(Health(rules_of(recipe())), [bad] * (steps + 2) + [good] + [bad] * steps)
    assert broken == [()] * (steps - 1) + [(rule,)] * 3 + [()] * steps + [(rule,)]
    proof(f"{key} {wrong} for {steps} steps broke health.{rule}, {close} never did")


@pytest.mark.fault(33)
def test_rewards_that_do_not_differ_in_most_steps(proof: Proof) -> None:
    same, differ = {"reward/std": 0.0}, {"reward/std": 1e-6}
    half = fired(Health(rules_of(recipe())), [same, differ] * 15)
    assert half == [()] * 30
    health = Health(rules_of(recipe()))
    assert fired(health, [differ] * 4 + [same] * 6) == [()] * 9 + [("reward_std",)]
    checkup = health({**WELL, **same, "step": 11})
    assert "rewards 0, 0, 0: at or below 0 in 7 of 10 steps, up to step 11 (health.reward_std)" in checkup.broken[0]
    assert fired(health, [differ] * 6) == [("reward_std",)] * 4 + [()] * 2
    proof("rewards were equal in 6 of 10 steps, which broke health.reward_std; 5 of 10 never did")


def test_the_samples_of_a_step_are_counted_whatever_their_number() -> None:
    """Groups without signal were resampled, or stale samples dropped."""
    for samples in (192, 24):
        of_step = {"tokens/generated": samples * 40}
        health = Health(rules_of(recipe()))
        assert fired(health, [of_step | {"reward/unscored": samples - 1}, of_step | {"reward/unscored": samples}]) == [
            (),
            ("unscored",),
        ]


@pytest.mark.parametrize("mode", ["none", "token_truncate", "token_mask", "sequence_truncate"])
def test_one_absurd_ratio_is_seen_whatever_is_made_of_it(mode: str) -> None:
    """A weight of at most 2 hides it; and where nothing is corrected it is in the loss."""
    changed = recipe(trainer={"kind": "grpo", "correction": {"mode": mode}})
    correction, mask = correction_of(changed.trainer.correction), torch.ones(16, 40, dtype=torch.bool)
    old, gap = torch.zeros(16, 40), 0.05 * torch.randn(16, 40, generator=torch.Generator().manual_seed(0))

    def broken(sampler: torch.Tensor) -> bool:
        weight = importance_weight(old, sampler, mask, correction)
        found = Mismatch.of(old, sampler, weight, mask, correction).metrics()
        return "ess" in fired(Health(rules_of(changed)), [found] * 5)[-1]

    assert not broken(old - gap), "what bfloat16 does"
    gap[3, 7] = math.log(1e6)
    assert broken(old - gap)


def test_what_is_not_measured_neither_counts_nor_ends_a_row() -> None:
    low, none = {"entropy": 0.001}, {"entropy": None}
    assert fired(Health(rules_of(recipe())), [low, none, low, low, none, low, low]) == [()] * 6 + [("entropy",)]
    health = Health(rules_of(recipe()))
    record = {key: value for key, value in WELL.items() if not key.startswith(("kl/", "reward/exact"))}
    for step in range(1, 40):
        assert not {"health/ref_kl", "health/reward_failed"} & health({**record, "step": step}).metrics.keys()


def test_a_run_that_goes_on_finds_what_it_would_have_found() -> None:
    values = (
        [{"entropy": 0.001, "grad_norm": 99.0 if step % 7 else None} for step in range(12)] + [{}] * 3 + [{"is/ess_raw": 0.1}] * 9
    )
    records = [{**WELL, **changes, "step": step} for step, changes in enumerate(values, 1)]
    whole = Health(rules_of(recipe()))
    checkups = [whole(record) for record in records]
    assert len({one.broken for one in checkups}) > 4
    for at in range(len(records)):
        resumed = Health(rules_of(recipe()), records[:at])
        assert [str(resumed(record)) for record in records[at:]] == [str(one) for one in checkups[at:]], at


def test_it_is_said_when_it_begins_and_when_it_ends() -> None:
    health = Health(rules_of(recipe(health={"entropy": {"steps": 2}})))
    news = [health({**WELL, "entropy": value, "step": step}).news for step, value in enumerate([0.001, 0.002, 0.003, 1, 1], 1)]
    assert [len(lines) for lines in news] == [0, 1, 0, 1, 0]
    assert news[1][0].startswith("health: entropy of a token 0.001, 0.002: below 0.01 for 2 steps, up to step 2 (health.entropy)")
    assert "lower optim.learning_rate" in news[1][0] and "has recovered at step 4" in news[3][0]


@pytest.mark.parametrize(
    ("section", "ends", "saves"),
    [
        ({}, False, False),
        ({"action": "stop"}, True, False),
        ({"action": "checkpoint_and_stop"}, True, True),
        ({"entropy": {"action": "stop"}}, True, False),
        ({"action": "stop", "entropy": {"action": "warn"}}, False, False),
        ({"action": "stop", "entropy": {"action": "ignore"}}, False, False),
    ],
)
def test_the_recipe_says_what_a_broken_rule_leads_to(section: dict[str, Any], ends: bool, saves: bool) -> None:
    health = Health(rules_of(recipe(health=section)))
    checkups = [health({**WELL, "entropy": 0.0, "step": step}) for step in range(1, 7)]
    assert [one.ends is not None for one in checkups] == [False] * 4 + [ends] * 2
    assert [one.saves for one in checkups] == [False] * 4 + [saves] * 2
    if ends:
        assert "health.entropy" in str(checkups[4].ends) and "0: below 0.01 for 5 steps, up to step 5" in str(checkups[4].ends)


def test_rules_that_cannot_apply_are_left_out_and_refused(recipe_file: Path) -> None:
    names = {rule.name for rule in rules_of(recipe(trainer={"kind": "online_dpo"}))}
    assert "clipped" not in names and {"reward", "grad_norm", "no_update", "entropy", "ref_kl", "ess"} <= names
    names = {rule.name for rule in rules_of(recipe(trainer={"kind": "grpo"}))}
    assert not {"ref_kl", "clipped"} & names and {"entropy", "ess"} <= names
    names = {rule.name for rule in rules_of(recipe(trainer={"kind": "own", "use": "mine.py:Mine"}))}
    assert {"ref_kl", "clipped"} <= names, "its loss may clip ratios to the engine, and have a reference of its own"
    ahead = {"engine": {"kind": "server", "launch": True}, "rollout": {"max_completion_tokens": 100, "async_steps": 1}}
    names = {rule.name for rule in rules_of(recipe(**ahead))}
    assert not {"sampler_delta", "sampler_kl"} & names and "ess" in names, "what earlier weights sampled differs, and is no fault"
    for override, place in [
        ("health.ref_kl.steps=3", "health.ref_kl has no effect when trainer.beta is 0"),
        ("health.clipped={threshold: 0.5}", "health.clipped has no effect when trainer.updates_per_rollout is 1"),
        ("health.entropy={action: ignore, steps: 3}", "health.entropy.steps has no effect when health.entropy.action is ignore"),
        ("health.entropy.treshold=1", "did you mean `threshold`"),
        ("rollout={dynamic_sampling: 1, async_steps: 1}", "rollout.dynamic_sampling waits for a step's rewards"),
    ]:
        with pytest.raises(RecipeError, match=place):
            load_recipe(recipe_file, [override])


def test_a_rule_said_in_part_keeps_the_rest(recipe_file: Path) -> None:
    loaded = load_recipe(recipe_file, ["health.entropy={steps: 3}", "health.grad_norm.action=ignore"])
    assert loaded.recipe.health.entropy == HealthRule(threshold=0.01, steps=3)
    assert loaded.recipe.health.grad_norm == HealthRule(threshold=10.0, steps=5, action="ignore")
    again = recipe_file.with_name("again.yaml")
    again.write_text(dump_recipe(loaded.recipe))
    assert dump_recipe(load_recipe(again, []).recipe) == again.read_text()


# --- in a run --------------------------------------------------------------------------------------------------------


def run(recipe: Path, *overrides: str, resume: bool = False, name: str = "run") -> Path:
    directory = recipe.parent / name
    train_command(recipe, ["engine={kind: transformers}", *overrides], resume, False, None, directory)
    return directory


BROKEN = "health={grad_norm: {threshold: 0.0, steps: 3, action: ACTION}}"


@pytest.mark.fault(49)
@pytest.mark.parametrize("action", ["stop", "checkpoint_and_stop"])
def test_a_broken_rule_ends_the_run_where_the_recipe_says(recipe_file: Path, action: str, proof: Proof) -> None:
    with pytest.raises(DivergedError, match=r"norm of the gradient .* above 0 for 3 steps, up to step 3 \(health.grad_norm\)"):
        run(recipe_file, BROKEN.replace("ACTION", action), "run.steps=6")
    directory = recipe_file.parent / "run"
    status, records = read_json(directory / "status.json"), read_jsonl(directory / "metrics.jsonl")
    assert (status["state"], status["exit_code"], status["step"]) == ("failed", 7, 3)
    assert "health.grad_norm" in status["health"][0] and status["message"].startswith("health: norm of the gradient")
    assert [record["health/grad_norm"] for record in records] == [False, False, True]
    saved = [path.name for path in (directory / "checkpoints").iterdir()]
    assert saved == (["step_000003"] if action == "checkpoint_and_stop" else [])
    proof("the norm of the gradient was above a threshold of 0 for three steps: exit 7 after step 3")


@pytest.mark.slow
@pytest.mark.fault(49)
def test_a_resumed_run_is_broken_at_the_same_step(recipe_file: Path, proof: Proof) -> None:
    ends = BROKEN.replace("ACTION", "warn")
    run(recipe_file, ends, "run.steps=2", "checkpoint.every=1")
    resumed = run(recipe_file, ends, "run.steps=4", "checkpoint.every=1", resume=True)
    whole = run(recipe_file, ends, "run.steps=4", "checkpoint.every=1", name="whole")
    ours = records_but_times(resumed)
    assert ours == records_but_times(whole) and [record["health/grad_norm"] for record in ours] == [False, False, True, True]
    assert len(read_json(resumed / "status.json")["health"]) == 1
    proof("two steps, a resume and one more broke the rule, as three steps did")
