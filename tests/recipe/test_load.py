"""Reading recipes: places, all mistakes at once, overrides, rules, and that resolving twice changes nothing."""

import math
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import yaml
from conftest import RECIPE, ROOT, Proof
from helpers.recipes import problems, written
from pydantic import BaseModel

from rlgen.algorithms.registry import TRAINERS
from rlgen.errors import RecipeError
from rlgen.recipe import dump_recipe, load_recipe
from rlgen.recipe.data import TASKS
from rlgen.recipe.engines import ServerEngineRecipe
from rlgen.recipe.inert import inert
from rlgen.recipe.keys import models_of
from rlgen.recipe.models import Recipe, RewardRecipe, ToolRecipe
from rlgen.recipe.rules import servers
from rlgen.recipe.yaml import parse, scalar


@pytest.mark.fault(1, 2, 3, 5)
def test_all_mistakes_at_once_in_line_order(tmp_path: Path, proof: Proof) -> None:
    path = written(
        tmp_path,
        """\
run: {name: demo, steps: 3, steps: 4}
model:
  path: tiny:qwen3
  dtype: float16
data: {source: task:sort, options: {min_lenght: 3}}
rewards:
  - use: exact_match
    wieght: 2
rollout: {group_size: eight, repetition_penalty: 0.9}
trainer: {kind: grpo, clip_hgih: 0.28}
optim: {learning_rate: .nan}
""",
    )
    expected = [
        (":1:29: `steps` appears twice, first in line 1", ""),
        (":4:3: model.dtype: 'float16' is not one of float32, bfloat16", "bfloat16"),
        (":5:37: `min_lenght` is not a key of `data.options`", "did you mean `min_length`?"),
        (":8:5: `wieght` is not a key of `rewards.0`", "did you mean `weight`?"),
        (":9:11: rollout.group_size: must be a whole number, not 'eight'", ""),
        (":9:30: `repetition_penalty` is not a key of `rollout`", "rlgen docs sampling"),
        (":10:23: `clip_hgih` is not a key of `trainer` (kind: grpo)", "did you mean `clip_high`?"),
        (":11:9: optim.learning_rate: must be a finite number, not nan", ""),
    ]
    found = problems(path)
    assert len(found) == len(expected)
    for line, (start, hint) in zip(found, expected, strict=True):
        assert line.startswith(f"{path}{start}") and hint in line
    proof(f"{len(found)} mistakes in one file, told in line order")


@pytest.mark.fault(1)
def test_an_unknown_key_at_the_top_and_four_levels_down(tmp_path: Path, proof: Proof) -> None:
    deep = RECIPE.replace("rollout:", "trainer: {correction: {geometric: {mix: 0.5}}}\nrolout: {seed: 1}\nrollout:")
    found = problems(written(tmp_path, deep))
    places = [":7:36: `mix` is not a key of `trainer.correction.geometric`", ":8:1: `rolout` is not a key of a recipe"]
    for line, place, closest in zip(found, places, ("`min`", "`rollout`"), strict=True):
        assert line.startswith(f"{tmp_path}/recipe.yaml{place}") and f"did you mean {closest}?" in line
    proof("; ".join(place.partition(": ")[2] for place in places))


@pytest.mark.parametrize(
    "text, value",
    [
        ("1e-6", 1e-6),
        ("1.0E+3", 1000.0),
        (".5", 0.5),
        ("12", 12),
        ("010", "010"),
        ("no", "no"),
        ("yes", "yes"),
        ("true", True),
        ("~", None),
        ("2024-01-01", "2024-01-01"),
        ("-.inf", -math.inf),
        ("1_000", "1_000"),
        ("0x10", "0x10"),
    ],
)
def test_scalars_are_read_as_in_yaml_1_2(text: str, value: object) -> None:
    assert scalar(text) == value and type(scalar(text)) is type(value)


def test_quotes_make_text() -> None:
    assert parse("{a: '1e-6', b: \"true\"}", "f").data == {"a": "1e-6", "b": "true"}


@pytest.mark.fault(6, 7)
@pytest.mark.parametrize(
    "text, part",
    [
        ("", "the recipe is empty"),
        ("# nothing\n", "the recipe is empty"),
        ("- a\n- b\n", "a recipe is a mapping"),
        ("a: 1\n---\nb: 2\n", "single document"),
        ("run: !!python/object:os.system x\n", "is not allowed"),
        ("a: &a [*a]\n", "too large or too deep"),
        ("run: \x00\n", "not YAML"),
    ],
)
def test_what_is_no_recipe(tmp_path: Path, text: str, part: str, proof: Proof) -> None:
    assert part in "\n".join(problems(written(tmp_path, text)))
    proof(f"{text!r}: {part}")


@pytest.mark.fault(7)
@pytest.mark.parametrize(
    "tag", ["!!python/object/apply:os.mkdir", "!!python/object/new:os.mkdir", "tag:yaml.org,2002:python/object/apply:os.mkdir"]
)
def test_no_tag_constructs_anything(tmp_path: Path, tag: str, proof: Proof) -> None:
    made = tmp_path / "made"
    value = f"{tag if tag.startswith('!') else f'!<{tag}>'} [{made}]"
    found = problems(written(tmp_path, RECIPE.replace("name: test", f"name: {value}")))
    assert any(line.startswith(f"{tmp_path}/recipe.yaml:1:13: ") and "is not allowed" in line for line in found)
    found = problems(written(tmp_path, RECIPE), f"run.name={value}")
    assert any(line.startswith("--set 1: ") and "is not allowed" in line for line in found)
    assert not made.exists()
    yaml.unsafe_load(value)
    assert made.is_dir(), "a loader that constructs would have made it"
    proof(f"{tag}: refused in a file and behind --set, nothing made")


@pytest.mark.fault(6)
def test_byte_order_mark_and_crlf_are_accepted(tmp_path: Path, proof: Proof) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + RECIPE.replace("\n", "\r\n").encode())
    assert load_recipe(path).recipe.run.steps == 2
    proof("read with BOM and CRLF")


@pytest.mark.fault(9)
def test_overrides(recipe_file: Path, proof: Proof) -> None:
    overrides = ["run.steps=3", "model.lora=null", "model.lora.rank=4", "rewards.1.weight=2"]
    overrides += ["trainer={kind: rloo, beta: 0.1}", "run.steps=7", "run.seed=5"]
    loaded = load_recipe(recipe_file, overrides)
    recipe = loaded.recipe
    assert (recipe.run.steps, recipe.rewards[1].weight, recipe.trainer.kind, recipe.run.seed) == (7, 2.0, "rloo", 5)
    assert recipe.trainer.beta == 0.1
    assert recipe.model.lora is not None and recipe.model.lora.rank == 4
    assert loaded.origins["run.steps"] == "--set 6: run.steps=7"
    assert loaded.origins["trainer.beta"].startswith("--set 5")
    assert loaded.origins["model.path"] == f"{recipe_file}:2:9"
    assert loaded.origins["optim.schedule"] == "default"
    proof("run.steps was given twice, 3 and 7: it is 7")


@pytest.mark.fault(3, 9, 12, 13)
@pytest.mark.parametrize(
    "override, part",
    [
        ("foo", "is not of the form"),
        ("optim.lr=1", "did you mean `learning_rate`?"),
        ("rewards.9.weight=1", "there is no key rewards.9.weight"),
        ("rewards.0.use.path=x", "rewards.0.use has a value; set all of it: {path: …}"),
        ("run.steps=0", "greater than or equal to 1"),
        ("run.steps=8.5", "must be a whole number, not 8.5"),
        ("run.steps='8'", "must be a whole number, not '8'"),
        ("run.steps=true", "must be a whole number, not True"),
        ("data.source=task:srot", "did you mean `sort`?"),
        ("trainer.kind=grop", "trainer.kind: 'grop' is not one of grpo, rloo, online_dpo, own; did you mean `grpo`?"),
        ("optim.schedule=cosin", "optim.schedule: 'cosin' is not one of constant, linear, cosine; did you mean `cosine`?"),
        # two fields and the nearest valid value
        ("rollout.temperature=0.005", "must be 0.01 or more"),
        ("rollout.temperature=-0.5", "greater than or equal to 0"),
        ("optim.micro_batch_tokens=75", "set optim.micro_batch_tokens to 76 or more"),
        ("optim.warmup_steps=2", "set optim.warmup_steps to 1 or less"),
        ("engine.max_model_len=75", "set engine.max_model_len to 76 or more"),
        ("engine={kv_cache_gib: 1, gpu_memory_utilization: 0.5}", "has no effect beside engine.kv_cache_gib"),
        ("engine={extra: {logprobs_mode: raw_logprobs}}", "engine.extra.logprobs_mode is set by rlgen"),
        ("engine.structured_regex='[0-9]+'", "set trainer.correction to {mode: none}"),
        ("engine={extra: {max-logprobs: 3}}", "engine.extra.max-logprobs is set by rlgen"),
        ("engine={extra: {Block: 3}}", "engine.extra.Block is not an argument of vLLM"),
        ("engine={kind: server, launch: true, url: 'http://a:1'}", "engine.launch is true: rlgen would start another"),
        ("engine={kind: server, url: 'a:1'}", "is not the address of a server"),
        ("engine={kind: server, url: 'http://me:secret@a:1'}", "environment variable RLGEN_SERVER_TOKEN"),
        ("engine={kind: server, url: ['http://a:1', 'http://a:1/']}", "engine.url names http://a:1/ twice"),
        ("engine={kind: server, url: 'http://a:1', token_env: 'a b'}", "engine.token_env"),
        ("engine={kind: server, launch: true, max_model_len: 75}", "set engine.max_model_len to 76 or more"),
        ("trainer={updates_per_rollout: 2, clip_low: 0.5}", "set trainer.clip_low to 0.28 or less"),
        ("rewards=[{use: exact_match}, {use: exact_match}]", "two rewards are called `exact_match`"),
        ("rewards=[{use: exact_match, weight: 0}]", "every weight in rewards is 0"),
        ("data.options={min_length: 6}", "set data.options.min_length to 5 or less"),
        # fields without an effect
        ("trainer.clip_low=0.1", "has no effect when trainer.updates_per_rollout is 1"),
        ("trainer.clip_high=0.3", "has no effect when trainer.updates_per_rollout is 1"),
        ("trainer.correction={mode: none, max: 3}", "has no effect when trainer.correction.mode is none"),
        ("data.columns={prompt: q}", "data.columns has no effect with a task: source"),
        ("data.split=test", "data.split has no effect with a task: source"),
        ("data={source: a.jsonl, revision: main}", "data.revision has no effect with local files"),
        ("data={source: a.jsonl, options: {size: 3}}", "data.options has no effect without a task: source"),
        ("data={source: 'task:sort', template_args: {a: 1}}", "data.template_args has no effect"),
        ("model.revision=main", "model.revision has no effect"),
        ("engine={kind: transformers, url: 'http://x'}", "an engine of this kind has no server; set engine.kind to server"),
        ("engine={kind: server, url: 'http://a:1', port: 1}", "engine.port has no effect beside engine.url"),
        ("engine={kind: server, url: 'http://a:1', kv_cache_gib: 1}", "engine.kv_cache_gib has no effect beside engine.url"),
        ("engine={kind: server, launch: true, transfer: nccl}", 'set engine.devices to its number, such as "1"'),
        ("engine={kind: server, launch: true, transfer: ipc}", "'ipc' is not one of files, nccl"),
        ("engine={kind: server, launch: true, devices: '1, 2'}", "engine.devices"),
        ("engine={kind: server, launch: true, servers: 2, devices: [1, 1]}", "engine.devices names 1 twice"),
        ("engine={kind: server, launch: true, servers: 2, devices: [1, 2, 3]}", "needs an equal number of them"),
        ("engine={kind: server, launch: true, tensor_parallel_size: 2, devices: '1'}", "name 2 GPUs"),
        ("engine={kind: server, launch: true, servers: 3, port: 65534}", "engine.servers 3 needs port 65536"),
        ("engine={kind: server, url: 'http://a:1', servers: 2}", "engine.servers has no effect beside engine.url"),
        ("engine={kind: server, launch: true, extra: {data_parallel_size: 2}}", "set engine.servers to their number"),
        ("engine={kind: colocated, extra: {data_parallel_size: 2}}", "start more processes"),
        ("engine={kind: server, url: 'http://a:1', devices: '1'}", "engine.devices has no effect beside engine.url"),
        ("engine={kind: server, url: 'http://a:1', transfer: nccl, restarts: 1}", "engine.restarts has no effect with"),
        ("engine={kind: server, url: 'http://a:1', transfer: nccl, transfer_dir: /x}", "engine.transfer_dir has no effect with"),
        ("engine={extra: {weight_transfer_config: {}}}", "engine.extra.weight_transfer_config is set by rlgen"),
        ("model.quantization=nf4", "freezes all weights: without model.lora"),
        ("model.lora={dropout: 0.1}", "rlgen uses no dropout"),
        ("engine={kind: server, url: 'http://a:1', lora: adapter}", "engine.lora has no effect without model.lora"),
        ("processes.shard=2", "processes.shard has no effect with processes.strategy ddp"),
        ("processes={defer_sync: true, count: 2}", "processes.defer_sync has no effect with processes.strategy ddp"),
        ("processes={strategy: fsdp, shard: 1}", "processes.shard 1 divides no weights over several processes"),
        ("processes.experts=2", "processes.experts has no effect with processes.strategy ddp"),
        ("processes={strategy: fsdp, experts: 1}", "processes.experts 1 divides no experts over several processes"),
        ("processes={strategy: fsdp, experts: 4, count: 6}", "processes.experts 4 divides no experts over 6 processes"),
        ("processes={strategy: fsdp, experts: 2, shard: 2}", "processes.experts has not been tried with processes.shard"),
        ("processes={strategy: fsdp, tensor: 2, experts: 2}", "processes.tensor has not been tried with processes.experts"),
        ("processes={strategy: fsdp, shard: 4, count: 6}", "processes.shard 4 divides no weights over 6 processes"),
        ("model.lora={r: 8}", "did you mean `rank`?"),
        ("model.lora={rank: 0}", "model.lora.rank"),
        ("trainer={kind: online_dpo, correction: {mode: token_truncate}}", "is not one of sequence_mask, none"),
        ("trainer={kind: online_dpo, kl: k2}", "the loss itself contains the reference"),
        ("trainer={kind: rloo, loss: dapo}", "RLOO has one loss"),
        # placements and settings that are known to be wrong
        ("trainer={beta: 0.1, kl: k1}", "k1 in a loss has an expected gradient of zero"),
        ("trainer={combine_rewards: normalize_then_sum, beta: 0.1, kl: k1_in_reward}", "normalises each by itself"),
        ("trainer={combine_rewards: normalize_then_sum, scale_rewards: batch}", "which scales by itself"),
        ("trainer={correction: {mode: token_mask, min: 1.0, max: 1.0}}", "is not below trainer.correction.max"),
        ("trainer={correction: {geometric: {min: 1.0}}}", "less than 1"),
        ("trainer={updates_per_rollout: 2, delta: 1.2}", "is not above 1 + trainer.clip_high"),
        ("trainer={kind: rloo, updates_per_rollout: 2, ratio: sequence}", "one weight for each token"),
        ("trainer={kind: rloo, reward_clip: [1.0, -1.0]}", "swap them"),
        ("trainer.kl=k2", "has no effect when trainer.beta is 0"),
        ("sinks.0.kind=wandb", "sinks: must be a list"),
        ("rolout.seed=1", "`rolout` is not a key of a recipe; did you mean `rollout`?"),
        ("trainer={loss: cispo, clip_high: 0.3}", "has no effect with trainer.loss cispo"),
        ("trainer={loss: gspo, updates_per_rollout: 2, cispo_max: 4.0}", "has no effect with trainer.loss gspo"),
    ],
)
def test_refused_overrides_are_blamed_on_the_argument(recipe_file: Path, override: str, part: str, proof: Proof) -> None:
    found = problems(recipe_file, override)
    assert len(found) == 1 and found[0].startswith("--set 1: ") and part in found[0]
    proof(f"{override}: {part}")


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ("optim.packing=true", "optim.packing is true"),
        ("processes.strategy=fsdp", "processes.strategy is fsdp"),
        ("model={path: 'tiny:qwen3', compile: true, lora: {}, quantization: nf4}", "model.quantization is nf4"),
    ],
)
def test_compiled_layers_are_refused_beside_what_they_do_not_compute(recipe_file: Path, other: str, said: str) -> None:
    found = problems(recipe_file, "model.compile=true", other)
    assert any(f"model.compile needs whole layers and padded rows, but {said}" in problem for problem in found)
    load_recipe(recipe_file, [other.replace("compile: true, ", "")])


@pytest.mark.parametrize(
    ("cluster", "other", "said"),
    [
        ("trainers: 2", "processes.count=3", "processes.count is 3, but cluster.trainers is 2"),
        ("address: 'ray://a:1'", "run.steps=1", "cluster.address is that of a Ray client"),
        ("trainers: 2", "engine={kind: server, launch: true}", "remove engine.launch, and set cluster.servers"),
        ("servers: 1", "engine={kind: colocated}", "cluster.servers is 1, but engine.kind is colocated"),
        ("servers: 1", "engine={kind: server, url: 'http://a:1'}", "cluster.servers would start others"),
        ("trainers: 2", "engine={kind: server}", "or cluster.servers to their number"),
        ("servers: 2", "engine={kind: server, servers: 4}", "engine.servers has no effect with cluster.servers"),
    ],
)
def test_what_a_cluster_starts_differently_is_refused(recipe_file: Path, cluster: str, other: str, said: str) -> None:
    found = problems(recipe_file, f"cluster={{kind: ray, {cluster}}}", other)
    assert len(found) == 1 and said in found[0]
    served = load_recipe(recipe_file, ["cluster={kind: ray, trainers: 2, servers: 1}", "engine={kind: server}"])
    assert served.recipe.cluster is not None and served.recipe.cluster.restarts == 3


def test_recipes_with_servers(recipe_file: Path, tmp_path: Path) -> None:
    there = load_recipe(recipe_file, ["engine={kind: server, url: ['http://127.0.0.1:1', 'http://10.0.0.7:2/a']}"])
    assert isinstance(there.recipe.engine, ServerEngineRecipe)
    assert servers(there.recipe.engine) == ["http://127.0.0.1:1", "http://10.0.0.7:2/a"]
    assert [note for note in there.notices if "not encrypted" in note] == [there.notices[-2]]
    assert "10.0.0.7 is another machine" in there.notices[-2] and "10.0.0.7 must read the weights" in there.notices[-1]
    assert "kv_cache" not in dump_recipe(there.recipe) and "start_timeout" not in dump_recipe(there.recipe)
    ours = load_recipe(recipe_file, ["engine={kind: server, launch: true, host: 0.0.0.0, kv_cache_gib: 1}"])
    assert "0.0.0.0 is another machine" in ours.notices[-1] and "kv_cache_gib: 1.0" in dump_recipe(ours.recipe)
    gpus = load_recipe(recipe_file, ["engine={kind: server, launch: true, transfer: nccl, devices: '1,2'}"])
    assert "restarts" not in dump_recipe(gpus.recipe) and "devices: 1,2" in dump_recipe(gpus.recipe)
    far = load_recipe(recipe_file, ["engine={kind: server, url: 'https://10.0.0.7:2', transfer: nccl}"])
    assert "nccl to https://10.0.0.7:2 has no token and no encryption" in far.notices[-1]
    assert not any("no token" in note for note in [*there.notices, *gpus.notices])
    for loaded in (there, ours, gpus, far):
        assert load_recipe(written(tmp_path, dump_recipe(loaded.recipe))).recipe == loaded.recipe


def numbers(model: type[BaseModel], prefix: str = "", kind: str = "") -> dict[str, str]:
    """{"optim.learning_rate": "", "engine.timeout": "engine.kind=server", ...}: every number, and what makes it a key."""
    found: dict[str, str] = {}
    for name, field in model.model_fields.items():
        for inner in models_of(field.annotation):
            tag = inner.model_fields.get("kind")
            needed = f"{prefix}{name}.kind={get_args(tag.annotation)[0]}" if tag else kind
            if tag and "list" in str(field.annotation):
                needed = f"{prefix}{name}=[{{kind: {get_args(tag.annotation)[0]}}}]"
            if inner is RewardRecipe and not field.is_required():
                needed = f"{prefix}{name}=[{{use: exact_match}}, {{use: numeric_match}}]"  # unless said, there is none
            found = numbers(inner, f"{prefix}{name}.{'0.' if 'list' in str(field.annotation) else ''}", needed) | found
        if set(plain_types(field.annotation)) & {int, float}:
            found[f"{prefix}{name}"] = kind
    return found


def plain_types(annotation: Any) -> list[Any]:
    """The types of a field, without those of a mapping's values, which are free."""
    if get_origin(annotation) is dict:
        return []
    return [annotation, *(part for argument in get_args(annotation) for part in plain_types(argument))]


SOURCES = {task: f"data.source=task:{task}" for task in TASKS} | {"colours": "data={source: task:colours, columns: {images: i}}"}
TASK_NUMBERS = {f"data.options.{key}": SOURCES[task] for task, model in TASKS.items() for key in numbers(model)}
TOOL_NUMBERS = {f"tools.0.{key}": "tools=[{use: 'tools.py:f'}]" for key in numbers(ToolRecipe)}
NUMBERS = numbers(Recipe) | TASK_NUMBERS | TOOL_NUMBERS


def test_the_walk_finds_the_numbers() -> None:
    assert {"optim.learning_rate", "run.steps", "trainer.beta", "trainer.correction.max", "engine.kv_cache_gib"} <= NUMBERS.keys()
    assert {"rewards.0.weight", "engine.timeout", "model.lora.rank", "trainer.correction.geometric.min"} <= NUMBERS.keys()
    assert len(NUMBERS) >= 60


@pytest.mark.fault(4)
@pytest.mark.parametrize("value", [".nan", ".inf", "-.inf", "1e308", "-1e9", "many"])
@pytest.mark.parametrize("path", NUMBERS)
def test_every_number_has_bounds(recipe_file: Path, path: str, value: str, proof: Proof) -> None:
    found = problems(recipe_file, *filter(None, [NUMBERS[path], f"{path}={value}"]))
    assert any(path in line and "is not a key" not in line for line in found)
    proof(f"{path}={value}: refused")


@pytest.mark.fault(4)
@pytest.mark.parametrize("path", NUMBERS)
def test_zero_is_a_value_or_is_refused_by_name(recipe_file: Path, path: str, proof: Proof) -> None:
    overrides = [*filter(None, [NUMBERS[path], "engine.launch=true" if "server" in NUMBERS[path] else "", f"{path}=0"])]
    try:
        value: Any = load_recipe(recipe_file, overrides).recipe.model_dump()
    except RecipeError as error:
        found = [str(problem) for problem in error.problems if problem.where.endswith(overrides[-1])]
        assert found and all(path in line for line in found)
        proof(f"{path}=0: refused")
        return
    for part in path.split("."):
        value = value[int(part)] if isinstance(value, list) else value[part]
    assert value == 0 and not isinstance(value, bool)
    proof(f"{path}=0: taken")


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml")))
def test_recipes_parse_and_resolving_twice_gives_the_same_bytes(name: str, tmp_path: Path) -> None:
    loaded = load_recipe(ROOT / "recipes" / f"{name}.yaml")
    resolved = dump_recipe(loaded.recipe)
    again = load_recipe(written(tmp_path, resolved))
    assert again.recipe == loaded.recipe and dump_recipe(again.recipe) == resolved


def test_texts_that_look_like_other_values_survive_the_dump(recipe_file: Path, tmp_path: Path) -> None:
    loaded = load_recipe(recipe_file, ["run.name='2024'", "data.system='1e-6'"])
    assert (loaded.recipe.run.name, loaded.recipe.data.system) == ("2024", "1e-6")
    assert load_recipe(written(tmp_path, dump_recipe(loaded.recipe))).recipe == loaded.recipe


def test_inert_fields_are_left_out_of_the_resolved_recipe(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file).recipe
    assert {finding.path for finding in inert(recipe)} >= {"trainer.clip_low", "trainer.clip_high", "data.split"}
    assert "clip_low" not in dump_recipe(recipe)
    assert "clip_low: 0.2" in dump_recipe(load_recipe(recipe_file, ["trainer.updates_per_rollout=2"]).recipe)


def test_local_paths_start_at_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "model: {path: ./m}\ndata: {source: d/*.jsonl}\nrewards: [{use: 'r.py:f'}, {use: 'pkg.mod:g'}]\n"
    path = written(tmp_path, text)
    monkeypatch.chdir("/")
    recipe = load_recipe(path).recipe
    assert recipe.model.path == str(tmp_path / "m") and recipe.data.source == str(tmp_path / "d/*.jsonl")
    assert [reward.use for reward in recipe.rewards] == [f"{tmp_path}/r.py:f", "pkg.mod:g"]
    assert recipe.run.name == "recipe"


def test_the_registry_has_every_trainer_of_the_recipe() -> None:
    union = Recipe.model_fields["trainer"].annotation
    assert set(TRAINERS) == {get_args(variant.model_fields["kind"].annotation)[0] for variant in get_args(union)}


@pytest.mark.parametrize(
    "trainer, expected",
    [
        ("{}", {"aggregation": "token_mean", "scale_rewards": "group", "clip_high": 0.28}),
        ("{loss: dr_grpo}", {"aggregation": "fixed", "scale_rewards": "none", "clip_high": 0.28}),
        ("{loss: dr_grpo, scale_rewards: batch}", {"aggregation": "fixed", "scale_rewards": "batch"}),
        ("{loss: gspo}", {"aggregation": "seq_mean", "clip_low": 3e-4, "clip_high": 4e-4}),
        (
            "{loss: luspo, updates_per_rollout: 2, clip_low: 0.0001}",
            {"aggregation": "seq_sum", "clip_low": 1e-4, "clip_high": 4e-4},
        ),
        ("{kind: rloo}", {"clip_high": 0.2, "kl": "k1_in_reward"}),
    ],
)
def test_a_loss_brings_its_papers_defaults(recipe_file: Path, trainer: str, expected: dict[str, object]) -> None:
    found = load_recipe(recipe_file, [f"trainer={trainer}"]).recipe.trainer
    assert {key: getattr(found, key) for key in expected} == expected


@pytest.mark.parametrize(
    "mode, low, high",
    [("token_truncate", None, 2.0), ("token_mask", 0.5, 2.0), ("sequence_mask", None, 3.0), ("icepop", 0.5, 5.0)],
)
def test_a_correction_brings_its_caps(recipe_file: Path, mode: str, low: float | None, high: float) -> None:
    correction = load_recipe(recipe_file, [f"trainer.correction.mode={mode}"]).recipe.trainer.correction
    assert (correction.min, correction.max) == (low, high)


def test_old_names_of_keys_are_read_and_told(recipe_file: Path) -> None:
    for old, new, value in (("ahead", "async_steps", 0), ("refill", "dynamic_sampling", 2)):
        loaded = load_recipe(recipe_file, [f"rollout.{old}={value}"])
        assert getattr(loaded.recipe.rollout, new) == value and loaded.origins[f"rollout.{new}"].startswith("--set 1")
        assert loaded.notices[0].startswith(f"rollout.{old} is called rollout.{new} now: rename it (--set 1")
        twice = problems(recipe_file, f"rollout.{old}=1", f"rollout.{new}=1")
        assert f"rollout.{old} is the old name of rollout.{new}, which is set too" in twice[0]
    (recipe_file.parent / "resolved.yaml").write_text(dump_recipe(loaded.recipe).replace("dynamic_sampling:", "refill:"))
    resumed = load_recipe(recipe_file.parent / "resolved.yaml", resolved=True)
    assert resumed.recipe == loaded.recipe and not any("refill" in notice for notice in resumed.notices)
