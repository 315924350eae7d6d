"""How a run stands, whoever ended it."""

import fcntl
import json
import os
import re
import time
from pathlib import Path

import pytest
from helpers.runs import bare_run
from helpers.waiting import HANGS
from typer.testing import CliRunner

from rlgen.cli import status
from rlgen.cli.app import app
from rlgen.cli.status import status_of
from rlgen.errors import UsageError
from rlgen.files import read_json, write_json
from rlgen.run.directory import RunDirectory


def test_a_run_that_lives_ends_or_is_killed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no run"):
        status_of(tmp_path)
    directory = RunDirectory.create(tmp_path / "run", "", "run: {}\n")
    path = directory.path
    assert status_of(path)["state"] == "starting", "nothing is written yet"
    last = {"step": 1, "loss": 0.5}
    directory.write_metrics(last)
    directory.write_status("running", 1, 9)
    with directory.metrics.open("a") as file:
        file.write('{"step": 2, "lo')
    found = status_of(path)
    assert (found["state"], found["alive"], found["pid"], found["last"]) == ("running", True, os.getpid(), last)
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


def test_a_dry_run_was_not_killed(tmp_path: Path) -> None:
    (tmp_path / "resolved.yaml").write_text("run: {}\n")
    found = status_of(tmp_path)
    assert found["state"] == "not started" and "--resume" not in found["message"]


def test_what_is_wrong_is_shown(tmp_path: Path) -> None:
    """Every broken rule in words, and the values that rules are about, as far as they were measured."""
    directory = RunDirectory.create(tmp_path / "run", "", "run: {}\n")
    values = {"groups/zero_std": 0.9, "entropy": 0.004, "kl/ref_k1": 0.5, "kl/ref_k3": None, "clip/region": 0.25}
    gap = {"sampler/delta_mean": 1.5e-7, "sampler/kl": 2e-8, "is/ess_raw": 0.999}
    directory.write_metrics({"step": 7, "loss": 0.5, **values, "completions/truncated": 0.125, **gap})
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


def test_looking_takes_no_run_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who looks is done when the run has tried twice to lock its folder."""
    directory = RunDirectory.create(tmp_path / "run", "", "run: {}\n")
    directory.close()
    status_of(directory.path)
    RunDirectory.reopen(directory.path).close()
    flock, tried = fcntl.flock, []
    with (directory.path / ".lock").open() as other:  # somebody else looks at the same time
        flock(other, fcntl.LOCK_SH)
        assert status_of(directory.path)["alive"] is False

        def tries(file: int, how: int) -> None:
            if len(tried) == 2:
                flock(other, fcntl.LOCK_UN)
            tried.append(how)
            flock(file, how)

        monkeypatch.setattr(fcntl, "flock", tries)
        monkeypatch.setattr("rlgen.run.directory.PATIENCE", HANGS)
        RunDirectory.reopen(directory.path).close()
    assert tried[:3] == [fcntl.LOCK_EX | fcntl.LOCK_NB] * 3


def test_a_damaged_run_hides_no_other(tmp_path: Path) -> None:
    for name in ("good", "bad"):
        bare_run(tmp_path / name, [0.5], steps=50, state="done")
    (tmp_path / "bad" / "status.json").write_text("")
    shown = CliRunner().invoke(app, ["runs", str(tmp_path), "--json"])
    assert {one["name"]: one["state"] for one in json.loads(shown.stdout)} == {"good": "done", "bad": "unknown"}
    assert "status.json is damaged" in CliRunner().invoke(app, ["status", str(tmp_path / "bad")]).stdout


def test_a_clock_that_is_ahead_counts_no_negative_seconds(tmp_path: Path) -> None:
    path = bare_run(tmp_path / "mine", [0.5])
    found = read_json(path / "status.json")
    write_json(path / "status.json", {**found, "time": time.time() + 90_000})
    assert re.search(r"last heard of (90000|899\d\d) s ahead of the clock", CliRunner().invoke(app, ["status", str(path)]).stdout)
    assert CliRunner().invoke(app, ["runs", str(tmp_path)]).stdout.splitlines()[-1].endswith(" 0 s")


def test_a_pager_whose_quotation_is_not_closed_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGER", 'less "')
    bare_run(tmp_path / "mine", [0.5])
    assert "mine" in CliRunner().invoke(app, ["runs", str(tmp_path)]).stdout


def test_how_it_goes_on(tmp_path: Path) -> None:
    """Time left, the trend of the reward and the rewards by name; two seconds a step."""
    path = bare_run(tmp_path / "mine", [0.25, *[0.5] * 18, 0.75], steps=50, state="running")
    with (path / "metrics.jsonl").open("a") as file:
        values = {"reward/mean": 0.875, "reward/exact_match/mean": 1.0, "reward/length/mean": None, "time/step": 2.0}
        file.write(json.dumps({"step": 21, **values}) + "\n")
    found = status_of(path)
    assert found["state"] == "killed" and found["remaining"] is None
    directory = RunDirectory.reopen(path)
    directory.write_status("running", 21, 50)
    found = status_of(path)
    assert found["remaining"] == 58.0 and found["trend"] == {"first": 0.375, "last": 0.8125}
    assert found["rewards"] == {"exact_match": 1.0, "length": None}
    first, trend, rewards, *_ = CliRunner().invoke(app, ["status", str(path)]).stdout.splitlines()
    assert first.endswith(", 0:58 left") and rewards == "rewards: exact_match 1.000, length –"
    assert trend == "reward: 0.375 in the first tenth of the steps, 0.8125 in the last"
    directory.close()


@pytest.mark.parametrize("as_json", [False, True])
def test_a_run_is_followed_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_json: bool) -> None:
    """What was there before is not repeated; between two looks the run trains a step, evaluates, or ends."""
    directory = RunDirectory.create(tmp_path / "run", "", "run: {}\n")
    step = {"reward/mean": 0.5, "reward/std": 0.25, "loss": 0.125, "tokens/generated": 200, "time/step": 2.0}
    directory.write_metrics({"step": 1, **step})
    directory.write_status("running", 1, 3)

    def trains(number: int) -> None:
        evaluated = {"eval/reward/mean": 0.5} if number == 3 else {}
        directory.write_metrics({"step": number, **step, **evaluated})
        directory.write_status("running", number, 3)

    def ends() -> None:
        directory.write_status("stopped", 3, 3, 75, "stopped on request")
        directory.close()

    happens = iter([lambda: trains(2), lambda: None, lambda: trains(3), ends])
    monkeypatch.setattr(status.time, "sleep", lambda seconds: next(happens)())
    said = CliRunner().invoke(app, ["status", str(directory.path), "--follow", *["--json"] * as_json])
    lines = said.stdout.splitlines()
    assert said.exit_code == 0
    if as_json:
        objects = [json.loads(line) for line in lines]
        assert [one["step"] for one in objects] == [2, 3, 3] and objects[-1]["state"] == "stopped"
        return
    assert lines == [
        "step 2/3  reward 0.500 ±0.25  loss +0.1250  Δ –  100 tok/s  left 0:02",
        "step 3/3  reward 0.500 ±0.25  loss +0.1250  Δ –  100 tok/s  left 0:00",
        "eval 3/3  reward 0.500  pass@1 –  length –",
        f"{directory.path}: stopped, exit code 75: stopped on request; --resume goes on",
        "stopped on request",
    ]
