"""Killed and resumed, a run trains every position once and is the run that was never killed, to the last bit."""

import importlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

import pytest
from conftest import Proof, Run, read_jsonl
from helpers.torchrun import ALONE, launch
from helpers.waiting import HANGS, until
from kills import ENGINES, KILLS, SAVE, Kill, Kills, Outcome
from typer.testing import CliRunner

from rlgen.cli.app import app
from rlgen.errors import UsageError
from rlgen.files import read_json
from rlgen.rollout.read import read_rollouts, rollout_steps
from rlgen.run.directory import RunDirectory

STEPS = 6
ENGINE = ["--set", *ENGINES["transformers"]]


class InThisProcess(Kills):
    """Only what is killed has a process of its own: to import all takes longer than to train."""

    def start(self, command: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
        if environment:
            return super().start(command, **environment)
        found = CliRunner().invoke(app, list(command[3:]))  # after `python -m rlgen`
        return subprocess.CompletedProcess(command, found.exit_code, found.stdout, found.stderr)

    def undisturbed(self, engine: str) -> Path:
        if not (run := self.folder / engine).exists():
            assert self.start(self.command(engine, run)).returncode == 0
        return run


@pytest.fixture(scope="module")
def quick_kills(tmp_path_factory: pytest.TempPathFactory) -> Kills:
    return InThisProcess(tmp_path_factory.mktemp("quick"))


@pytest.fixture(scope="module")
def kills(tmp_path_factory: pytest.TempPathFactory) -> Kills:
    return Kills(tmp_path_factory.mktemp("kills"))


def resumed(kills: Kills, kill: Kill, name: str) -> Outcome:
    """Killed, resumed, and then as if nothing had happened."""
    outcome = kills(kill, name)
    assert outcome.problem is None, outcome
    return outcome


GENERATION = Kill("transformers", "in mid-generation", "after:rlgen.rollout.journal:Journal.answered:5@4")
OTHERS = [
    Kill("transformers", "between rollouts and journal", "before:rlgen.rollout.journal:Journal.retire:1@4"),
    Kill("transformers", "in mid-save", SAVE.format(at=0.6)),
]


@pytest.mark.fault(63, 71)
def test_killed_and_resumed_is_undisturbed(quick_kills: Kills, proof: Proof, one_thread: None) -> None:
    """On the engine that starts fastest; the real vLLM is below."""
    resumed_and_equal(quick_kills, GENERATION, proof)


@pytest.mark.slow
@pytest.mark.fault(63, 71)
@pytest.mark.parametrize("kill", OTHERS, ids=["rollouts", "save"])
def test_killed_while_files_are_written(kills: Kills, kill: Kill, proof: Proof) -> None:
    resumed_and_equal(kills, kill, proof)


def resumed_and_equal(kills: Kills, kill: Kill, proof: Proof) -> None:
    name = kill.words.replace(" ", "_")
    outcome = resumed(kills, kill, name)
    proof(f"exit -9, {outcome.fired}; resumed and equal")
    run = kills.folder / name
    assert [record["step"] for record in read_jsonl(run / "metrics.jsonl")] == list(range(1, STEPS + 1))
    rows = [row for step in rollout_steps(run / "rollouts") for row in read_rollouts(run, step).to_pylist()]
    trained = [(row["group_id"], row["sample_index"]) for row in rows]
    assert len(set(trained)) == len(trained) == STEPS * 16 and {group for group, _ in trained} == set(range(STEPS * 4))
    # what belonged to steps after the checkpoint was in the journal, and is in the rollouts again
    assert not (run / "logs" / "attempt_1" / "rollouts").exists()
    assert [path.name for path in (run / "journal").glob("step_*")] == []
    assert read_json(run / "status.json")["exit_code"] == 0 and len(read_json(run / "provenance.json")) == 2


@pytest.mark.slow
def test_killed_between_prompts_with_images(kills: Kills) -> None:
    """Answers about images come from the journal again, and the images themselves from the data."""
    resumed(kills, Kill("images", "in mid-generation", GENERATION.instant), "images_killed")
    rows = [row for step in range(1, STEPS + 1) for row in read_rollouts(kills.folder / "images_killed", step).to_pylist()]
    assert {len(row["images"]) for row in rows} == {0, 1}
    assert {image["path"] for row in rows for image in row["images"]} == {None} and "base64" not in str(rows)


@pytest.mark.slow
def test_killed_with_experts_that_only_the_journal_has(kills: Kills) -> None:
    """Two steps were trained and written after the checkpoint: their answers come from the journal, with their experts."""
    resumed(kills, Kill("experts", "before a save", "after:rlgen.run.directory:RunDirectory.write_metrics:1@4"), "experts_killed")
    log = "".join(path.read_text() for path in (kills.folder / "experts_killed" / "logs").rglob("*.log"))
    assert "sampled again" not in log and "model.route_replay: off" not in log


@pytest.mark.slow
@pytest.mark.fault(63)
def test_killed_among_further_prompts_with_an_adapter(kills: Kills, proof: Proof) -> None:
    kill = Kill("adapter", "after the rewards of a second round", "after:rlgen.rollout.journal:Journal.score:2@3")
    outcome = resumed(kills, kill, "further")
    assert read_jsonl(kills.folder / "further" / "metrics.jsonl")[2]["groups/resampled"] > 0
    proof(f"LoRA, a step that asks for further prompts: exit -9, {outcome.fired}; resumed and equal")


@pytest.mark.slow
@pytest.mark.fault(63)
@pytest.mark.parametrize(
    ("kind", "instant"),
    [
        ("preferences", "after:torch.optim.adamw:AdamW.step:2@4"),  # between two updates
        ("reference", "after:torch.optim.adamw:AdamW.step:1@4"),
        ("evaluated", "after:rlgen.trainers.evaluate:Evaluator.groups:1@4"),
        ("evaluated", "before:rlgen.run.directory:RunDirectory.write_metrics:1@4"),
        ("evaluated", "file:/evals/:1@4"),
        ("evaluated", "half:rlgen.run.directory:RunDirectory.write_metrics:1@0"),  # of the evaluation before step 1
    ],
)
def test_killed_in_other_kinds_of_runs(kills: Kills, kind: str, instant: str, proof: Proof) -> None:
    outcome = resumed(kills, Kill(kind, "at an instant", instant), f"{kind}_{re.sub(r'[^A-Za-z0-9._]', '_', instant)}")
    proof(f"{' '.join(ENGINES[kind][1:])}: exit -9, {outcome.fired}; resumed and equal")


def test_every_instant_is_one_of_the_code() -> None:
    """A kill names the function that it interrupts, which may have moved."""
    for kill in KILLS:
        if not kill.instant.startswith("file:"):
            _, module, function, _ = kill.instant.split(":")
            assert callable(attrgetter(function)(importlib.import_module(module))), kill


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.fault(63, 71)
@pytest.mark.parametrize("number", range(1, len(KILLS) + 1))
def test_killed_at_one_of_50_instants(kills: Kills, number: int, proof: Proof) -> None:
    kill = KILLS[number - 1]
    outcome = resumed(kills, kill, f"kill{number:02}")
    proof(f"{kill.engine}: exit -9, {outcome.fired}; resumed and equal")


@pytest.mark.slow
def test_a_termination_saves_and_exits_75(rlgen: Run, recipe_file: Path) -> None:
    directory, settings = recipe_file.parent / "run", [*ENGINE, "--set", "checkpoint={every: 3}"]
    endless = ["--max-steps", "1000000"]  # however late the signal comes
    process = subprocess.Popen(
        [sys.executable, "-m", "rlgen", "train", str(recipe_file), "--run-dir", str(directory), *settings, *endless],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    metrics = directory / "metrics.jsonl"
    until(lambda: process.poll() is not None or (metrics.exists() and len(metrics.read_text().splitlines()) >= 2))
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=HANGS) == 75
    status = read_json(directory / "status.json")
    done = status["step"]
    assert (status["state"], status["exit_code"]) == ("stopped", 75) and done >= 2
    assert (directory / "checkpoints" / f"step_{done:06d}").is_dir()
    result = rlgen("train", recipe_file, "--run-dir", directory, "--resume", *settings, "--max-steps", done + 2)
    assert result.returncode == 0 and f"resuming after step {done}" in result.stdout
    assert len(read_jsonl(directory / "metrics.jsonl")) == done + 2


@pytest.mark.fault(71)
def test_what_is_beyond_the_resumed_step_is_kept_apart(tmp_path: Path, proof: Proof) -> None:
    directory = RunDirectory.create(tmp_path / "run", "", "")
    (directory.logs / "attempt_7").mkdir()  # those before were deleted
    (directory.logs / "rlgen.log").write_text("first")
    for step in (1, 2, 3):
        directory.write_metrics({"step": step})
        (directory.rollouts / f"step_{step:06d}.parquet").write_text(str(step))
    with directory.metrics.open("a") as file:
        file.write('{"step": 4, "lo')
    (directory.path / ".status.json.123").write_text("{")  # killed between writing and renaming
    (directory.rollouts / ".step_000004.parquet.123").write_text("{")
    (directory.rollouts / "step_000002.parquet").unlink()
    (directory.rollouts / "step_000002.parquet").mkdir()  # of several processes
    (directory.rollouts / "step_000002.parquet" / ".part-00001.parquet.123").write_text("{")
    directory.cut(2)
    attempt = directory.logs / "attempt_8"
    assert directory.metrics.read_text() == '{"step": 1}\n{"step": 2}\n'
    assert (attempt / "metrics.jsonl").read_text() == '{"step": 3}\n{"step": 4, "lo'
    assert sorted(path.name for path in directory.rollouts.iterdir()) == ["step_000001.parquet", "step_000002.parquet"]
    assert [path.name for path in directory.journal.iterdir()] == ["step_000003.parquet"], "the run takes its samples again"
    assert sorted(path.name for path in attempt.rglob("*")) == ["metrics.jsonl", "rlgen.log"]
    assert [path.name for path in directory.path.rglob(".*")] == [".lock", ".reserve"]
    proof("metrics of steps 3 and, torn, 4 and rollouts of 3 were there; cut at 2")


# Prints what each child died of, at each instant of `RunDirectory.create`.
KILLED_CREATES = """
import sys
from pathlib import Path
from helpers.instants import Instants, in_child
from rlgen.run.directory import RunDirectory

def create(run, fatal):
    Instants(run, fatal, torn=True)
    RunDirectory.create(run, "recipe", "resolved")
    return 0

for instant in range(100):
    died, _ = in_child(lambda: create(Path(sys.argv[1], f"killed_{instant}"), instant))
    print(died, flush=True)
    if died != 9:
        break
"""


@pytest.mark.fault(63)
def test_killed_while_the_directory_is_made_blocks_nothing(tmp_path: Path, proof: Proof) -> None:
    ended = launch("-c", KILLED_CREATES, tmp_path, launcher=ALONE, timeout=HANGS)
    *died, last = map(int, ended.stdout.split())
    assert set(died) == {signal.SIGKILL} and last == 0 and len(died) > 8, ended.stderr
    for instant in range(len(died)):
        run = tmp_path / f"killed_{instant}"
        RunDirectory.create(run, "recipe", "resolved").close()
        left = {path.name: path.read_text() for path in run.iterdir() if path.name in ("recipe.yaml", "resolved.yaml")}
        assert left == {"recipe.yaml": "recipe", "resolved.yaml": "resolved"}, instant
        assert {path.name for path in run.glob(".*")} == {".lock", ".reserve"}, instant
    for foreign in ("notes.txt", "checkpoints/step_000001", "status.json"):
        other = tmp_path / foreign.replace("/", "_")
        (other / foreign).mkdir(parents=True)
        with pytest.raises(UsageError, match="already holds a run"):
            RunDirectory.create(other, "recipe", "resolved")
    proof(f"SIGKILL at {len(died)} of {len(died)} instants of it, the last file half there: -9 each; the same start succeeds")
