"""How a run stands, whoever ended it."""

import fcntl
import json
import os
from pathlib import Path

import pytest
from helpers.waiting import HANGS
from typer.testing import CliRunner

from rlgen.cli.app import app
from rlgen.cli.status import status_of
from rlgen.errors import UsageError
from rlgen.run.directory import RunDirectory


def test_a_run_that_lives_ends_or_is_killed(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "run", "", "run: {}\n")
    path = directory.path
    assert status_of(path)["state"] == "starting", "nothing is written yet"
    directory.write_metrics({"step": 1, "loss": 0.5})
    directory.write_status("running", 1, 9)
    with directory.metrics.open("a") as file:
        file.write('{"step": 2, "lo')
    found = status_of(path)
    assert (found["state"], found["alive"], found["pid"], found["last"]) == (
        "running",
        True,
        os.getpid(),
        {"step": 1, "loss": 0.5},
    )
    directory.close()  # as the kernel does for a process that was killed
    found = status_of(path)
    assert (found["state"], found["alive"], found["exit_code"]) == ("killed", False, None) and "--resume" in found["message"]
    shown = CliRunner().invoke(app, ["status", str(path)])
    assert shown.exit_code == 0 and "killed" in shown.stdout and "step 1 of 9" in shown.stdout and "loss 0.5" in shown.stdout
    again = RunDirectory.reopen(path)
    again.write_status("stopped", 3, 9, 75, "stopped on request")
    again.close()
    found = json.loads(CliRunner().invoke(app, ["status", str(path), "--json"]).stdout)
    assert (found["state"], found["exit_code"], found["message"], found["alive"]) == ("stopped", 75, "stopped on request", False)


def test_what_is_wrong_is_shown(tmp_path: Path) -> None:
    """Every broken rule in words, and the values that rules are about, as far as they were measured."""
    directory = RunDirectory.create(tmp_path / "run", "", "run: {}\n")
    values = {
        "groups/zero_std": 0.9,
        "entropy": 0.004,
        "kl/ref_k1": 0.5,
        "kl/ref_k3": None,
        "clip/region": 0.25,
        "completions/truncated": 0.125,
    }
    gap = {"sampler/delta_mean": 1.5e-7, "sampler/kl": 2e-8, "is/ess_raw": 0.999}
    directory.write_metrics({"step": 7, "loss": 0.5, **values, **gap})
    broken = ["entropy of a token 0.004: below 0.01", "share of groups 0.9: at or above 0.8"]
    directory.write_status("running", 7, 9, health=broken)
    directory.close()
    shown = CliRunner().invoke(app, ["status", str(directory.path)]).stdout.splitlines()
    assert shown[2:] == [
        "step 7, loss 0.5",
        "groups/zero_std 0.9, entropy 0.004, kl/ref_k1 0.5, clip/region 0.25, completions/truncated 0.125",
        "sampler/delta_mean 1.5e-07, sampler/kl 2e-08, is/ess_raw 0.999",
        "health: entropy of a token 0.004: below 0.01",
        "health: share of groups 0.9: at or above 0.8",
    ]


def test_looking_takes_no_run_its_lock(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "run", "", "run: {}\n")
    directory.close()
    status_of(directory.path)
    RunDirectory.reopen(directory.path).close()
    with (directory.path / ".lock").open() as other:  # somebody else looks at the same time
        fcntl.flock(other, fcntl.LOCK_SH)
        assert status_of(directory.path)["alive"] is False


def test_a_run_starts_while_somebody_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who looks is done when the run has tried twice to lock its folder."""
    directory = RunDirectory.create(tmp_path / "run", "", "run: {}\n")
    directory.close()
    flock, tried = fcntl.flock, []
    with (directory.path / ".lock").open() as other:
        flock(other, fcntl.LOCK_SH)  # as `in_use` does

        def tries(file: int, how: int) -> None:
            if len(tried) == 2:
                flock(other, fcntl.LOCK_UN)
            tried.append(how)
            flock(file, how)

        monkeypatch.setattr(fcntl, "flock", tries)
        monkeypatch.setattr("rlgen.run.directory.PATIENCE", HANGS)
        RunDirectory.reopen(directory.path).close()
    assert tried[:3] == [fcntl.LOCK_EX | fcntl.LOCK_NB] * 3


def test_where_no_run_is(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no run"):
        status_of(tmp_path)
