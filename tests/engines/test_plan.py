"""The plan of an engine: what of it decides answers, what vLLM is told, and what a server's process imports."""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, plan_of
from helpers.engines import server_plan
from helpers.recipes import recipe_for
from helpers.samples import request

from rlgen.engines import vllm_compat
from rlgen.engines.answer import Labelled, ServerAnswer
from rlgen.engines.base import EngineCapabilities
from rlgen.engines.launch import flags, reason
from rlgen.engines.open import server_plans
from rlgen.engines.plan import UNDECIDING, EnginePlan
from rlgen.engines.server import SamplingCall, ServerEngine
from rlgen.errors import EngineError, UsageError
from rlgen.recipe.engines import RESERVED_ENGINE_ARGUMENTS, EngineNeeds, VllmRecipe
from rlgen.types import Sampling

# Another value of every field of a plan.
OTHERS: dict[str, Any] = {
    "model": "/models/other",
    "revision": "main",
    "dtype": "bfloat16",
    "fp32_head": False,
    "max_model_len": 641,
    "max_num_seqs": 65,
    "kv_cache_gib": 0.5,
    "gpu_memory_utilization": 0.3,
    "tensor_parallel_size": 2,
    "sleep": True,
    "model_impl": "transformers",
    "quantization": "fp8",
    "structured_outputs": True,
    "enforce_eager": False,
    "extra": {"block_size": 32},
    "on_gpu": True,
    "vllm": "0.31.0",
    "stops_at_text": True,
    "image_token": 261,
    "experts": True,
}
PLAN = replace(plan_of("qwen3"), model="/models/tiny", on_gpu=False, vllm="0.32.0")


def needs(stream: bool = False, **engine: Any) -> EngineNeeds:
    rollout = {"prompts_per_step": 5, "group_size": 2, "max_completion_tokens": 24, "stream": stream}
    model, data = {"revision": "r1", "dtype": "bfloat16"}, {"source": "task:sort", "max_prompt_tokens": 40}
    settings = engine or {"kind": "colocated"}
    return recipe_for("tiny:qwen3", engine=settings, model=model, data=data, rollout=rollout).engine_needs


def test_every_field_has_another_value() -> None:
    assert [field.name for field in fields(EnginePlan)] == list(OTHERS)
    assert all(getattr(PLAN, name) != value for name, value in OTHERS.items())
    assert UNDECIDING.keys() < OTHERS.keys() and all(UNDECIDING.values())


@pytest.mark.parametrize("name", OTHERS)
def test_a_field_changes_the_digest_unless_it_decides_no_answer(name: str) -> None:
    assert (replace(PLAN, **{name: OTHERS[name]}).digest() == PLAN.digest()) is (name in UNDECIDING)
    assert replace(PLAN, model="/moved/tiny").digest() == PLAN.digest()


def test_a_digest_is_of_what_is_meant() -> None:
    """Not of the order in which arguments are written, nor of whether a default is written at all."""
    two = replace(PLAN, extra={"block_size": 32, "swap_space": 1})
    assert two.digest() == replace(PLAN, extra={"swap_space": 1, "block_size": 32}).digest()
    assert two.digest() != replace(PLAN, extra={"block_size": 32, "swap_space": 2}).digest()
    assert replace(PLAN, enforce_eager=True).digest() == PLAN.digest()  # on the CPU nothing is captured
    on_gpu = replace(PLAN, on_gpu=True)
    assert replace(on_gpu, enforce_eager=False).digest() == on_gpu.digest() != replace(on_gpu, enforce_eager=True).digest()


def test_a_plan_says_what_the_recipe_says() -> None:
    shared = {key: OTHERS[key] for key in VllmRecipe.model_fields} | {"max_num_seqs": 7, "dtype": "float32"}
    plan = EnginePlan.of(needs(kind="colocated", sleep=True, structured_regex="a+", **shared), "/m")
    assert (plan.model, plan.revision, plan.dtype, plan.fp32_head) == ("/m", "r1", "float32", True)
    assert {key: getattr(plan, key) for key in shared} == shared and plan.sleep and plan.structured_outputs
    assert plan.vllm is not None and plan.vllm.startswith("0.")
    served = EnginePlan.of(needs(kind="server", launch=True, **shared), "/m")
    assert served == replace(plan, sleep=False, structured_outputs=False) and served.digest() == plan.digest()
    assert EnginePlan.of(needs(), "/m").dtype == "bfloat16" and EnginePlan.of(needs(), "/m").max_num_seqs == 10
    assert EnginePlan.of(needs(), "/m").max_model_len == 64
    with pytest.raises(UsageError, match=r"engine\.kind transformers runs without vLLM"):
        EnginePlan.of(needs(kind="transformers"), "/m")


def test_every_field_reaches_vllm() -> None:
    """In an engine's arguments and on a server's command line alike; what vLLM is told of a field differs with it."""
    own = plan_of("qwen3", on_gpu=True)
    told = {name: replace(own, **{name: OTHERS[name]}) for name in OTHERS if name not in ("on_gpu", "vllm", "fp32_head")}
    told["fp32_head"] = replace(own, fp32_head=False, dtype="bfloat16")
    told["enforce_eager"] = replace(own, enforce_eager=True)
    before = {"fp32_head": replace(own, dtype="bfloat16")}
    for name, plan in told.items():
        was = before.get(name, own)
        assert vllm_compat.arguments(plan) != vllm_compat.arguments(was), name
        assert server_plan(plan).command() != server_plan(was).command(), name


def test_what_rlgen_tells_vllm_is_refused_in_extra() -> None:
    """vLLM gets rlgen's value whatever `engine.extra` says: said there, it would have no effect."""
    for plan in (plan_of("qwen3", on_gpu=False), plan_of("qwen3", on_gpu=True)):
        line = server_plan(plan, nccl=True).command()
        of_server = {re.sub("^--(no-)?|=.*$", "", word).replace("-", "_") for word in line if word.startswith("--")}
        # These may be said: what a recipe says there holds.
        assert (of_server | vllm_compat.arguments(plan).keys()) - RESERVED_ENGINE_ARGUMENTS <= {"scheduler_cls", "worker_cls"}


def test_a_refusal_of_vllm_is_one_sentence_without_the_list_of_what_it_has() -> None:
    said = (
        "1 validation error for ModelConfig\n  Value error, Model architectures ['CodeGenForCausalLM'] are not supported for now."
        " Supported architectures: dict_keys(['AfmoeForCausalLM', 'GPT2LMHeadModel']) [type=value_error,"
        " input_value=ArgsKwargs((), {'model': '/m'}), input_type=ArgsKwargs]\n    For further information visit https://e.dev/v"
    )
    kept = "Model architectures ['CodeGenForCausalLM'] are not supported for now."
    assert vllm_compat.without_lists(" ".join(said.split())) == kept
    other = "Argument position_ids not found in the forward method of <class 'transformers.models.blenderbot'>"
    assert vllm_compat.without_lists(other) == other


@pytest.mark.parametrize(
    ("abilities", "labels", "versions"),
    [
        ({}, ["r.1"], [1]),
        ({"in_flight": True}, ["r.2"], [2]),
        ({"in_flight": True, "keeps_cache": True}, ["r.1", "r.2"], [1, 2]),
        # The cache that its prompt used may be of version 1, which sampled none of its tokens.
        ({"in_flight": True, "keeps_cache": True}, ["r.2"], [1, 2]),
        ({"in_flight": True, "keeps_cache": True}, ["r.0"], [0]),  # by a server that a sync has lost
    ],
)
def test_a_server_holds_tokens_back_only_where_weights_stay_and_a_kept_cache_is_told(
    monkeypatch: pytest.MonkeyPatch, abilities: dict[str, bool], labels: list[str], versions: list[int]
) -> None:
    bodies: list[dict[str, Any]] = []

    class Line:
        server = SimpleNamespace(arrays=True, url="http://s")

        async def post(self, route: str, body: bytes) -> bytes:
            bodies.append(json.loads(body))
            spans = [Labelled(label, place, place + 1) for place, label in enumerate(labels)]
            logp, experts = [-1.0] * len(spans), np.zeros((1 + len(spans), 2, 2), dtype=np.uint8)
            return ServerAnswer.of((3, 4), [7] * len(spans), logp, "stop", spans, 0, experts).packed()

    async def each(servers: Any, most: int, items: Any, ask: Any, **_: Any) -> None:
        await ask(Line(), items[0])

    monkeypatch.setattr("rlgen.engines.client.each", each)
    keeper: Any = SimpleNamespace(
        held=SimpleNamespace(run="r", version=1, syncs=1), servers=[], abilities=EngineCapabilities(**abilities)
    )
    call = SamplingCall(waiting={0: request((3, 4), seed=1)}, finished=None, further=None)
    sampling = Sampling(max_tokens=4, temperature=1.0, stop_ids=(257,))
    asyncio.run(ServerEngine(keeper)._sample(call, sampling, pytest.fail))
    assert [body["sampling_params"]["extra_args"] for body in bodies] == [{"rlgen_held": not abilities}]
    spans = call.answers[0].spans
    assert [span.version for span in spans] == versions and spans[-1].stop == len(labels)
    assert all(span.start < span.stop for span in spans) is (len(versions) == len(labels))
    assert call.answers[0].weight_version == int(labels[0][2:]), "of the oldest token"
    assert not len(call.answers[0].experts), "this run has not asked for them"


def test_servers_share_the_work_and_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("rlgen.engines.open.cores", lambda: 7)
    gpus: dict[str, Any] = {"devices": [4, 5, 6, "7"], "tensor_parallel_size": 2}
    plans = server_plans(needs(kind="server", launch=True, servers=2, port=8000, **gpus), "/m")
    assert [(plan.port, plan.devices) for plan in plans] == [(8000, "4,5"), (8001, "6,7")]
    assert plans[0].engine == plans[1].engine and plans[0].engine.max_num_seqs == 5  # of 10 samples a step
    assert [plan.environment("t")["CUDA_VISIBLE_DEVICES"] for plan in plans] == ["4,5", "6,7"]
    free = server_plans(needs(kind="server", launch=True, servers=3), "/m")
    assert [(plan.port, plan.devices) for plan in free] == [(0, None)] * 3
    assert [plan.environment("t")["OMP_NUM_THREADS"] for plan in free] == ["2"] * 3  # of 7 cores
    one = server_plans(needs(kind="server", launch=True, devices="1"), "/m")
    assert [(plan.port, plan.devices) for plan in one] == [(0, "1")] and one[0].engine.max_num_seqs == 10
    assert one[0].threads is None
    # The trainer has the other 3 meanwhile.
    assert server_plans(needs(kind="server", launch=True, stream=True), "/m")[0].threads == 4
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    two = server_plans(needs(kind="server", launch=True, servers=2), "/m")
    assert [plan.environment("t")["OMP_NUM_THREADS"] for plan in two] == ["5"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("module", ["rlgen.engines.gate", "rlgen.engines.worker"])
def test_a_server_imports_what_it_needs(module: str) -> None:
    """vLLM's processes import the gate and the worker: neither the recipe nor the trainer's side."""
    code = f"import sys, {module}; print(*sorted(sys.modules))"
    names = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    ours = {name.removeprefix("rlgen.") for name in names if name.startswith("rlgen.")}
    both = {"engines", "errors", "heap", "models", "models.half", "models.vision", "out_of_memory", "redact", "types"}
    both |= {f"engines.{name}" for name in ("answer", "base", "gate", "vllm_compat")}
    own = {"rlgen.engines.worker": {"engines.worker", "engines.vllm_weights", "models.factors"}}.get(module, set())
    assert ours == both | own
    assert not {"peft", "pydantic", "datasets", "vllm"} & set(names)


@pytest.mark.fault(77)
def test_the_environment_holds_no_launch_around_it(monkeypatch: pytest.MonkeyPatch, proof: Callable[[str], None]) -> None:
    foreign = {
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "VLLM_API_KEY"),
        *("TORCHELASTIC_RUN_ID", "ACCELERATE_USE_FSDP", "FSDP_VERSION", "VLLM_DP_RANK", "VLLM_CONFIGURE_LOGGING"),
    }
    for name in foreign:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", "/somewhere")
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/elsewhere")
    server = server_plan(PLAN)
    environment = server.environment("a token")
    assert foreign & environment.keys() == set()
    assert (environment["HF_HOME"], environment["VLLM_CACHE_ROOT"]) == ("/somewhere", "/elsewhere")
    assert environment["RLGEN_SERVER_TOKEN"] == "a token"
    assert (environment["VLLM_NO_USAGE_STATS"], environment["DO_NOT_TRACK"]) == ("1", "1")
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT)
    with pytest.raises(EngineError, match="needs a token"):
        server.environment("")
    proof(f"a server started with {len(foreign)} variables of a launch around it gets none of them")


def test_arguments_become_flags() -> None:
    arguments = {"max_num_seqs": 8, "enforce_eager": True, "x": False, "revision": None, "hf_overrides": {"a": 1}, "l": ["p", 2]}
    assert flags(arguments) == ["--max-num-seqs=8", "--enforce-eager", "--no-x", '--hf-overrides={"a": 1}', "--l", "p", "2"]
    assert flags({"hf_overrides": {}}) == []


def test_the_reason_is_the_first_cause() -> None:
    log = (
        "(EngineCore pid=7) INFO 11-21 10:00:00 [core.py:1] starting\n"
        "(EngineCore pid=7) ERROR 11-21 10:00:01 [core.py:12] Traceback (most recent call last):\n"
        "(EngineCore pid=7) ERROR 11-21 10:00:01 [core.py:12] ValueError: no room for the KV cache\n"
        "(APIServer pid=6) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"
    )
    assert reason(log) == "ValueError: no room for the KV cache"
    died = "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root"
    harmless = "ValueError: Tokenizer not available when `skip_tokenizer_init=True`"
    assert reason(f"{harmless}\n{died}\n") == died
    assert reason(f"{harmless}\none\ntwo\n").endswith("one; two")
    assert reason("") == "its log is empty"
