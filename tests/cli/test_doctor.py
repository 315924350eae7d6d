"""`rlgen doctor` as a user runs it. What it finds is tested in tests/sentinel."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.slow
@pytest.mark.timed
def test_a_healthy_pair_gets_seven_verdicts_in_less_than_a_minute_and_a_baseline(
    recipe_file: Path, tmp_path: Path, rlgen: Callable[..., Any]
) -> None:
    cache = str(tmp_path / "cache")
    first = rlgen("doctor", recipe_file, "--json", "--store-baseline", RLGEN_CACHE=cache)
    assert first.returncode == 0, first.stderr
    report = json.loads(first.stdout)
    assert report["healthy"] and [rung["number"] for rung in report["rungs"]] == list(range(7))
    assert {rung["verdict"] for rung in report["rungs"]} == {"ok", "not needed"} and report["baseline"] is None
    assert report["seconds"] < 60
    assert not (recipe_file.parent / "runs").exists(), "nothing is trained"
    again = rlgen("doctor", recipe_file, RLGEN_CACHE=cache)
    assert again.returncode == 0 and "baseline: no worse than the baseline of" in again.stdout
    assert "healthy: what would be trained on is what the model sampled" in again.stdout
    assert "3  changed weights" in again.stdout and "FAILED" not in again.stdout


def test_an_unhealthy_pair_gets_a_name_and_exit_6(recipe_file: Path, rlgen: Callable[..., Any]) -> None:
    # Bounds that no pair of programs can keep stand for a fault here.
    ended = rlgen("doctor", recipe_file, "--json", "--set", "sentinel.max_delta=1e-12", "--set", "engine={kind: transformers}")
    report = json.loads(ended.stdout)
    assert ended.returncode == 6 and not report["healthy"]
    assert (report["rungs"][-1]["verdict"], report["rungs"][-1]["fault"]) == ("failed", "numerics")
    assert "error: sentinel: rung 1, same weights: numerics: at the start, with the same ids" in ended.stderr
