"""Each process saves the shards that it holds; any number of processes goes on with them, and one puts them together."""

from pathlib import Path

import pytest
import shards_worker
import torch
from helpers.slow import slow_but
from helpers.torchrun import ALONE, farthest, launch, nothing_is_left, recipe, same_rollouts, torchrun, train, weights, well
from transformers import AutoModelForCausalLM, Qwen3Config

from rlgen.files import read_json
from rlgen.models.load import WEIGHT_SHARDS
from rlgen.models.tiny import ARCHITECTURES, build_tiny
from rlgen.models.weights import own_tensors
from rlgen.run.checkpoint import whole_checkpoint
from rlgen.run.manifest import read_manifest
from rlgen.run.state import save_shards

__all__ = ["nothing_is_left", "recipe"]
BUCKET = 64 << 20  # bytes


@pytest.mark.parametrize("name", slow_but(ARCHITECTURES, "qwen3", "mixtral"))
def test_shards_are_put_together_to_what_a_run_without_them_writes(name: str, tmp_path: Path) -> None:
    """Byte by byte: layouts and names are those of the model that the run began with."""
    model = AutoModelForCausalLM.from_pretrained(build_tiny(name), dtype=torch.float32)
    expected, checkpoint = tmp_path / "expected", tmp_path / "checkpoint"
    model.save_pretrained(expected)
    model.save_pretrained(checkpoint, state_dict={})
    save_shards(own_tensors(model), checkpoint / WEIGHT_SHARDS, 0)
    with whole_checkpoint(checkpoint, tmp_path / "whole") as folder:
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert files == {path.name: path.read_bytes() for path in expected.iterdir()}
    assert not (tmp_path / "whole").exists()


def test_an_unsharded_checkpoint_is_whole_already(tmp_path: Path) -> None:
    with whole_checkpoint(tmp_path, tmp_path / "whole") as folder:
        assert folder == tmp_path


@pytest.mark.slow
def test_four_then_three_then_two_then_one_process_learn_what_one_learns(recipe: Path, tmp_path: Path) -> None:
    whole = train(recipe, tmp_path / "whole", "run.steps=8", launcher=ALONE)
    for step, world in ((2, 4), (4, 3), (6, 2), (8, 1)):
        launcher = torchrun(world)
        train(recipe, tmp_path / "run", f"run.steps={step}", "processes.strategy=fsdp", resume=step > 2, launcher=launcher)
        away = farthest(weights(tmp_path / "run", step), weights(whole, step))
        print(f"{world} processes, step {step}: {away:.1e}")
        assert read_manifest(tmp_path / "run" / "checkpoints" / f"step_{step:06d}").processes == world
        assert away <= 1e-6
    assert same_rollouts(tmp_path / "run", whole)
    moved = farthest(weights(whole, 8), weights(whole, 2))
    print(f"moved by {moved:.1e}")
    assert moved > 1e-4, "the later steps have learned something"


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 425 MB in float32, as in `test_sharded_opening.py`."""
    shape = {"vocab_size": 8192, "hidden_size": 384, "intermediate_size": 1152, "num_hidden_layers": 60, "head_dim": 64}
    config = Qwen3Config(**shape, num_attention_heads=6, num_key_value_heads=2, tie_word_embeddings=True, eos_token_id=1)
    folder = tmp_path_factory.mktemp("large")
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_a_save_takes_the_memory_of_the_shards(large: Path, tmp_path: Path, world: int) -> None:
    well(launch(shards_worker.__file__, tmp_path, build_tiny("qwen3"), large, launcher=torchrun(world), timeout=600))
    of_processes = read_json(tmp_path / "measure.json")
    for found in of_processes:
        print({"shards": found["shards"] >> 20}, [{**one, "peak": one["peak"] >> 20} for one in found["saves"]])
        assert 0.9 * found["shards"] < found["saves"][0]["peak"] <= found["shards"] + 2 * BUCKET
        assert max(one["peak"] for one in found["saves"][1:]) <= 2 * BUCKET, "the room for the copies is there"
