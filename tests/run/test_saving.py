"""A save stops the loop for a snapshot; what is written beside it is that snapshot, and the run ends by what goes wrong there."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import RECIPE, read_jsonl
from helpers.before import before
from helpers.recipes import written
from helpers.train_state import equal, learn, parts, position, save_parts, state
from helpers.waiting import HANGS
from test_signals import left, train

from rlgen.errors import CheckpointError
from rlgen.files import read_json
from rlgen.models.half import replaced
from rlgen.models.weights import base_digest
from rlgen.processes import Processes
from rlgen.recipe.models import LoraRecipe
from rlgen.run import writing
from rlgen.run.checkpoint import Checkpoints, load_checkpoint
from rlgen.run.manifest import check_files, read_manifest
from rlgen.run.signals import StopRequest
from rlgen.run.state import model_facts
from rlgen.trainers.collect import Collector

EVERY = "checkpoint={every: 1, keep: 2}"


class Gate:
    """A writer that stands still in the midst of a checkpoint until it may go on. `events`: what happened, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self.events: list[str] = []
        self.waited_in_vain = False
        seal = writing.seal

        def held(folder: Path, facts: Any, **known: Any) -> Any:
            self.reached.set()
            self.waited_in_vain |= not self.opened.wait(HANGS)
            manifest = seal(folder, facts, **known)
            self.events.append(f"sealed {facts['step']}")
            return manifest

        monkeypatch.setattr(writing, "seal", held)
        before(writing.Writer, "start", lambda *_: self.events.append("begun"), monkeypatch.setattr)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    held = Gate(monkeypatch)
    yield held
    held.opened.set()


def test_an_update_waits_until_the_save_before_it_has_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, checkpoints, go, waited = parts(), Checkpoints(tmp_path, 2, Processes.alone()), threading.Event(), list[bool]()
    learn(*mine)
    first = state(*mine)
    before(writing, "copied", lambda *_: waited.append(go.wait(HANGS)), monkeypatch.setattr)
    checkpoints.save(position(1), *mine)
    threading.Timer(0.3, go.set).start()
    learn(*mine)
    assert go.is_set() and checkpoints.complete(wait=True) and waited == [True, True]
    again = parts()
    load_checkpoint(checkpoints.folder.path(1), *again)
    assert equal(state(*again), first) and not equal(state(*mine), first)
    go.clear()
    learn(*mine)  # waits for nothing: no save is going on


@pytest.mark.parametrize("lora", [None, LoraRecipe(rank=4, alpha=8)])
def test_a_save_beside_a_pass_writes_what_the_model_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: LoraRecipe | None
) -> None:
    """In a pass modules have other tensors in the place of their weights: FSDP2's whole ones, or rounded ones."""
    mine, go = parts(lora=lora), threading.Event()
    model, facts = mine[0], model_facts(mine[0])
    places = [(module, name) for module in model.modules() for name in module._parameters]
    asked = list[str]()
    before(writing, "copied", lambda *_: go.wait(HANGS), monkeypatch.setattr)
    checkpoints = Checkpoints(tmp_path, 2, Processes.alone(), base_digest(model) if lora else None)
    path = checkpoints.save(position(1), *mine)
    model.register_state_dict_pre_hook(lambda *_: asked.append("FSDP2 would take the weights of the pass away"))
    with replaced(places, lambda _, weight: weight.detach().bfloat16()):
        go.set()
        assert checkpoints.complete(wait=True)
    assert read_manifest(path).model == facts and not asked
    load_checkpoint(path, *parts(lora=lora))


def test_an_interrupt_before_the_thread_begins_leaves_nothing_to_wait_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, checkpoints = parts(), Checkpoints(tmp_path, 2, Processes.alone())
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        before(writing.Writer, "start", lambda *_: signal.raise_signal(signal.SIGINT), patch.setattr)
        checkpoints.save(position(1), *mine)
    assert checkpoints.close() is None and not checkpoints.complete(wait=True)
    learn(*mine)  # an update waits for no copy
    checkpoints.save(position(2), *mine)
    assert checkpoints.complete(wait=True) and checkpoints.folder.path(2).is_dir()


def test_what_is_written_is_what_was_when_the_save_began(tmp_path: Path, gate: Gate) -> None:
    """The loop trains on and draws on while the writer is busy, and begins the next save only after it."""
    mine, checkpoints = parts(), Checkpoints(tmp_path, 2, Processes.alone())
    learn(*mine)
    first = state(*mine)
    path = checkpoints.save(position(1), *mine)
    drawn = torch.rand(4)
    assert gate.reached.wait(HANGS) and not path.exists()
    assert not checkpoints.complete(wait=False) and not checkpoints.folder.has(1), "it is being written"
    learn(*mine)
    now = state(*mine)
    assert not any(torch.equal(now[name], first[name]) for name in first if name.endswith(("exp_avg", "proj.weight")))
    threading.Timer(0.3, gate.opened.set).start()
    save_parts(checkpoints, 2, mine)
    assert gate.events == ["begun", "sealed 1", "begun", "sealed 2"] and not gate.waited_in_vain
    assert not checkpoints.complete(wait=True), "there is nothing more"
    for step, saved in ((1, first), (2, now)):
        again = parts()
        assert load_checkpoint(checkpoints.folder.path(step), *again).prompts == 8 * step
        assert equal(state(*again), saved)
        if step == 1:
            assert torch.equal(torch.rand(4), drawn)


@pytest.mark.parametrize("write", ["save_file", "seal"])
def test_a_writer_that_fails_is_heard_at_the_next_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: str) -> None:
    mine, checkpoints = parts(), Checkpoints(tmp_path, 1, Processes.alone())
    save_parts(checkpoints, 1, mine)

    def full(*values: object, **named: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing, write, full)
    checkpoints.save(position(2), *mine)
    with pytest.raises(CheckpointError, match=r"step_000002 cannot be written: .*No space left on device; free space") as caught:
        while not checkpoints.complete(wait=False):
            pass
    assert caught.value.exit_code == 8 and [path.name for path in tmp_path.iterdir()] == ["step_000001"]
    assert not checkpoints.complete(wait=True), "it is said once"
    assert checkpoints.choose().path == tmp_path / "step_000001"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    assert train(written(folder, RECIPE), folder / "run", EVERY) == 0
    return folder / "run"


def test_a_run_goes_on_while_its_checkpoint_is_written(
    recipe_file: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer of step 1 waits until step 2 has sampled; until it is done, the journal keeps what step 1 was trained on."""
    directory, sample = recipe_file.parent / "run", Collector.sample
    begun, journals, in_rollouts, in_vain = threading.Event(), [], [], []

    def waits(folder: Path, facts: Any) -> None:
        if facts["step"] == 1:
            in_vain.append(not begun.wait(HANGS))
            journals.append({path.name for path in (directory / "journal").iterdir()})
            in_rollouts.append((directory / "rollouts" / "step_000001.parquet").exists())

    def samples(collector: Collector, step: int, *rest: Any) -> Any:
        got = sample(collector, step, *rest)
        if step == 2:
            begun.set()
        return got

    before(writing, "seal", waits, monkeypatch.setattr)
    monkeypatch.setattr(Collector, "sample", samples)
    assert train(recipe_file, directory, EVERY) == 0
    assert in_vain == [False], "step 2 came while step 1 was being written"
    # The answers of a step are in the journal until its rollouts are on disk, and in these afterwards.
    assert {"start_000001.jsonl", "start_000002.jsonl"} <= journals[0] and ("step_000001.bin" in journals[0] or in_rollouts[0])
    assert {path.name for path in (directory / "journal").iterdir()} <= {"start_000003.jsonl", "start_000004.jsonl"}
    assert left(directory) == left(undisturbed)


def test_a_run_ends_by_what_its_writer_could_not_write(
    recipe_file: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk fills up while step 2 is written: exit 8, step 1 stands, nothing half-written; and it goes on to the same bits."""
    directory = recipe_file.parent / "run"

    def full(folder: Path, facts: Any) -> None:
        if facts["step"] == 2:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        before(writing, "seal", full, patch.setattr)
        assert train(recipe_file, directory, EVERY) == 8
    status = read_json(directory / "status.json")
    assert status["state"] == "failed" and "step_000002 cannot be written: [Errno 28] No space left" in status["message"]
    assert [path.name for path in (directory / "checkpoints").iterdir()] == ["step_000001"]
    check_files(directory / "checkpoints" / "step_000001", hashes=True)
    assert train(recipe_file, directory, EVERY, resume=True) == 0
    assert left(directory) == left(undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("error", [RuntimeError("a bug"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_run_that_ends_in_mid_step_waits_for_its_writer_unless_it_is_interrupted(
    recipe_file: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch, gate: Gate, error: BaseException
) -> None:
    directory = recipe_file.parent / "run"

    def fails(collector: Collector, step: int, *rest: Any) -> None:
        if step == 2:
            assert gate.reached.wait(HANGS)
            raise error

    with monkeypatch.context() as patch:
        before(Collector, "sample", fails, patch.setattr)
        before(Checkpoints, "close", lambda checkpoints: gate.opened.set(), patch.setattr)
        with pytest.raises(type(error)) if isinstance(error, RuntimeError) else pytest.MonkeyPatch.context():
            assert train(recipe_file, directory, EVERY) == 130
    saved = [path.name for path in (directory / "checkpoints").glob("step_*")]
    assert saved == (["step_000001"] if isinstance(error, RuntimeError) else []) and not gate.waited_in_vain
    assert train(recipe_file, directory, EVERY, resume=True) == 0
    assert left(directory) == left(undisturbed)


@pytest.mark.slow
def test_a_second_interrupt_ends_the_wait_for_the_last_checkpoint(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, give_up = recipe_file.parent / "run", writing.Writer.give_up
    heard, gave_up = threading.Semaphore(0), threading.Event()

    def insists(*_: object) -> None:
        for _ in range(2):  # a signal that comes before the one before it was heard is the same one
            os.kill(os.getpid(), signal.SIGINT)
            assert heard.acquire(timeout=HANGS)
        assert gave_up.wait(HANGS)

    def gives_up(writer: writing.Writer) -> None:
        give_up(writer)
        gave_up.set()

    with monkeypatch.context() as patch:
        before(StopRequest, "handle", lambda *_: heard.release(), patch.setattr)
        before(writing, "seal", insists, patch.setattr)
        patch.setattr(writing.Writer, "give_up", gives_up)
        assert train(recipe_file, directory, "run.steps=1") == 130
    assert not list((directory / "checkpoints").glob("step_*"))
    assert train(recipe_file, directory, "run.steps=1", resume=True) == 0
    assert [row["step"] for row in read_jsonl(directory / "metrics.jsonl")] == [1]
