"""The glossary against real runs: every key that is written is in it, and every rule of `health` measures something."""

import ast
from typing import Any

import pytest
from conftest import RECIPE, ROOT, read_jsonl
from helpers.recipes import written
from helpers.scripted import dialogue
from rollout.talking import STOPS
from typer.testing import CliRunner

from rlgen.cli.app import app
from rlgen.metrics import Family, Metric
from rlgen.recipe.health import HealthRecipe, HealthRule
from rlgen.setup import data
from rlgen.setup import trainer as opening

REWARDS = """\
def half(completion_ids):
    if completion_ids[0] % 4 == 0:
        raise ValueError("every fourth id")
    return float(completion_ids[0] % 2)
"""
GRPO = "kind: grpo, beta: 0.1, updates_per_rollout: 2"
# Together they switch on everything that a recipe can measure without a server.
TRAINERS = {
    "clipped": f"{{{GRPO}, off_policy_max: 1.0, top_entropy: 0.8, entropy_bonus: 0.001}}",
    "cispo": f"{{{GRPO}, loss: cispo}}",
    "vespo": "{kind: grpo, loss: vespo, updates_per_rollout: 2}",
    "rloo": "{kind: rloo, beta: 0.1, updates_per_rollout: 2}",
    "online_dpo": "{kind: online_dpo, updates_per_rollout: 2, correction: {mode: sequence_mask}}",
}
# Written only with an engine that these runs do not have; the glossary says which.
ELSEWHERE = {Metric.SENTINEL_PROBE_DELTA}
RULES = {name for name, field in HealthRecipe.model_fields.items() if isinstance(field.default, HealthRule)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The metrics of two steps by each trainer."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "rewards.py").write_text(REWARDS)
    recipe = written(folder, RECIPE)
    reward = f"{{use: '{folder}/rewards.py:half', on_error: skip, max_error_fraction: 1.0}}"
    records = {}
    for name, trainer in TRAINERS.items():
        changes = [f"trainer={trainer}", f"rewards=[{reward}, {{use: length, args: {{target: 6}}}}]"]
        changes += ["engine={kind: transformers}"]
        changes += ["eval={limit: 2, at_start: false}"] if name == "clipped" else []
        options = [part for change in changes for part in ("--set", change)]
        with pytest.MonkeyPatch.context() as patch:
            if name == "clipped":  # its completions are conversations of several turns
                patch.setattr(opening, "open_dialogue", lambda *given: dialogue())
                patch.setattr(data, "stop_ids", lambda *given: STOPS)
            done = CliRunner().invoke(app, ["train", str(recipe), *options, "--run-dir", str(folder / name)])
        assert done.exit_code == 0, (done.output, done.exception)
        records[name] = read_jsonl(folder / name / "metrics.jsonl")
        assert len(records[name]) == 2 and all(record[Metric.TOKENS_TRAINED] for record in records[name])
    return records


def test_every_key_of_a_run_is_in_the_glossary_and_those_without_a_condition_are_in_every_run(
    runs: dict[str, list[dict[str, Any]]],
) -> None:
    always = {metric for metric in Metric if not metric.when}
    assert len(always) > 30
    for name, records in runs.items():
        for record in records:
            of_families = {key for family in Family for key in family.keys(record)}
            assert (set(record) - set(Metric) - of_families, always - set(record)) == (set(), set()), name


def test_every_metric_of_the_glossary_is_measured_in_a_run(runs: dict[str, list[dict[str, Any]]]) -> None:
    records = [record for of_run in runs.values() for record in of_run]
    measured = {key: value for record in records for key, value in record.items() if value is not None}
    assert set(Metric) - set(measured) == ELSEWHERE and all(metric.when for metric in ELSEWHERE)
    assert [family for family in Family if not any(family.keys(measured))] == []


def test_every_health_rule_measures_something(runs: dict[str, list[dict[str, Any]]]) -> None:
    """`health/<rule>` is written only for a rule that found its metric, and found it measured."""
    assert len(RULES) >= 14
    assert {name for name in RULES if Family.HEALTH.of(name) not in runs["clipped"][-1]} == set()
    assert Family.HEALTH.of("clipped") in runs["cispo"][-1], "cispo clips under a name of its own"
    assert Family.HEALTH.of("ref_kl") in runs["rloo"][-1], "a KL in the reward has one estimator only"
    assert Family.HEALTH.of("ref_kl") in runs["online_dpo"][-1]


def test_keys_of_a_family() -> None:
    record = {"reward/mean": 1, "reward/a.b-c/failed": 2, "reward/failed": 3, "health/entropy": False, "step": 1}
    assert list(Family.REWARD_FAILED.keys(record)) == ["reward/a.b-c/failed"]
    assert Family.REWARD_FAILED.of("a.b-c") == "reward/a.b-c/failed"
    assert list(Family.HEALTH.keys(record)) == ["health/entropy"]


def test_no_metric_is_written_as_a_literal() -> None:
    """Names stand in `rlgen/metrics.py` alone; what has no `/` in it may mean something else."""
    names = {metric.value for metric in Metric if "/" in metric}
    found = set()
    for path in sorted([*(ROOT / "rlgen").rglob("*.py"), *(ROOT / "scripts").glob("*.py")]):
        constants = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        found |= {(str(path.relative_to(ROOT)), name) for name in names & constants}
    assert {place for place, _ in found} == {"rlgen/metrics.py"}, found


@pytest.mark.parametrize("kind", [Metric, Family])
def test_every_entry_has_a_sentence_of_its_own(kind: type[Metric] | type[Family]) -> None:
    assert len({entry.what for entry in kind}) == len(list(kind))
    for entry in kind:
        assert entry.what.endswith(".") and entry.what[0].isupper(), entry
