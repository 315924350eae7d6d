"""Programs in several processes, and the weights that they train."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from helpers.spread import SPREAD

TESTS = Path(__file__).parent.parent
PATHS = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATHS}
PRECISE = 1e-5  # relative
# Completions whose rewards differ, so that every step has something to learn from; checkpoints and learning rate are the test's.
RECIPE = """\
run: {name: test, steps: 2}
model: {path: "tiny:qwen3", dtype: float32}
data: {source: "task:sort", chat: true, max_prompt_tokens: 64}
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


def torchrun(world: int = 2) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]


def launch(*command: object, launcher: Sequence[str] | None = None, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    words = [*(torchrun() if launcher is None else launcher), *map(str, command)]
    return subprocess.run(words, capture_output=True, text=True, timeout=timeout, env=ENVIRONMENT)


def well(ended: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    """A program that must not have failed."""
    assert ended.returncode == 0, ended.stderr[-6000:]
    return ended


def weights(run: Path, step: int = 2) -> dict[str, Tensor]:
    """Those of the model, or of the adapter."""
    (file,) = (run / "checkpoints" / f"step_{step:06d}").glob("*model.safetensors")
    return load_file(file)


def farthest(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest relative distance of a tensor; 0 if both are 0."""
    assert ours.keys() == theirs.keys()
    return max(((ours[name] - theirs[name]).norm() / theirs[name].norm().clamp(min=1e-30)).item() for name in theirs)
