"""Killed and resumed, a run trains every position once and is the run that was never killed, to the last bit."""

import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from conftest import read_jsonl
from helpers.waiting import HANGS, until
from kills import ENGINES, KILLS, RECIPE, SAVE, Kill, Kills
from typer.testing import CliRunner

from rlgen.cli import prove
from rlgen.cli.app import app
from rlgen.cli.train import train_command
from rlgen.errors import CheckpointError, UsageError
from rlgen.files import read_json
from rlgen.rollout.frames import Answer, frame
from rlgen.run.directory import RunDirectory
from rlgen.run.rollouts import read_rollouts, rollout_steps

Run = Callable[..., subprocess.CompletedProcess[str]]
Proof = Callable[[str], None]
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
    outcome = kills(kill, name)
    assert outcome.problem is None, outcome
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
    outcome = kills(Kill("images", "in mid-generation", "after:rlgen.rollout.journal:Journal.answered:5@4"), "images_killed")
    assert outcome.problem is None, outcome
    rows = [row for step in range(1, STEPS + 1) for row in read_rollouts(kills.folder / "images_killed", step).to_pylist()]
    assert {len(row["images"]) for row in rows} == {0, 1}
    assert {image["path"] for row in rows for image in row["images"]} == {None} and "base64" not in str(rows)


@pytest.mark.slow
@pytest.mark.fault(63)
def test_killed_among_further_prompts_with_an_adapter(kills: Kills, proof: Proof) -> None:
    kill = Kill("adapter", "after the rewards of a second round", "after:rlgen.rollout.journal:Journal.score:2@3")
    outcome = kills(kill, "further")
    assert outcome.problem is None, outcome
    assert read_jsonl(kills.folder / "further" / "metrics.jsonl")[2]["groups/resampled"] > 0
    proof(f"LoRA, a step that asks for further prompts: exit -9, {outcome.fired}; resumed and equal")


@pytest.mark.slow
@pytest.mark.fault(63)
@pytest.mark.parametrize("what", ["preferences", "reference"])
def test_killed_between_two_updates_or_beside_a_reference(kills: Kills, what: str, proof: Proof) -> None:
    update = 2 if what == "preferences" else 1
    outcome = kills(Kill(what, f"after update {update}", f"after:torch.optim.adamw:AdamW.step:{update}@4"), f"killed_{what}")
    assert outcome.problem is None, outcome
    proof(f"{' '.join(ENGINES[what][1:])}: exit -9, {outcome.fired}; resumed and equal")


@pytest.mark.slow
@pytest.mark.fault(63)
@pytest.mark.parametrize(
    "instant",
    [
        "after:rlgen.trainers.evaluate:Evaluator.groups:1@4",
        "before:rlgen.run.directory:RunDirectory.write_metrics:1@4",
        "file:/evals/:1@4",
        "half:rlgen.run.directory:RunDirectory.write_metrics:1@0",  # of the evaluation before step 1
    ],
)
def test_killed_in_an_evaluation(kills: Kills, instant: str, proof: Proof) -> None:
    outcome = kills(Kill("evaluated", "in an evaluation", instant), re.sub(r"[^A-Za-z0-9._]", "_", instant))
    assert outcome.problem is None, outcome
    proof(f"evaluated each step: exit -9, {outcome.fired}; resumed and equal")


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
    outcome = kills(kill, f"kill{number:02}")
    assert outcome.problem is None, outcome
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


@pytest.mark.slow
@pytest.mark.fault(17, 68, 69)
def test_a_run_never_writes_into_anothers_directory(rlgen: Run, kills: Kills, tmp_path: Path, proof: Proof) -> None:
    run, recipe = kills.undisturbed("transformers"), kills.recipe

    def times() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file() and path.name != ".lock"}

    before = times()
    taken = rlgen("train", recipe, "--run-dir", run)
    assert taken.returncode == 2 and "already holds a run; go on with --resume" in taken.stderr
    other = rlgen("train", recipe, "--run-dir", run, "--resume", *ENGINE, "--set", "run.seed=1")
    assert other.returncode == 2 and "run.seed: 3 -> 1" in other.stderr
    none = rlgen("train", recipe, "--run-dir", tmp_path / "nothing", "--resume")
    assert none.returncode == 2 and "holds no run to resume" in none.stderr
    assert before == times()
    done = rlgen("train", run / "recipe.yaml", "--run-dir", run, "--resume", *ENGINE)
    assert done.returncode == 0 and f"already complete, {STEPS} steps" in done.stdout
    proof("taken, another seed, no run: exit 2 each, no file changed; the finished run resumed: exit 0")


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


# Forks a child for each instant of `RunDirectory.create`, in which it dies: just before a file is opened to be written, flushed,
# renamed or removed, or a folder made. What it had opened last has the half of its bytes. Prints what each of them died of.
KILLED_CREATES = """
import os, signal, sys
from rlgen.run.directory import RunDirectory
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate")

def create(run, fatal):
    seen, last = [], []
    def reached(what):
        seen.append(what)
        if len(seen) == fatal:
            if last and os.path.exists(last[-1]):
                seen.append("cut")
                os.truncate(last[-1], os.stat(last[-1]).st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
    def hear(event, values):
        if event == "open" and str(values[0]).startswith(run) and values[2] & (os.O_WRONLY | os.O_RDWR):
            reached("open " + os.path.basename(values[0]))
            last.append(values[0])
        elif event in CHANGES:
            reached(event)
    flush = os.fsync
    os.fsync = lambda file: (reached("fsync"), flush(file))
    sys.addaudithook(hear)
    RunDirectory.create(__import__("pathlib").Path(run), "recipe", "resolved")

for fatal in range(1, 100):
    if (child := os.fork()) == 0:
        try:
            create(f"{sys.argv[1]}/killed_{fatal}", fatal)
        finally:
            os._exit(0)
    died = os.waitpid(child, 0)[1]
    print(died, flush=True)
    if died != signal.SIGKILL:
        break
"""


@pytest.mark.fault(63)
def test_killed_while_the_directory_is_made_blocks_nothing(tmp_path: Path, proof: Proof) -> None:
    ended = subprocess.run([sys.executable, "-c", KILLED_CREATES, tmp_path], capture_output=True, text=True, timeout=HANGS)
    *died, last = map(int, ended.stdout.split())
    assert set(died) == {signal.SIGKILL} and last == 0 and len(died) > 8, ended.stderr
    for instant in range(1, len(died) + 1):
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


def proven(monkeypatch: pytest.MonkeyPatch, folder: Path, reward: str) -> Path:
    """Everything in this process; the run that is killed is one that ends before its last checkpoint."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.replace("{use: exact_match}", '{use: "judge.py:judge"}'))
    (folder / "judge.py").write_text(reward)

    def run(words: list[str], log: Path) -> None:
        place = Path(words[words.index("--run-dir") + 1])
        settings = [words[at + 1] for at, word in enumerate(words) if word == "--set"]
        steps = int(words[words.index("--max-steps") + 1])
        train_command(recipe, settings, "--resume" in words, False, steps, place)

    def kill(recipe: Path, settings: list[str], steps: int, every: int, parent: Path, patience: float) -> str:
        run(prove.command(recipe, settings, steps, parent / "killed"), parent / "log")
        shutil.rmtree(parent / "killed" / "checkpoints" / "step_000004")
        return "killed"

    monkeypatch.setattr(prove, "run", run)
    monkeypatch.setattr(prove, "kill", kill)
    return recipe


@pytest.mark.slow
def test_prove_resume_says_yes_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = proven(monkeypatch, tmp_path, "def judge(completion_ids):\n    return len(completion_ids)\n")
    prove.prove_command(recipe, ENGINES["transformers"], None, tmp_path / "mine")
    assert capsys.readouterr().out.splitlines()[-1].startswith("yes: killed, resumed, and equal to the undisturbed run")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["judge.py", "recipe.yaml"]


@pytest.mark.slow
def test_prove_resume_names_the_first_difference(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recipe = proven(monkeypatch, tmp_path, "import os\n\ndef judge():\n    return os.urandom(1)[0] / 256\n")
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
    monkeypatch.setattr(prove, "run", lambda *values: pytest.fail("a run was started"))
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

    monkeypatch.setattr(prove, "run", run)
    monkeypatch.setattr(prove, "kill", kill)
    words = ["train", str(recipe_file), "--prove-resume", "--probe-max", "--run-dir", str(recipe_file.parent / "mine")]
    for least in (prove.LEAST, 1.0):
        monkeypatch.setattr(prove, "LEAST", least)
        with pytest.raises(CheckpointError, match="far enough"):
            app([*words, "--set", "run.seed=5"], standalone_mode=False)
    settings = [[of_one[at + 1] for at, word in enumerate(of_one) if word == "--set"] for of_one in started]
    assert len(settings) == 4
    assert all(one == ["run.seed=5", "run.probe_max=true", "checkpoint.every=2"] for one in settings), settings
    assert waits == [60.0, 30.0]


def test_prove_resume_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The run to be killed hangs before it samples anything; once it is there, 3 s pass by a clock of this test."""
    pids = tmp_path / "pids"
    clock = SimpleNamespace(monotonic=lambda: 3.5 if pids.exists() and pids.read_text() else 0.0, sleep=time.sleep)
    monkeypatch.setattr(prove, "time", clock)
    code = f"import os, time; open({str(pids)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    monkeypatch.setattr(prove, "command", lambda *values: [sys.executable, "-c", code])
    with pytest.raises(CheckpointError, match=r"killed in step 4 of 4 did not reach it in 3 s, .*; see .*killed_1\.log"):
        prove.kill(tmp_path / "recipe.yaml", [], 4, 2, tmp_path, 3.0)
    assert not psutil.pid_exists(int(pids.read_text()))


def test_the_run_to_be_killed_has_its_checkpoint_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Sampled ahead, answers of the step are there earlier."""
    answer = Answer(0, 0, "asked", "engine", {0: "w0"}, bytes(4), bytes(4), "stop", [(0, 1, 0)], 0)
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
    assert prove.kill(tmp_path / "recipe.yaml", [], 4, 2, tmp_path, HANGS).startswith(
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
