"""`rlgen checkpoints` says what there is, finds every damage, and never takes the last good one."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Proof
from helpers.damage import flip
from typer.testing import CliRunner

from rlgen.cli.app import app
from rlgen.cli.checkpoints import list_command, prune_command, verify_command
from rlgen.errors import CheckpointError, UsageError
from rlgen.run.checkpoint_folder import CheckpointFolder
from rlgen.run.directory import RunDirectory, pinned_step
from rlgen.run.manifest import seal

FACTS = {"time": 1.7e9, "rlgen": "0", "trainer": "grpo", "processes": 1, "model": {}}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """Checkpoints of steps 1 to 4, with a file of random bytes each; nothing is as large as a model."""
    directory = RunDirectory.create(tmp_path / "run", "recipe", "resolved")
    for step in (1, 2, 3, 4):
        folder = directory.checkpoints / f"step_{step:06d}"
        folder.mkdir()
        (folder / "data").write_bytes(os.urandom(5000))
        seal(folder, {"step": step, **FACTS})
    directory.close()
    yield directory.path


def damage(run: Path, step: int) -> None:
    flip(run / "checkpoints" / f"step_{step:06d}" / "data", 1)


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_list_looks_and_verify_reads(run: Path) -> None:
    damage(run, 3)
    (run / "checkpoints" / "step_000002" / "data").unlink()
    CheckpointFolder(run / "checkpoints").set_aside(run / "checkpoints" / "step_000001")
    listed = CliRunner().invoke(app, ["checkpoints", "list", str(run), "--json"])
    assert listed.exit_code == 0
    rows = {row["step"]: row for row in json.loads(listed.stdout)}
    found = {step: (row["complete"], row["set_aside"]) for step, row in rows.items()}
    assert found == {2: (False, False), 3: (True, False), 4: (True, False), 1: (True, True)}  # 3 is of the right size: not read
    assert rows[2]["problem"].endswith("step_000002: data is missing") and rows[4]["bytes"] > 5000
    assert rows[4]["time"] == 1.7e9 and rows[4]["verified"] is None
    text = CliRunner().invoke(app, ["checkpoints", "list", str(run)]).stdout
    assert "set aside: complete" in text and "data is missing" in text and len(text.splitlines()) == 4


@pytest.mark.fault(65)
def test_verify_names_all_that_is_damaged(run: Path, capsys: pytest.CaptureFixture[str], proof: Proof) -> None:
    verify_command(run, None, True)
    assert [row["verified"] for row in json.loads(capsys.readouterr().out)] == [True] * 4
    damage(run, 2)
    damage(run, 4)
    with pytest.raises(CheckpointError) as caught:
        verify_command(run, None, True)
    assert caught.value.exit_code == 8
    assert all(f"step_00000{step}: data has other bytes" in str(caught.value) for step in (2, 4))
    assert [row["verified"] for row in json.loads(capsys.readouterr().out)] == [True, False, True, False]
    verify_command(run, 3, True)
    with pytest.raises(UsageError, match="no checkpoint of step 9"):
        verify_command(run, 9, True)
    with pytest.raises(UsageError, match="holds no run"):
        verify_command(run.parent, None, False)
    shutil.rmtree(run / "checkpoints")  # to make room
    capsys.readouterr()
    list_command(run)
    assert capsys.readouterr().out == f"{run}: no checkpoints\n"
    proof(str(caught.value)[-90:])


@pytest.mark.fault(67)
def test_prune_keeps_good_ones(run: Path, capsys: pytest.CaptureFixture[str], proof: Proof) -> None:
    folder = CheckpointFolder(run / "checkpoints")
    damage(run, 4)
    folder.set_aside(run / "checkpoints" / "step_000001")
    (run / "checkpoints" / ".writing_000005").mkdir()
    held = RunDirectory.reopen(run)
    with pytest.raises(UsageError, match="in use by a running rlgen"):
        prune_command(run, 1, False)
    held.close()
    assert names(run) == [".writing_000005", "set_aside", "step_000002", "step_000003", "step_000004"]
    prune_command(run, 1, True)
    report = json.loads(capsys.readouterr().out)
    assert report["kept"] == ["step_000003"] and len(report["removed"]) == 4 and report["freed_bytes"] > 15000
    assert names(run) == ["set_aside", "step_000003"] and folder.aside() == []
    damage(run, 3)
    with pytest.raises(CheckpointError, match="has no good checkpoint; nothing was deleted"):
        prune_command(run, 1, False)
    assert names(run) == ["set_aside", "step_000003"]
    proof("newest of four damaged, keep 1: the good one before it stays; with none good nothing goes")


@pytest.mark.fault(67)
def test_the_best_one_is_never_pruned(run: Path, capsys: pytest.CaptureFixture[str], proof: Proof) -> None:
    """Step 0 has no checkpoint, and of steps 2 and 3, which are as good, the first is the best."""
    rewards = {0: 9.0, 1: 0.1, 2: 0.5, 3: 0.5, 4: 0.2}
    lines = [json.dumps({"step": step, "eval/reward/mean": reward}) + "\n" for step, reward in rewards.items()]
    (run / "metrics.jsonl").write_text("".join(lines) + '{"step": 5, "eval/reward/mean": 0')
    (run / "resolved.yaml").write_text("eval: {best: true}\n")
    listed = CliRunner().invoke(app, ["checkpoints", "list", str(run), "--json"])
    assert [row["step"] for row in json.loads(listed.stdout) if row["best"]] == [2]
    gone = [run / "checkpoints" / name for name in ("step_000001", "step_000003")]
    assert CheckpointFolder(run / "checkpoints").rotate(1, pinned_step(run)) == gone
    prune_command(run, 1, True)
    assert json.loads(capsys.readouterr().out)["kept"] == ["step_000002", "step_000004"] == names(run)
    (run / "resolved.yaml").write_text("eval: {best: false}\n")
    assert pinned_step(run) is None
    prune_command(run, 1, True)
    assert names(run) == ["step_000004"]
    (run / "resolved.yaml").write_text("eval: {best: true}\n")
    assert pinned_step(run) == 4, "step 2 is better, but gone"
    proof("of steps 1 to 4, step 2 is the best: rotated and pruned to steps 2 and 4")
