"""A tiny model learns a task of two turns: to ask the environment first, and then to say what it was told."""

import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest
from conftest import ROOT, read_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.vllm]
RECIPE = Path(__file__).parent / "environment-tiny-grpo.yaml"


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("warm") / "environment"
    command = [sys.executable, "-m", "rlgen", "recipes", "warm-start", str(RECIPE), "--out", str(out), "--accuracy", "0.3"]
    subprocess.run(command, check=True, cwd=ROOT)
    return out


@pytest.mark.parametrize("engine", ["{kind: colocated}", "{kind: server, launch: true}"])
def test_the_recipe_learns_its_environment(warm: Path, tmp_path: Path, engine: str) -> None:
    settings = ["--set", f"model.path={warm}", "--set", f"engine={engine}", "--run-dir", str(tmp_path / "run")]
    subprocess.run([sys.executable, "-m", "rlgen", "train", str(RECIPE), *settings], check=True, stdout=subprocess.DEVNULL)
    records = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    rewards = [record["reward/environment/mean"] for record in records]
    assert fmean(rewards[-5:]) - rewards[0] >= 0.3
    assert max(record["sampler/delta_max"] for record in records) <= 1e-4
    assert records[0]["turns/mean"] < 1.5 and fmean(record["turns/mean"] for record in records[-5:]) > 1.8
    assert not any("tools/raised" in record or "tools/timeouts" in record for record in records)
