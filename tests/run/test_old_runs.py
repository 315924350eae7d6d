"""A run that rlgen trained at commit 614f252, before keys and metrics got their present names, is resumed and read."""

import shutil
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import read_jsonl
from helpers.runs import bare_run
from typer.testing import CliRunner

from rlgen.analysis.run import read_run
from rlgen.cli import evaluate
from rlgen.cli.app import app
from rlgen.errors import RecipeError
from rlgen.rollout.read import rollout_steps
from rlgen.run.directory import read_records
from rlgen.setup.change import with_changes

TRAINED_AT = "/tmp/oldrun"  # its recipe says ./model


def rlgen(*words: str) -> str:
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.output
    return found.output


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of three steps, with its recipe and model in the present folder."""
    with tarfile.open(Path(__file__).with_name("run_of_614f252.tar.xz")) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "old"
    resolved = run / "resolved.yaml"
    resolved.write_text(resolved.read_text().replace(TRAINED_AT, str(tmp_path)))
    return run


def test_an_old_run_is_resumed_and_read(old: Path) -> None:
    assert "refill: 1" in (old / "resolved.yaml").read_text() and "groups/replaced" in (old / "metrics.jsonl").read_text()
    said = rlgen("train", "recipe.yaml", "--resume", "--set", "run.steps=5", "--set", "checkpoint={every: 1, keep: 2}")
    assert "rollout.refill is called rollout.dynamic_sampling now" in said and "5 of 5 steps" in said
    assert "dynamic_sampling: 1" in (old / "resolved.yaml").read_text()
    assert [record["step"] for record in read_jsonl(old / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    assert all("is/ratio_max" in record and "is/raw_max" not in record for record in read_records(old / "metrics.jsonl"))
    assert rollout_steps(old / "rollouts") == [1, 2, 3, 4, 5]

    for step in ("3", "4"):  # one of the old code, one of today's
        assert "recorded" in rlgen("replay", "old", "--step", step)
        assert "answer" in rlgen("rollouts", "old", "--step", step)
    # From the checkpoint of step 4, because steps 1 to 3 may be of another processor.
    assert "the same to the last bit" in rlgen("replay", "old", "--step", "5")
    assert "5 steps" in rlgen("report", "old", "--out", "report.html")
    shutil.copytree(old, old.with_name("copy"))
    assert "copy" in rlgen("compare", "old", "copy")


def test_what_is_refused_today_is_no_mistake_of_an_old_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = bare_run(tmp_path / "run", [0.5])
    resolved = run / "resolved.yaml"
    resolved.write_text(resolved.read_text().replace("rollout:\n", "rollout:\n  max_staleness: 1\n"))
    recipe = read_run(run).recipe
    assert recipe.rollout.max_staleness == 1
    assert with_changes(resolved, recipe, ["trainer.beta=0.5"])[1] == {"trainer.beta": (0.0, 0.5)}
    monkeypatch.setattr(evaluate, "read_manifest", lambda _: SimpleNamespace(step=1))
    assert evaluate.checkpoint_of(recipe, run / "checkpoints" / "step_000001").model == recipe.model
    resolved.write_text(resolved.read_text().replace("structured_regex: null", "structured_regex: x"))
    assert read_run(run).recipe.structured_regex == "x"  # beside trainer.correction
    with pytest.raises(RecipeError, match=r"so trainer.correction would be wrong"):
        with_changes(resolved, recipe, ["trainer.beta=0.5"])
