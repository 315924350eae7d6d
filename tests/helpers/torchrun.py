"""Programs in several processes, and the weights that they train."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file
from torch import Tensor

from helpers.rollouts import rollout_rows
from helpers.spread import SPREAD
from helpers.waiting import until
from rlgen.run.checkpoint import whole_checkpoint

TESTS = Path(__file__).parent.parent
PATHS = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATHS}
PRECISE = 1e-5  # relative
ALONE = [sys.executable]
# Completions whose rewards differ, so that every step has something to learn from; checkpoints and learning rate are the test's.
RECIPE = """\
run: {name: test, steps: 2}
model: {path: "tiny:qwen3", dtype: float32}
data: {source: "task:sort", chat: true, max_prompt_tokens: 64, options: {size: 100}}
rewards: [{use: "spread.py:spread"}]
rollout: {prompts_per_step: 5, group_size: 4, max_completion_tokens: 12, temperature: 0.9}
engine: {kind: transformers}
"""


def recipe_of(folder: Path, rest: str, code: str = SPREAD) -> Path:
    """The recipe with more sections, and its reward beside it."""
    path = folder / "recipe.yaml"
    path.write_text(RECIPE + rest)
    path.with_name("spread.py").write_text(code)
    return path


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recipe_of(tmp_path_factory.mktemp("recipe"), "checkpoint: {every: 2, keep: 9}\noptim: {learning_rate: 1.0e-4}\n")


def torchrun(world: int = 2) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]


def launch(
    *command: object, launcher: Sequence[str] | None = None, timeout: float = 120, **environment: str
) -> subprocess.CompletedProcess[str]:
    words = [*(torchrun() if launcher is None else launcher), *map(str, command)]
    return subprocess.run(words, capture_output=True, text=True, timeout=timeout, env={**ENVIRONMENT, **environment})


def well(ended: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    """A program that must not have failed."""
    assert ended.returncode == 0, ended.stderr[-6000:]
    return ended


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """However a run ends, none of its processes goes on. Guards and workers of a busy machine have some seconds to end.

    This process may have a guard of its own, of an engine that an earlier test opened.
    """
    this = psutil.Process()
    before = this.children(recursive=True)
    yield
    begun = [one for one in this.children(recursive=True) if one not in before and is_of_rlgen(one)]
    _, left = psutil.wait_procs(begun, timeout=10)
    words = [" ".join(process.cmdline()) for process in left]
    for process in left:
        process.kill()
    assert not words, words


def is_of_rlgen(process: psutil.Process) -> bool:
    try:
        return "rlgen" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


def train_words(recipe: Path, run: Path, *settings: str, resume: bool = False) -> list[object]:
    """The arguments of `rlgen`."""
    chosen = [word for setting in settings for word in ("--set", setting)]
    return ["train", recipe, "--run-dir", run, *chosen, *(["--resume"] if resume else [])]


def faulty(
    fault: str,
    recipe: Path,
    run: Path,
    *settings: str,
    resume: bool = False,
    launcher: list[str] | None = None,
    timeout: float = 120,
) -> subprocess.CompletedProcess[str]:
    """Trains with a fault of `faulty.py` in one process."""
    words = train_words(recipe, run, *settings, resume=resume)
    return launch(TESTS / "run" / "faulty.py", fault, *words, launcher=launcher, timeout=timeout)


def train(recipe: Path, run: Path, *settings: str, resume: bool = False, launcher: list[str] | None = None) -> Path:
    ended = well(launch("-m", "rlgen", *train_words(recipe, run, *settings, resume=resume), launcher=launcher))
    run.with_name(f"{run.name}.out").write_text(ended.stdout)
    return run


class Running:
    """Two processes that train until they are stopped."""

    def __init__(self, recipe: Path, directory: Path, *settings: str) -> None:
        self.directory = directory
        words = [*torchrun(), "-m", "rlgen", *map(str, train_words(recipe, directory, "run.steps=5000", *settings))]
        self.launcher = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
        until(lambda: (directory / "metrics.jsonl").exists() or self.launcher.poll() is not None)
        assert self.launcher.poll() is None
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


KEPT = ("group_id", "sample_index", "prompt_ids", "completion_ids", "seed", "completion", "rewards", "reward", "trained")


def kept(run: Path, *steps: int) -> list[list[Any]]:
    """What was sampled and rewarded in these steps, or in all."""
    return [[row[key] for key in KEPT] for row in rollout_rows(run, *steps)]


def same_rollouts(ours: Path, theirs: Path) -> bool:
    return kept(ours) == kept(theirs)


def weights(run: Path, step: int = 2) -> dict[str, Tensor]:
    """Those of the model, put together where each process has written shards, or of the adapter."""
    folder = run / "checkpoints" / f"step_{step:06d}"
    with whole_checkpoint(folder, run / "whole") as whole:
        (file,) = whole.glob("*model.safetensors")
        return load_file(file)


def farthest(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest relative distance of a tensor; 0 if both are 0."""
    assert ours.keys() == theirs.keys()
    return max(((ours[name] - theirs[name]).norm() / theirs[name].norm().clamp(min=1e-30)).item() for name in theirs)
