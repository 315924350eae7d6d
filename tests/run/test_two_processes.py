"""What `make test` asks of two processes: one start of them does all, since that takes longer than any of it.

`test_sharded.py` and `test_shards.py` have the slow tests of the same.
"""

import shutil
from pathlib import Path

import pytest
import sharded_worker
from conftest import read_jsonl
from helpers import paths
from helpers.in_processes import train_in
from helpers.rollouts import rollout_rows
from helpers.spread import learned, name_of_way, recipe_of_way
from helpers.torchrun import farthest, launch, recipe_of, weights, well
from helpers.train_state import equal, learn_together, loaded, parts, state
from helpers.waiting import HANGS
from safetensors.torch import load_file
from test_sharded import CONTEXT, FIRST, GROUPS, HALF, SECTIONS, SHARDED, SPLIT, WAYS, Alone, alone, same

from rlgen.analysis.run import read_run
from rlgen.cli.evaluate import evaluate_target
from rlgen.cli.export import export_command
from rlgen.engines.launch import new_token, start_servers
from rlgen.engines.open import server_plans
from rlgen.errors import SetupError
from rlgen.files import read_json
from rlgen.models.load import WEIGHT_SHARDS, locate
from rlgen.processes import Processes
from rlgen.recipe import load_recipe
from rlgen.run.checkpoint import Checkpoints, whole_checkpoint
from rlgen.run.manifest import check_files
from rlgen.setup.change import with_changes
from rlgen.setup.evaluation import evaluate_model
from rlgen.setup.replay import Past, replay

__all__ = ["alone"]
DEEDS = [
    *(f"train {name} {SHARDED} {WAYS[name]}" for name in ("packed", "adapter")),
    f"train half {SHARDED} {HALF} {FIRST} {GROUPS}",
    f"doctor healthy {SHARDED}",
    f"train packed_split {SPLIT} {FIRST}",
    f"train packed_split {CONTEXT}",
    f"refuse refused {SHARDED}",
    "replay packed 2",
    "damage damaged",
    f"train vllm {SHARDED} {HALF} engine.kind=colocated trainer.kind=rloo",
]
DECLARED = [way for way, test in paths.declared(Path(__file__).parent) if test.endswith("::test_ways_on_vllm_and_servers")]


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what two processes did with one server."""
    folder = tmp_path_factory.mktemp("fast")
    recipe = recipe_of(folder, SECTIONS)
    launches = load_recipe(recipe_of_way(next(way for way in DECLARED if "server" in way), folder)).recipe
    token, log = new_token(), folder / "server.log"
    (server,) = start_servers(server_plans(launches.engine_needs, locate("tiny:qwen3")), token, [log], HANGS)
    try:
        ways = [f"train {recipe_of_way(way, folder, url=server.url).stem}" for way in DECLARED]
        deeds = [*ways[1:], *DEEDS, ways[0]]  # vLLM in the process closes the process groups, which are opened again
        well(launch(sharded_worker.__file__, recipe, folder, *deeds, timeout=900, RLGEN_SERVER_TOKEN=token))
    finally:
        server.stop()
    return folder


@pytest.mark.path("grpo", "colocated", "ddp", "float32", "packed", "full")
@pytest.mark.path("online_dpo", "server", "fsdp", "bfloat16", "padded", "full")
@pytest.mark.path("rloo", "server", "ddp", "bfloat16", "padded", "lora")
@pytest.mark.path("online_dpo", "transformers", "ddp", "bfloat16", "packed", "full")
@pytest.mark.vllm
def test_ways_on_vllm_and_servers(fast: Path) -> None:
    """Two with vLLM learn what one learns: the same samples, and the same gradient of these."""
    for way in DECLARED:
        learned(fast / name_of_way(way))
    two, one = fast / name_of_way(DECLARED[0]), fast / "one"
    train_in(one, load_recipe(two.with_suffix(".yaml")), Processes.alone())
    for key in ("prompt_ids", "completion_ids", "reward"):
        ours, theirs = ([row[key] for row in rollout_rows(run, 1)] for run in (two, one))
        assert ours == theirs, key
    for ours, theirs in zip(read_jsonl(two / "metrics.jsonl"), read_jsonl(one / "metrics.jsonl"), strict=True):
        for key in ("loss", "grad_norm", "reward/mean", "tokens/trained"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-6), (ours["step"], key)


@pytest.mark.path("grpo", "transformers", "fsdp", "float32", "packed", "full")
@pytest.mark.path("grpo", "transformers", "fsdp", "float32", "packed", "lora")
@pytest.mark.parametrize("way", ["packed", "adapter", "packed_split"])
def test_two_processes_learn_what_one_learns(fast: Path, alone: Alone, way: str) -> None:
    """On default settings, and with layers that they split in the first step, and tokens that they share out in the second."""
    same(fast / way, alone(way.partition("_")[0]))
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
    learned(fast / "vllm")
    assert all(record["sampler/delta_mean"] > 0 for record in read_jsonl(fast / "vllm" / "metrics.jsonl"))


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


def test_one_process_goes_on_with_what_two_have_saved(fast: Path) -> None:
    path = fast / "damaged" / "step_000001"
    manifest = check_files(path, hashes=True)
    names = {name: file.size for name, file in manifest.files.items()}
    for kind in ("weights", "optimizer"):
        sizes = [sum(names[name] for name in names if name.startswith(f"state/{kind}/shard-0000{rank}")) for rank in (1, 2)]
        assert all(sizes) and max(sizes) < 1.2 * min(sizes), "each process has written its half"
    assert manifest.processes == 2 and "config.json" in names and not [name for name in names if name.startswith("part_")]
    assert not list(path.glob("*.safetensors")), "no process has put the weights together"
    alone = parts()
    learn_together(alone)
    assert equal(loaded(path), state(*alone)), "to the last bit"


def test_a_wrong_bit_of_one_process_is_found_and_the_one_before_is_used_by_all(fast: Path) -> None:
    one, other = read_json(fast / "damaged.json")
    assert one == other
    step, later, notice = one
    assert (step, later) == (1, ["step_000002"])
    assert "state/weights/shard-00002-model-00001-of-00001.safetensors has other bytes than were written" in notice
    choice = Checkpoints(fast / "damaged", 9, Processes.alone()).choose()
    assert choice.step == 1


def test_a_checkpoint_of_shards_is_no_model(fast: Path) -> None:
    with pytest.raises(SetupError, match=r"step_000001 is a checkpoint of shards; `rlgen export` makes a model of them"):
        locate(str(fast / "damaged" / "step_000001"))


def test_a_sharded_checkpoint_of_before_is_read(fast: Path, tmp_path: Path) -> None:
    """It had the weights unsharded, beside the shards of the optimizer's state."""
    path = shutil.copytree(fast / "damaged" / "step_000001", tmp_path / "step_000001")
    with whole_checkpoint(path, tmp_path / "whole") as folder:
        shutil.copy(folder / "model.safetensors", path)
    shutil.rmtree(path / WEIGHT_SHARDS)
    assert equal(loaded(path), loaded(fast / "damaged" / "step_000001"))
