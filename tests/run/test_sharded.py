"""Runs with sharded weights learn what runs with whole ones learn: adapters, bfloat16, copies of the shards, and resumed ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import sharded_worker
from conftest import read_jsonl
from safetensors.torch import load_file
from torch import Tensor

from rlgen.run.manifest import check_files

RECIPE = """\
run: {name: test, steps: 3}
model: {path: "tiny:qwen3", dtype: float32}
data: {source: "task:sort", chat: true, max_prompt_tokens: 64}
rewards: [{use: "spread.py:spread"}]
rollout: {prompts_per_step: 5, group_size: 4, max_completion_tokens: 12, temperature: 0.9}
engine: {kind: transformers}
trainer: {kind: grpo, beta: 0.05}
checkpoint: {every: 1, keep: 9}
optim: {learning_rate: 1.0e-4, micro_batch_tokens: 200}
"""
REWARD = "def spread(completion_ids):\n    return sum(completion_ids) % 97 / 97\n"
SHARDED, ADAPTER, HALF = "processes.strategy=fsdp", "model.lora={rank: 8}", "model.dtype=bfloat16"
FIRST = "run.steps=2"  # so that the run is resumed at step 2
# By number of processes, in the order in which they are trained; what stands twice is resumed.
WAYS = {
    2: {
        "whole": [[]],
        "sharded": [[SHARDED, FIRST], [SHARDED]],
        "deferred": [[SHARDED, "processes.defer_sync=true"]],
        "adapter": [[ADAPTER]],
        "sharded adapter": [[SHARDED, ADAPTER, FIRST], [SHARDED, ADAPTER]],
        "half": [[HALF]],
        "sharded half": [[SHARDED, HALF]],
        "half adapter": [[HALF, ADAPTER]],
        "sharded half adapter": [[SHARDED, HALF, ADAPTER]],
    },
    4: {
        "whole": [[]],
        "copies": [[SHARDED, "processes.shard=2", FIRST], [SHARDED, "processes.shard=2"]],
        "deferred copies": [[SHARDED, "processes.shard=2", "processes.defer_sync=true"]],
        "adapter": [[ADAPTER]],
        "copies adapter": [[SHARDED, "processes.shard=2", ADAPTER]],
    },
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The folders of all ways, by number of processes; starting processes is what takes time."""
    found = {}
    for world, ways in WAYS.items():
        folder = found[world] = tmp_path_factory.mktemp("sharded")
        (folder / "recipe.yaml").write_text(RECIPE)
        (folder / "spread.py").write_text(REWARD)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
        words = [f"{name}={';'.join(overrides)}" for name, parts in ways.items() for overrides in parts]
        paths = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
        ended = subprocess.run(
            [*launcher, sharded_worker.__file__, str(folder / "recipe.yaml"), str(folder), *words],
            capture_output=True,
            text=True,
            timeout=900,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        )
        assert ended.returncode == 0, ended.stderr[-3000:]
    return found


def weights(run: Path, step: int = 3) -> dict[str, Tensor]:
    """Those of the model, or of the adapter."""
    folder = run / "checkpoints" / f"step_{step:06d}"
    (file,) = folder.glob("*model.safetensors")
    return load_file(file)


def farthest(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest relative distance of a tensor."""
    assert ours.keys() == theirs.keys()
    return max(((ours[name] - theirs[name]).norm() / theirs[name].norm()).item() for name in theirs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "way", "whole", "bound"),
    [
        (2, "sharded", "whole", 1e-5),
        (2, "deferred", "whole", 1e-5),
        (2, "sharded adapter", "adapter", 1e-5),
        (2, "sharded half adapter", "half adapter", 1e-5),
        (4, "copies", "whole", 1e-5),
        (4, "deferred copies", "whole", 1e-5),
        (4, "copies adapter", "adapter", 1e-5),
    ],
)
def test_sharded_weights_learn_what_whole_ones_learn(
    trained: dict[int, Path], world: int, way: str, whole: str, bound: float
) -> None:
    ours, theirs = trained[world] / way, trained[world] / whole
    assert farthest(weights(ours), weights(theirs)) <= bound
    for one, other in zip(read_jsonl(ours / "metrics.jsonl"), read_jsonl(theirs / "metrics.jsonl"), strict=True):
        for key in ("step", "loss", "grad_norm", "kl/ref_k3", "reward/mean", "tokens/trained"):
            assert one[key] == pytest.approx(other[key], rel=1e-4, abs=1e-6), (one["step"], key)
    for step in (1, 2, 3):
        check_files(ours / "checkpoints" / f"step_{step:06d}", hashes=True)


@pytest.mark.slow
def test_in_bfloat16_the_first_update_is_the_same_but_for_rounding(trained: dict[int, Path]) -> None:
    """Numbers are rounded in other places, so that later steps learn from other samples."""
    ours, theirs = trained[2] / "sharded half", trained[2] / "half"
    assert farthest(weights(ours, 1), weights(theirs, 1)) <= 1e-3
    (one, *_), (other, *_) = (read_jsonl(run / "metrics.jsonl") for run in (ours, theirs))
    assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-3)
