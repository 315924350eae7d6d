"""`rlgen doctor` as a user runs it. What it finds is tested in tests/sentinel."""

import json
import subprocess
from pathlib import Path

import pytest
from conftest import Run
from helpers.torchrun import launch
from helpers.waiting import HANGS

from rlgen.cli.doctor import doctor_command
from rlgen.errors import SentinelError

FSDP = ("--set", "engine={kind: transformers}", "--set", "processes.strategy=fsdp")


@pytest.mark.slow
@pytest.mark.timed
def test_a_healthy_pair_gets_seven_verdicts_in_less_than_a_minute_and_a_baseline(
    recipe_file: Path, tmp_path: Path, rlgen: Run
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


def test_an_unhealthy_pair_gets_a_name_and_exit_6(recipe_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Bounds that no pair of programs can keep stand for a fault here.
    fault = "sentinel: rung 1, same weights: numerics: at the start, with the same ids"
    with pytest.raises(SentinelError, match=fault) as caught:
        doctor_command(recipe_file, ["sentinel.max_delta=1e-12", "engine={kind: transformers}"], True, False)
    report = json.loads(capsys.readouterr().out)
    assert caught.value.exit_code == 6 and not report["healthy"]
    assert (report["rungs"][-1]["verdict"], report["rungs"][-1]["fault"]) == ("failed", "numerics")


@pytest.mark.slow
def test_several_processes_print_one_report_and_one_fault(recipe_file: Path) -> None:
    """What they find of sharded weights is tested faster in tests/run/test_two_processes.py."""

    def doctor(*words: str) -> subprocess.CompletedProcess[str]:
        return launch("-m", "rlgen", "doctor", recipe_file, "--json", *FSDP, *words, timeout=HANGS)

    healthy = doctor()
    assert healthy.returncode == 0, healthy.stderr[-3000:]
    report = json.loads(healthy.stdout)
    assert report["healthy"] and [rung["number"] for rung in report["rungs"]] == list(range(7))
    unhealthy = doctor("--set", "sentinel.max_delta=1e-12")
    assert json.loads(unhealthy.stdout)["rungs"][-1]["fault"] == "numerics"
    assert unhealthy.stderr.count("error: sentinel: rung 1, same weights: numerics") == 1
    assert unhealthy.stderr.count("exitcode  : 6") == 2  # of torchrun
    mistaken = doctor("--set", "run.nothing=1")
    assert mistaken.returncode == 1 and mistaken.stderr.count("run.nothing") == 1


@pytest.mark.slow
def test_one_process_says_that_it_shards_nothing(recipe_file: Path, rlgen: Run) -> None:
    ended = rlgen("doctor", recipe_file, *FSDP)
    assert ended.returncode == 0, ended
    assert ended.stdout.startswith("one process holds all weights; for sharded ones (fsdp): `torchrun"), ended
