"""Whatever happens to one of several processes, all end, and one says why; a slow one ends nobody."""

import re
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch
from conftest import Proof, read_jsonl
from helpers.rollouts import rollout_rows
from helpers.torchrun import (
    ALONE,
    ENVIRONMENT,
    PRECISE,
    Running,
    farthest,
    faulty,
    launch,
    nothing_is_left,
    recipe,
    same_rollouts,
    train_words,
    weights,
    well,
)
from helpers.train_state import equal

from rlgen import processes
from rlgen.errors import RewardError
from rlgen.files import read_json
from rlgen.processes import Processes
from rlgen.run.manifest import check_files

__all__ = ["nothing_is_left", "recipe"]
SHARDED, IMPATIENT = "processes.strategy=fsdp", "processes.timeout=5"
FAILS = """
def fails_in_process_1(completion_ids):
    import os
    return 0.5 if os.environ["RANK"] == "0" else 1 / 0
"""


def ended_badly(ended: subprocess.CompletedProcess[str], directory: Path, code: int, message: str) -> None:
    """The status holds the code, and one of the processes said why."""
    status = read_json(directory / "status.json")
    assert (status["state"], status["exit_code"]) == ("failed", code), (status, ended.stderr[-3000:])
    assert message in status["message"] and ended.stderr.count(message) == 1, ended.stderr[-3000:]
    assert ended.returncode != 0


@pytest.mark.slow
@pytest.mark.fault(75)
def test_the_reward_of_one_process_fails(recipe: Path, tmp_path: Path, proof: Proof) -> None:
    recipe.with_name("fails.py").write_text(FAILS)
    words = train_words(recipe, tmp_path / "run", "rewards=[{use: 'fails.py:fails_in_process_1'}]")
    ended = launch("-m", "rlgen", *words)
    ended_badly(ended, tmp_path / "run", 5, "process 1: reward fails_in_process_1, prompt at position 2, sample 0: Zero")
    proof("a reward that divides by zero in process 1 of 2")


UNANSWERED = "did not answer for 5 s (processes.timeout)"
NO_SPACE = "step_000002 cannot be written: [Errno 28] No space left on device; free space or change run.dir"
# Fault -> (processes that have it, one after the other; settings; exit code; what one process says)
ENDED: dict[str, tuple[str, list[str], int, str]] = {
    "one_engine_loses_a_tensor": ("1", [], 6, "stale_tensor: the engine computes with earlier values of model.layers.1."),
    "one_hangs_in_c": ("01", [IMPATIENT], 9, UNANSWERED),
    "one_sleeps": ("1", [IMPATIENT], 9, UNANSWERED),
    "one_goes_another_way": ("1", [], 9, "the processes execute different code (process 0 at run/signals.py:"),
    "one_has_no_space": ("1", [SHARDED, "run.steps=4", "checkpoint={every: 1, keep: 1}"], 8, NO_SPACE),
}


@pytest.mark.slow
@pytest.mark.fault(70, 75, 76)
@pytest.mark.parametrize(("fault", "rank"), [(fault, rank) for fault, (ranks, *_) in ENDED.items() for rank in ranks])
def test_a_fault_of_one_process_ends_all(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proof: Proof, fault: str, rank: str
) -> None:
    _, settings, code, message = ENDED[fault]
    monkeypatch.setitem(ENVIRONMENT, "FAULTY_RANK", rank)
    began, run = time.monotonic(), tmp_path / "run"
    ended_badly(faulty(fault, recipe, run, *settings, timeout=90), run, code, message)
    if fault == "one_has_no_space":  # it writes beside the loop: the error comes to all, and the checkpoint before stands
        assert read_json(run / "status.json")["message"].startswith("process 1: ")
        assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_000001"], "and nothing half-written"
        check_files(run / "checkpoints" / "step_000001", hashes=True)
    proof(f"{fault} in process {rank} of 2: exit {code}, all gone after {time.monotonic() - began:.0f} s, starts included")


MEMORY = r"process 1( failed)?: the memory does not suffice for {}.*CUDA out of memory; peak "


@pytest.mark.slow
@pytest.mark.timed
@pytest.mark.fault(41, 75)
@pytest.mark.parametrize(
    ("fault", "strategy", "code", "message"),
    [
        ("one_backward_fails", "ddp", 70, "process 1 failed: .*a bug after"),
        ("one_backward_fails", "fsdp", 70, "process 1 failed: .*a bug after"),
        ("one_lacks_memory_in_optimizer", "ddp", 3, MEMORY.format("the optimizer step")),
        ("one_lacks_memory_in_scoring", "ddp", 3, MEMORY.format("log-probs of ")),
        ("one_lacks_memory_in_backward", "fsdp", 3, MEMORY.format("the backward pass of ")),
    ],
)
def test_one_process_fails_while_it_learns(
    recipe: Path, tmp_path: Path, proof: Proof, fault: str, strategy: str, code: int, message: str
) -> None:
    began = time.monotonic()
    ended = faulty(fault, recipe, tmp_path / "run", f"processes.strategy={strategy}")
    status = read_json(tmp_path / "run" / "status.json")
    assert status["exit_code"] == code and ended.returncode != 0, (status, ended.stderr[-3000:])
    assert re.match(message, status["message"], re.S) and ended.stderr.count("error: ") == 1, ended.stderr[-3000:]
    assert code == 70 or "this is a bug" not in ended.stderr
    assert time.monotonic() - began < 60, "long before the others' patience ends"
    proof(f"{fault}: process 1 of 2, {strategy}; both end, exit {code}")


@pytest.mark.slow
@pytest.mark.fault(45, 46)
@pytest.mark.parametrize("what", ["gradient", "loss"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_what_is_not_finite_in_one_process_is_skipped_by_all(
    recipe: Path, tmp_path: Path, what: str, strategy: str, proof: Proof
) -> None:
    """And they ask for the same further prompts."""
    settings = ["run.steps=3", "rollout.dynamic_sampling=2", "checkpoint.every=1"]
    fault, two = f"one_{what}_is_not_finite", tmp_path / "two"
    ended = well(faulty(fault, recipe, two, *settings, f"processes.strategy={strategy}"))
    assert ended.stdout.count("planted in process 1") == 1 and "planted in process 0" not in ended.stdout
    assert equal(weights(two, 1), weights(two, 2))
    # In step 3 the sentinel compares each process's engine, which has its own weights, and finds them equal.
    records = read_jsonl(two / "metrics.jsonl")
    assert [record["updates/skipped"] for record in records] == [0, 1, 0] and records[2]["updates/done"] == 1
    assert [record["groups/resampled"] for record in records] == [3, 2, 3]  # 0 3 6, 9 12, 15 18 21
    assert {row["group_id"] for row in rollout_rows(two) if row["trained"] and row["group_id"] % 3 == 0} == set()
    if strategy == "fsdp":
        one = tmp_path / "one"
        well(faulty(fault, recipe, one, *settings, launcher=ALONE))
        assert same_rollouts(two, one) and farthest(weights(two, 3), weights(one, 3)) <= PRECISE
    assert read_json(two / "nonfinite" / "step_000002.json")["step"] == 2 and len(rollout_rows(two, 2)) > 10
    assert "step 2: the " in ended.stdout and ended.stdout.count("the update was skipped") == 1
    went_on = " as one process does" if strategy == "fsdp" else ""
    proof(f"NaN in the {what} of process 1 alone ({strategy}): both skipped step 2, and went on{went_on}")


@pytest.mark.slow
@pytest.mark.fault(75)
@pytest.mark.parametrize(
    ("engine", "rank"), [("{kind: transformers}", 0), ("{kind: colocated, tensor_parallel_size: 2}", 1)], ids=["main", "other"]
)
def test_a_killed_process_ends_the_others(recipe: Path, tmp_path: Path, proof: Proof, engine: str, rank: int) -> None:
    """The main one too: then another one writes the status."""
    running = Running(recipe, tmp_path / "run", f"engine={engine}")
    running.process(rank).kill()
    ended = running.end(timeout=30)
    assert f"Signal 9 (SIGKILL) received by PID {running.pids[rank]}" in ended.stderr
    ended_badly(ended, tmp_path / "run", 9, "another process was killed or did not answer")
    assert not running.left()
    proof(f"SIGKILL to process {rank} of 2, told by torchrun")


@pytest.mark.slow
@pytest.mark.timed
@pytest.mark.fault(75)
def test_a_process_that_hangs_ends_all_within_the_timeout(recipe: Path, tmp_path: Path, proof: Proof) -> None:
    """Stopped, it hears no SIGTERM: its launcher would wait 30 seconds for it."""
    running = Running(recipe, tmp_path / "run", "processes.timeout=4")
    running.process(1).suspend()
    began = time.monotonic()
    ended_badly(running.end(timeout=30), tmp_path / "run", 9, "did not answer for 4 s (processes.timeout)")
    assert 4 < time.monotonic() - began < 4 + 15 and not running.left()
    proof(f"SIGSTOP to process 1 of 2; all gone after {time.monotonic() - began:.0f} s with a timeout of 4 s")


# Fault -> (process that has it; settings; steps in which a phase takes longer than the timeout)
SLOW: dict[str, tuple[str, list[str], dict[str, list[bool]]]] = {
    "one_is_slow": ("0", ["run.steps=1"], {"time/reward": [True], "time/generate": [True]}),
    "one_has_a_slow_disk": ("1", [SHARDED, "run.steps=1"], {}),
    "one_samples_for_long": ("1", ["run.steps=3"], {"time/generate": [False, False, True]}),
}


@pytest.mark.slow
@pytest.mark.fault(75)
@pytest.mark.parametrize("fault", SLOW)
def test_what_takes_one_process_longer_than_the_timeout_ends_nobody(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proof: Proof, fault: str
) -> None:
    """It waits for a judge, then for answers before a sync, then for a disk; or samples for 15 s; and the others wait for it."""
    (rank, settings, slow), run = SLOW[fault], tmp_path / "run"
    monkeypatch.setitem(ENVIRONMENT, "FAULTY_RANK", rank)
    well(faulty(fault, recipe, run, IMPATIENT, *settings, timeout=200))
    records = read_jsonl(run / "metrics.jsonl")
    assert {key: [record[key] > 7 for record in records] for key in slow} == slow
    assert read_json(run / "status.json")["exit_code"] == 0
    if "run.steps=1" in settings:
        check_files(run / "checkpoints" / "step_000001", hashes=True)
    proof(f"{fault} in process {rank} of 2: waits of 7 s and more with a timeout of 5 s")


@pytest.mark.slow
@pytest.mark.fault(75)
def test_a_process_that_samples_what_others_replay_ends_nobody(recipe: Path, tmp_path: Path, proof: Proof) -> None:
    run = tmp_path / "run"
    assert faulty("one_fails_the_first_time", recipe, run, IMPATIENT, "run.steps=3", timeout=90).returncode == 1
    (run / "journal" / "step_000003.rank1.bin").unlink()
    well(faulty("one_samples_for_long", recipe, run, IMPATIENT, "run.steps=3", resume=True, timeout=90))
    record = read_jsonl(run / "metrics.jsonl")[-1]
    assert record["step"] == 3 and record["time/generate"] > 15
    proof("one process took its answers from the journal, the other one sampled for 15 s with a timeout of 5 s")


def test_the_reason_of_a_failure_outlives_the_loss_of_the_others() -> None:
    """Who fails while another process is killed says why it failed, not that the other one is gone."""
    others = Processes(rank=0, world=2, device=torch.device("cpu"), timeout=1, group=None, store=None)

    def gone(*_: object, **__: object) -> None:
        raise RuntimeError("Connection closed by peer")

    def fails() -> None:
        raise RewardError("the judge is away")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RewardError) as caught:
        patch.setattr(processes.dist, "all_gather_object", gone)
        others.run_all(fails)
    assert not processes.lost(caught.value)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError) as gone_too:
        patch.setattr(processes.dist, "all_gather_object", gone)
        others.run_all(int)
    assert processes.lost(gone_too.value)


@pytest.mark.slow
@pytest.mark.timed
@pytest.mark.fault(76)
def test_a_process_that_skips_a_step_ends_all_in_time(recipe: Path, tmp_path: Path, proof: Proof) -> None:
    began = time.monotonic()
    ended = faulty("one_skips_a_step", recipe, tmp_path / "run", IMPATIENT)
    status = read_json(tmp_path / "run" / "status.json")
    assert ended.returncode != 0 and (status["state"], status["step"]) == ("failed", 0), ended.stderr[-3000:]
    assert status["exit_code"] == 9 and time.monotonic() - began < 60
    proof("process 1 of 2 adds no gradient: ended by the timeout of 5 s")


@pytest.mark.slow
@pytest.mark.fault(78)
def test_without_their_launcher_the_processes_stop(recipe: Path, tmp_path: Path, proof: Proof) -> None:
    running = Running(recipe, tmp_path / "run")
    running.launcher.kill()
    running.launcher.communicate(timeout=30)
    assert psutil.wait_procs(running.processes, timeout=20)[1] == [], "it ended, and they did not"
    status = read_json(tmp_path / "run" / "status.json")
    assert (status["state"], status["exit_code"]) == ("stopped", 75) and "because its launcher is gone" in status["message"]
    assert (tmp_path / "run" / "checkpoints" / f"step_{status['step']:06d}").is_dir()
    proof("SIGKILL to torchrun")
