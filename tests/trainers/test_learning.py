"""The demo's recipe learns: on both engines alike, and untied as well as tied."""

import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest
from conftest import ROOT, read_jsonl

RECIPE = ROOT / "recipes" / "demo-grpo.yaml"


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Warm-started models, tied and untied."""
    folder = tmp_path_factory.mktemp("warm")
    for name in ("qwen3", "qwen3-untied"):
        command = [sys.executable, "scripts/warm_start.py", str(RECIPE), "--model", f"tiny:{name}", "--out", str(folder / name)]
        subprocess.run(command, check=True, cwd=ROOT, timeout=200)
    return folder


def learn(model: Path, directory: Path, *overrides: str) -> tuple[float, float]:
    """Mean reward of the first three and the last five steps; the gap stays small at every step."""
    settings = [part for override in (f"model.path={model}", *overrides) for part in ("--set", override)]
    command = [sys.executable, "-m", "rlgen", "train", str(RECIPE), "--run-dir", str(directory), *settings]
    subprocess.run(command, check=True, timeout=280, stdout=subprocess.DEVNULL)
    records = read_jsonl(directory / "metrics.jsonl")
    assert max(record["sampler/delta_max"] for record in records) <= 1e-4
    rewards = [record["reward/exact_match/mean"] for record in records]
    return fmean(rewards[:3]), fmean(rewards[-5:])


def test_both_engines_learn_the_same(warm: Path, tmp_path: Path) -> None:
    first, last = learn(warm / "qwen3", tmp_path / "vllm")
    _, other = learn(warm / "qwen3", tmp_path / "transformers", "engine.kind=transformers")
    assert last >= 0.8 and last - first >= 0.3
    assert abs(other - last) <= 0.1


def test_untied_models_learn_too(warm: Path, tmp_path: Path) -> None:
    first, last = learn(warm / "qwen3-untied", tmp_path / "untied", "run.steps=70")
    assert last - first >= 0.2
