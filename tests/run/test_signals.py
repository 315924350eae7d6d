"""Asked to stop in any phase, a run saves what it has trained, says so, and goes on as if nobody had asked."""

import hashlib
import os
import random
import signal
import threading
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import RECIPE, Proof, read_jsonl
from helpers.before import before
from helpers.recipes import written
from helpers.rollouts import records_but_times
from helpers.slow import slow_but
from helpers.spread import SPREAD
from helpers.waiting import HANGS, until

from rlgen.cli.train import train_command
from rlgen.errors import RlgenError, UsageError
from rlgen.files import read_json
from rlgen.processes import Processes
from rlgen.recipe import load_recipe
from rlgen.recipe.fields import moment
from rlgen.rewards.score import EarlyScoring
from rlgen.rollout.sampler import Sampler
from rlgen.run import clock, writing
from rlgen.run.checkpoint import Checkpoints, seed_random
from rlgen.run.console import Console
from rlgen.run.signals import LEAST, MARGIN, Deadline, StopNow, StopRequest
from rlgen.run.writing import Writer
from rlgen.setup import attempt, policy, trainer, trainer_and_engine
from rlgen.trainers import loop
from rlgen.trainers.collect import Collector
from rlgen.trainers.train_batch import TrainBatch
from rlgen.trainers.update import Updater

STEPS = 3
# The transformers engine, so that starts are quick; a checkpoint in mid-run, whose save can be disturbed.
SETTINGS = [
    *("engine={kind: transformers}", f"run.steps={STEPS}", "rollout.max_completion_tokens=6", "checkpoint={every: 2}"),
    "rewards=[{use: 'spread.py:spread'}]",
]

# phase -> (what is called in it, its how-manieth call, steps that are trained when the run has stopped)
PHASES: dict[str, tuple[Any, str, int, int]] = {
    "load": (policy, "build_policy", 1, 0),
    "engine": (trainer_and_engine, "build_engine", 1, 0),
    "ladder": (trainer, "record_attempt", 1, 0),
    "generation of step 1": (Sampler, "groups", 1, 0),
    "generation": (Sampler, "groups", 3, 2),
    "reward": (EarlyScoring, "result", 2, 1),
    "window": (TrainBatch, "of", 2, 2),
    "backward": (Updater, "_run", 2, 2),
    "sync": (loop, "send_weights", 2, 2),
    "save": (Writer, "start", 1, 2),
    "last save": (Writer, "start", 2, 3),
    "writing": (writing, "seal", 2, 3),  # beside the loop, which waits for the last one
}


def train(recipe: Path, directory: Path, *overrides: str, resume: bool = False) -> int:
    """The exit code, as `status.json` and the error have it."""
    seed_random("a program that starts")
    recipe.with_name("spread.py").write_text(SPREAD)
    try:
        train_command(recipe, [*SETTINGS, *overrides], resume, False, None, directory)
        code = 0
    except RlgenError as error:
        code = error.exit_code
        assert read_json(directory / "status.json")["message"] == str(error)
    except KeyboardInterrupt:
        code = 130
    assert read_json(directory / "status.json")["exit_code"] == code
    return code


def when(monkeypatch: pytest.MonkeyPatch, phase: str, *numbers: int) -> list[int]:
    """Sends this process signals when the phase comes; with the signals that were sent."""
    owner, name, turn, _ = PHASES[phase]
    calls: list[int] = []
    sent: list[int] = []

    def sends(*_: object) -> None:
        calls.append(1)
        if len(calls) == turn:
            if phase in ("generation", "reward"):
                random.random()  # of a step that is given up: as if it had never been drawn
            for number in numbers:
                sent.append(number)
                os.kill(os.getpid(), number)

    before(owner, name, sends, monkeypatch.setattr)
    return sent


def draw(patch: pytest.MonkeyPatch) -> None:
    before(Collector, "rewarded", lambda *_: random.random(), patch.setattr)


@pytest.fixture
def drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step draws from Python's random numbers: their state is part of what is resumed."""
    draw(monkeypatch)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        draw(patch)
        assert train(written(folder, RECIPE), folder / "run") == 0
    assert all(row["grad_norm"] > 1e-3 for row in read_jsonl(folder / "run" / "metrics.jsonl"))
    return folder / "run"


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def left(directory: Path) -> dict[str, Any]:
    """All that a run leaves, but for times and names."""
    last = directory / "checkpoints" / f"step_{STEPS:06d}"
    return {
        "metrics": records_but_times(directory),
        "rollouts": {path.name: digest(path) for path in (directory / "rollouts").glob("step_*.parquet")},
        "checkpoint": {str(path.relative_to(last)): digest(path) for path in last.rglob("*.safetensors")},
    }


@pytest.mark.fault(73)
@pytest.mark.parametrize("phase", slow_but(PHASES, "generation", "writing"))
def test_a_stop_in_each_phase(
    recipe_file: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch, drawing: None, proof: Proof, phase: str
) -> None:
    directory, trained = recipe_file.parent / "run", PHASES[phase][3]
    number = signal.SIGUSR1 if phase == "reward" else signal.SIGTERM
    with monkeypatch.context() as patch:
        sent = when(patch, phase, number)
        code = train(recipe_file, directory)
    assert sent == [number]
    proof(f"{signal.Signals(number).name} sent to itself in {phase}")
    status = read_json(directory / "status.json")
    saved = sorted(path.name for path in (directory / "checkpoints").iterdir())
    if trained == STEPS:  # too late to be stopped
        assert (code, status["state"]) == (0, "done")
    else:
        assert (code, status["state"]) == (75, "stopped") and "go on with --resume" in status["message"]
        assert f"stopped on request ({signal.Signals(number).name})" in status["message"]
        assert status["step"] == trained and saved == ([f"step_{trained:06d}"] if trained else []), "and nothing half-written"
        assert train(recipe_file, directory, resume=True) == 0
    assert left(directory) == left(undisturbed)


@pytest.mark.slow
@pytest.mark.fault(74)
@pytest.mark.parametrize("phases", [("generation", "save"), ("backward", "backward"), ("save", "save"), ("load", "load")])
def test_a_second_one_stops_at_once(
    recipe_file: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch, drawing: None, proof: Proof, phases: tuple[str, str]
) -> None:
    """What has been asked to stop in generation saves at once: there the second one comes."""
    directory = recipe_file.parent / "run"
    with monkeypatch.context() as patch:
        twice = [signal.SIGINT] * (2 if phases[0] == phases[1] else 1)
        sent = [when(patch, phase, *twice) for phase in dict.fromkeys(phases)]
        code = train(recipe_file, directory, *(["checkpoint.every=3"] if phases[0] == "generation" else []))
    status, saved = read_json(directory / "status.json"), list((directory / "checkpoints").glob("step_*"))
    if phases[0] == "load":  # the first one has ended it: nobody is there to hear the second
        assert (code, status["state"]) == (75, "stopped") and sent[0]
    else:
        assert sum(map(len, sent)) == 2 and (code, status["state"]) == (130, "failed")
        assert "stopped at once; --resume goes on from the last checkpoint" in status["message"]
    proof(f"SIGINT in {phases[0]} and again in {phases[1]}")
    assert saved == [], "none was whole yet"
    assert train(recipe_file, directory, resume=True) == 0
    assert left(directory) == left(undisturbed)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.fault(73)
def test_a_stop_in_the_midst_of_vllms_generation(recipe_file: Path, monkeypatch: pytest.MonkeyPatch, proof: Proof) -> None:
    """vLLM has requests under way that nobody will fetch; the trainer has all that it needs, and does not wait for them."""
    directory = recipe_file.parent / "run"
    long = ["engine={kind: colocated}", "rollout.max_completion_tokens=3000", "data.limit=8", "optim.micro_batch_tokens=4000"]
    real, asked, answered, decoded = Sampler.groups, [], [], []

    def groups(sampler: Any, step: int, prompts: Any) -> Any:
        asked.append(step)
        vllm = sampler.engine._llm.llm_engine
        decode = vllm.step

        def one_more() -> Any:
            decoded.append(step)
            if len(decoded) == 20:
                os.kill(os.getpid(), signal.SIGTERM)
            return decode()

        vllm.step = one_more
        found = real(sampler, step, prompts)
        answered.append(step)
        return found

    monkeypatch.setattr(Sampler, "groups", groups)
    assert train(recipe_file, directory, *long) == 75
    assert asked == [1] and answered == [] and 20 <= len(decoded) < 100
    proof(f"SIGTERM after 20 of up to 3000 tokens of 16 completions; {len(decoded)} were decoded")


def test_a_signal_is_answered_at_once() -> None:
    """What it leads to depends on where the run is; the second one says so, too, and a launcher's echo says nothing."""
    said: list[str] = []

    def asked(step: int, sampling: bool, launched: bool = False) -> StopRequest:
        stop = StopRequest(launched=launched, answer=said.append)
        stop.step, stop._sampling = step, sampling
        stop.handle(signal.SIGINT, None)
        return stop

    with pytest.raises(KeyboardInterrupt):
        asked(7, False).handle(signal.SIGINT, None)
    asked(7, False, launched=True).handle(signal.SIGTERM, None)
    for step, sampling in ((7, True), (1, True), (0, False)):
        asked(step, sampling)
    assert said == [
        "finishing step 7, then saving; interrupt again to stop now",
        "stopping now; go on with --resume",
        "finishing step 7, then saving; interrupt again to stop now",
        "stopping before step 7, then saving; interrupt again to stop now",
        "stopping before step 1: nothing is lost; interrupt again to stop now",
        "stopping before the first step: nothing is lost; interrupt again to stop now",
    ]


@pytest.mark.parametrize(
    ("phase", "said"), [("generation", "stopping before step 3, then"), ("backward", "finishing step 2, then")]
)
def test_a_run_knows_where_it_is(recipe_file: Path, monkeypatch: pytest.MonkeyPatch, phase: str, said: str) -> None:
    answers: list[str] = []
    monkeypatch.setattr(Console, "answer", lambda console, text: answers.append(text))
    with monkeypatch.context() as patch:
        when(patch, phase, signal.SIGTERM)
        assert train(recipe_file, recipe_file.parent / "run") == 75
    assert answers == [f"{said} saving; interrupt again to stop now"]


# --- deadlines -------------------------------------------------------------------------------------------------------------


@pytest.mark.fault(73)
def test_a_step_is_begun_if_it_and_its_save_fit(proof: Proof) -> None:
    now = 1000.0
    deadline = Deadline(at=1100.0, now=lambda: now)
    assert deadline.fits(), "of the first step nothing is known"
    assert deadline.seconds_to_sample() == 98.0, "nothing would be lost"
    deadline.took(step=20.0, update=4.0, save=0.0)
    now = 1047.0  # a step of 20 s and a save taken for one of 20 s, with margin: 52 s
    assert deadline.fits()
    now = 1049.0
    assert not deadline.fits() and deadline.seconds_to_sample() == 19.0, "30 s for an update of 4 s and its save, and 2 s"
    deadline.took(step=20.0, update=8.0, save=4.0)  # now it is known what a save takes: 32 s with margin
    now = 1067.0
    assert deadline.fits()
    now = 1069.0
    assert not deadline.fits()
    deadline.took(step=8.0, update=2.0, save=2.0)  # the longest ones count
    assert not deadline.fits() and deadline.seconds_to_sample() == 14.0
    proof("a clock that a test sets, past what a step and a save need")


def test_a_save_that_goes_on_beside_the_step_must_end_first() -> None:
    deadline = Deadline(at=1100.0, now=lambda: 1000.0)
    deadline.took(step=4.0, update=2.0, save=0.0, saving=20.0)  # the first save: it takes 20 s at least
    assert deadline.seconds_to_sample() == 100 - MARGIN * (2 + 20) - LEAST
    deadline.took(step=4.0, update=2.0, save=30.0)
    assert deadline.seconds_to_sample() == 100 - MARGIN * (2 + 30) - LEAST
    deadline.took(step=4.0, update=2.0, save=30.0, saving=10.0)  # 20 s more, then 30 s for the next one
    assert deadline.seconds_to_sample() == 100 - MARGIN * (20 + 30) - LEAST and deadline.fits()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("3h50m", 13800), ("90s", 90), ("1d", 86400), ("1970-01-01T01:00:00+01:00", -50), ("1970-01-01T00:01:40Z", 50)],
)
def test_times_and_durations(text: str, seconds: float) -> None:
    assert moment(text, began=50.0) - 50.0 == seconds


@pytest.mark.parametrize("value", ["soon", "''", "0s", "-5m", "2026-11-22T03:50:00", "99999d", "9999999999s", "5", "3.5h"])
def test_what_is_no_deadline_is_refused(recipe_file: Path, value: str) -> None:
    with pytest.raises(RlgenError, match="must_save_by") as caught:
        load_recipe(recipe_file, [f"run.must_save_by={value}"])
    assert caught.value.exit_code == 2


def test_a_deadline_that_has_passed_is_refused(recipe_file: Path) -> None:
    with pytest.raises(UsageError, match=r"run\.must_save_by 2020-01-01T00:00:00Z has passed") as caught:
        train_command(recipe_file, ["run.must_save_by=2020-01-01T00:00:00Z"], False, False, None, recipe_file.parent / "run")
    assert caught.value.exit_code == 2 and not (recipe_file.parent / "run").exists()


class Turned:
    """A clock that stands still but for what takes said seconds by it. The durations of steps and saves are its."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self._patch = 0.0, monkeypatch
        monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def takes(self, seconds: float, owner: Any, name: str) -> None:
        def takes(*_: object) -> None:
            self.now += seconds

        before(owner, name, takes, self._patch.setattr)


@pytest.mark.slow
@pytest.mark.fault(73)
def test_a_run_saves_before_its_deadline(recipe_file: Path, monkeypatch: pytest.MonkeyPatch, proof: Proof) -> None:
    """By a clock on which a step takes 2000 s, of which its update takes 1500 s, and a save 3000 s."""
    directory, turned = recipe_file.parent / "run", Turned(monkeypatch)
    turned.takes(500.0, Sampler, "groups")
    turned.takes(1500.0, Updater, "_run")
    turned.takes(1000.0, Writer, "start")
    turned.takes(2000.0, writing, "seal")
    began = time.time() + 1e6  # long enough before a time that is past, however long it takes to begin
    monkeypatch.setattr(attempt, "Deadline", partial(Deadline, now=lambda: began + turned.now))
    text = datetime.fromtimestamp(began + 20_000, UTC).isoformat()
    code = train(recipe_file, directory, f"run.must_save_by={text}", "checkpoint.every=50", "run.steps=50")
    # After step 7, 6000 s are left: one more and a save that is taken for as long, with margin, need 5002 s. After it, 4000 s.
    status = read_json(directory / "status.json")
    assert (code, status["step"], turned.now) == (75, 8, 19_000.0)
    assert "stopped for run.must_save_by after step 8" in status["message"]
    assert [path.name for path in (directory / "checkpoints").iterdir()] == ["step_000008"]
    proof("stopped after step 8 and saved 1000 s before the deadline, by a clock that a test turns")


@pytest.mark.slow
@pytest.mark.fault(73)
def test_a_generation_that_would_end_too_late_is_given_up(
    recipe_file: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch, drawing: None, proof: Proof
) -> None:
    """The third one never ends; in the midst of it, there is just time for an update and its save."""
    directory, by = recipe_file.parent / "run", StopRequest.by
    stops: list[StopRequest] = []
    begun: list[int] = []

    def never_ends(sampler: Any, step: int, prompts: Any) -> None:
        begun.append(step)
        if step == 3:
            by(stops[0], Deadline(at=time.time() + LEAST + 0.1))
            threading.Event().wait(HANGS)

    with monkeypatch.context() as patch:
        before(Sampler, "groups", never_ends, patch.setattr)
        before(StopRequest, "by", lambda stop, deadline: stops.append(stop), patch.setattr)
        code = train(recipe_file, directory, "run.must_save_by=30d", "checkpoint.every=50")
    assert code == 75 and begun == [1, 2, 3]
    status = read_json(directory / "status.json")
    assert status["step"] == 2 and "stopped for run.must_save_by after step 2" in status["message"]
    assert [path.name for path in (directory / "checkpoints").iterdir()] == ["step_000002"]
    proof("a generation that never ends was given up when the deadline came near, and all before it was saved")
    assert train(recipe_file, directory, resume=True) == 0
    assert left(directory) == left(undisturbed)


def test_the_first_signal_after_a_deadline_is_no_haste_and_the_timer_ends_with_those_who_listen() -> None:
    with StopRequest(launched=False).listening() as stop:
        stop.by(Deadline(at=time.time() + LEAST + 0.3))
        until(lambda: stop.why)
        assert stop.why == "for run.must_save_by"
        stop.handle(signal.SIGTERM, None)  # of a batch system, say, while all is saved
        with pytest.raises(KeyboardInterrupt):
            stop.handle(signal.SIGTERM, None)
    with StopRequest(launched=False).listening() as stop:
        timers = []
        # The last but one is longer than a thread can wait.
        for at in (time.time() + HANGS, moment("9999-12-31T00:00:00Z", 0.0), time.time() + HANGS):
            stop.by(Deadline(at=at))
            timers.append(stop._timer)
        assert [timer.finished.is_set() for timer in timers if timer] == [True, True, False]
        until(lambda: timers[2] in threading.enumerate())
    assert timers[2] is not None and timers[2].finished.is_set(), "an unheard SIGUSR2 would kill this process"
    assert stop.why == "" and signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL


@pytest.mark.slow
def test_a_deadline_hears_of_steps_and_of_their_saves_apart(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which sampling, updates and saves take said times, and all else none.

    The metrics count the time of a save to the step after it, the deadline to none.
    """
    turned, heard = Turned(monkeypatch), []
    turned.takes(0.25, Sampler, "groups")
    turned.takes(1.5, Updater, "_run")
    turned.takes(1.0, Writer, "start")
    turned.takes(3.0, writing, "seal")
    save = Checkpoints.save

    def saves(checkpoints: Checkpoints, *values: Any) -> Path:
        path = save(checkpoints, *values)
        assert checkpoints._writer is not None
        checkpoints._writer.result()  # so that only one of the two threads turns the clock at a time
        return path

    monkeypatch.setattr(Checkpoints, "save", saves)
    before(Deadline, "took", lambda deadline, *seconds: heard.append(seconds), monkeypatch.setattr)
    directory = recipe_file.parent / "run"
    assert train(recipe_file, directory, "run.must_save_by=1h") == 0  # saves after step 2 and after the last one
    assert heard == [(1.75, 1.5, 0.0, None), (1.75, 1.5, 0.0, 4.0), (1.75, 1.5, 4.0, None)]
    assert [row["time/step"] for row in read_jsonl(directory / "metrics.jsonl")] == [1.75, 1.75, 5.75]


# --- requests ----------------------------------------------------------------------------------------------------------------


def test_a_launcher_repeats_itself_and_a_person_insists(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("rlgen.run.signals.time.monotonic", lambda: now)
    stop = StopRequest(launched=True)
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
        stop.handle(number, None)
    now = 110.0
    stop.handle(signal.SIGTERM, None)  # a process that ended first makes it stop the others
    with pytest.raises(KeyboardInterrupt):
        stop.handle(signal.SIGINT, None)


def test_without_its_launcher_a_process_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    for launched, stops in ((True, True), (False, False)):  # a run of its own may outlive the shell that started it
        stop = StopRequest(launched=launched)
        stop.check(Processes.alone())
        with monkeypatch.context() as patch:
            patch.setattr(os, "getppid", lambda: 1)
            if stops:
                with pytest.raises(StopNow):
                    stop.check(Processes.alone())
                assert stop.why == "because its launcher is gone"
            else:
                stop.check(Processes.alone())
