"""Memory is counted as it is: parameters, moments and cache to the byte, activations beside what autograd and torch's allocator
really hold on the CPU. What a GPU's allocator, its kernels and vLLM take, `make gpu-check` compares."""

import gc
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import tiny_model
from helpers.batches import random_batch
from helpers.slow import slow_but
from torch import Tensor
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import (
    AutoModelForCausalLM,
    BltConfig,
    FalconConfig,
    Gemma4TextConfig,
    Mamba2Config,
    MambaConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

from rlgen.engines.base import model_shape
from rlgen.errors import SetupError
from rlgen.models import memory
from rlgen.models.half import compute_as_held
from rlgen.models.load import load_config
from rlgen.models.memory import FLOAT32, GIB, Counts, MemoryPlan, cache_elements, hints, needs
from rlgen.models.policy import Policy
from rlgen.models.sharding import Meshes
from rlgen.models.sharding import shard as shard_policy
from rlgen.models.tiny import build_tiny
from rlgen.processes import Processes
from rlgen.setup.policy import checkpoint_activations
from rlgen.types import WHOLE, MicroBatch

ROWS, PROMPT, LENGTH = 4, 32, 128
TRACKED: dict[str, Any] = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8}
TRACKED |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True}
DTYPES = [torch.float32, torch.bfloat16]


def counted(name: str, rows: int = ROWS, length: int = LENGTH, dtype: torch.dtype = torch.float32) -> Counts:
    return memory.count(load_config(str(build_tiny(name)), None), rows, length, dtype, "sdpa")


def policy_of(name: str, dtype: torch.dtype, checkpointing: bool) -> Policy:
    model = tiny_model(name)
    if checkpointing:
        checkpoint_activations(model)
    return Policy(model, dtype, True)


def batch_of(rows: int, prompt: int, length: int) -> MicroBatch:
    return random_batch(prompt, [length - prompt] * rows)


# --- counted, to the byte ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3-tied", "qwen3-untied", "gpt2", "mixtral"])
def test_parameters_gradients_and_moments_are_those_of_a_real_step(name: str) -> None:
    policy, counts = policy_of(name, torch.float32, False), counted(name)
    optimizer = torch.optim.AdamW(policy.parameters())
    policy(batch_of(ROWS, PROMPT, LENGTH), (WHOLE,)).logp.sum().backward()
    optimizer.step()
    parameters = list(policy.parameters())
    moments = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    assert bytes_of(parameters) == FLOAT32 * counts.parameters
    assert bytes_of([p.grad for p in parameters if p.grad is not None]) == FLOAT32 * counts.parameters
    assert bytes_of(moments) == memory.ADAMW * counts.parameters
    assert counts.largest == max(p.numel() for p in parameters) and counts.vocabulary == policy.head.weight.shape[0]


def bytes_of(tensors: list[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@pytest.mark.parametrize("name", ["qwen3", "gpt_neox", "glm4"])
@torch.no_grad()
def test_the_cache_of_a_token_is_what_a_real_cache_holds(name: str) -> None:
    model = tiny_model(name)
    cache = model(torch.zeros(2, 5, dtype=torch.long), use_cache=True).past_key_values
    held = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert cache_elements(model.config) == held // (2 * 5)


def test_the_cache_of_models_that_name_their_heads_otherwise() -> None:
    falcon = FalconConfig(
        hidden_size=128, num_attention_heads=4, num_hidden_layers=3, num_kv_heads=2, new_decoder_architecture=True
    )
    assert cache_elements(falcon) == 2 * 3 * 2 * 32 and not memory.keeps_states(falcon)
    assert cache_elements(MambaConfig()) == 0 and memory.keeps_states(MambaConfig())
    kinds, sizes = ["sliding_attention", "full_attention"], {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    gemma = Gemma4TextConfig(num_hidden_layers=2, layer_types=kinds, global_head_dim=64, **sizes)
    assert cache_elements(gemma) == 2 * 2 * 32 + 2 * 2 * 64, "heads differ by layer"
    with torch.device("meta"):
        models = [AutoModelForCausalLM.from_config(config) for config in (falcon, gemma, Mamba2Config(num_hidden_layers=1))]
    pairs = [round(Policy(model, torch.float32, True).attention_cost * model.num_parameters()) for model in models]
    assert pairs == [2 * 3 * 4 * 32, 2 * 4 * 32 + 2 * 4 * 64, 0], "elements of queries, once for keys and once for values"
    assert model_shape(falcon)["hidden_size"] == 128
    with pytest.raises(SetupError, match=r"BltConfig has no num_hidden_layers, .* set engine\.kind to transformers"):
        cache_elements(BltConfig())
    two = Gemma4TextConfig(num_hidden_layers=2, layer_types=kinds, attention_k_eq_v=True, num_global_key_value_heads=1, **sizes)
    assert model_shape(two)["num_key_value_heads"] == [2, 1] and model_shape(two)["num_attention_heads"] == 4
    assert memory.keeps_states(Qwen3NextConfig()) and not memory.keeps_states(Qwen3Config())


def test_a_config_is_enough_and_says_when_it_is_not(tmp_path: Any) -> None:
    config = load_config(str(build_tiny("qwen3")), None)
    config.save_pretrained(tmp_path)
    assert memory.count(load_config(str(tmp_path), None), ROWS, LENGTH, torch.float32, "sdpa") == counted("qwen3")
    with pytest.raises(SetupError, match="holds no config that can be loaded"):
        load_config(str(tmp_path / "nowhere"), None)


# --- activations, beside the real ones -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", slow_but(["qwen3", "gpt2", "gemma2", "mixtral"], "qwen3", "mixtral"))
def test_kept_bytes_are_what_autograd_keeps(name: str, dtype: torch.dtype) -> None:
    counts = counted(name, dtype=dtype)
    # Experts have no fake float32; what stands in for it is more. Checkpoints are small, so that constants show.
    at_most = {False: 1.2 if name == "mixtral" else 1.01, True: 1.25}
    for checkpointing, expected in ((False, counts.kept), (True, counts.kept_checkpointed)):
        real = really_kept(policy_of(name, dtype, checkpointing))
        assert 0.99 * real <= expected <= at_most[checkpointing] * real


def really_kept(policy: Policy) -> int:
    """Of a real forward: storages that are not a parameter's, of a model that holds its weights in the dtype of the forward."""
    compute_as_held(policy.model.to(policy.dtype))
    own = {tensor.data_ptr() for tensor in [*policy.parameters(), *policy.buffers()]}
    found: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        states = policy.hidden(batch_of(ROWS, PROMPT, LENGTH)).states
    del states
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


@pytest.mark.parametrize("name", slow_but(["qwen3", "gpt2"], "gpt2"))
def test_activations_grow_with_tokens(name: str) -> None:
    one, two = counted(name, rows=4), counted(name, rows=8)
    longer = counted(name, rows=4, length=2 * LENGTH)
    for field in ("kept", "kept_checkpointed"):
        small, large, long = (getattr(counts, field) for counts in (one, two, longer))
        assert large == pytest.approx(2 * small, rel=0.02) and long == pytest.approx(2 * small, rel=0.02)


@pytest.mark.parametrize("name", slow_but(["qwen3", "gpt2", "gemma2"], "qwen3"))
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_estimated_peaks_are_those_of_the_allocator(name: str, checkpointing: bool, dtype: torch.dtype) -> None:
    rows, length = 8, 256
    policy, batch = policy_of(name, dtype, checkpointing), batch_of(rows, 1, length)
    counts = counted(name, rows, length, dtype)
    plan = replace(PLAN, rows=rows, length=length, trainer_bytes=dtype.itemsize, checkpointing=checkpointing)
    policy(batch, (WHOLE,)).logp.sum().backward()  # gradients are there, and counted elsewhere
    kept: list[Tensor] = []
    forward, left = allocated(lambda: kept.append(policy(batch, (WHOLE,), "value").logp.sum()))  # as an update asks for it
    backward, _ = allocated(kept.pop().backward)
    assert 0.95 * forward <= sum(memory.forward_parts(counts, plan).values()) <= 2.6 * forward
    assert 0.95 * (left + backward) <= sum(memory.backward_parts(counts, plan).values()) <= 1.55 * (left + backward)
    with torch.no_grad():
        scored, _ = allocated(lambda: policy(batch, (WHOLE,)))
    assert 0.75 * scored <= sum(memory.reference_parts(counts, plan).values()) <= 2.6 * scored


def allocated(run: Callable[[], Any]) -> tuple[int, int]:
    """Bytes that torch's allocator gave out while something ran: at the peak, and left at the end."""
    gc.collect()  # what other tests have left would be freed while it runs
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        held = run()
    del held
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    held_then = list(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
    return max(0, *held_then), held_then[-1]


@pytest.mark.parametrize("shard", slow_but([None, 2], 2))
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rank_of_many_needs_what_torchs_own_tracker_counts(dtype: torch.dtype, shard: int | None) -> None:
    """Of rank 0 among eight processes that do not exist: backward, with moments, and without gradients of earlier passes."""
    rows, length, config = 2, 128, Qwen3Config(**TRACKED)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        group = Processes(rank=0, world=8, device=torch.device("cpu"), timeout=1, group=None, store=None)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        policy, batch = Policy(model, dtype, True), batch_of(rows, 1, length)
        shard_policy(policy, Meshes.of(group, shard))
        tracker = FSDPMemTracker(policy, torch.optim.AdamW(policy.parameters(), foreach=False))
        with tracker:
            for _ in range(2):
                tracker.reset_mod_stats()
                policy(batch, (WHOLE,)).logp.sum().backward()
                tracker._optm.step()
                tracker._optm.zero_grad()
        (found,) = tracker.get_tracker_snapshot("peak").values()
    finally:
        dist.destroy_process_group()
    counts = memory.count(config, rows, length, dtype, "sdpa")
    sizes = {"rows": rows, "length": length, "trainer_bytes": dtype.itemsize, "processes": 8, "shard": shard}
    plan = replace(PLAN, **sizes, sharded=True, engine="elsewhere", device=80 * GIB)
    parts = needs(counts, plan)["backward"]
    estimated = sum(size for part, size in parts.items() if part not in ("overhead", "gradients"))
    print(dtype, shard, estimated / found["Total"])
    assert 0.95 * found["Total"] <= estimated <= 1.15 * found["Total"]


# --- arithmetic, by hand -------------------------------------------------------------------------------------------------

COUNTS = Counts(
    parameters=1000,
    largest=300,
    matrices=600,
    linear=400,
    sides=50,
    layers=2,
    hidden=10,
    vocabulary=30,
    cache_token=8,
    kept=8000,
    kept_checkpointed=1000,
)
PLAN = MemoryPlan(
    rows=2,
    length=10,
    trainer_bytes=2,
    fp32_head=True,
    checkpointing=False,
    reference=False,
    adapter_rank=None,
    processes=1,
    sharded=False,
    engine="colocated",
    engine_bytes=2,
    sequences=5,
    model_len=20,
    cache_gib=None,
    share=None,
    tensor_parallel=1,
    sleeps=False,
    device=None,
)
BASE = {"trainer weights": 4000, "Adam moments": 8000, "copy to save": 12000}
ENGINE = {"engine weights": 2000, "KV cache": 2 * 8 * 5 * 20, "engine's own": memory.SERVING}
LAST = {"overhead": memory.OVERHEAD}
HEAD = {"head's states": 2 * 4 * 20 * 10 + 2 * 30 * 10, "chunk of logits": 2 * 4 * 20 * 30}


def test_each_phase_by_hand() -> None:
    found = needs(COUNTS, PLAN)
    kept = {"activations": 8000, "bfloat16 weights": 2 * 300}
    assert list(found) == ["load", "generate", "forward", "backward", "optimizer", "sync"]
    assert found["load"] == {"trainer weights": 4000, **LAST}
    assert found["generate"] == {**BASE, **ENGINE, **LAST}
    assert found["forward"] == {**BASE, "gradients": 4000, **ENGINE, **kept, **HEAD, **LAST}
    of_backward = {"bfloat16 weights": 2 * 2 * 300, "gradients of states": 8 * 20 * 10, "head's gradient": 4 * 30 * 10}
    assert found["backward"] == {**BASE, "gradients": 4000, **ENGINE, **kept, **HEAD, **of_backward, **LAST}
    assert found["optimizer"] == {**BASE, "gradients": 4000, **ENGINE, **LAST}
    assert found["sync"] == {**BASE, **ENGINE, "tensor to load": 600, **LAST}
    assert {part for parts in found.values() for part in parts} <= set(memory.HOW)
    assert memory.HOW["chunk of logits"] == "2 x 4 bytes x 67,108,864 logits, or fewer if there are fewer tokens"


# name -> (changes of the plan, phase, parts in it; None: a part that is not there)
FSDP = {"processes": 4, "sharded": True, "reference": True}
GATHERED = {"gathered tensor": 2 * 2 * 300}
DEVICE = 100_000
CHANGED: dict[str, tuple[dict[str, Any], str, dict[str, int | None]]] = {
    "share": ({"share": 0.45, "device": DEVICE}, "generate", {"KV cache": 45_000 - 2000}),
    "GiB": ({"cache_gib": 2.0, "device": DEVICE}, "generate", {"KV cache": 2 * GIB, "engine's own": memory.SERVING}),
    "tensor parallel": ({"tensor_parallel": 2}, "generate", {"engine weights": 1000, "KV cache": 800}),
    "sleeping, to train": ({"sleeps": True}, "optimizer", {"engine weights": None}),
    "sleeping, to generate": ({"sleeps": True}, "generate", {"engine weights": 2000}),
    "sleeping, to sync": ({"sleeps": True}, "sync", {"engine weights": 2000}),
    "8-bit": ({"moment_bytes": 2}, "optimizer", {"Adam moments": 2000}),
    "GPU": ({"device": DEVICE}, "optimizer", {"copy to save": None}),
    "LoRA": (
        {"adapter_rank": 2, "reference": True},
        "optimizer",
        {"trainer weights": 2400, "Adam moments": 800, "gradients": 400, "copy to save": 1200, "reference": None},
    ),
    "QLoRA": ({"adapter_rank": 2, "quantized": 0.5}, "load", {"trainer weights": 2 * 600 + 200 + 400}),
    "QLoRA, backward": ({"adapter_rank": 2, "quantized": 0.5}, "backward", {"dequantised weights": 400, "head's gradient": 0}),
    "LoRA in float32": ({"adapter_rank": 2, "trainer_bytes": 4}, "optimizer", {"trainer weights": 4400}),
    # the frozen weights are held in bfloat16
    "LoRA, backward": ({"adapter_rank": 2}, "backward", {"bfloat16 weights": None, "head's gradient": 0, "head's states": 1600}),
    "DDP": ({"processes": 4}, "optimizer", {"trainer weights": 4000, "gradients": 4000, "buckets to send": 4000}),
    "FSDP": (
        FSDP,
        "optimizer",
        {"trainer weights": 1000, "Adam moments": 2000, "gradients": 1000, "reference": 1000, "gathered layers": None},
    ),
    "FSDP, forward": (FSDP, "forward", {"gathered layers": 2 * (30 * 10 + 2 * 300)}),
    "FSDP, another process": (FSDP | {"first": False}, "optimizer", {"copy to save": 1000 + 2000}),
    "adapters, another process": (FSDP | {"first": False, "adapter_rank": 2}, "optimizer", {"copy to save": 0}),
    "DDP, another process": ({"processes": 4, "first": False}, "optimizer", {"copy to save": 0}),
    "DDP, backward": ({"processes": 4}, "backward", {"buckets to send": None}),
    "transformers, to train": ({"engine": "transformers"}, "backward", {"engine weights": 2000, "KV cache": None}),
    "transformers, to sync": ({"engine": "transformers"}, "sync", {"engine weights": 2000, "KV cache": None}),
    "shards of two": (FSDP | {"shard": 2}, "optimizer", {"Adam moments": 4000}),
    # each process holds the whole adapter
    "FSDP, LoRA": (FSDP | {"adapter_rank": 2}, "optimizer", {"Adam moments": 800, "gradients": 400}),
    "deferred, forward": (FSDP | {"defer_sync": True}, "forward", {"whole gradients": 4000}),
    "deferred, backward": (FSDP | {"defer_sync": True}, "backward", {"whole gradients": 4000}),
    "deferred, optimizer": (FSDP | {"defer_sync": True}, "optimizer", {"whole gradients": None}),
    "not deferred": (FSDP, "backward", {"whole gradients": None}),
    "streams": ({"streams": True}, "generate", {"sums of gradients": 8000}),
    "streams, at first": ({"streams": True}, "load", {"sums of gradients": None}),
    "streams not": ({}, "optimizer", {"sums of gradients": None}),
    "checkpointing, forward": ({"checkpointing": True}, "forward", {"activations": 1000 + 3000}),
    "checkpointing, backward": ({"checkpointing": True}, "backward", {"activations": 1000 + 4000}),
}


@pytest.mark.parametrize("name", CHANGED)
def test_parts_of_a_phase_by_hand(name: str) -> None:
    changes, phase, expected = CHANGED[name]
    parts = needs(COUNTS, replace(PLAN, **changes))[phase]
    assert {part: parts.get(part) for part in expected} == expected


# name -> (changes of the plan, phase, all that is in it besides `LAST`)
WHOLE_PHASES: dict[str, tuple[dict[str, Any], str, dict[str, int]]] = {
    "reference": ({"sleeps": True, "reference": True}, "reference", {**BASE, "reference": 4000, **HEAD}),
    "engine elsewhere": ({"engine": "elsewhere"}, "sync", BASE),
    "transformers": ({"engine": "transformers"}, "generate", {**BASE, "engine weights": 2000, "KV cache": 1600}),
    "a reference is copied later": ({"processes": 4, "reference": True}, "load", {"trainer weights": 4000}),
    "loaded by shards": (FSDP, "load", {"trainer weights": 1000, "reference": 1000, **GATHERED}),
    "shards of two": (FSDP | {"shard": 2}, "load", {"trainer weights": 2000, "reference": 2000, **GATHERED}),
    "loaded by shards, LoRA": (FSDP | {"adapter_rank": 2}, "load", {"trainer weights": 500 + 400, **GATHERED}),
}


@pytest.mark.parametrize("name", WHOLE_PHASES)
def test_all_of_a_phase_by_hand(name: str) -> None:
    changes, phase, expected = WHOLE_PHASES[name]
    assert needs(COUNTS, replace(PLAN, **changes))[phase] == {**expected, **LAST}


def test_what_is_offloaded_is_counted_only_where_it_is() -> None:
    plan = replace(PLAN, checkpointing=True, device=80 * GIB)
    before, after = needs(COUNTS, plan), needs(COUNTS, replace(plan, offload_activations=True, offload_moments=True))
    assert [phase for phase in after if "Adam moments" in after[phase]] == ["optimizer"]
    assert after["optimizer"] == before["optimizer"] and after["optimizer"]["Adam moments"] == 8 * 1000
    assert [before[phase]["activations"] - after[phase]["activations"] for phase in ("forward", "backward")] == [500, 500]
    on_cpu = replace(PLAN, checkpointing=True)
    assert needs(COUNTS, replace(on_cpu, offload_activations=True, offload_moments=True)) == needs(COUNTS, on_cpu)


def test_a_reference_needs_most_in_its_layers_or_in_its_head() -> None:
    layers = needs(replace(COUNTS, kept=80_000), replace(PLAN, sleeps=True, reference=True))["reference"]
    assert layers == {**BASE, "reference": 4000, "activations": 30_000, "bfloat16 weights": 2 * 300, **LAST}


@pytest.mark.parametrize(
    ("changes", "setting", "saves"),
    [
        ({"processes": 4, "sharded": True, "defer_sync": True}, "processes.defer_sync=false", 4 * GIB),
        ({"streams": True}, "rollout.stream=false", 8 * GIB),
    ],
)
def test_a_hint_saves_what_the_setting_takes(changes: dict[str, Any], setting: str, saves: int) -> None:
    found = hints(replace(COUNTS, parameters=GIB), None, replace(PLAN, **changes), frozenset())
    assert [hint.saves for hint in found if hint.setting == setting] == [saves]


def test_hints_say_what_they_save() -> None:
    large = replace(COUNTS, parameters=GIB, kept=40 * GIB, kept_checkpointed=4 * GIB, cache_token=GIB // 100)
    plan = replace(PLAN, share=0.5, device=80 * GIB)
    smaller = replace(large, kept=20 * GIB, kept_checkpointed=2 * GIB)
    found = hints(large, smaller, plan, frozenset())
    assert [hint.setting for hint in found] == [
        "engine.sleep=true",
        "optim.micro_batch_tokens=10",
        "model.gradient_checkpointing=true",
        "optim.offload=true",
        "engine.gpu_memory_utilization=0.4",
        "optim.kind=adamw_8bit",
    ]
    before = memory.peak(needs(large, plan))
    slept = memory.peak(needs(large, replace(plan, sleeps=True)))
    assert before[0] == "backward" and found[0].saves == before[1] - slept[1] == found[0].of_phase == 40 * GIB
    assert found[3].saves == pytest.approx(8 * GIB, rel=1e-6)
    offered = hints(large, None, plan, frozenset(["adapters", "shards"]))
    assert {"model.lora.rank=16", "processes.strategy=fsdp"} <= {hint.setting for hint in offered}
    held = hints(large, None, replace(plan, reference=True), frozenset(["no reference"]))
    assert "trainer.beta=0" in {hint.setting for hint in held}
    least = replace(plan, engine="elsewhere", share=None, checkpointing=True, moment_bytes=2)
    least = replace(least, offload_activations=True, offload_moments=True)
    assert not hints(large, None, least, frozenset())


def test_the_cache_of_a_token_is_the_engines_whatever_the_trainer_splits() -> None:
    config = load_config(str(build_tiny("qwen3")), None)
    whole, split = (memory.count(config, ROWS, LENGTH, torch.float32, "sdpa", tensor) for tensor in (None, 2))
    assert whole.cache_token == split.cache_token and split.matrices * 2 == whole.matrices
