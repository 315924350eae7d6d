"""One attempt of a run, through the Python API and as `rlgen train` starts it."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CPU, ROOT, read_jsonl, tiny_model
from helpers.before import before
from safetensors.torch import load_file

from rlgen.cli.doctor import examine
from rlgen.cli.train import train_command
from rlgen.errors import DataError, UsageError
from rlgen.files import read_json
from rlgen.processes import Processes
from rlgen.recipe import load_recipe
from rlgen.run import directory as run_directory
from rlgen.run.compare import first_difference
from rlgen.run.directory import RunDirectory
from rlgen.run.signals import StopRequest
from rlgen.sentinel import rungs
from rlgen.setup import TrainOptions, attempt, data, policy, probe, train, train_state, trainer, trainer_and_engine

TRANSFORMERS = "engine={kind: transformers}"


@pytest.mark.slow
def test_the_python_api_trains_as_the_command_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    smoke, said = ROOT / "recipes" / "smoke.yaml", []
    directory = train(smoke, TrainOptions(overrides=[TRANSFORMERS], max_steps=2, run_dir=tmp_path / "api"), said.append)
    assert directory == tmp_path / "api"
    assert said == ["note: checkpoint.every 3 is above run.steps 2: only the last step is saved"]
    assert read_json(directory / "status.json")["state"] == "done"
    assert [row["step"] for row in read_jsonl(directory / "metrics.jsonl")] == [1, 2]
    assert "step 2/2" in capsys.readouterr().out
    before, after = tiny_model("qwen3").state_dict(), load_file(directory / "checkpoints" / "step_000002" / "model.safetensors")
    moved = [name for name, tensor in after.items() if not torch.equal(tensor, before[name])]
    assert len(moved) > len(after) / 2, "the weights of the model have moved"
    train_command(smoke, [TRANSFORMERS], False, False, 2, tmp_path / "command")
    assert first_difference(directory, tmp_path / "command") is None
    options = TrainOptions(overrides=[TRANSFORMERS], max_steps=3, run_dir=directory, resume=True)
    assert train(smoke, options) == directory
    assert [row["step"] for row in read_jsonl(directory / "metrics.jsonl")] == [1, 2, 3], "it goes on"


def test_a_dry_run_and_a_contradiction_start_nothing(recipe_file: Path) -> None:
    place = recipe_file.parent / "Läufe 🌱" / "dry"
    written = attempt.write_resolved(recipe_file, TrainOptions(overrides=[TRANSFORMERS], max_steps=7, run_dir=place))
    assert written == place / "resolved.yaml" and load_recipe(written, []).recipe.run.steps == 7
    with pytest.raises(UsageError, match="--clean deletes what --resume goes on from"):
        TrainOptions(clean=True, resume_step=3)


def recorded(monkeypatch: pytest.MonkeyPatch, functions: list[Callable[..., Any]]) -> list[str]:
    """Notes each call of these functions, whichever module of rlgen calls it."""
    calls: list[str] = []

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **options: Any) -> Any:
            calls.append(function.__name__)
            return function(*arguments, **options)

        return noted

    for function in functions:
        instead = noting(function)
        for module in [module for name, module in sys.modules.items() if name.startswith("rlgen.")]:
            for name in [name for name, value in vars(module).items() if value is function]:
                monkeypatch.setattr(module, name, instead)
    return calls


def test_doctor_and_train_open_by_the_same_functions(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = [
        data.open_data,
        trainer_and_engine.open_trainer_and_engine,
        policy.open_policies,
        trainer_and_engine.build_engine,
        train_state.open_train_state,
        train_state.restore,
    ]
    order += [probe.probe_of]
    for module in (trainer, rungs):
        monkeypatch.setattr(module, "climb", lambda *_: [])  # what is opened is tested, not what it measures
    calls = recorded(monkeypatch, order)
    examine(load_recipe(recipe_file, [TRANSFORMERS]).recipe, recipe_file.parent, print, False, False, Processes.alone())
    of_doctor = list(calls)
    calls.clear()
    train(recipe_file, TrainOptions(overrides=[TRANSFORMERS], max_steps=1, run_dir=recipe_file.parent / "run"))
    assert of_doctor == calls == [function.__name__ for function in order]


def run_as_another(recipe: Path, directory: RunDirectory) -> None:
    """As a process that is not the main one."""
    other = Processes(rank=1, world=2, device=CPU, timeout=1, group=None, store=None)
    attempt.run_with_status(load_recipe(recipe, []), directory, TrainOptions(), other, StopRequest(launched=True))


@pytest.mark.parametrize(("code", "said"), [(70, "process 1 failed"), (None, "no memory")])
def test_another_process_speaks_only_for_a_main_one_that_was_killed(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int | None, said: str
) -> None:
    directory = RunDirectory.create(tmp_path / "run", "", "")
    directory.write_status("running" if code is None else "failed", 3, 9, code, "" if code is None else "process 1 failed")

    def fails(*_: object) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(attempt, "run", fails)
    monkeypatch.setattr(Processes, "reports_end", lambda processes: True)  # the main one is gone
    with pytest.raises(MemoryError):
        run_as_another(recipe_file, directory)
    assert (directory.status()["exit_code"], directory.status()["message"]) == (70, said)


def test_only_the_main_process_reads_the_status_that_it_replaces(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RunDirectory.create(tmp_path / "run", "", "")

    def status(_: RunDirectory) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    ran: list[object] = []
    monkeypatch.setattr(attempt, "run", lambda *given: ran.append(given))
    monkeypatch.setattr(RunDirectory, "status", status)
    run_as_another(recipe_file, directory)
    assert len(ran) == 1


@pytest.mark.parametrize("there", [False, True])
def test_a_failed_start_leaves_only_what_was_there(recipe_file: Path, tmp_path: Path, there: bool) -> None:
    place = tmp_path / "runs" / "deep" / "run"
    if there:
        place.mkdir(parents=True)
    options = TrainOptions(overrides=[TRANSFORMERS, "data={source: none.jsonl}"], run_dir=place)
    with pytest.raises(DataError, match=r"none\.jsonl: there is no such file"):
        train(recipe_file, options)
    assert (tmp_path / "runs").exists() == there
    assert not there or read_json(place / "status.json")["exit_code"] == 4
    (tmp_path / "runs").mkdir(exist_ok=True)
    (tmp_path / "runs" / "other").mkdir()
    with pytest.raises(DataError):
        train(recipe_file, options)
    assert (tmp_path / "runs" / "other").is_dir() and place.exists() == there


def test_of_two_starts_at_once_the_loser_deletes_nothing(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, lock, held = tmp_path / "runs" / "run", run_directory._lock, []

    def first(path: Path) -> None:
        held.append(lock(path))  # as another process, after this one saw that there is no folder
        (path / "resolved.yaml").touch()

    before(run_directory, "_lock", first, monkeypatch.setattr)
    monkeypatch.setattr(run_directory, "PATIENCE", 0.0)
    with pytest.raises(UsageError, match="in use by a running rlgen"):
        train(recipe_file, TrainOptions(overrides=[TRANSFORMERS], run_dir=place))
    assert (place / "resolved.yaml").exists()
    os.close(*held)


@pytest.mark.slow
def test_collections_leave_out_what_was_imported_and_nothing_later() -> None:
    script = """
import gc
from rlgen.setup.attempt import import_parts
collected = gc.get_stats()[2]["collections"]
import_parts()
frozen = gc.get_freeze_count()
assert frozen > 100_000 and gc.isenabled()
assert gc.get_stats()[2]["collections"] == collected + 1  # of what was there before
garbage = [[] for _ in range(1000)]
import_parts()
assert gc.get_freeze_count() <= frozen
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_damaged_line_of_the_metrics_is_told(recipe_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At the step of the checkpoint: no later step trains it again."""
    run = recipe_file.parent / "run"
    train_command(recipe_file, [TRANSFORMERS, "run.steps=2"], False, False, None, run)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text(lines[0] + lines[1][:40])
    train_command(recipe_file, [TRANSFORMERS, "run.steps=3"], True, False, None, run)
    assert "warning: metrics.jsonl has no whole line of step 2: a line was damaged" in capsys.readouterr().out
    assert [row["step"] for row in read_jsonl(run / "metrics.jsonl")] == [1, 3]


# What libraries print goes to a file of the run, without secrets; what rlgen prints stays on the screen.
HIDDEN = """
import os, subprocess, sys
from pathlib import Path
from rlgen.setup.attempt import OutputToFile
from rlgen.run.console import Console, own_stream

print("held back", end="")
with Console(2, file=own_stream(sys.stdout)) as console, OutputToFile() as hidden:
    hidden.to(Path(sys.argv[1]) / "first.log")
    print("python")
    console.say(" said")
    os.write(2, b"from C, key sk-abcdefghijklmnopqrstuvwx\\n")
    hidden.to(Path(sys.argv[1]) / "second.log")
    subprocess.run(["echo", "a child"])
    console.say("said too")
print("afterwards")
"""


def test_only_rlgen_reaches_the_screen(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", HIDDEN, str(tmp_path)], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "held back said\nsaid too\nafterwards\n", "")
    assert sorted((tmp_path / "first.log").read_text().splitlines()) == ["from C, key [redacted]", "python"]
    assert (tmp_path / "second.log").read_text() == "a child\n"


def test_an_error_is_seen(tmp_path: Path) -> None:
    script = HIDDEN.replace('console.say("said too")', "raise ValueError('why')")
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.rstrip().endswith("ValueError: why")
