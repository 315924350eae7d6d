"""A float32 engine on a GPU multiplies in float32; a quantised one has bounds of its own; engines say what they run with."""

import importlib.util
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import plan_of
from helpers.engines import server_plan

from rlgen.engines import vllm_compat
from rlgen.engines.colocated import ColocatedEngine
from rlgen.engines.vllm_compat import arguments, exact_products, process_kept_as_is, runner_of
from rlgen.errors import SetupError

EXACT = {"TRITON_F32_DEFAULT": "ieee", "VLLM_FLOAT32_MATMUL_PRECISION": "highest"}


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"dtype": "float32", "on_gpu": True}, EXACT),
        ({"dtype": "bfloat16", "on_gpu": True}, {}),
        ({"dtype": "float32", "on_gpu": False}, {}),
    ],
)
def test_only_a_float32_engine_on_a_gpu_is_told_to_multiply_exactly(changes: dict[str, Any], found: dict[str, str]) -> None:
    plan = plan_of("qwen3", **changes)
    assert exact_products(plan) == found
    server = server_plan(plan).environment("token")
    assert {name: server[name] for name in EXACT if name in server} == found


@pytest.fixture
def not_set(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in EXACT:
        monkeypatch.delenv(name, raising=False)
    yield


@pytest.mark.usefixtures("not_set")
def test_an_engine_in_this_process_is_told_whenever_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, str | None]] = []

    def notes(*_: Any, **__: Any) -> Any:
        told.append({name: os.environ.get(name) for name in EXACT})
        return SimpleNamespace(generate=lambda *_, **__: notes() and [])

    monkeypatch.setattr(vllm_compat, "import_vllm", lambda: None)
    monkeypatch.setattr(vllm_compat, "open_llm", notes)
    engine = ColocatedEngine(plan_of("qwen3", dtype="float32", on_gpu=True), wait=None)
    engine.generate([], None)  # type: ignore[arg-type]
    assert told == [EXACT, EXACT]
    assert not EXACT.keys() & os.environ.keys(), "the trainer's own kernels are its own matter"
    with process_kept_as_is():
        assert not EXACT.keys() & os.environ.keys()


@pytest.mark.usefixtures("not_set")
def test_triton_takes_the_word_for_kernels_that_say_no_precision() -> None:
    triton = pytest.importorskip("triton")
    from triton._C.libtriton import get_cache_invalidating_env_vars

    chosen = {}
    for word in (None, "ieee"):
        with process_kept_as_is({} if word is None else EXACT):
            chosen[word] = triton.knobs.language.fp32_default
            kept_apart = get_cache_invalidating_env_vars()
        assert kept_apart.get("TRITON_F32_DEFAULT") == word, "kernels compiled with TF32 would be taken from the disk"
    assert chosen == {None: None, "ieee": "ieee"}


def test_the_model_runner_is_read_from_the_worker() -> None:
    """The second one needs a GPU: on a CPU vLLM refuses it for lack of Triton."""
    modules = {
        "vllm.v1.worker.gpu_model_runner": "V1",
        "vllm.v1.worker.cpu_model_runner": "V1",
        "vllm.v1.worker.gpu.model_runner": "V2",
        "vllm.v1.worker.cpu.model_runner": "V2",
    }
    for module, name in modules.items():
        assert importlib.util.find_spec(module) is not None, "vLLM has moved its model runners"
        kind = type("Runner", (), {"__module__": module})
        derived = type("Ours", (kind,), {"__module__": "elsewhere"})
        assert runner_of(SimpleNamespace(model_runner=kind())) == runner_of(SimpleNamespace(model_runner=derived())) == name


def test_an_engine_says_its_model_runner_and_that_nothing_is_quantised(engine: Any) -> None:
    facts = engine.facts()
    assert facts.quantization is None
    assert facts.runner == ("V1" if facts.engine.startswith("vllm") else None)


def test_a_quantised_engine_needs_a_gpu() -> None:
    plan = plan_of("qwen3", quantization="fp8", dtype="bfloat16")
    with pytest.raises(SetupError, match=r"engine\.quantization: fp8 needs an NVIDIA GPU; remove it"):
        ColocatedEngine(plan, wait=None)
    with pytest.raises(SetupError, match=r"engine\.quantization: fp8 needs an NVIDIA GPU; remove it"):
        server_plan(plan).command()
    on_gpu = arguments(plan_of("qwen3", quantization="fp8", dtype="bfloat16", on_gpu=True))
    assert on_gpu["quantization"] == "fp8" and on_gpu["dtype"] == "bfloat16"
    assert on_gpu["hf_overrides"] == {"head_dtype": "float32"}
