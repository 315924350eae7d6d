"""The demo's recipe learns: on all engines alike, and untied as well as tied."""

import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest
from ahead import serve
from conftest import ROOT, read_jsonl

pytestmark = pytest.mark.slow

RECIPE = ROOT / "recipes" / "demo-grpo.yaml"
STEPS = 70  # of the recipe's 120: what is left adds little


def warm_start(name: str, out: Path) -> Path:
    command = [sys.executable, "-m", "rlgen", "recipes", "warm-start", str(RECIPE), "--model", f"tiny:{name}", "--out", str(out)]
    subprocess.run(command, check=True, cwd=ROOT, timeout=200)
    return out


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return warm_start("qwen3", tmp_path_factory.mktemp("warm") / "qwen3")


def learn(model: Path, directory: Path, *overrides: str) -> tuple[float, float]:
    """Mean reward of the first three and the last five steps; the gap stays small at every step that is on-policy."""
    settings = [part for override in (f"model.path={model}", *overrides) for part in ("--set", override)]
    command = [sys.executable, "-m", "rlgen", "train", str(RECIPE), "--run-dir", str(directory), f"--max-steps={STEPS}"]
    subprocess.run([*command, *settings], check=True, timeout=280, stdout=subprocess.DEVNULL)
    records = read_jsonl(directory / "metrics.jsonl")
    assert max(record["rollout/staleness_max"] for record in records) == (1 if "rollout.async_steps=1" in overrides else 0)
    assert max(record["sampler/delta_max"] for record in records if record["rollout/staleness_max"] == 0) <= 1e-4
    rewards = [record["reward/exact_match/mean"] for record in records]
    return fmean(rewards[:3]), fmean(rewards[-5:])


@pytest.fixture(scope="module")
def colocated(warm: Path, tmp_path_factory: pytest.TempPathFactory) -> float:
    """The reward that the demo comes to."""
    first, last = learn(warm, tmp_path_factory.mktemp("runs") / "vllm")
    assert last >= 0.8 and last - first >= 0.3
    return last


def test_without_vllm_the_same_is_learned(warm: Path, colocated: float, tmp_path: Path) -> None:
    _, last = learn(warm, tmp_path / "transformers", "engine.kind=transformers")
    assert abs(last - colocated) <= 0.1


def test_on_a_server_that_rlgen_launches_the_same_is_learned(warm: Path, colocated: float, tmp_path: Path) -> None:
    _, last = learn(warm, tmp_path / "server", "engine={kind: server, launch: true}")
    assert abs(last - colocated) <= 0.1
    assert "APIServer" in (tmp_path / "server" / "logs" / "server.log").read_text()


def test_on_a_server_that_runs_already_a_step_ahead_the_same_is_learned(
    warm: Path, colocated: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLGEN_SERVER_TOKEN", "of-this-test")
    server, url = serve(RECIPE, tmp_path, f"model.path={warm}")
    try:
        engine = f"engine={{kind: server, url: '{url}'}}"
        _, last = learn(warm, tmp_path / "ahead", engine, "rollout.async_steps=1")
        assert server.poll() is None  # it is not rlgen's to stop
    finally:
        server.terminate()
    assert abs(last - colocated) <= 0.1
    assert server.wait(timeout=60) == 0


def test_untied_models_learn_too(tmp_path: Path) -> None:
    first, last = learn(warm_start("qwen3-untied", tmp_path / "warm"), tmp_path / "untied")
    assert last - first >= 0.2
