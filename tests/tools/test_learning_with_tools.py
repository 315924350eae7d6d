"""A tiny model that asks its calculator now and then learns to ask it, and to say what it answers."""

import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest
from conftest import ROOT, read_jsonl

from rlgen.rollout.read import read_rollouts

pytestmark = [pytest.mark.slow, pytest.mark.vllm]
RECIPE = Path(__file__).parent / "tools-tiny-grpo.yaml"


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("warm") / "tools"
    command = [sys.executable, "-m", "rlgen", "recipes", "warm-start", str(RECIPE), "--out", str(out), "--accuracy", "0.3"]
    subprocess.run(command, check=True, cwd=ROOT)
    return out


@pytest.mark.parametrize("engine", ["{kind: colocated}", "{kind: server, launch: true}"])
def test_the_recipe_learns_to_use_its_tool(warm: Path, tmp_path: Path, engine: str) -> None:
    settings = ["--set", f"model.path={warm}", "--set", f"engine={engine}", "--run-dir", str(tmp_path / "run")]
    subprocess.run([sys.executable, "-m", "rlgen", "train", str(RECIPE), *settings], check=True, stdout=subprocess.DEVNULL)
    records = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    rewards = [record["reward/exact_match/mean"] for record in records]
    assert fmean(rewards[-5:]) - rewards[0] >= 0.3
    assert max(record["sampler/delta_max"] for record in records) <= 1e-4
    # It is the tool that it learns to use: without an answer of it no product is right but by chance.
    assert records[0]["turns/mean"] < 1.5 and fmean(record["turns/mean"] for record in records[-5:]) > 1.8
    asked = {True: [], False: []}
    for step in (1, 2, 3):
        for row in read_rollouts(tmp_path / "run", step).to_pylist():
            asked["tool" in {message["role"] for message in json.loads(row["messages"])}].append(row["rewards"]["exact_match"])
    assert fmean(asked[False]) < 0.05 < 0.6 < fmean(asked[True]) and min(map(len, asked.values())) > 50


@pytest.mark.vllm
def test_four_steps_ahead_the_same_is_learned(warm: Path, tmp_path: Path) -> None:
    """By weights that change under the conversations; at a learning rate for samples that are four versions old."""
    settings = [
        f"model.path={warm}",
        "engine={kind: server, launch: true}",
        "run.steps=120",
        "optim={learning_rate: 1.0e-4, warmup_steps: 5}",
        "trainer.correction={mode: token_mask, min: 0.5, max: 2.0}",
    ]
    last = []
    for ahead in (0, 4):
        said = [part for setting in (*settings, f"rollout.async_steps={ahead}") for part in ("--set", setting)]
        run = tmp_path / f"ahead{ahead}"
        command = [sys.executable, "-m", "rlgen", "train", str(RECIPE), "--run-dir", str(run), *said]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        records = read_jsonl(run / "metrics.jsonl")
        rewards = [record["reward/exact_match/mean"] for record in records]
        assert fmean(rewards[-20:]) - fmean(rewards[:5]) >= 0.12
        assert max(record["rollout/staleness_max"] for record in records) == ahead
        assert sum(record["rollout/dropped_stale"] for record in records) == 0
        last.append(fmean(rewards[-20:]))
    assert abs(last[0] - last[1]) <= 0.05
