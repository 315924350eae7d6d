"""The sentinel on a pretrained model, SmolLM2-135M-Instruct (`make real`): healthy runs are healthy, planted faults are named.

Bounds follow from the rounding of this model. What the toys' tests prove of each fault is asked for again here, with its power.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import read_jsonl
from helpers.recipes import written
from test_ladder import LONG, PLANTED, TRANSFORMERS, WARM, checks_of

from rlgen import rollouts
from rlgen.cli.train import train_command
from rlgen.metrics import Metric
from rlgen.sentinel.bounds import POWER
from rlgen.sentinel.verdict import Outcome, Rung

pytestmark = pytest.mark.real

SERVER = "engine={kind: server, launch: true}"
# Faults of the toys' test: those that a gap shows, and those that contract and receipts show.
BY_GAP = ["raw log-probs, denied", "other temperature", "other temperature at 1", "top-p", "top-k", "min-p"]
BY_GAP += ["bfloat16 engine, denied", "all weights stale", "old weights not put back", "tied head stale", "prefix cache kept"]
BY_GAP += ["decode is not prefill", "rolled", "shifted, last repeated", "relabelled", "unexplained"]
OTHERWISE = ["raw log-probs", "sync skipped", "swapped on the way", "lost on the way", "not loaded", "split dependence"]
# Prompts of this model are longer.
AT = {"prefix cache kept": ["engine={kind: colocated, max_model_len: 200}"]}


RECIPE = """\
run: {{name: real, steps: 2}}
model: {{path: {model}, dtype: float32}}
data: {{source: "task:word_problems", chat: true}}
rewards: [{{use: numeric_match}}]
rollout: {{prompts_per_step: 4, group_size: 4, max_completion_tokens: 16}}
engine: {{kind: colocated}}
optim: {{learning_rate: 5.0e-6}}
"""


@pytest.fixture
def recipe(real_model: Path, tmp_path: Path) -> Path:
    return written(tmp_path, RECIPE.format(model=real_model))


def ladder(recipe: Path, *overrides: str) -> tuple[list[Rung], bool]:
    rungs, packed = checks_of(recipe, list(overrides))
    for rung in rungs:
        print(rung.number, rung.name, rung.verdict, dict(rung.measured), dict(rung.bounds), rung.power, rung.noise)
    return rungs, packed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("engine", ["engine={kind: colocated, max_model_len: 200}", SERVER, TRANSFORMERS])
def test_healthy_and_packed(recipe: Path, engine: str, dtype: str) -> None:
    rungs, packed = ladder(recipe, engine, WARM, f"model.dtype={dtype}", "rollout.max_completion_tokens=48")
    assert packed and [rung.number for rung in rungs] == list(range(7))
    for rung in rungs:
        assert rung.verdict is not Outcome.FAILED, rung
        blind = rung.power is not None and rung.bound is not None and rung.power <= POWER * rung.bound
        assert blind == (rung.verdict is Outcome.NOT_MEASURABLE) == ("blind" in rung.sentence)
        # In bfloat16 raw log-probs at temperature 0.7 differ by two and a half bounds.
        assert not blind or (dtype == "bfloat16" and rung.number == 2)
    first = rungs[1]
    assert first.noise is not None and first.measured["mean_delta"] < 1.6 * first.noise.mean, "three times is enough by far"


@pytest.mark.parametrize("name", [*BY_GAP, *OTHERWISE])
def test_a_planted_fault_is_named(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, name: str, record_property: Callable[[str, object], None]
) -> None:
    plant, number, fault, words, overrides = PLANTED[name]
    fired = plant(monkeypatch)
    rungs, _ = ladder(recipe, *[AT.get(name, [one])[0] if one == LONG else one for one in overrides])
    last = rungs[-1]
    assert fired and (last.number, last.verdict, last.fault) == (number, Outcome.FAILED, fault), last
    assert words.split(" tokens")[0] in last.sentence or name in AT
    if name in BY_GAP:
        power = max(last.measured[statistic] / bound for statistic, bound in last.bounds.items())
        record_property("power", power)
        print(f"{name}: {power:.0f} bounds")
        assert power >= POWER


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_a_thousand_tokens_are_healthy(recipe: Path, dtype: str) -> None:
    """Rounding grows along a row: the noise of eight rows of 64 tokens is what the bounds of the probe know."""
    long = ["rollout={prompts_per_step: 1, group_size: 2, max_completion_tokens: 1024}", "run.steps=1", f"model.dtype={dtype}"]
    told = "data.columns={prompt: question, answer: answer}"
    source = recipe.parent / "stories.jsonl"
    source.write_text(
        '{"question": "Write a very long story about a lighthouse, at least two thousand words.", "answer": "1"}\n' * 2
    )
    overrides = [*long, told, f"data.source={source}", "sentinel.on_drift=stop"]
    train_command(recipe, overrides, False, False, None, recipe.parent / "run")
    [record] = read_jsonl(recipe.parent / "run" / "metrics.jsonl")
    print(record[Metric.SAMPLER_DELTA_MEAN], record[Metric.SAMPLER_DELTA_MAX], record[Metric.TOKENS_GENERATED])
    assert not record[Metric.SENTINEL_DRIFT] and record[Metric.TOKENS_GENERATED] > 700


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("engine", ["engine.kind=colocated", SERVER])
def test_a_truncated_distribution_and_stop_strings_are_healthy(recipe: Path, engine: str, dtype: str) -> None:
    sampling = ["rollout.temperature=0.8", "rollout.top_p=0.95", 'rollout.stop=["."]', "rollout.max_completion_tokens=48"]
    overrides = [engine, *sampling, f"model.dtype={dtype}", "sentinel.on_drift=stop"]
    train_command(recipe, overrides, False, False, None, recipe.parent / "run")
    for record in read_jsonl(recipe.parent / "run" / "metrics.jsonl"):
        print(engine, dtype, record[Metric.SAMPLER_DELTA_MEAN], record[Metric.SAMPLER_DELTA_MAX])
        assert not record[Metric.SENTINEL_DRIFT] and (dtype == "bfloat16" or record[Metric.SAMPLER_DELTA_MAX] <= 1e-4)
    rows = [row for step in (1, 2) for row in rollouts(recipe.parent / "run", step) if row["finish_reason"] == "stop"]
    assert sum(str(row["completion"]).endswith(".") for row in rows) >= 8
