"""`--prove-resume`: kills a run, resumes it, and says whether it is the run that was never killed."""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from conftest import Proof, Run
from helpers.waiting import HANGS, until
from kills import ENGINES, RECIPE

from rlgen.cli import prove
from rlgen.cli.app import app
from rlgen.cli.train import train_command
from rlgen.errors import CheckpointError, UsageError
from rlgen.rollout.frames import AnswerRecord, frame

ENGINE = ["--set", *ENGINES["transformers"]]


@pytest.mark.slow
def test_prove_resume_names_the_first_difference(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Everything in this process; the run that is killed is one that ends before its last checkpoint."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.replace("{use: exact_match}", '{use: "judge.py:judge"}'))
    (tmp_path / "judge.py").write_text("import os\n\ndef judge():\n    return os.urandom(1)[0] / 256\n")

    def run(words: list[str], log: Path) -> None:
        place = Path(words[words.index("--run-dir") + 1])
        settings = [words[at + 1] for at, word in enumerate(words) if word == "--set"]
        steps = int(words[words.index("--max-steps") + 1])
        train_command(recipe, settings, "--resume" in words, False, steps, place)

    def kill(recipe: Path, settings: list[str], steps: int, every: int, parent: Path, patience: float) -> str:
        run(prove.command(recipe, settings, steps, parent / "killed"), parent / "log")
        shutil.rmtree(parent / "killed" / "checkpoints" / "step_000004")
        return "killed"

    monkeypatch.setattr(prove, "run_logged", run)
    monkeypatch.setattr(prove, "run_killed", kill)
    with pytest.raises(
        CheckpointError, match=r"rollouts/step_000001.parquet, step 1, sample 0, rewards: .*judge.* If a reward or a GPU kernel"
    ):
        prove.prove_command(recipe, ENGINES["transformers"], None, tmp_path / "mine")
    (left,) = tmp_path.glob("mine.prove-resume-*")
    assert (left / "undisturbed" / "metrics.jsonl").exists() and (left / "killed" / "metrics.jsonl").exists()
    with pytest.raises(UsageError, match=r"--max-steps 1: .* give at least 2"):
        prove.prove_command(recipe, [], 1, None)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--resume"], "--resume"),
        (["--resume-step", "1"], "--resume-step"),
        (["--allow-changed-rewards"], "--allow-changed-rewards"),
        (["--clean"], "--clean"),
        (["--dry-run"], "--dry-run"),
        (["--clean", "--resume-step", "2"], "--resume-step and --clean"),
    ],
)
def test_prove_resume_refuses_what_is_said_of_one_run(
    monkeypatch: pytest.MonkeyPatch, recipe_file: Path, given: list[str], named: str
) -> None:
    monkeypatch.setattr(prove, "run_logged", lambda *values: pytest.fail("a run was started"))
    with pytest.raises(UsageError, match=f": leave {named} out$"):
        app(["train", str(recipe_file), "--prove-resume", *given], standalone_mode=False)
    assert [path.name for path in recipe_file.parent.iterdir()] == ["recipe.yaml"]


def test_prove_resume_hands_on_what_was_asked_and_how_long_to_wait(monkeypatch: pytest.MonkeyPatch, recipe_file: Path) -> None:
    """The run that is killed has ten times as long as the undisturbed one took, which takes 3 s by a clock of this test."""
    started: list[list[str]] = []
    waits: list[float] = []
    monkeypatch.setattr(prove, "time", SimpleNamespace(monotonic=lambda: 3.0 * len(started)))

    def run(words: list[str], log: Path) -> None:
        started.append(words)

    def kill(recipe: Path, settings: list[str], steps: int, every: int, folder: Path, patience: float) -> str:
        started.append(prove.command(recipe, settings, steps, folder / "killed"))
        waits.append(patience)
        raise CheckpointError("far enough")

    monkeypatch.setattr(prove, "run_logged", run)
    monkeypatch.setattr(prove, "run_killed", kill)
    words = ["train", str(recipe_file), "--prove-resume", "--probe-max", "--run-dir", str(recipe_file.parent / "mine")]
    for least in (prove.LEAST, 1.0):
        monkeypatch.setattr(prove, "LEAST", least)
        with pytest.raises(CheckpointError, match="far enough"):
            app([*words, "--set", "run.seed=5"], standalone_mode=False)
    settings = [[of_one[at + 1] for at, word in enumerate(of_one) if word == "--set"] for of_one in started]
    assert len(settings) == 4
    assert all(one == ["run.seed=5", "run.probe_max=true", "checkpoint.every=2", "sinks=[]"] for one in settings), settings
    assert waits == [60.0, 30.0]


def test_prove_resume_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The run to be killed hangs before it samples anything; once it is there, 3 s pass by a clock of this test."""
    pids = tmp_path / "pids"
    clock = SimpleNamespace(monotonic=lambda: 3.5 if pids.exists() and pids.read_text() else 0.0, sleep=time.sleep)
    monkeypatch.setattr(prove, "time", clock)
    code = f"import os, time; open({str(pids)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    monkeypatch.setattr(prove, "command", lambda *values: [sys.executable, "-c", code])
    with pytest.raises(
        CheckpointError, match=r"did not reach step 4 of 4, in which it is killed, within 3 s; see .*killed_1\.log"
    ):
        prove.run_killed(tmp_path / "recipe.yaml", [], 4, 2, tmp_path, 3.0)
    assert not psutil.pid_exists(int(pids.read_text()))


def test_the_run_to_be_killed_has_its_checkpoint_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Sampled ahead, answers of the step are there earlier."""
    answer = AnswerRecord(0, 0, "asked", "engine", {0: "w0"}, bytes(4), bytes(4), "stop", [(0, 1, 0)], 0)
    code = f"""
import os, time
os.makedirs("killed/journal")
open("killed/journal/step_000004.bin", "wb").write({frame(answer)!r})
time.sleep(0.5)
os.makedirs("killed/checkpoints/step_000002")
time.sleep(600)
"""
    monkeypatch.setattr(prove, "command", lambda *values: [sys.executable, "-c", code])
    monkeypatch.chdir(tmp_path)
    assert prove.run_killed(tmp_path / "recipe.yaml", [], 4, 2, tmp_path, HANGS).startswith(
        "killed when the journal had 1 answers of step 4"
    )
    assert (tmp_path / "killed/checkpoints/step_000002").exists()


@pytest.mark.slow
@pytest.mark.fault(78)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_prove_resume_leaves_no_run_behind(recipe_file: Path, number: signal.Signals, proof: Proof) -> None:
    """Asked to stop, its terminal closed, or killed, while the first run is under way."""
    words = [
        sys.executable,
        "-m",
        "rlgen",
        "train",
        str(recipe_file),
        "--prove-resume",
        "--run-dir",
        str(recipe_file.parent / "mine"),
        *("--max-steps", "1000000"),  # it does not end by itself
    ]
    prover = subprocess.Popen(
        [*words, *ENGINE], stderr=subprocess.DEVNULL, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL)
    )
    try:
        until(lambda: list(recipe_file.parent.glob("mine.*/undisturbed/status.json")))
        (trains,) = psutil.Process(prover.pid).children()
        assert "--max-steps" in trains.cmdline()
        prover.send_signal(number)
        assert prover.wait(HANGS) == (-number if number == signal.SIGKILL else 130)
        assert psutil.wait_procs([trains], timeout=HANGS)[1] == []
        left = list(recipe_file.parent.glob("mine*"))
        assert len(left) == (number == signal.SIGKILL), left
        proof(f"{number.name} to the prover: its `rlgen train`, process {trains.pid}, has ended too")
    finally:
        prover.kill()
        prover.wait()


@pytest.mark.slow
@pytest.mark.fault(63)
def test_prove_resume_as_a_user_runs_it(rlgen: Run, recipe_file: Path, proof: Proof) -> None:
    mine = recipe_file.parent / "mine"
    result = rlgen("train", recipe_file, "--prove-resume", "--run-dir", mine, *ENGINE)
    assert result.returncode == 0, result.stderr
    assert "yes: killed when the journal had " in result.stdout and " answers of step 4 of 4, resumed" in result.stdout
    assert not list(recipe_file.parent.glob("mine*"))
    proof(result.stdout.splitlines()[-1])
