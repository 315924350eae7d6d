"""Runs with sharded weights learn what one process learns: packed or not, adapters, bfloat16, references, and resumed ones."""

from pathlib import Path
from typing import Any

import pytest
import sharded_worker
from conftest import read_jsonl
from helpers.in_processes import train_in
from helpers.rollouts import rollout_rows
from helpers.torchrun import PRECISE, farthest, launch, recipe_of, torchrun, weights, well
from safetensors.torch import load_file
from torch import Tensor, tensor

from rlgen.files import read_json
from rlgen.processes import Processes
from rlgen.recipe import load_recipe
from rlgen.run.manifest import check_files

pytestmark = pytest.mark.timeout(5400)  # three launches, with all deeds of each, are the set-up of one test

SECTIONS = """\
trainer: {kind: grpo, beta: 0.05}
checkpoint: {every: 1, keep: 9}
optim: {learning_rate: 1.0e-4, micro_batch_tokens: 200}
"""
# What one process trains, by name.
WAYS = {
    "packed": "",
    "adapter": "model.lora.rank=8",
    "pairs": 'trainer={"kind":"online_dpo"}',
    "experts": "model.path=tiny:qwen3_moe",
}
REWARD = 'trainer={"kind":"grpo","beta":0.05,"kl":"k1_in_reward"}'
PADDED, HALF = "optim.packing=false", "model.dtype=bfloat16"
SHARDED, COPIES, DEFERRED = "processes.strategy=fsdp", "processes.shard=2", "processes.defer_sync=true"
DIVIDED, QUARTERED = (f"{SHARDED} processes.experts={count} {WAYS['experts']}" for count in (2, 4))
SPLIT, CONTEXT = (f"{SHARDED} processes.{key}=2" for key in ("tensor", "context"))
FIRST = "run.steps=1"  # so that the run is resumed at step 1
# A group fills a micro-batch: they are the same in one process as in two. In bfloat16, other neighbours are other rounding.
GROUPS = "optim.micro_batch_tokens=100"
LESS = 40  # tokens, fewer than most rows have
# By number of processes.
SLOW = {
    2: [
        f"train packed_padded {SHARDED} {PADDED}",
        *(f"train {name}_resumed {SHARDED} {words} {end}" for name, words in WAYS.items() for end in (FIRST, "")),
        f"train packed_deferred {SHARDED} {DEFERRED}",
        *(f"train {name}_ddp {words}" for name, words in WAYS.items()),
        *(f"train half_adapter{name} {HALF} {WAYS['adapter']} {words}" for name, words in (("", SHARDED), ("_ddp", ""))),
        *(f"train half{name} {HALF} {words}" for name, words in (("", SHARDED), ("_ddp", ""))),
        *(f"train experts_divided{name} {DIVIDED} {end}" for name, end in (("", ""), ("_resumed", FIRST), ("_resumed", ""))),
        f"train half_experts {DIVIDED} {HALF}",
        *(f"doctor {name}_healthy {SHARDED} {words}" for name, words in [*WAYS.items(), ("half", HALF)]),
        f"doctor divided_healthy {DIVIDED}",
        *(f"train packed_split{name} {SPLIT} {end}" for name, end in (("", ""), ("_resumed", FIRST), ("_resumed", ""))),
        f"train packed_split_padded {SPLIT} {PADDED}",
        f"train pairs_split {SPLIT} {WAYS['pairs']}",
        f"train half_split {SPLIT} {HALF}",
        f"doctor split_healthy {SPLIT}",
        *(f"train {name}_context {CONTEXT} {words}" for name, words in WAYS.items()),
        f"train half_context {CONTEXT} {HALF}",
        *(f"train packed_left {words}" for words in (f"{SPLIT} {FIRST}", SHARDED)),
        *(f"train packed_met {words}" for words in (f"{SHARDED} {FIRST}", SPLIT)),
        *(f"train experts_left {words} {WAYS['experts']}" for words in (f"{DIVIDED} {FIRST}", SHARDED)),
        f"doctor context_healthy {CONTEXT}",
        f"widest reward_context {CONTEXT} {REWARD} optim.micro_batch_tokens={LESS} run.probe_max=true",
        "replay adapter_resumed 2",
    ],
    3: [f"train {name} {SHARDED} {words}" for name, words in [*WAYS.items(), ("packed_padded", PADDED)]],
    4: [
        *(f"train {name} {SHARDED} {words}" for name, words in WAYS.items()),
        *(f"train packed_copies {SHARDED} {COPIES} {end}" for end in (FIRST, "")),
        f"train packed_deferred_copies {SHARDED} {COPIES} {DEFERRED}",
        f"train adapter_copies {SHARDED} {COPIES} {WAYS['adapter']}",
        f"train experts_divided {DIVIDED}",
        f"train experts_quartered {QUARTERED}",
        *(f"train packed_split {SPLIT} {end}" for end in (FIRST, "")),
        f"train packed_context {CONTEXT}",
    ],
}


def done(folder: Path, world: int, deeds: list[str]) -> Path:
    """The folder of what was done; starting processes is what takes time."""
    folder.mkdir()
    recipe = recipe_of(folder, SECTIONS)
    well(launch(sharded_worker.__file__, recipe, folder, *deeds, launcher=torchrun(world), timeout=1800))
    return folder


class Alone:
    """What one process, this one, learns in each way."""

    def __init__(self, folder: Path) -> None:
        self.recipe = recipe_of(folder, SECTIONS)

    def __call__(self, way: str) -> Path:
        run = self.recipe.with_name(way)
        if not run.exists():
            train_in(run, load_recipe(self.recipe, {**WAYS, "reward": REWARD}[way].split()), Processes.alone())
        return run


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    return Alone(tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("sharded")
    return {world: done(folder / str(world), world, deeds) for world, deeds in SLOW.items()}


def learned(run: Path) -> dict[str, Tensor]:
    """The weights after the last step; of an adapter its first gradient, tenfold: Adam moves what is 0 by little but its sign."""
    if "adapter" not in run.name:
        return weights(run)
    moments = load_file(run / "checkpoints" / "step_000001" / "state" / "optimizer.safetensors")
    return {name: tensor for name, tensor in moments.items() if name.endswith("/exp_avg")}


def log_probs(run: Path) -> Tensor:
    """[N] of the trainer, of all sampled tokens of all steps."""
    rows = sorted(rollout_rows(run), key=lambda row: (row["group_id"], row["sample_index"]))
    return tensor([logp for row in rows for logp in row["policy_logp"] or ()])


def same(ours: Path, theirs: Path) -> None:
    """Compares what two runs in float32 have learned and measured."""
    assert farthest(learned(ours), learned(theirs)) <= PRECISE
    assert (log_probs(ours) - log_probs(theirs)).abs().max() <= 1e-5
    for one, other in zip(read_jsonl(ours / "metrics.jsonl"), read_jsonl(theirs / "metrics.jsonl"), strict=True):
        assert one["grad_norm"] > 0
        for key in {"step", "loss", "grad_norm", "kl/ref_k3", "reward/mean", "tokens/trained"} & other.keys():
            assert one[key] == pytest.approx(other[key], rel=1e-4, abs=1e-6), (one["step"], key)
    for step in (1, 2):
        check_files(ours / "checkpoints" / f"step_{step:06d}", hashes=True)


def cases() -> list[Any]:
    trained = {
        world: dict.fromkeys(deed.split()[1] for deed in deeds if deed.startswith("train")) for world, deeds in SLOW.items()
    }
    return [(world, name) for world, names in trained.items() for name in names if not name.startswith("half")]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "name"), cases())
def test_sharded_weights_learn_what_one_process_learns(slow: dict[int, Path], alone: Alone, world: int, name: str) -> None:
    same(slow[world] / name, alone(name.partition("_")[0]))


@pytest.mark.slow
def test_processes_that_share_out_a_row_have_their_budgets_together(slow: dict[int, Path], alone: Alone) -> None:
    """In the trial of the largest micro-batches, in the checks of the sentinel, for the reference, and in each update."""
    same(slow[2] / "reward_context", alone("reward"))
    for most in read_json(slow[2] / "reward_context.json"):
        assert LESS < most <= 2 * LESS


@pytest.mark.slow
def test_in_bfloat16_the_first_update_is_that_of_whole_weights(slow: dict[int, Path]) -> None:
    """Numbers are rounded in other places, so that later steps learn from other samples. Adapters are whole in both."""
    theirs = slow[2] / "half_ddp"
    (other, *_) = read_jsonl(theirs / "metrics.jsonl")
    for name, apart in (("half", 1e-5), ("half_split", 1e-3), ("half_context", 1e-3)):  # sums of parts are rounded otherwise
        ours = slow[2] / name
        assert farthest(weights(ours, 1), weights(theirs, 1)) <= 1e-3
        (one, *_) = read_jsonl(ours / "metrics.jsonl")
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-3, abs=apart)
    assert farthest(weights(slow[2] / "half_adapter"), weights(slow[2] / "half_adapter_ddp")) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["half_experts", "half_split", "half_context"])
def test_other_divisions_train_in_bfloat16(slow: dict[int, Path], name: str) -> None:
    records = read_jsonl(slow[2] / name / "metrics.jsonl")
    assert all(record["grad_norm"] > 0 and not record["sentinel/drift"] for record in records)


@pytest.mark.slow
def test_an_adapter_over_shards_is_that_over_whole_weights(slow: dict[int, Path]) -> None:
    assert farthest(weights(slow[2] / "adapter_resumed"), weights(slow[2] / "adapter_ddp")) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("way", [*WAYS, "half", "divided", "split", "context"])
def test_doctor_and_replay_in_other_ways(slow: dict[int, Path], way: str) -> None:
    ours, theirs = read_json(slow[2] / f"{way}_healthy.json")
    assert ours == theirs and {verdict for _, verdict in ours} <= {"ok", "not needed", "not measurable"}
    assert [verdict for name, verdict in ours if name == "loss"] == ["ok"]
    assert read_json(slow[2] / "adapter_resumed.json") == [{}, {}]
