"""`rlgen estimate`. What it counts is tested in tests/models/test_memory.py."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import RECIPE
from helpers.recipes import written
from transformers import CONFIG_MAPPING

from rlgen.cli.estimate import conclusions, estimate_command, memory_report, plan_of
from rlgen.cli.step_time import Machines
from rlgen.errors import RecipeError, UsageError
from rlgen.metrics import Metric
from rlgen.recipe import dump_recipe, load_recipe

pytestmark = pytest.mark.usefixtures("counted_once")

GIB = 1 << 30
# The shape of Qwen3-0.6B.
SHAPE: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
SHAPE |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True}
SIZES = ["rollout={prompts_per_step: 32, group_size: 8, max_completion_tokens: 1024}", "data.max_prompt_tokens=512"]
SIZES += ["optim.micro_batch_tokens=32768", "model.dtype=bfloat16"]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Of a model that is a config and nothing else: no weights, no tokenizer."""
    folder = tmp_path / "model"
    CONFIG_MAPPING["qwen3"](**SHAPE).save_pretrained(folder)
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    return written(tmp_path, RECIPE.replace('"tiny:qwen3"', str(folder)))


def report(recipe: Path, *overrides: str, gib: int | None = 80) -> dict[str, Any]:
    return memory_report(load_recipe(recipe, [*SIZES, *overrides]).recipe, gib and gib * GIB)


def test_a_table_from_a_config_alone(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    estimate_command(recipe, SIZES, 80, as_json=False)
    said = capsys.readouterr().out
    assert "596,049,920 parameters; micro-batches of 30 rows of 1092 tokens" in said
    # 4 and 8 bytes a parameter, and 45 % of the GPU for the engine
    weights = "trainer weights      2.22      2.22     2.22      2.22       2.22   2.22"
    moments = "Adam moments                   4.44     4.44      4.44       4.44   4.44"
    assert weights in said and moments in said and "KV cache                      34.89" in said
    assert "does not fit" in said and "--set model.gradient_checkpointing=true" in said and "--set engine.sleep=true" in said


def test_prompts_are_as_long_as_the_data_has_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The longest has 30 tokens, and a group of 4 shares it: 12 + 8 a row. Padded, each row has its own."""
    path = written(tmp_path, RECIPE.replace(", max_prompt_tokens: 64", ""))
    found = {}
    for packing in ("null", "false"):
        estimate_command(path, [f"optim.packing={packing}"], None, as_json=True)
        found[packing] = json.loads(capsys.readouterr().out)["micro_batch"]
    assert found == {"null": {"rows": 16, "tokens_a_row": 20}, "false": {"rows": 16, "tokens_a_row": 42}}


def test_json_says_all_and_the_settings_help(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    estimate_command(recipe, SIZES, 80, as_json=True)
    first = json.loads(capsys.readouterr().out)
    parts = {part for phase in first["phases"].values() for part in phase}
    assert set(first["how"]) == parts and first["fits"] is False and first["peak"]["phase"] == "backward"
    saved = {hint["setting"]: hint["saves"] for hint in first["hints"]}
    assert list(saved.values()) == sorted(saved.values(), reverse=True)
    # a hint keeps its word: set, it saves what it said
    second = report(recipe, "model.gradient_checkpointing=true")
    assert first["peak"]["bytes"] - second["peak"]["bytes"] == saved["model.gradient_checkpointing=true"] > 40 * GIB
    halved = next(setting for setting in saved if setting.startswith("optim.micro_batch_tokens"))
    third = report(recipe, halved)
    assert first["peak"]["bytes"] - third["peak"]["bytes"] == pytest.approx(saved[halved], rel=0.05)
    all_of_them = report(recipe, "model.gradient_checkpointing=true", "engine.sleep=true")
    assert all_of_them["fits"] is True and all_of_them["peak"]["phase"] == "sync"


def test_the_plan_follows_the_recipe(recipe: Path) -> None:
    changes = ["engine={kind: colocated, kv_cache_gib: 2.0, sleep: true, max_num_seqs: 64}", "trainer={kind: grpo, beta: 0.1}"]
    plan = plan_of(load_recipe(recipe, [*SIZES, *changes]).recipe, 80 * GIB)
    assert (plan.cache_gib, plan.share, plan.sleeps, plan.sequences, plan.model_len) == (2.0, None, True, 64, 1536)
    assert plan.reference and (plan.trainer_bytes, plan.engine_bytes) == (2, 2)
    small = plan_of(load_recipe(recipe, ["rollout.group_size=2", "engine={kind: transformers, dtype: bfloat16}"]).recipe, None)
    # a micro-batch is never more than a step has: 4 prompts of 2 completions of at most 64 / 2 + 12 tokens, the prompt shared
    assert (small.rows, small.length, small.sequences) == (8, 44, 8)
    assert (small.engine, small.trainer_bytes, small.engine_bytes, small.share) == ("transformers", 4, 2, None)
    assert plan_of(load_recipe(recipe, ["trainer={kind: online_dpo}"]).recipe, None).reference


def test_weights_of_four_bits_and_rows_that_processes_share_out(recipe: Path) -> None:
    """Of Qwen3-0.6B 440 million weights are those of linear layers; embedding, head and norms stay in bfloat16."""
    lora = report(recipe, "model.lora={}")
    assert any(hint["setting"] == "model.quantization=nf4" for hint in lora["hints"])
    nf4, int8 = (report(recipe, "model.lora={}", f"model.quantization={kind}") for kind in ("nf4", "int8"))
    linear = 28 * (2 * 1024 * 2048 + 2 * 1024 * 1024 + 3 * 1024 * 3072)
    weights = [found["phases"]["load"]["trainer weights"] for found in (lora, nf4, int8)]
    assert [weights[0] - less for less in weights[1:]] == [linear * (2 - 1 / 2 - 1 / 16), linear]
    whole = plan_of(load_recipe(recipe, SIZES).recipe, 80 * GIB)
    fsdp = "processes={strategy: fsdp, count: 4, context: 4}"
    shared = plan_of(load_recipe(recipe, [*SIZES, fsdp, "optim.micro_batch_tokens=384"]).recipe, 80 * GIB)
    assert (whole.rows, whole.length) == (30, 1092) and (shared.rows, shared.length) == (1, 384), "of 1,536 tokens of one row"
    with pytest.raises(RecipeError, match=r"= 1536; set optim.micro_batch_tokens to 384 or more"):
        load_recipe(recipe, [*SIZES, fsdp, "optim.micro_batch_tokens=383"])


def test_what_is_said_without_a_gpu_and_with_too_small_a_cache(recipe: Path) -> None:
    said = "\n".join(conclusions(report(recipe, gib=None)))
    assert "no GPU here: pass --gpu-gib N" in said and "fit," not in said
    tight = report(recipe, "engine.gpu_memory_utilization=0.02", gib=60)
    assert tight["sequences"]["cache_holds"] == 0 and tight["fits"] is False
    tight["peak"]["bytes"] = 0
    assert "the KV cache cannot hold one sequence of full length" in "\n".join(conclusions(tight))


def test_launched_servers_are_where_their_gpus_are(recipe: Path) -> None:
    """On the trainer's GPU unless they have their own; then each GPU of a server has its part beside the table."""
    here = report(recipe, "engine={kind: server, launch: true, kv_cache_gib: 2.0}")
    colocated = report(recipe, "engine={kind: colocated, kv_cache_gib: 2.0}")
    assert here["phases"] == colocated["phases"] and here["servers"] is None
    assert not [hint for hint in here["hints"] if "sleep" in hint["setting"]]  # a server cannot
    own = "engine={kind: server, launch: true, servers: 2, devices: [1, 2, 3, 4], tensor_parallel_size: 2, kv_cache_gib: 2.0}"
    there = report(recipe, own)
    assert "engine weights" not in there["phases"]["generate"] and there["sequences"]["decoded_together"] == 128
    weights = 2 * colocated["parameters"] // 2  # in bfloat16, half of them on a GPU
    a_gpu = {"engine weights": weights, "KV cache": 2 * GIB, "engine's own": GIB // 2}
    assert there["servers"] == {"count": 2, "gpus": ["1", "2", "3", "4"], "a_gpu": a_gpu}
    assert "launched servers: 2, on GPUs 1, 2, 3, 4, not in this table: 3.06 GiB on each" in conclusions(there)
    url = report(recipe, "engine={kind: server, url: 'http://a:1'}")
    assert url["servers"] is None and "engine weights" not in url["phases"]["generate"]


def timed(recipe: Path, *overrides: str, **machines: Any) -> dict[str, Any]:
    found = memory_report(load_recipe(recipe, [*SIZES, *overrides]).recipe, 74 * GIB, Machines(**machines))
    return found["time"]


SHARDED = 'processes={"strategy":"fsdp","shard":8}'


def test_nodes_and_gpus_share_the_weights(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """64 processes; each eight hold the weights once. Nobody but the recipe's rules refuses what cannot be divided."""
    estimate_command(recipe, [*SIZES, SHARDED], 80, True, Machines(nodes=8, gpus=8))
    found = json.loads(capsys.readouterr().out)
    assert found["processes"]["count"] == 64 and found["time"] is None
    assert found["phases"]["optimizer"]["Adam moments"] == 8 * (found["parameters"] // 8)
    assert found["micro_batch"]["rows"] == 4, "256 completions in 64 processes"
    assert found["processes"]["peak_of_others"] == found["peak"]["bytes"], "on a GPU no checkpoint is copied"
    with pytest.raises(RecipeError, match=r"processes\.shard 8 divides no weights over 12 processes"):
        estimate_command(recipe, [*SIZES, SHARDED], 80, True, Machines(nodes=3, gpus=4))


def test_the_first_process_needs_more_where_it_copies_a_checkpoint(recipe: Path) -> None:
    found = report(recipe, "processes.count=2", gib=None)
    assert found["peak"]["bytes"] - found["processes"]["peak_of_others"] == 12 * found["parameters"]
    assert "of the first of 2 processes" in conclusions(found)[0]


def test_a_cluster_has_as_many_processes_as_trainers(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = "cluster={kind: ray, trainers: 4}"
    found = report(recipe, cluster)
    assert found["processes"]["count"] == 4 and found["micro_batch"] == report(recipe, "processes.count=4")["micro_batch"]
    estimate_command(recipe, [*SIZES, cluster], 80, True, Machines(nodes=2, gpus=4))
    assert json.loads(capsys.readouterr().out)["processes"]["count"] == 8


def test_no_setting_is_advised_that_the_recipe_refuses(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def advised(*overrides: str) -> set[str]:
        estimate_command(recipe, [*SIZES, *overrides], 80, as_json=True)
        return {hint["setting"] for hint in json.loads(capsys.readouterr().out)["hints"]}

    usual = advised("processes.count=1")
    assert {"engine.sleep=true", "model.lora.rank=16", "processes.strategy=fsdp"} <= usual
    assert usual - advised("rollout.stream=true") == {"engine.sleep=true", "processes.strategy=fsdp"}
    assert usual - advised("model.dither=true") == {"model.lora.rank=16"}


def test_published_numbers_give_a_time(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    estimate_command(recipe, SIZES, None, False, Machines(gpu="h100"))
    said = capsys.readouterr().out
    assert "of 74.40 GiB" in said and "a step takes" in said
    assert "h100: of the published 989.5 TFLOP/s training reaches 30%" in said
    assert "completions have 512 tokens in the mean, half of the most (--mean-tokens)" in said
    found = timed(recipe, gpu="h100", mean_tokens=200)
    assert found["rates"]["train_token"] == pytest.approx(6 * 596_049_920 / 0.3 / 989.5e12)
    assert found["rates"]["decode_step"] == pytest.approx(2 * 596_049_920 / 0.6 / 3350e9)
    assert found["work"]["mean_tokens"] == 200 and found["work"]["slots"] == 256 and found["rates"]["sync"] == 0
    trained = 256 * 200 + 32 * 512
    assert found["phases"]["train"] == pytest.approx(found["rates"]["train_token"] * trained, rel=0.05)


def test_processes_send_by_nvlink_in_a_node_and_by_the_network_between_nodes(recipe: Path) -> None:
    recipe_of = 'processes={"strategy":"fsdp","count":16}'
    near, far = (timed(recipe, recipe_of, gpu="h100", nodes=16 // each, gpus=each) for each in (16, 8))
    assert far["rates"]["micro_batch"] == pytest.approx(9 * near["rates"]["micro_batch"])  # 450 and 50 GB a second
    assert timed(recipe, recipe_of, gpu="h100", nodes=16)["rates"] == far["rates"], "a GPU in each node"
    given = timed(recipe, recipe_of, gpu="h100", nodes=2, gpus=8, bandwidth=100.0)
    assert given["rates"]["micro_batch"] == pytest.approx(8 * 596_049_920 / 100e9)


def test_given_rates(recipe: Path) -> None:
    found = timed(recipe, tokens_per_second=5000.0, train_flops=1e14, mean_tokens=100)
    assert found["rates"]["decode_step"] == pytest.approx(256 / 5000)
    assert found["rates"]["train_token"] == pytest.approx(6 * 596_049_920 / 1e14)
    elsewhere = timed(recipe, "engine={kind: server, url: ['http://a:1', 'http://b:1']}", tokens_per_second=5e3, train_flops=1e14)
    assert elsewhere["rates"]["sync"] == pytest.approx(2 * 596_049_920 / 50e9)
    assert elsewhere["work"]["engines"] == 2, "each address is a server"
    pairs = "trainer={kind: online_dpo, updates_per_rollout: 3}"
    assert timed(recipe, pairs, tokens_per_second=5000.0, train_flops=1e14)["work"]["updates"] == 3


@pytest.mark.parametrize(
    ("machines", "message"),
    [
        ({"gpu": "h1000"}, "--gpu h1000: known are h200, h100"),
        ({"gpu": "h100", "like": [Path("a")]}, "pass one of them"),
        ({"tokens_per_second": 1.0}, "go together"),
        ({"train_flops": 1.0}, "go together"),
    ],
)
def test_options_that_contradict_each_other(machines: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Machines(**machines)


def run_like(folder: Path, recipe: Path, *overrides: str, steps: int = 6) -> Path:
    """A run whose steps took 2 s to sample and 1 s to train; the first one ten times as long."""
    folder.mkdir()
    (folder / "resolved.yaml").write_text(dump_recipe(load_recipe(recipe, [*SIZES, *overrides]).recipe))
    times = {Metric.TIME_GENERATE: 2.0, Metric.TIME_REWARD: 0.256, Metric.TIME_TRAIN: 1.0, Metric.TIME_SYNC: 0.5}
    times |= {Metric.TIME_STEP: 4.0, Metric.TOKENS_GENERATED: 25600}
    sizes = {Metric.COMPLETIONS_MEAN_TOKENS: 100.0, Metric.COMPLETIONS_MAX_TOKENS: 400}
    records = [{**times, **sizes, Metric.STEP: step} for step in range(1, steps + 1)]
    records[0] |= {key: 10 * value for key, value in times.items()}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_rates_of_a_run(recipe: Path, tmp_path: Path) -> None:
    run = run_like(tmp_path / "run", recipe)
    same = timed(recipe, like=[run])
    assert same["phases"]["train"] == pytest.approx(1.0, rel=0.05) and same["phases"]["generate"] == pytest.approx(2.0, rel=0.1)
    assert same["phases"]["sync"] == 0.5 and same["phases"]["reward"] == pytest.approx(0.256)
    assert same["phases"]["save"] == pytest.approx(4 - 3.756)
    twice = timed(recipe, "rollout.prompts_per_step=64", "engine.max_num_seqs=512", like=[run])
    assert twice["phases"]["train"] == pytest.approx(2.0, rel=0.05)
    assert twice["phases"]["generate"] == pytest.approx(3.0, rel=0.15), "half of it grows with the sequences"
    assert any("50% of the sampling grows with the sequences" in sentence for sentence in twice["assumed"])


def test_runs_that_are_no_measure(recipe: Path, tmp_path: Path) -> None:
    short = run_like(tmp_path / "short", recipe, steps=3)
    with pytest.raises(UsageError, match="it has 2 measured steps after the first one; 3 or more are needed"):
        timed(recipe, like=[short])
    other = run_like(tmp_path / "other", recipe, "model.dtype=float32")
    with pytest.raises(UsageError, match=r"its model\.dtype is float32, and bfloat16 is needed"):
        timed(recipe, like=[other])
    ahead = run_like(tmp_path / "ahead", recipe, "rollout.async_steps=1", "engine={kind: server, url: 'http://a:1'}")
    with pytest.raises(UsageError, match=r"its engine\.kind is server, and colocated is needed"):
        timed(recipe, like=[ahead])
    with pytest.raises(UsageError, match=r"its rollout\.async_steps is 1, and 0 is needed"):
        timed(recipe, "engine={kind: server, url: 'http://a:1'}", like=[ahead])
