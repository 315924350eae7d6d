"""One recipe trains the same in one process and in several; whatever happens to one of them, all end, and one says why."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import read_jsonl
from helpers.learner import Parts, equal, parts, save_parts, state
from helpers.rollouts import rollout_rows
from process_worker import TRAINERS
from safetensors.torch import load_file
from torch import Tensor

from rlgen import processes
from rlgen.errors import ProcessError, RewardError
from rlgen.files import read_json
from rlgen.processes import EngineShare, Processes
from rlgen.rollout.read import read_rollouts
from rlgen.run.checkpoint import Checkpoints
from rlgen.run.launch import Launch, asked_for, check_launch
from rlgen.run.manifest import check_files

HERE = Path(__file__).parent
PATHS = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATHS}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
PRECISE = 1e-5  # relative
Proof = Callable[[str], None]
# Completions whose rewards differ, so that every step has something to learn from.
RECIPE = """\
run: {name: test, steps: 2}
model: {path: "tiny:qwen3", dtype: float32}
data: {source: "task:sort", chat: true, max_prompt_tokens: 64}
rewards: [{use: "spread.py:spread"}]
rollout: {prompts_per_step: 5, group_size: 4, max_completion_tokens: 12, temperature: 0.9}
engine: {kind: transformers}
checkpoint: {every: 2, keep: 9}
optim: {learning_rate: 1.0e-4}
"""
REWARD = """\
import os
def spread(completion_ids):
    return sum(completion_ids) % 97 / 97
def fails_in_process_1(completion_ids):
    return 0.5 if os.environ["RANK"] == "0" else 1 / 0
"""


def recipe_of(folder: Path) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(RECIPE)
    path.with_name("spread.py").write_text(REWARD)
    return path


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recipe_of(tmp_path_factory.mktemp("recipe"))


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """However a run ends, none of its processes goes on."""
    yield
    left = [process for process in psutil.Process().children(recursive=True) if "rlgen" in " ".join(process.cmdline())]
    for process in left:
        process.kill()
    assert not left


def launch(*command: object, launcher: list[str] | None = None, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    words = [*(TORCHRUN if launcher is None else launcher), *map(str, command)]
    return subprocess.run(words, capture_output=True, text=True, timeout=timeout, env=ENVIRONMENT)


def train(recipe: Path, directory: Path, *options: str, launcher: list[str] | None = None) -> Path:
    ended = launch("-m", "rlgen", "train", recipe, "--run-dir", directory, *options, launcher=launcher)
    assert ended.returncode == 0, ended.stderr[-3000:]
    directory.with_name(f"{directory.name}.out").write_text(ended.stdout)
    return directory


def alone(recipe: Path, directory: Path, *options: str) -> Path:
    return train(recipe, directory, *options, launcher=[sys.executable])


def weights(directory: Path, step: int) -> dict[str, Tensor]:
    return load_file(directory / "checkpoints" / f"step_{step:06d}" / "model.safetensors")


def gradient(directory: Path) -> Tensor:
    """Of the first step, clipped: what is left of it in the first moments, tensor by tensor."""
    stored = load_file(directory / "checkpoints" / "step_000001" / "state" / "optimizer.safetensors")
    return torch.cat([tensor.flatten().double() for name, tensor in sorted(stored.items()) if name.endswith("/exp_avg")])


def farthest(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest relative distance of a tensor."""
    assert ours.keys() == theirs.keys()
    return max(((ours[name] - theirs[name]).norm() / theirs[name].norm()).item() for name in theirs)


KEPT = ("group_id", "sample_index", "prompt_ids", "completion_ids", "seed", "completion", "rewards", "reward", "trained")


def same_rollouts(ours: Path, theirs: Path) -> bool:
    return [[row[key] for key in KEPT] for row in rollout_rows(ours)] == [
        [row[key] for key in KEPT] for row in rollout_rows(theirs)
    ]


def first_of(directory: Path, steps: int) -> list[list[Any]]:
    """What was sampled and rewarded in the first steps."""
    return [[row[key] for key in KEPT] for row in rollout_rows(directory, *range(1, steps + 1))]


# --- the same training -----------------------------------------------------------------------------------------------


LAYOUTS = {"one": ([sys.executable], 1), "two": (TORCHRUN, 1), "tensor parallel": (TORCHRUN, 2)}


@pytest.fixture(scope="module")
def on_vllm(recipe: Path) -> Callable[[str], Path]:
    """A step of each trainer with vLLM: in one process, in two with an engine each, or in two that share one."""
    own = recipe.with_name("vllm.yaml")
    own.write_text(RECIPE.replace("engine: {kind: transformers}\n", ""))

    @cache
    def trained(layout: str) -> Path:
        (launcher, size), folder = LAYOUTS[layout], recipe.parent / layout
        ended = launch(HERE / "process_worker.py", own, folder, size, *TRAINERS, launcher=launcher, timeout=200)
        assert ended.returncode == 0, ended.stderr[-3000:]
        return folder

    return trained


@pytest.mark.slow  # two processes, GRPO: tests/test_paths.py
@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("layout", ["two", "tensor parallel"])
def test_processes_with_vllm_learn_what_one_learns(on_vllm: Callable[[str], Path], layout: str, trainer: str) -> None:
    one, several = on_vllm("one") / trainer, on_vllm(layout) / trainer
    assert same_rollouts(several, one)
    expected, found = gradient(one), gradient(several)
    assert (found - expected).norm() / expected.norm() <= PRECISE and expected.norm() > 1e-3
    assert farthest(weights(several, 1), weights(one, 1)) <= PRECISE
    (ours,), (theirs,) = (read_jsonl(directory / "metrics.jsonl") for directory in (several, one))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if not name.startswith(("time/", "sampler/", "tokens/padding")) and value is not None:
            assert ours[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


@pytest.fixture(scope="module")
def chain(recipe: Path) -> dict[str, Path]:
    """Six steps in two processes that hold all weights; and by twos in two that hold shards, in one, and again in two."""
    whole = train(recipe, recipe.parent / "whole", "--max-steps", "6")
    parts = train(recipe, recipe.parent / "parts", "--set", "processes.strategy=fsdp")
    shutil.copytree(parts, recipe.parent / "one_more")
    one = alone(recipe, recipe.parent / "one_more", "--resume", "--max-steps", "4")
    shutil.copytree(one, recipe.parent / "two_again")
    again = train(recipe, recipe.parent / "two_again", "--resume", "--max-steps", "6", "--set", "processes.strategy=fsdp")
    return {"whole": whole, "parts": parts, "one": one, "again": again}


@pytest.mark.slow
def test_sharded_weights_learn_what_whole_ones_learn(chain: dict[str, Path]) -> None:
    assert farthest(weights(chain["parts"], 2), weights(chain["whole"], 2)) <= PRECISE
    state = chain["parts"] / "checkpoints" / "step_000002" / "state"
    assert len(list((state / "optimizer").glob("shard-*.safetensors"))) == 2
    assert not [path for path in state.rglob("*") if path.is_file() and path.suffix not in (".safetensors", ".json")], "no pickle"


@pytest.mark.slow
@pytest.mark.fault(64)
def test_a_run_goes_on_in_another_number_of_processes(chain: dict[str, Path], proof: Callable[[str], None]) -> None:
    for name, step in (("one", 4), ("again", 6)):
        assert farthest(weights(chain[name], step), weights(chain["whole"], step)) <= PRECISE, name
    assert same_rollouts(chain["again"], chain["whole"]), "the data goes on where it stood"
    assert [record["step"] for record in read_jsonl(chain["again"] / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert len(read_json(chain["again"] / "provenance.json")) == 3
    for name, stored, run in (("one_more", 2, 1), ("two_again", 1, 2)):
        said = (chain["whole"].parent / f"{name}.out").read_text()
        assert said.count(f"the checkpoint is of {stored} processes, but {run} run: some random states are new") == 1
    proof("2 processes with shards, then 1, then 2 again: weights within 1e-5 of 2 that went through, same rollouts")


@pytest.mark.slow
def test_what_is_loaded_is_what_was_saved_to_the_last_bit(chain: dict[str, Path], tmp_path: Path) -> None:
    """Shards to whole tensors here, to shards again in two processes, and back."""

    def load(path: Path, own: Parts) -> dict[str, Tensor]:
        assert Checkpoints.load(path, *own, Processes.alone()).step == 2
        return state(*own)

    first = parts()
    loaded = load(chain["parts"] / "checkpoints" / "step_000002", first)
    whole = save_parts(Checkpoints(tmp_path / "whole", 1, Processes.alone()), 2, first)
    ended = launch(HERE / "resave.py", whole, tmp_path / "sharded")
    assert ended.returncode == 0, ended.stderr[-3000:]
    again = load(tmp_path / "sharded" / "step_000002", parts())
    assert sum(name.endswith("/exp_avg_sq") for name in loaded) > 40 and equal(loaded, again)
    assert all(loaded[name].any() for name in loaded)


# --- faults ----------------------------------------------------------------------------------------------------------


def ended_badly(ended: subprocess.CompletedProcess[str], directory: Path, code: int, message: str) -> None:
    """The status holds the code, and one of the processes said why."""
    status = read_json(directory / "status.json")
    assert (status["state"], status["exit_code"]) == ("failed", code), (status, ended.stderr[-3000:])
    assert message in status["message"] and ended.stderr.count(message) == 1, ended.stderr[-3000:]
    assert ended.returncode != 0


@pytest.mark.slow
@pytest.mark.fault(75)
def test_the_reward_of_one_process_fails(recipe: Path, tmp_path: Path, proof: Proof) -> None:
    options = ["--run-dir", tmp_path / "run", "--set", "rewards=[{use: 'spread.py:fails_in_process_1'}]"]
    ended = launch("-m", "rlgen", "train", recipe, *options)
    ended_badly(ended, tmp_path / "run", 5, "process 1: reward fails_in_process_1, prompt at position 2, sample 0: Zero")
    proof("a reward that divides by zero in process 1 of 2")


@pytest.mark.slow
def test_one_engine_of_two_is_wrong(recipe: Path, tmp_path: Path) -> None:
    ended = launch(HERE / "faulty.py", "one_engine_loses_a_tensor", "train", recipe, "--run-dir", tmp_path / "run")
    ended_badly(ended, tmp_path / "run", 6, "stale_tensor: the engine computes with earlier values of model.layers.1.mlp.up_proj")


@pytest.mark.slow
@pytest.mark.timed
@pytest.mark.fault(75)
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_one_process_fails_while_it_learns(recipe: Path, tmp_path: Path, proof: Proof, strategy: str) -> None:
    options = ["--run-dir", tmp_path / "run", "--set", f"processes.strategy={strategy}"]
    began = time.monotonic()
    ended = launch(HERE / "faulty.py", "one_backward_fails", "train", recipe, *options)
    status = read_json(tmp_path / "run" / "status.json")
    assert status["exit_code"] == 70 and "process 1 failed: " in status["message"], status
    assert "a bug after" in status["message"] and ended.stderr.count("error: ") == 1, ended.stderr[-3000:]
    assert time.monotonic() - began < 60, "long before the others' patience ends"
    proof(f"ZeroDivisionError in a backward pass of process 1 of 2, {strategy}")


@pytest.mark.slow
@pytest.mark.timed
@pytest.mark.fault(41, 75)
@pytest.mark.parametrize(
    ("where", "strategy", "phase"),
    [
        pytest.param("optimizer", "ddp", "the optimizer step", marks=pytest.mark.slow),
        pytest.param("scoring", "ddp", "log-probs of ", marks=pytest.mark.slow),
        pytest.param("backward", "fsdp", "the backward pass of ", marks=pytest.mark.slow),
    ],
)
def test_one_process_lacks_memory(recipe: Path, tmp_path: Path, proof: Proof, where: str, strategy: str, phase: str) -> None:
    options = ["--run-dir", tmp_path / "run", "--set", f"processes.strategy={strategy}"]
    began = time.monotonic()
    ended = launch(HERE / "faulty.py", f"one_lacks_memory_in_{where}", "train", recipe, *options)
    status = read_json(tmp_path / "run" / "status.json")
    assert status["exit_code"] == 3 and ended.returncode != 0, (status, ended.stderr[-3000:])
    assert re.match(
        rf"process 1( failed)?: the memory does not suffice for {phase}.*CUDA out of memory; peak ", status["message"]
    )
    assert ended.stderr.count("error: ") == 1 and "this is a bug" not in ended.stderr, ended.stderr[-3000:]
    assert time.monotonic() - began < 60, "long before the others' patience ends"
    proof(f"torch.OutOfMemoryError in {phase.removesuffix(' of ')} of process 1 of 2, {strategy}: both end, exit 3")


@pytest.mark.slow
@pytest.mark.fault(45, 46)
@pytest.mark.parametrize(
    ("what", "strategy"),
    [
        ("gradient", "ddp"),
        pytest.param("loss", "ddp", marks=pytest.mark.slow),
        pytest.param("gradient", "fsdp", marks=pytest.mark.slow),
        pytest.param("loss", "fsdp", marks=pytest.mark.slow),
    ],
)
def test_what_is_not_finite_in_one_process_is_skipped_by_all(
    recipe: Path, tmp_path: Path, what: str, strategy: str, proof: Callable[[str], None]
) -> None:
    """And they ask for the same further prompts."""
    options = ["--max-steps", "3", "--set", "rollout.dynamic_sampling=2", "--set", "checkpoint.every=1"]
    worker, sharding = HERE / "unfinite_worker.py", ["--set", f"processes.strategy={strategy}"]
    ended = launch(worker, 1, what, "train", recipe, "--run-dir", tmp_path / "two", *options, *sharding)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.count("planted in process 1") == 1 and "planted in process 0" not in ended.stdout
    two = tmp_path / "two"
    before, after = weights(two, 1), weights(two, 2)
    assert all(torch.equal(before[name], after[name]) for name in before)
    # In step 3 the sentinel compares each process's engine, which has its own weights, and finds them equal.
    records = read_jsonl(two / "metrics.jsonl")
    assert [record["updates/skipped"] for record in records] == [0, 1, 0] and records[2]["updates/done"] == 1
    assert [record["groups/resampled"] for record in records] == [3, 2, 3]  # 0 3 6, 9 12, 15 18 21
    assert {row["group_id"] for row in rollout_rows(two) if row["trained"] and row["group_id"] % 3 == 0} == set()
    if strategy == "fsdp":
        alone = launch(worker, 0, what, "train", recipe, "--run-dir", tmp_path / "one", *options, launcher=[sys.executable])
        assert alone.returncode == 0, alone.stderr[-3000:]
        assert same_rollouts(two, tmp_path / "one") and farthest(weights(two, 3), weights(tmp_path / "one", 3)) <= PRECISE
    assert read_json(two / "nonfinite" / "step_000002.json")["step"] == 2 and len(rollout_rows(two, 2)) > 10
    assert "step 2: the " in ended.stdout and ended.stdout.count("the update was skipped") == 1
    went_on = " as one process does" if strategy == "fsdp" else ""
    proof(f"NaN in the {what} of process 1 alone ({strategy}): both skipped step 2, and went on{went_on}")


class Running:
    """Two processes that train until they are stopped."""

    def __init__(self, recipe: Path, directory: Path, *options: str) -> None:
        self.directory = directory
        words = [*TORCHRUN, "-m", "rlgen", "train", str(recipe), "--run-dir", str(directory), "--max-steps", "5000", *options]
        self.launcher = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
        deadline = time.monotonic() + 60
        while not (directory / "metrics.jsonl").exists():
            assert self.launcher.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        self.processes = psutil.Process(self.launcher.pid).children()
        self.pids = [self.process(rank).pid for rank in range(2)]

    def left(self) -> list[psutil.Process]:
        return psutil.wait_procs(self.processes, timeout=1)[1]

    def process(self, rank: int) -> psutil.Process:
        workers = psutil.Process(self.launcher.pid).children()
        return next(worker for worker in workers if worker.environ().get("RANK") == str(rank))

    def end(self, timeout: float) -> subprocess.CompletedProcess[str]:
        out, err = self.launcher.communicate(timeout=timeout)
        return subprocess.CompletedProcess(self.launcher.args, self.launcher.returncode, out, err)


@pytest.mark.slow
@pytest.mark.fault(75)
@pytest.mark.parametrize(
    ("engine", "rank"), [("{kind: transformers}", 0), ("{kind: colocated, tensor_parallel_size: 2}", 1)], ids=["main", "other"]
)
def test_a_killed_process_ends_the_others(recipe: Path, tmp_path: Path, proof: Proof, engine: str, rank: int) -> None:
    """The main one too: then another one writes the status."""
    running = Running(recipe, tmp_path / "run", "--set", f"engine={engine}")
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
    running = Running(recipe, tmp_path / "run", "--set", "processes.timeout=4")
    running.process(1).suspend()
    began = time.monotonic()
    ended_badly(running.end(timeout=30), tmp_path / "run", 9, "did not answer for 4 s (processes.timeout)")
    assert 4 < time.monotonic() - began < 4 + 15 and not running.left()
    proof(f"SIGSTOP to process 1 of 2; all gone after {time.monotonic() - began:.0f} s with a timeout of 4 s")


@pytest.mark.slow
@pytest.mark.fault(75)
@pytest.mark.parametrize(("fault", "rank"), [("one_hangs_in_c", "0"), ("one_hangs_in_c", "1"), ("one_sleeps", "1")])
def test_a_process_that_is_deaf_is_ended(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proof: Proof, fault: str, rank: str
) -> None:
    monkeypatch.setitem(ENVIRONMENT, "FAULTY_RANK", rank)
    began = time.monotonic()
    ended = launch(
        HERE / "faulty.py", fault, "train", recipe, "--run-dir", tmp_path / "run", "--set", "processes.timeout=5", timeout=90
    )
    ended_badly(ended, tmp_path / "run", 9, "did not answer for 5 s (processes.timeout)")
    proof(f"{fault} in process {rank} of 2; all gone after {time.monotonic() - began:.0f} s, starts included")


@pytest.mark.slow
@pytest.mark.fault(75)
def test_what_takes_one_process_longer_than_the_timeout_ends_nobody(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proof: Proof
) -> None:
    """It waits for a judge, then for answers before a sync, then for a disk, and the others wait for it."""
    monkeypatch.setitem(ENVIRONMENT, "FAULTY_RANK", "0")
    command = [HERE / "faulty.py", "one_is_slow", "train", recipe, "--run-dir", tmp_path / "run"]
    ended = launch(*command, "--max-steps", "1", "--set", "processes.timeout=5", timeout=90)
    assert ended.returncode == 0, ended.stderr[-3000:]
    (record,) = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert record["time/reward"] > 7 and record["time/generate"] > 7
    assert read_json(tmp_path / "run" / "status.json")["exit_code"] == 0
    proof("rewards, a wait before the sync, and the weights of a checkpoint, of 7 s each with a timeout of 5 s")


@pytest.mark.slow
@pytest.mark.fault(70, 75)
def test_a_shard_that_cannot_be_written_ends_all(recipe: Path, tmp_path: Path, proof: Proof) -> None:
    """Its process writes beside the loop: the error comes to all of them, and the checkpoint before stands."""
    run = tmp_path / "run"
    options = [
        "--run-dir",
        run,
        "--max-steps",
        "4",
        "--set",
        "processes.strategy=fsdp",
        "--set",
        "checkpoint={every: 1, keep: 1}",
    ]
    ended = launch(HERE / "faulty.py", "one_has_no_space", "train", recipe, *options)
    ended_badly(ended, run, 8, "step_000002 cannot be written: [Errno 28] No space left on device; free space or change run.dir")
    assert read_json(run / "status.json")["message"].startswith("process 1: ")
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_000001"], "and nothing half-written"
    check_files(run / "checkpoints" / "step_000001", hashes=True)
    proof("ENOSPC in the shards of process 1 of 2 at step 2: exit 8, step 1 good")


@pytest.mark.slow
@pytest.mark.fault(75)
def test_shards_that_take_longer_than_the_timeout_end_nobody(recipe: Path, tmp_path: Path, proof: Proof) -> None:
    run = tmp_path / "run"
    options = ["--run-dir", run, "--set", "processes.strategy=fsdp", "--set", "processes.timeout=5"]
    ended = launch(HERE / "faulty.py", "one_has_a_slow_disk", "train", recipe, *options, "--max-steps", "1", timeout=200)
    assert ended.returncode == 0, ended.stderr[-3000:]
    check_files(run / "checkpoints" / "step_000001", hashes=True)
    proof("shards of process 1 of 2 written for 7 s with a timeout of 5 s")


@pytest.mark.slow
@pytest.mark.fault(75)
def test_a_process_that_samples_what_others_replay_ends_nobody(recipe: Path, tmp_path: Path, proof: Proof) -> None:
    options = ["train", recipe, "--run-dir", tmp_path / "run", "--max-steps", "3", "--set", "processes.timeout=5"]
    assert launch(HERE / "faulty.py", "one_fails_the_first_time", *options, timeout=90).returncode == 1
    (tmp_path / "run" / "journal" / "step_000003.rank1.bin").unlink()
    ended = launch(HERE / "faulty.py", "one_samples_for_long", *options, "--resume", timeout=90)
    assert ended.returncode == 0, ended.stderr[-3000:]
    record = read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]
    assert record["step"] == 3 and record["time/generate"] > 15
    proof("one process took its answers from the journal, the other one sampled for 15 s with a timeout of 5 s")


@pytest.mark.slow
@pytest.mark.fault(75)
def test_a_process_that_samples_for_three_times_the_timeout_ends_nobody(recipe: Path, tmp_path: Path, proof: Proof) -> None:
    options = ["train", recipe, "--run-dir", tmp_path / "run", "--max-steps", "3", "--set", "processes.timeout=5"]
    ended = launch(HERE / "faulty.py", "one_samples_for_long", *options, timeout=120)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert [record["time/generate"] > 15 for record in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [False, False, True]
    proof("one process sampled for 15 s, the other one waited, with a timeout of 5 s")


def test_the_reason_of_a_failure_outlives_the_loss_of_the_others() -> None:
    """Who fails while another process is killed says why it failed, not that the other one is gone."""
    others = Processes(rank=0, world=2, device=torch.device("cpu"), timeout=1, group=None, store=None)

    def gone(*_: object, **__: object) -> None:
        raise RuntimeError("Connection closed by peer")

    def fails() -> None:
        raise RewardError("the judge is away")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RewardError) as caught:
        patch.setattr(processes.dist, "all_gather", gone)
        others.run_all(fails)
    assert not processes.lost(caught.value)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError) as gone_too:
        patch.setattr(processes.dist, "all_gather", gone)
        others.run_all(int)
    assert processes.lost(gone_too.value)


@pytest.mark.slow
@pytest.mark.fault(76)
def test_processes_that_go_different_ways_are_told_apart(recipe: Path, tmp_path: Path, proof: Proof) -> None:
    ended = launch(HERE / "faulty.py", "one_goes_another_way", "train", recipe, "--run-dir", tmp_path / "run", timeout=60)
    ended_badly(ended, tmp_path / "run", 9, "the processes execute different code (process 0 at run/signals.py:")
    proof("process 1 of 2 leaves out a question that process 0 asks: found at the next one")


@pytest.mark.slow
@pytest.mark.timed
@pytest.mark.fault(76)
def test_a_process_that_skips_a_step_ends_all_in_time(recipe: Path, tmp_path: Path, proof: Proof) -> None:
    began = time.monotonic()
    ended = launch(
        HERE / "faulty.py", "one_skips_a_step", "train", recipe, "--run-dir", tmp_path / "run", "--set", "processes.timeout=5"
    )
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


@pytest.mark.slow
@pytest.mark.fault(79)
def test_what_a_launcher_starts_again_goes_on(recipe: Path, tmp_path: Path, chain: dict[str, Path], proof: Proof) -> None:
    again = [*TORCHRUN, "--max-restarts=1"]
    command = [HERE / "faulty.py", "one_fails_the_first_time", "train", recipe, "--run-dir", tmp_path / "run", "--max-steps", "4"]
    ended = launch(*command, launcher=again)
    assert ended.returncode == 0 and "resuming after step 2" in ended.stdout, ended.stderr[-3000:]
    assert [record["step"] for record in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4]
    ours, theirs = weights(tmp_path / "run", 4), weights(chain["whole"], 4)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs), "to the last bit"
    attempts = read_json(tmp_path / "run" / "provenance.json")
    assert [attempt["from_step"] for attempt in attempts] == [0, 2]
    logs = tmp_path / "run" / "logs"
    for folder in (logs, logs / "attempt_1"):
        assert {"rlgen.log", "rlgen.rank1.log"} <= {path.name for path in folder.iterdir()}
    proof("SIGKILL in step 3 of the first attempt; torchrun started both processes again")


@pytest.mark.slow
@pytest.mark.fault(73)
@pytest.mark.parametrize("to", ["process 1", pytest.param("SIGUSR1 to process 0", marks=pytest.mark.slow), "torchrun"])
def test_a_stop_asked_of_one_process_is_a_stop_of_all(
    recipe: Path, tmp_path: Path, chain: dict[str, Path], proof: Proof, to: str
) -> None:
    running = Running(recipe, tmp_path / "run")
    target = running.launcher if to == "torchrun" else running.process(int(to[-1]))
    target.send_signal(signal.SIGUSR1 if "USR1" in to else signal.SIGTERM)
    proof(f"signal to {to} of 2 processes under torchrun")
    ended = running.end(timeout=60)
    status = read_json(tmp_path / "run" / "status.json")
    assert (status["state"], status["exit_code"]) == ("stopped", 75)
    check_files(tmp_path / "run" / "checkpoints" / f"step_{status['step']:06d}", hashes=True)
    same = min(status["step"], 6)  # as far as the undisturbed run went, which saved every second step
    assert first_of(tmp_path / "run", same) == first_of(chain["whole"], same), "up to the stop it is the undisturbed run"
    saved = [step for step in range(2, same + 1, 2) if (tmp_path / "run" / "checkpoints" / f"step_{step:06d}").is_dir()]
    for step in saved:  # all, unless a busy host let it train on until old ones went
        ours, theirs = weights(tmp_path / "run", step), weights(chain["whole"], step)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs), step
    assert ended.stderr.count("stopped on request") == 1 and ("exitcode  : 75" in ended.stderr or to == "torchrun")
    logs = {f"{name}{rank}.log" for name in ("rlgen", "output", "rewards") for rank in ("", ".rank1")}
    assert {path.name for path in (tmp_path / "run" / "logs").iterdir()} == logs


# --- launches --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_accelerate_that_starts_one_process_of_two(recipe: Path, tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    ended = launch("-m", "rlgen", "train", recipe, "--run-dir", tmp_path / "run", launcher=launcher)
    assert "was asked for 2 processes, but 1 runs" in ended.stderr and "exit status 9" in ended.stderr
    assert "torchrun --nproc-per-node 2" in ended.stderr and not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.fault(77)
def test_accelerate_that_starts_two_processes(recipe: Path, tmp_path: Path, proof: Proof) -> None:
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    directory = train(recipe, tmp_path / "run", "--max-steps", "1", launcher=launcher)
    logs = {path.name for path in (directory / "logs").iterdir()}
    assert {name for name in logs if name.startswith("rlgen")} == {"rlgen.log", "rlgen.rank1.log"}, (
        "two processes, none of them started others"
    )
    proof("`accelerate launch` around `rlgen train`, which never launches: two logs of two processes")


def test_a_mistake_of_the_recipe_is_said_once(recipe: Path, tmp_path: Path) -> None:
    ended = launch("-m", "rlgen", "train", recipe, "--run-dir", tmp_path / "run", "--set", "processes.count=3")
    assert ended.stderr.count("processes.count is 3, but 2 run") == 1 and "exitcode  : 9" in ended.stderr


ABORTS = """\
import atexit, ctypes, threading, time
from rlgen.cli import app
libc = ctypes.CDLL(None)
libc.__cxa_atexit(ctypes.cast(libc.abort, ctypes.c_void_p), None, None)  # as a thread of gloo may do in the tear-down
atexit.register(print, "put away")
threading.Thread(target=lambda: (time.sleep(0.5), print("saved"))).start()
app.app = lambda arguments: (_ for _ in ()).throw(app.UsageError("a mistake"))
app.main()
"""


@pytest.mark.parametrize("processes", ["1", "2"])
def test_the_exit_code_outlives_what_aborts_in_the_teardown(monkeypatch: pytest.MonkeyPatch, processes: str) -> None:
    """Threads and exit functions end before; what would take the interpreter apart does not run."""
    monkeypatch.setitem(ENVIRONMENT, "WORLD_SIZE", processes)
    monkeypatch.setitem(ENVIRONMENT, "PYTHONUNBUFFERED", "")
    ended = launch("-c", ABORTS, launcher=[sys.executable])
    assert (ended.returncode, ended.stdout) == (2, "saved\nput away\n") and "error: a mistake" in ended.stderr


ONE, TWO = Launch(0, 1), Launch(0, 2)
ACCELERATE = ["python", "/venv/bin/accelerate", "launch"]


@pytest.mark.parametrize(
    ("launch", "count", "environment", "parents", "message"),
    [
        (ONE, 2, {}, [], "processes.count is 2, but 1 run"),
        (TWO, 1, {}, [], "start `rlgen train` alone"),
        (
            ONE,
            None,
            {},
            [["bash"], [*ACCELERATE, "--num-processes=4", "-m", "rlgen", "train"]],
            "asked for 4 processes, but 1 runs",
        ),
        (ONE, None, {"ACCELERATE_MIXED_PRECISION": "bf16"}, [], "use --mixed_precision no"),
        (ONE, None, {"ACCELERATE_USE_DEEPSPEED": "true"}, [], "processes.strategy: fsdp"),
        (TWO, None, {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, [], "micro_batch_tokens"),
    ],
)
def test_launches_that_are_refused(
    launch: Launch, count: int | None, environment: dict[str, str], parents: list[list[str]], message: str
) -> None:
    with pytest.raises(ProcessError, match=message):
        check_launch(launch, count, environment, parents)


@pytest.mark.slow
@pytest.mark.fault(85)
@pytest.mark.parametrize(("here", "interface"), [("2", "lo"), ("1", None)])
def test_processes_of_one_machine_listen_there_only(
    monkeypatch: pytest.MonkeyPatch, here: str, interface: str | None, proof: Proof
) -> None:
    def nobody(*_: object, **__: object) -> None:
        raise RuntimeError("nobody there")

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that it is put back as it was
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(processes.dist, "rendezvous", nobody)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": here}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ProcessError, match=r"did not find the others within 1 s: nobody there\. If no launcher .* `unset RANK"):
        Processes.open(1)
    assert os.environ.get("GLOO_SOCKET_IFNAME") == interface
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    with pytest.raises(ProcessError):
        Processes.open(1)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7", "whoever names one has it"
    proof(f"two processes, {here} of them here, look for each other")


@pytest.mark.slow
def test_launches_that_are_well(tmp_path: Path) -> None:
    config = tmp_path / "accelerate.yaml"
    config.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nnum_processes: 3\nmixed_precision: 'no'\n"
    )
    of_file = [*ACCELERATE, "--config_file", str(config), "-m", "rlgen", "train"]
    assert asked_for([of_file]) == ("accelerate launch", 3)
    # one of another program, which started this run from within, and one whose own argument looks like it
    assert asked_for([["bash"], [*ACCELERATE, "--num_processes", "2", "tune.py"]]) is None
    assert asked_for([[*ACCELERATE, "--cpu", "-m", "rlgen", "train", "--num_processes", "2"]]) is None
    assert asked_for([["python", "/venv/bin/torchrun", "--nproc-per-node", "2", "-m", "rlgen"]]) is None
    check_launch(TWO, 2, {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO"}, [[*of_file[:-4], "train.sh"]])
    with pytest.raises(ProcessError, match="MASTER_ADDR, MASTER_PORT is not set"):
        Launch.of({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"})


def test_prompts_are_shared_by_engines_and_engines_by_processes() -> None:
    def engine_share(rank: int, world: int, size: int) -> EngineShare:
        processes = Processes(rank=rank, world=world, device=torch.device("cpu"), timeout=1, group=None, store=None)
        return EngineShare.of(processes, size)

    for world, size, items in ((4, 1, 5), (4, 2, 5), (3, 1, 2), (2, 2, 1)):
        seats = [engine_share(rank, world, size) for rank in range(world)]
        assert [item for s in seats if s.first for item in s.share(range(items))] == list(range(items))
        assert sum(s.first for s in seats) == world // size
    with pytest.raises(ProcessError, match="needs a multiple of 2 processes, but 3 run"):
        engine_share(0, 3, 2)


# --- evaluation ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_processes_evaluate_what_one_evaluates(recipe: Path, tmp_path: Path, strategy: str) -> None:
    """Each its share of seven prompts; all know the whole, and so pin the same checkpoint."""
    options = ["--set", "eval={limit: 7, every: 1, group_size: 2}", "--set", "checkpoint={every: 9, keep: 1}"]
    one = alone(recipe, tmp_path / "one", *options)
    two = train(recipe, tmp_path / "two", *options, "--set", f"processes.strategy={strategy}")
    for ours, theirs in zip(read_jsonl(two / "metrics.jsonl"), read_jsonl(one / "metrics.jsonl"), strict=True):
        for key in theirs:
            if key.startswith("eval/"):
                assert ours[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-5), (key, theirs["step"])
    for step in (0, 1, 2):
        ours, theirs = (read_rollouts(folder / "evals" / f"step_{step:06d}.parquet") for folder in (two, one))
        assert ours["completion_ids"].to_pylist() == theirs["completion_ids"].to_pylist() and len(ours) == 14
        assert len(list((two / "evals" / f"step_{step:06d}.parquet").glob("part-*.parquet"))) == 2
    kept = [sorted(path.name for path in (folder / "checkpoints").iterdir()) for folder in (two, one)]
    assert kept[0] == kept[1]
