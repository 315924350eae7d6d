"""`rlgen estimate`. What it counts is tested in tests/models/test_memory.py."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import RECIPE
from transformers import CONFIG_MAPPING

from rlgen.cli.estimate import conclusions, estimate_command, memory_report, plan_of
from rlgen.recipe import load_recipe

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
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.replace('"tiny:qwen3"', str(folder)))
    return path


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
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.replace(", max_prompt_tokens: 64", ""))
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
