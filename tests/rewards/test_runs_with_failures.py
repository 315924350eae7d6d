"""Whole runs whose reward misbehaves on some samples."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Proof, Run, read_jsonl
from helpers.rollouts import rollout_rows
from helpers.scoring import overdue

from rlgen.cli.train import train_command
from rlgen.errors import RewardError
from rlgen.files import read_json

REWARD = """
import os, time
BAD = {bad}  # None: every completion

def f(completion, prompt_ids, step):
    # Of each step's sixteen completions one or two are such.
    if BAD is None or completion in BAD:
        return [lambda: time.sleep(100_000), lambda: os._exit(1), lambda: 1 / 0][len(completion) % 3]()
    return len(set(completion)) + 0.01 * len(completion)
"""
SMALL = ("engine={kind: transformers}", "run.steps=1", "rollout.max_completion_tokens=6")


def run(recipe: Path, name: str, bad: set[str] | None, *overrides: str) -> Path:
    folder = recipe.parent / f"rewards_{name}"
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(REWARD.replace("{bad}", repr(bad)))
    entry = f"rewards=[{{use: '{folder}/mine.py:f', timeout: 1.5, {', '.join(overrides)}}}]"
    train_command(recipe, [entry, *SMALL], False, False, None, recipe.parent / name)
    return recipe.parent / name


@pytest.mark.fault(28, 30, 32)
def test_a_run_goes_on_without_the_samples_whose_reward_failed(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch, proof: Proof
) -> None:
    whole = rollout_rows(run(recipe_file, "whole", set()))
    texts = sorted({row["completion"] for row in whole}, key=lambda text: (len(text) % 3, text))
    bad = {next(text for text in texts if len(text) % 3 == kind) for kind in {len(text) % 3 for text in texts}}
    overdue(monkeypatch, lambda completion: 1.5 if completion in bad else None)
    directory = run(recipe_file, "disturbed", bad, "on_error: skip", "max_error_fraction: 0.5")
    disturbed = rollout_rows(directory)
    failed = [row for row in disturbed if row["reward_errors"]]
    assert {row["completion"] for row in failed} == bad and 0 < len(failed) < 16
    for before, after in zip(whole, disturbed, strict=True):
        assert before["completion_ids"] == after["completion_ids"]
        if after["completion"] in bad:
            assert (after["reward"], after["rewards"], after["advantage"]) == (None, {"f": None}, 0.0)
        else:
            assert (after["reward"], after["rewards"], after["reward_errors"]) == (before["reward"], before["rewards"], {})
    (record,) = read_jsonl(directory / "metrics.jsonl")
    causes = {key: record[f"reward/f/{key}"] for key in ("failed", "errors", "timeouts", "died")}
    assert causes["failed"] == record["reward/unscored"] == len(failed)
    assert causes["failed"] == causes["errors"] + causes["timeouts"] + causes["died"]
    assert all(causes.values()), f"each of them happened: {causes}"
    assert list((directory / "failed_rewards").iterdir()) and "on_error: skip" in (directory / "logs" / "rlgen.log").read_text()
    facts = read_json(directory / "provenance.json")[0]
    assert len(facts["rewards"]["f"]) == 64
    proof(f"{causes}; the rewards of the other {16 - len(failed)} samples are those of the undisturbed run")


@pytest.mark.fault(29)
def test_a_run_that_may_not_go_on_ends_with_5(recipe_file: Path, proof: Proof, capsys: Any) -> None:
    with pytest.raises(RewardError) as caught:
        run(recipe_file, "failing", None)
    directory = recipe_file.parent / "failing"
    status = read_json(directory / "status.json")
    (saved,) = (directory / "failed_rewards").iterdir()
    assert (status["state"], status["exit_code"], status["step"]) == ("failed", 5, 0)
    assert status["message"] == str(caught.value) and "reward f, prompt at position" in status["message"]
    assert str(saved) in status["message"] and "completion" in read_json(saved)["arguments"]
    said = capsys.readouterr().out
    assert "mine.py:f (sha256 " in said and "lies outside" not in said
    proof(f"exit code 5 in status.json; {saved.name} holds the sample")


def test_known_answers_without_a_model(rlgen: Run, recipe_file: Path) -> None:
    result = rlgen("rewards", "test", recipe_file, "--json", "--rows", 2)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    means = {(row["reward"], row["answers"]): row["mean"] for row in found["rewards"]}
    assert [means["exact_match", kind] for kind in ("gold", "empty", "garbage", "long")] == [1.0, 0.0, 0.0, 0.0]
    assert found["problems"] == [] and found["warnings"] == []


MINE = """
import time
def constant(completion, answer): return 1.0
def layout(completion): return 0.0
def worse(completion, answer): return float(completion != answer)
def hangs(completion, answer): return time.sleep(100_000) if len(completion) > 1000 else float(completion == answer)
def raises(completion, answer): return float(completion == answer) / len(completion)
"""


def test_what_is_wrong_with_a_reward_is_said(recipe_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from rlgen.cli.rewards import rewards_test_command

    (recipe_file.parent / "mine.py").write_text(MINE)
    overdue(monkeypatch, lambda completion: 0.5 if len(completion) > 1000 else None)

    def tried(name: str) -> str:
        rewards_test_command(recipe_file, [f"rewards=[{{use: 'mine.py:{name}', timeout: 0.5}}]"], 1, False)
        return str(capsys.readouterr().out)

    assert "warning: reward layout gives 0 to every answer" in tried("layout")
    assert "warning: reward worse gives the data's own answers 0 on average, garbage 1" in tried("worse")
    for name, part in {
        "constant": "reward constant gives 1 to every answer, right or wrong",
        "hangs": "no answer within 0.5 s",
        "raises": r"ZeroDivisionError.*1 of the empty answers failed",
    }.items():
        with pytest.raises(RewardError, match=part):
            tried(name)
        assert name in capsys.readouterr().out, "the table stands above the error"
