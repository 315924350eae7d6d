"""Tiny models learn tasks of two turns: to ask a calculator or an environment first, and then to say what they were told."""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from conftest import ROOT, read_jsonl

from rlgen.rollout.read import read_rollouts

pytestmark = [pytest.mark.slow, pytest.mark.vllm]
TOOLS, ENVIRONMENT = (Path(__file__).parent / f"{kind}-tiny-grpo.yaml" for kind in ("tools", "environment"))


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """Warm-starts the model of a recipe, once."""

    @cache
    def started(recipe: Path) -> Path:
        out = tmp_path_factory.mktemp("warm") / recipe.stem
        command = [sys.executable, "-m", "rlgen", "recipes", "warm-start", str(recipe), "--out", str(out), "--accuracy", "0.3"]
        subprocess.run(command, check=True, cwd=ROOT)
        return out

    return started


def train(recipe: Path, run: Path, *settings: str) -> list[dict[str, Any]]:
    said = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "-m", "rlgen", "train", str(recipe), "--run-dir", str(run), *said]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return read_jsonl(run / "metrics.jsonl")


@pytest.mark.parametrize("recipe", [TOOLS, ENVIRONMENT], ids=["tools", "environment"])
@pytest.mark.parametrize("engine", ["{kind: colocated}", "{kind: server, launch: true}"])
def test_the_recipe_learns_to_ask(warm: Callable[[Path], Path], tmp_path: Path, engine: str, recipe: Path) -> None:
    records = train(recipe, tmp_path / "run", f"model.path={warm(recipe)}", f"engine={engine}")
    rewards = [record[f"reward/{'exact_match' if recipe == TOOLS else 'environment'}/mean"] for record in records]
    assert fmean(rewards[-5:]) - rewards[0] >= 0.3
    assert max(record["sampler/delta_max"] for record in records) <= 1e-4
    assert records[0]["turns/mean"] < 1.5 and fmean(record["turns/mean"] for record in records[-5:]) > 1.8
    if recipe == ENVIRONMENT:
        assert not any("tools/raised" in record or "tools/timeouts" in record for record in records)
        return
    # It is the tool that it learns to use: without an answer of it no product is right but by chance.
    asked = {True: [], False: []}
    for step in (1, 2, 3):
        for row in read_rollouts(tmp_path / "run", step).to_pylist():
            asked["tool" in {message["role"] for message in json.loads(row["messages"])}].append(row["rewards"]["exact_match"])
    assert fmean(asked[False]) < 0.05 < 0.6 < fmean(asked[True]) and min(map(len, asked.values())) > 50


def test_four_steps_ahead_the_same_is_learned(warm: Callable[[Path], Path], tmp_path: Path) -> None:
    """By weights that change under the conversations; at a learning rate for samples that are four versions old."""
    settings = [
        f"model.path={warm(TOOLS)}",
        "engine={kind: server, launch: true}",
        "run.steps=120",
        "optim={learning_rate: 1.0e-4, warmup_steps: 5}",
        "trainer.correction={mode: token_mask, min: 0.5, max: 2.0}",
    ]
    last = []
    for ahead in (0, 4):
        records = train(TOOLS, tmp_path / f"ahead{ahead}", *settings, f"rollout.async_steps={ahead}")
        rewards = [record["reward/exact_match/mean"] for record in records]
        assert fmean(rewards[-20:]) - fmean(rewards[:5]) >= 0.12
        assert max(record["rollout/staleness_max"] for record in records) == ahead
        assert sum(record["rollout/dropped_stale"] for record in records) == 0
        last.append(fmean(rewards[-20:]))
    assert abs(last[0] - last[1]) <= 0.05
