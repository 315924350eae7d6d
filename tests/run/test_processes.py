"""One recipe trains the same in one process and in several, and goes on in another number of them."""

import shutil
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from conftest import Proof, read_jsonl
from helpers.torchrun import (
    ALONE,
    PRECISE,
    Running,
    farthest,
    faulty,
    kept,
    launch,
    nothing_is_left,
    recipe,
    same_rollouts,
    torchrun,
    train,
    weights,
    well,
)
from helpers.train_state import Parts, equal, parts, save_parts, state
from process_worker import TRAINERS
from safetensors.torch import load_file
from torch import Tensor

from rlgen.files import read_json
from rlgen.processes import Processes
from rlgen.rollout.read import read_rollouts
from rlgen.run.checkpoint import Checkpoints, load_checkpoint
from rlgen.run.manifest import check_files

HERE = Path(__file__).parent
__all__ = ["nothing_is_left", "recipe"]
SHARDED = "processes.strategy=fsdp"


def gradient(directory: Path) -> Tensor:
    """Of the first step, clipped: what is left of it in the first moments, tensor by tensor."""
    stored = load_file(directory / "checkpoints" / "step_000001" / "state" / "optimizer.safetensors")
    return torch.cat([tensor.flatten().double() for name, tensor in sorted(stored.items()) if name.endswith("/exp_avg")])


# --- the same training -----------------------------------------------------------------------------------------------


LAYOUTS = {"one": (ALONE, 1), "two": (None, 1), "tensor parallel": (None, 2)}


@pytest.fixture(scope="module")
def on_vllm(recipe: Path) -> Callable[[str], Path]:
    """A step of each trainer with vLLM: in one process, in two with an engine each, or in two that share one."""
    own = recipe.with_name("vllm.yaml")
    own.write_text(recipe.read_text().replace("engine: {kind: transformers}\n", ""))

    @cache
    def trained(layout: str) -> Path:
        (launcher, size), folder = LAYOUTS[layout], recipe.parent / layout
        well(launch(HERE / "process_worker.py", own, folder, size, *TRAINERS, launcher=launcher, timeout=200))
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
    whole = train(recipe, recipe.parent / "whole", "run.steps=6")
    parts = train(recipe, recipe.parent / "parts", SHARDED)
    shutil.copytree(parts, recipe.parent / "one_more")
    one = train(recipe, recipe.parent / "one_more", "run.steps=4", resume=True, launcher=ALONE)
    shutil.copytree(one, recipe.parent / "two_again")
    again = train(recipe, recipe.parent / "two_again", "run.steps=6", SHARDED, resume=True)
    return {"whole": whole, "parts": parts, "one": one, "again": again}


@pytest.mark.slow
@pytest.mark.fault(64)
def test_a_run_goes_on_in_another_number_of_processes(chain: dict[str, Path], proof: Proof) -> None:
    state = chain["parts"] / "checkpoints" / "step_000002" / "state"
    assert len(list((state / "optimizer").glob("shard-*.safetensors"))) == 2
    assert not [path for path in state.rglob("*") if path.is_file() and path.suffix not in (".safetensors", ".json")], "no pickle"
    for name, step in (("parts", 2), ("one", 4), ("again", 6)):
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
        assert load_checkpoint(path, *own).step == 2
        return state(*own)

    first = parts()
    loaded = load(chain["parts"] / "checkpoints" / "step_000002", first)
    whole = save_parts(Checkpoints(tmp_path / "whole", 1, Processes.alone()), 2, first)
    well(launch(HERE / "resave.py", whole, tmp_path / "sharded"))
    again = load(tmp_path / "sharded" / "step_000002", parts())
    assert sum(name.endswith("/exp_avg_sq") for name in loaded) > 40 and equal(loaded, again)
    assert all(loaded[name].any() for name in loaded)


@pytest.mark.slow
@pytest.mark.fault(79)
def test_what_a_launcher_starts_again_goes_on(recipe: Path, tmp_path: Path, chain: dict[str, Path], proof: Proof) -> None:
    again = [*torchrun(), "--max-restarts=1"]
    ended = well(faulty("one_fails_the_first_time", recipe, tmp_path / "run", "run.steps=4", launcher=again))
    assert "resuming after step 2" in ended.stdout
    assert [record["step"] for record in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4]
    assert equal(weights(tmp_path / "run", 4), weights(chain["whole"], 4))
    attempts = read_json(tmp_path / "run" / "provenance.json")
    assert [attempt["from_step"] for attempt in attempts] == [0, 2]
    logs = tmp_path / "run" / "logs"
    for folder in (logs, logs / "attempt_1"):
        assert {"rlgen.log", "rlgen.rank1.log"} <= {path.name for path in folder.iterdir()}
    proof("SIGKILL in step 3 of the first attempt; torchrun started both processes again")


@pytest.mark.slow
@pytest.mark.fault(73)
@pytest.mark.parametrize("to", ["process 1", "SIGUSR1 to process 0", "torchrun"])
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
    steps = range(1, min(status["step"], 6) + 1)  # as far as the undisturbed run went, which saved every second step
    assert kept(tmp_path / "run", *steps) == kept(chain["whole"], *steps), "up to the stop it is the undisturbed run"
    saved = [step for step in steps if step % 2 == 0 and (tmp_path / "run" / "checkpoints" / f"step_{step:06d}").is_dir()]
    for step in saved:  # all, unless a busy host let it train on until old ones went
        assert equal(weights(tmp_path / "run", step), weights(chain["whole"], step)), step
    assert ended.stderr.count("stopped on request") == 1 and ("exitcode  : 75" in ended.stderr or to == "torchrun")
    logs = {f"{name}{rank}.log" for name in ("rlgen", "output", "rewards") for rank in ("", ".rank1")}
    assert {path.name for path in (tmp_path / "run" / "logs").iterdir()} == logs


# --- evaluation ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_processes_evaluate_what_one_evaluates(recipe: Path, tmp_path: Path, strategy: str) -> None:
    """Each its share of seven prompts; all know the whole, and so pin the same checkpoint."""
    settings = ["eval={limit: 7, every: 1, group_size: 2}", "checkpoint={every: 9, keep: 1}"]
    one = train(recipe, tmp_path / "one", *settings, launcher=ALONE)
    two = train(recipe, tmp_path / "two", *settings, f"processes.strategy={strategy}")
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
