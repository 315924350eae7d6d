"""Fast by construction: little padding on long tails, and a first step soon after the command."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, read_jsonl

from rlgen.cli.train import train_command


@pytest.mark.slow
def test_long_tails_are_hardly_padded(recipe_file: Path) -> None:
    """64 completions, cap 480, of a model that ends them at very unequal lengths; packed rows have no padding at all."""
    run = recipe_file.parent / "run"
    overrides = ["rollout={prompts_per_step: 8, group_size: 8, max_completion_tokens: 480}", "engine={kind: colocated}"]
    overrides += ["run.steps=1", "optim={learning_rate: 1.0e-6, packing: false}"]
    train_command(recipe_file, overrides, False, False, None, run)
    record = read_jsonl(run / "metrics.jsonl")[0]
    assert record["completions/min_tokens"] < 20 and record["completions/max_tokens"] > 300
    assert 0 < record["tokens/padding"] <= 0.1 * record["tokens/trained"]


@pytest.mark.slow
@pytest.mark.timed
def test_the_first_step_comes_within_35_s_with_cold_caches(tmp_path: Path) -> None:
    """Nothing compiled, no tiny model built, no vLLM cache: as on a fresh machine."""
    environment = {
        **os.environ,
        "HOME": str(tmp_path / "home"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "VLLM_CACHE_ROOT": str(tmp_path / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        "RLGEN_CACHE": str(tmp_path / "rlgen"),
    }
    start = time.monotonic()
    command = [sys.executable, "-m", "rlgen", "train", str(ROOT / "recipes" / "smoke.yaml"), "--run-dir", str(tmp_path / "run")]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text()):
        assert process.poll() is None or metrics.exists()
        assert time.monotonic() - start < 35
        time.sleep(0.05)
    first = time.monotonic() - start
    assert process.wait(timeout=60) == 0 and time.monotonic() - start < 60
    print(f"first step after {first:.1f} s, all after {time.monotonic() - start:.1f} s")
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".so", ".cpp", ".cubin")], "nothing was compiled"
