"""The order in which a sleeping engine is woken, filled and used. A stand-in records what vLLM is called with; whether memory
is freed, and that the log-probs of an engine that slept are right, only a GPU shows: `make gpu-check`."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import make_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import open_vllm, tiny_model
from helpers.engines import changed
from helpers.samples import request
from torch import Tensor, nn

from rlgen.engines import vllm_compat
from rlgen.engines.colocated import ColocatedEngine
from rlgen.engines.transformers import TransformersEngine
from rlgen.engines.vllm_compat import LEAST_SHARE, open_llm
from rlgen.errors import EngineError, Fault, SentinelError
from rlgen.models.weights import checkpoint_tensors
from rlgen.processes import Processes
from rlgen.recipe import load_recipe
from rlgen.rollout.samples import Samples
from rlgen.sentinel.probe import Probe
from rlgen.sentinel.rungs import changed_sync
from rlgen.sentinel.verdict import Outcome
from rlgen.sentinel.watch import Watch
from rlgen.setup.data import open_data
from rlgen.setup.probe import probe_of
from rlgen.setup.trainer_and_engine import open_trainer_and_engine
from rlgen.types import WHOLE, Completion, Sample, Sampling

SAMPLING = Sampling(max_tokens=3, temperature=1.0, stop_ids=(259,))
ASKED = [request([1, 2], 0)]
SMALLER = r"--set engine\.gpu_memory_utilization=0\.36 .* or --set engine\.max_num_seqs=32 "


class Model(nn.Linear):
    """vLLM's model: a loader, and two tensors that it says it filled."""

    def __init__(self, take: Callable[[Iterable[tuple[str, Tensor]]], None]) -> None:
        super().__init__(1, 1)
        self.take = take

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        self.take(weights)
        return {"weight", "bias"}


class Recorder:
    """vLLM's `LLM`, as far as the colocated engine calls it: writes down each call, computes nothing."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments, self.calls, self.model = arguments, [], Model(self.take)
        self.llm_engine = SimpleNamespace(model_config=SimpleNamespace(quantization=None))
        self.wakes, self.fails, self.starves = True, False, ""

    def take(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.calls.append(f"load {sum(1 for _ in weights)}")
        if self.fails:
            raise RuntimeError("out of memory")

    def apply_model(self, function: Callable[[nn.Module], Any]) -> list[Any]:
        return [function(self.model)]

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        assert method == "reload_weights"
        self.model.load_weights(kwargs["weights_iterator"])

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset cache")
        return True

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags: list[str]) -> bool:
        self.calls.append(f"wake {' '.join(tags)}")
        if tags == [self.starves]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return self.wakes

    def generate(self, prompts: list[Any], params: list[Any], use_tqdm: bool) -> list[Any]:
        self.calls.append("generate")
        if self.starves == "generate":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        answer = SimpleNamespace(token_ids=[259], logprobs=SimpleNamespace(logprobs=[-1.0]), finish_reason="stop")
        return [SimpleNamespace(outputs=[answer], prompt_token_ids=p["prompt_token_ids"], num_cached_tokens=0) for p in prompts]


@pytest.fixture
def open_recorded(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[ColocatedEngine, Recorder]]:
    """The colocated engine as on a GPU, on a recorder."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(vllm_compat, "import_vllm", lambda: None)
    monkeypatch.setattr(vllm_compat, "open_llm", lambda vllm, arguments: Recorder(arguments))
    monkeypatch.setattr(vllm_compat, "sampling_params", lambda vllm, request, sampling: None)

    def opened(**changes: Any) -> tuple[ColocatedEngine, Recorder]:
        engine = open_vllm("qwen3", **changes)
        return engine, engine._llm

    return opened


def weights() -> Iterator[tuple[str, Tensor]]:
    return checkpoint_tensors(tiny_model("qwen3"))


def test_weights_wake_before_the_sync_and_the_cache_after_it(open_recorded: Any) -> None:
    engine, llm = open_recorded(sleep=True)
    count = len(list(weights()))
    engine.generate(ASKED, SAMPLING)  # opened awake
    engine.sleep()
    engine.sync(weights(), 1)
    engine.generate(ASKED, SAMPLING)
    asleep = ["sleep 2", "wake weights", f"load {count}", "reset cache", "wake kv_cache"]
    assert llm.calls == ["generate", *asleep, "generate"] and llm.arguments["enable_sleep_mode"] is True
    llm.calls.clear()
    engine.sync(weights(), 2)  # awake already, as after a resume: nothing to wake
    assert llm.calls == [f"load {count}", "reset cache"]
    engine, llm = open_recorded(sleep=False)
    engine.sleep()
    engine.sync(weights(), 1)
    assert llm.calls == [f"load {count}", "reset cache"] and llm.arguments["enable_sleep_mode"] is False


@pytest.mark.fault(57)
def test_a_sleeping_engine_refuses_to_sample(open_recorded: Any, proof: Any) -> None:
    """vLLM would queue the requests and never answer."""
    engine, llm = open_recorded(sleep=True)
    engine.sleep()
    engine.sleep()
    with pytest.raises(EngineError, match="only a weight sync wakes it"):
        engine.generate(ASKED, SAMPLING)
    assert llm.calls == ["sleep 2"]
    proof("an engine that was put to sleep at level 2 is asked")


@pytest.mark.fault(41)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fails": True}, "did not take the weights of version 1: the memory does not suffice for its wake-up: out of memory; "),
        ({"wakes": False}, "did not wake up"),
        ({"starves": "weights"}, rf"for its wake-up: CUDA out of memory\..* GiB; peak .* helps most: {SMALLER}"),
        ({"starves": "kv_cache"}, rf"for its wake-up: CUDA out of memory\..* GiB; peak .* helps most: {SMALLER}"),
    ],
)
def test_a_wake_up_that_fails_leaves_it_asleep(open_recorded: Any, change: dict[str, Any], words: str, proof: Any) -> None:
    engine, llm = open_recorded(sleep=True)
    engine.sleep()
    vars(llm).update(change)
    with pytest.raises(EngineError, match=words) as caught:
        engine.sync(weights(), 1)
    assert caught.value.exit_code == 6 and engine.weight_version == 0
    with pytest.raises(EngineError, match="sleeps"):
        engine.generate(ASKED, SAMPLING)
    vars(llm).update(fails=False, wakes=True, starves="")
    engine.sync(weights(), 1)  # the next one heals it
    engine.generate(ASKED, SAMPLING)
    assert engine.weight_version == 1 and llm.calls[-2:] == ["wake kv_cache", "generate"]
    proof(f"a stand-in for vLLM with {change}, such as torch.OutOfMemoryError when it wakes up: exit 6")


def test_an_engine_that_is_awake_says_what_lacks_memory(open_recorded: Any) -> None:
    engine, llm = open_recorded(sleep=False)
    llm.starves, llm.fails = "generate", True
    with pytest.raises(EngineError, match=r"on 1 requests: the memory does not suffice for sampling: CUDA .* most: --set "):
        engine.generate(ASKED, SAMPLING)
    with pytest.raises(EngineError, match=r"of version 1: the memory does not suffice for a weight sync: out of memory; "):
        engine.sync(weights(), 1)


@pytest.mark.fault(41)
@pytest.mark.parametrize(("cache", "smaller"), [(None, "engine.gpu_memory_utilization=0.36"), (3.0, "engine.kv_cache_gib=1.5")])
def test_a_start_without_memory_says_so(open_recorded: Any, cache: float | None, smaller: str, proof: Any) -> None:
    fired: list[dict[str, Any]] = []

    def starting(**arguments: Any) -> None:
        fired.append(arguments)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    _, llm = open_recorded(kv_cache_gib=cache)
    vllm = SimpleNamespace(__version__="0.32.0", LLM=starting, EngineArgs=make_dataclass("EngineArgs", llm.arguments))
    with pytest.raises(EngineError, match=r"did not start on .*for the engine's start: CUDA out of memory\..*; peak ") as caught:
        open_llm(vllm, llm.arguments)
    assert f"What helps most: --set {smaller} (" in str(caught.value) and "or --set engine.max_num_seqs=32 (" in str(caught.value)
    assert caught.value.exit_code == 6 and fired == [llm.arguments]
    proof(f"torch.OutOfMemoryError when a stand-in for vLLM starts, {smaller}: exit 6")


@pytest.mark.parametrize("cache, share, told", [(None, None, 0.45), (None, 0.3, 0.3), (2.0, None, LEAST_SHARE)])
def test_what_vllm_is_told_about_memory(open_recorded: Any, cache: float | None, share: float | None, told: float) -> None:
    """A cache of a said size demands no share of the GPU to be free at the start."""
    _, llm = open_recorded(kv_cache_gib=cache, gpu_memory_utilization=share)
    assert llm.arguments["gpu_memory_utilization"] == told
    assert llm.arguments.get("kv_cache_memory_bytes") == (None if cache is None else 2 << 30)


# --- the sentinel on an engine that sleeps -------------------------------------------------------------------------------


@pytest.fixture
def sleepy(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Probe, list[str]]:
    """Both sides of a recipe, with an engine that sleeps as vLLM does: it loses its weights and cannot sample without."""
    generate, sync, calls = TransformersEngine.generate, TransformersEngine.sync, []

    def sleeping_generate(engine: Any, requests: Any, sampling: Sampling) -> list[Completion]:
        assert calls[-1:] != ["sleep"], "sampled from a sleeping engine"
        calls.append("generate")
        return generate(engine, requests, sampling)

    @torch.no_grad()
    def sleep(engine: Any) -> None:
        calls.append("sleep")
        for parameter in engine._model.parameters():
            parameter.fill_(float("nan"))

    def waking_sync(engine: Any, weights: Any, version: int, hashed: bool = False) -> Any:
        calls.append("sync")
        return sync(engine, weights, version, hashed)

    monkeypatch.setattr(TransformersEngine, "generate", sleeping_generate)
    monkeypatch.setattr(TransformersEngine, "sleep", sleep)
    monkeypatch.setattr(TransformersEngine, "sync", waking_sync)
    recipe = load_recipe(recipe_file, ["engine={kind: transformers}"]).recipe
    both = open_trainer_and_engine(open_data(recipe), None, Processes.alone(), recipe_file.parent, print)
    calls.clear()  # of the engine's own trial when it opens
    return probe_of(both), calls


def test_the_ladder_sleeps_before_it_sends(sleepy: tuple[Probe, list[str]]) -> None:
    """So that a tensor which sleeping loses and no sync brings back shows at the start."""
    probe, calls = sleepy
    assert changed_sync(probe).verdict is Outcome.OK
    assert calls == ["generate", "sleep", "sync", "generate", "sleep", "sync", "generate"]


def watched(probe: Probe, samples: Sequence[Sample]) -> None:
    """Looks at the samples of a batch as a run with `engine.sleep` does."""
    watch = Watch(probe=probe, warns=False, sleeps=True, probe_every=None, drain=lambda: None, say=print)
    watch(Samples.of(samples, ()), torch.cat(probe.trainer.logp(samples, WHOLE)), 1)


def test_a_drift_is_looked_at_by_a_woken_engine(sleepy: tuple[Probe, list[str]]) -> None:
    probe, calls = sleepy
    changed(probe.engine._model, 0.05)  # type: ignore[attr-defined]  # the engine misses an update that it names
    samples = probe.sample(WHOLE, 12)
    probe.engine.sleep()
    calls.clear()
    with pytest.raises(SentinelError, match=r"agree once version 0 is sent again") as caught:
        watched(probe, samples)
    assert caught.value.fault is Fault.STALE_WEIGHTS and calls[:2] == ["sync", "generate"]


def test_a_drift_is_named_even_if_the_engine_cannot_wake(
    sleepy: tuple[Probe, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a backward pass and its step there may be no memory to wake up in."""
    probe, _ = sleepy
    off = np.float32(-0.1) * np.arange(12, dtype=np.float32)  # what no known cause explains
    samples = [
        replace(sample, sampler_logp=sample.sampler_logp + off[: len(sample.sampler_logp)]) for sample in probe.sample(WHOLE, 12)
    ]
    probe.engine.sleep()

    def no_memory(*_: Any, **__: Any) -> None:
        raise EngineError("vLLM did not take the weights of version 0: CUDA out of memory")

    monkeypatch.setattr(TransformersEngine, "sync", no_memory)
    with pytest.raises(SentinelError, match="could not be checked again: vLLM did not take") as caught:
        watched(probe, samples)
    assert caught.value.fault is Fault.DRIFT
