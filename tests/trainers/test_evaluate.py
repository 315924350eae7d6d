"""Whole runs that are evaluated: what is measured, what is kept, and that training does not notice it."""

import itertools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import RECIPE, read_jsonl
from helpers.before import before
from helpers.slow import slow_but

from rlgen.cli.train import train_command
from rlgen.errors import DataError, EngineError, SentinelError, UsageError
from rlgen.files import read_json
from rlgen.rollout.read import read_rollouts, rollout_steps
from rlgen.run.compare import checkpoint_differences, first_difference, rollout_differences
from rlgen.trainers import loop
from rlgen.trainers.report import Reporter

Proof = Callable[[str], None]
STEPS = 4
PARITY = "def parity(completion_ids):\n    return float(sum(completion_ids) % 2)\n"
BY_STEP = "def by_step(step):\n    return {0: 9.0, 1: 0.5, 2: 2.0, 3: 2.0, 4: 1.0}[step]\n"
EVAL = "{limit: 5, every: 2, group_size: 4, rewards: [{use: 'judge.py:parity'}], best: false}"
PLAIN = ("engine={kind: transformers}", f"run.steps={STEPS}", "checkpoint={every: 2, keep: 2}")


def train(folder: Path, name: str, *overrides: str, resume: bool = False) -> Path:
    """A run of the recipe of these tests, in this process."""
    folder.mkdir(exist_ok=True)
    (folder / "judge.py").write_text(PARITY + BY_STEP)
    (folder / "recipe.yaml").write_text(RECIPE)
    train_command(folder / "recipe.yaml", [*PLAIN, *overrides], resume, False, None, folder / name)
    return folder / name


def samples(run: Path, step: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = read_rollouts(run / "evals" / f"step_{step:06d}.parquet").to_pylist()
    return rows


def without(record: dict[str, Any], *prefixes: str) -> dict[str, Any]:
    return {key: value for key, value in record.items() if not key.startswith(prefixes)}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("evaluated"), "whole", f"eval={EVAL}")


def test_the_metrics_are_those_of_the_samples(run: Path) -> None:
    records = {record["step"]: record for record in read_jsonl(run / "metrics.jsonl")}
    assert list(records) == [0, 1, 2, 3, 4] and rollout_steps(run / "evals") == [0, 2, 4]
    assert [step for step, record in records.items() if "eval/reward/mean" in record] == [0, 2, 4]
    assert {key for key in records[0] if not key.startswith(("eval/", "time/"))} == {"step"}
    for step in (0, 2, 4):
        rows, record = samples(run, step), records[step]
        groups = [[row for row in rows if row["group_id"] == prompt] for prompt in range(5)]
        assert [[row["sample_index"] for row in group] for group in groups] == [[0, 1, 2, 3]] * 5
        assert {row["weight_version"] for row in rows} == {step} and not any(row["trained"] for row in rows)
        assert all(row["reward"] == row["rewards"]["parity"] == sum(row["completion_ids"]) % 2 for row in rows)
        means = [statistics.fmean(row["reward"] for row in group) for group in groups]
        assert record["eval/reward/mean"] == record["eval/pass@1"] == pytest.approx(statistics.fmean(means))
        assert record["eval/reward/mean_low"] < record["eval/reward/mean"] < record["eval/reward/mean_high"]
        pairs = [list(itertools.combinations([row["reward"] for row in group], 2)) for group in groups]
        assert record["eval/pass@2"] == pytest.approx(statistics.fmean(max(pair) for group in pairs for pair in group))
        assert record["eval/pass@4"] == statistics.fmean(max(row["reward"] for row in group) for group in groups)
        assert record["eval/completions/mean_tokens"] == statistics.fmean(len(row["completion_ids"]) for row in rows)
        assert record["eval/completions/truncated"] == statistics.fmean(row["finish_reason"] == "length" for row in rows)
        assert 0 <= record["eval/sampler/delta_mean"] <= record["eval/sampler/delta_max"] < 1e-4
        assert record["eval/prompts"] == 5 and record["time/eval"] > 0
    asked = {tuple(row["prompt_ids"]) for row in samples(run, 0)}
    assert len(asked) == 5 and asked == {tuple(row["prompt_ids"]) for row in samples(run, 4)}
    seeds = [[row["seed"] for row in samples(run, step)] for step in (0, 4)]
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == 20
    trained = {seed for step in range(1, 5) for seed in read_rollouts(run, step)["seed"].to_pylist()}
    assert not trained & set(seeds[0])
    assert read_rollouts(run, 1).column_names == read_rollouts(run / "evals" / "step_000002.parquet").column_names


def test_training_does_not_notice_an_evaluation(run: Path) -> None:
    plain = train(run.parent, "plain")
    assert list(rollout_differences("rollouts", run, plain)) == list(checkpoint_differences(run, plain)) == []
    ours = [without(record, "eval/", "time/") for record in read_jsonl(run / "metrics.jsonl") if record["step"]]
    assert ours == [without(record, "time/") for record in read_jsonl(plain / "metrics.jsonl")]


@pytest.mark.parametrize("fatal", slow_but([0, 2, 4], 4))
def test_an_evaluated_run_that_fails_and_is_resumed_is_the_undisturbed_one(
    run: Path, fatal: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails after an evaluation, whose samples are on disk, and before its record is."""
    name = f"failed_{fatal}"

    def fail(report: Reporter, step: Any, *_: Any) -> None:
        if step == fatal or fatal == 0:
            raise RuntimeError("planted")

    before(Reporter, "metrics" if fatal else "first_evaluation", fail, monkeypatch.setattr)
    with pytest.raises(RuntimeError, match="planted"):
        train(run.parent, name, f"eval={EVAL}")
    monkeypatch.undo()
    failed = run.parent / name
    assert rollout_steps(failed / "evals") == [step for step in (0, 2, 4) if step <= fatal]
    assert read_json(failed / "status.json")["exit_code"] == 70
    train(run.parent, name, f"eval={EVAL}", resume=True)
    assert first_difference(run, failed) is None and (failed / "logs" / "attempt_1" / "evals").exists()


def test_a_run_that_had_none_may_get_an_evaluation(run: Path) -> None:
    """Training does not notice; what is evaluated from then on is what would have been."""
    train(run.parent, "added", "run.steps=2")
    (run.parent / "held.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    with pytest.raises(DataError, match="has no column `question`"):  # a mistake in it does not become a part of the run
        train(run.parent, "added", "eval={source: held.jsonl, columns: {prompt: question}}", resume=True)
    added = train(run.parent, "added", f"eval={EVAL}", resume=True)
    assert list(rollout_differences("rollouts", run, added)) == list(checkpoint_differences(run, added)) == []
    records = {record["step"]: record for record in read_jsonl(added / "metrics.jsonl")}
    assert [step for step, record in records.items() if "eval/reward/mean" in record] == [4]
    whole = next(record for record in read_jsonl(run / "metrics.jsonl") if record["step"] == 4)
    assert without(records[4], "time/") == without(whole, "time/")
    with pytest.raises(UsageError, match=r"eval.limit: 5 -> 4"):
        train(run.parent, "added", f"eval={EVAL}".replace("limit: 5", "limit: 4"), resume=True)


@pytest.mark.parametrize("fatal", slow_but([2, 4], 4))
def test_an_engine_that_fails_before_an_evaluation_costs_no_evaluation(
    run: Path, fatal: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(engine: Any, model: Any, step: int, *_: Any) -> None:
        if step == fatal:
            raise EngineError("planted")

    with monkeypatch.context() as patch, pytest.raises(EngineError, match="planted"):
        before(loop, "send_weights", fail, patch.setattr)
        train(run.parent, f"unsent_{fatal}", f"eval={EVAL}")
    failed = train(run.parent, f"unsent_{fatal}", f"eval={EVAL}", resume=True)
    assert first_difference(run, failed) is None


def test_the_comparison_of_runs_sees_evaluations(run: Path) -> None:
    other = train(run.parent, "other", f"eval={EVAL}".replace("limit: 5", "limit: 4"))
    # Log-probs may differ too: rounding depends on how many rows are computed together.
    found = [one for one in rollout_differences("evals", run, other) if one.key == "samples"]
    assert [(one.step, one.key, one.left, one.right) for one in found] == [(step, "samples", 20, 16) for step in (0, 2, 4)]


def test_the_best_checkpoint_is_saved_and_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Step 2 is the best; step 3 is as good, and step 0, better than all, has no checkpoint. A resumed run knows it too."""
    best, settings = "eval={limit: 2, every: 1, rewards: [{use: 'judge.py:by_step'}]}", "checkpoint={every: 100, keep: 1}"
    run = train(tmp_path, "run", best, settings, "run.steps=3")
    shown = capsys.readouterr().out
    assert "eval: 2 prompts, greedy, at the start and every step; 0 are trained on, too" in shown
    assert "eval 0/3  reward 9.000 (9.000 to 9.000)  pass@1 1.000" in shown and max(map(len, shown.splitlines())) < 130
    assert all(len(line) <= 80 for line in shown.splitlines() if line.startswith("eval "))
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == ["step_000002", "step_000003"]
    train(tmp_path, "run", best, settings, resume=True)
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == ["step_000002", "step_000004"]


def test_an_engine_with_other_weights_than_it_says_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlgen.engines.transformers import TransformersEngine

    real = TransformersEngine.generate

    def shifted(engine: Any, requests: Any, sampling: Any, finished: Any = None) -> Any:
        answers = real(engine, requests, sampling, finished)
        if sampling.max_tokens == 7:  # an evaluation
            for answer in answers:
                answer.logp[:] -= 0.01
        return answers

    monkeypatch.setattr(TransformersEngine, "generate", shifted)
    with pytest.raises(SentinelError, match="evaluation after step 0"):
        train(tmp_path, "run", "eval={limit: 2, max_completion_tokens: 7}")


def test_a_nucleus_is_sampled_and_compared(tmp_path: Path) -> None:
    run = train(tmp_path, "run", "eval={limit: 8, group_size: 2, top_p: 0.05}", "run.steps=1")
    record = read_jsonl(run / "metrics.jsonl")[0]
    assert record["step"] == 0 and record["eval/sampler/delta_max"] < 1e-5
    # twenty most probable of 300 nearly equal ids: what is left has log-probs about ln 20 higher than before
    logp = [value for row in samples(run, 0) for value in row["sampler_logp"]]
    assert -4.5 < statistics.fmean(logp) < -1.0


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("engine", ["{kind: colocated}", "{kind: server, launch: true, start_timeout: 600.0}"])
def test_an_evaluation_on_vllm_with_longer_prompts_than_in_training(tmp_path: Path, engine: str) -> None:
    rows = "eval={options: {min_length: 60, max_length: 60}, limit: 9, group_size: 2, every: 1, max_completion_tokens: 20}"
    run = train(tmp_path, "run", f"engine={engine}", rows, "run.steps=1", "data.options={max_length: 4}")
    before, after = read_jsonl(run / "metrics.jsonl")
    assert (before["step"], after["step"]) == (0, 1) and before["eval/reward/mean"] != after["eval/reward/mean"]
    assert max(record["eval/sampler/delta_max"] for record in (before, after)) < 1e-4
    trained = max(len(row) for row in read_rollouts(run, 1)["prompt_ids"].to_pylist())
    assert all(len(row["prompt_ids"]) > trained + 40 for row in samples(run, 1))
    assert max(len(row["completion_ids"]) for row in samples(run, 1)) == 20


@pytest.mark.slow
@pytest.mark.vllm
def test_an_evaluation_beside_sampling_ahead(tmp_path: Path) -> None:
    """Its rewards have processes of their own: those of training score the next step."""
    engine = "engine={kind: server, launch: true, start_timeout: 600.0}"
    run = train(tmp_path, "run", engine, "rollout.async_steps=1", "eval={limit: 4, every: 1}")
    records = read_jsonl(run / "metrics.jsonl")
    assert ["eval/reward/mean" in record for record in records] == [True] * 5
    assert {row["weight_version"] for row in samples(run, 3)} == {3}
    assert set(read_rollouts(run, 4)["weight_version"].to_pylist()) == {2}
