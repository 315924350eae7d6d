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

from rlgen.analysis.run import read_run
from rlgen.cli.evaluate import evaluate_target
from rlgen.cli.export import export_command
from rlgen.files import read_json
from rlgen.processes import Processes
from rlgen.recipe import load_recipe
from rlgen.run.manifest import check_files
from rlgen.setup.change import with_changes
from rlgen.setup.evaluation import evaluate_model
from rlgen.setup.replay import Past, replay

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
PADDED, HALF = "optim.packing=false", "model.dtype=bfloat16"
SHARDED, COPIES, DEFERRED = "processes.strategy=fsdp", "processes.shard=2", "processes.defer_sync=true"
DIVIDED, QUARTERED = (f"{SHARDED} processes.experts={count} {WAYS['experts']}" for count in (2, 4))
FIRST = "run.steps=1"  # so that the run is resumed at step 1
# A group fills a micro-batch: they are the same in one process as in two. In bfloat16, other neighbours are other rounding.
GROUPS = "optim.micro_batch_tokens=100"
FAST = [
    *(f"train {name} {SHARDED} {WAYS[name]}" for name in ("packed", "adapter")),
    f"train half {SHARDED} {HALF} {FIRST} {GROUPS}",
    f"doctor healthy {SHARDED}",
    f"refuse refused {SHARDED}",
    "replay packed 2",
    f"train vllm {SHARDED} {HALF} engine.kind=colocated trainer.kind=rloo",  # the last: vLLM closes the process groups
]
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
    ],
}


def done(folder: Path, world: int, deeds: list[str]) -> Path:
    """The folder of what was done; starting processes is what takes time."""
    folder.mkdir()
    recipe = recipe_of(folder, SECTIONS)
    well(launch(sharded_worker.__file__, recipe, folder, *deeds, launcher=torchrun(world), timeout=900))
    return folder


class Alone:
    """What one process, this one, learns in each way."""

    def __init__(self, folder: Path) -> None:
        self.recipe = recipe_of(folder, SECTIONS)

    def __call__(self, way: str) -> Path:
        run = self.recipe.with_name(way)
        if not run.exists():
            train_in(run, load_recipe(self.recipe, WAYS[way].split()), Processes.alone())
        return run


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    return Alone(tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return done(tmp_path_factory.mktemp("fast") / "2", 2, FAST)


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


@pytest.mark.path("grpo", "transformers", "fsdp", "float32", "packed", "full")
@pytest.mark.path("grpo", "transformers", "fsdp", "float32", "packed", "lora")
@pytest.mark.parametrize("way", ["packed", "adapter"])
def test_two_processes_learn_on_default_settings_what_one_learns(fast: Path, alone: Alone, way: str) -> None:
    same(fast / way, alone(way))
    assert {record["tokens/padding"] for record in read_jsonl(fast / way / "metrics.jsonl")} == {0}, "rows are packed"


def test_in_bfloat16_one_process_computes_the_same_but_for_rounding(fast: Path) -> None:
    """On the same samples: an engine in bfloat16 samples otherwise in batches of another size."""
    found = read_run(fast / "half")
    past = Past.of(fast / "half", found.recipe, found.attempts, found.metrics)
    whole, (sharded,) = replay(past, 1, None, print, Processes.alone()).metrics, found.metrics
    for key in ("loss", "grad_norm", "entropy", "sampler/kl"):  # measured: grad_norm 1.2e-6, the others the same bits
        assert sharded[key] == pytest.approx(whole[key], rel=1e-4), key


@pytest.mark.path("rloo", "colocated", "fsdp", "bfloat16", "packed", "full")
@pytest.mark.vllm
def test_vllm_in_two_processes_takes_sharded_weights_in_bfloat16(fast: Path) -> None:
    records = read_jsonl(fast / "vllm" / "metrics.jsonl")
    assert [record["weights/version"] for record in records] == [1, 2]
    assert all(
        record["grad_norm"] > 0 and record["sampler/delta_mean"] > 0 and not record["sentinel/drift"] for record in records
    )


def test_doctor_finds_sharded_weights_healthy(fast: Path) -> None:
    ours, theirs = read_json(fast / "healthy.json")
    assert ours == theirs
    assert [verdict for _, verdict in ours] == ["ok", "ok", "ok", "ok", "not needed", "ok", "ok"] and ours[-1][0] == "loss"


@pytest.mark.parametrize(("name", "least", "most"), [("packed", 1e-7, 2e-6), ("adapter", 1e-7, 2e-6), ("half", 1e-3, 0.03)])
def test_rounding_is_measured_on_sharded_weights(fast: Path, name: str, least: float, most: float) -> None:
    noise = {rung["name"]: rung["noise"] for rung in read_run(fast / name).attempts[-1]["sentinel"]}
    assert least < noise["same weights"]["mean"] < most


def test_a_sharded_step_is_replayed_to_the_last_bit(fast: Path) -> None:
    assert read_json(fast / "packed.json") == [{}, {}]


def test_a_change_of_a_sharded_step_is_computed_in_one_process(fast: Path) -> None:
    found = read_run(fast / "packed")
    past = Past.of(fast / "packed", found.recipe, found.attempts, found.metrics)
    changed, _ = with_changes(fast / "packed" / "resolved.yaml", past.recipe, ["trainer.beta=0.2"])
    again, recorded = replay(past, 2, changed, print, Processes.alone()), found.metrics[1]
    assert again.metrics["grad_norm"] == pytest.approx(recorded["grad_norm"], rel=1e-5)
    # On policy the loss is that of the KL alone: four times beta.
    assert again.change is not None and again.change.metrics["loss"] == pytest.approx(4 * recorded["loss"], rel=1e-3)


def test_rows_are_packed_in_all_processes_or_in_none(fast: Path) -> None:
    """Policy and reference; the last process refuses."""
    assert read_json(fast / "refused.json") == [[[False, "not on this GPU", "sdpa"]] * 2] * 2


def test_a_sharded_checkpoint_is_exported_and_evaluated(fast: Path, tmp_path: Path) -> None:
    export_command(fast / "packed", tmp_path / "out", None, "float32", as_json=True)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert farthest(written, weights(fast / "packed")) == 0
    recipe = load_recipe(
        fast / "recipe.yaml", [SHARDED, "eval={source: 'task:sort', limit: 4}", f"model.path={tmp_path / 'out'}"]
    )
    _, found = evaluate_model(recipe.recipe, None, 2, tmp_path, None, print)
    assert found["eval/sampler/delta_max"] < 1e-4
    words = [SHARDED, "eval={source: 'task:sort', limit: 4}"]
    *_, direct = evaluate_target(fast / "packed", fast / "recipe.yaml", words, None, None, print)
    assert direct["eval/reward/mean"] == found["eval/reward/mean"], "`rlgen eval` puts the shards together"


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
def test_in_bfloat16_the_first_update_is_that_of_whole_weights(slow: dict[int, Path]) -> None:
    """Numbers are rounded in other places, so that later steps learn from other samples. Adapters are whole in both."""
    ours, theirs = slow[2] / "half", slow[2] / "half_ddp"
    assert farthest(weights(ours, 1), weights(theirs, 1)) <= 1e-3
    (one, *_), (other, *_) = (read_jsonl(run / "metrics.jsonl") for run in (ours, theirs))
    assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-3)
    assert farthest(weights(slow[2] / "half_adapter"), weights(slow[2] / "half_adapter_ddp")) <= 1e-5


@pytest.mark.slow
def test_divided_experts_train_in_bfloat16(slow: dict[int, Path]) -> None:
    records = read_jsonl(slow[2] / "half_experts" / "metrics.jsonl")
    assert all(record["grad_norm"] > 0 and not record["sentinel/drift"] for record in records)


@pytest.mark.slow
def test_an_adapter_over_shards_is_that_over_whole_weights(slow: dict[int, Path]) -> None:
    assert farthest(weights(slow[2] / "adapter_resumed"), weights(slow[2] / "adapter_ddp")) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("way", [*WAYS, "half", "divided"])
def test_doctor_and_replay_in_other_ways(slow: dict[int, Path], way: str) -> None:
    ours, theirs = read_json(slow[2] / f"{way}_healthy.json")
    assert ours == theirs and {verdict for _, verdict in ours} <= {"ok", "not needed", "not measurable"}
    assert [verdict for name, verdict in ours if name == "loss"] == ["ok"]
    assert read_json(slow[2] / "adapter_resumed.json") == [{}, {}]
