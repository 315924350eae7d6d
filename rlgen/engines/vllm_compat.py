"""Everything that depends on vLLM's version: arguments, environment, patches. Tried with 0.32 (CPU); window 0.28-0.33.

Each patch says what it cures; the tests of `tests/engines` run on the real vLLM, and fail when upstream changes under it.
"""

import importlib
import importlib.util
import math
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from rlgen.engines.base import Facts, Ledger, Settings
from rlgen.errors import EngineError, SetupError
from rlgen.models.shortage import reason
from rlgen.types import Request, Sampling

OLDEST, NEWEST = (0, 28), (0, 33)

GIB = 1 << 30
# Shares of a GPU's memory and bytes of main memory for the KV cache, where the recipe names neither.
GPU_SHARE = 0.45
# vLLM does not start unless the share of the GPU that it may use is free. A cache of a said size needs no share: the least.
LEAST_SHARE = 0.01
CPU_KV_LIMIT = 4 * GIB
CPU_BLOCK = 128  # tokens of a KV block on the CPU

Weights = Iterable[tuple[str, Tensor]]

ENVIRONMENT = {
    # Engine and worker live in this process: a sync needs no transport.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # The default attention kernel splits long sequences by load, so that a completion depends on its neighbours.
    "VLLM_CPU_ATTN_SPLIT_KV": "0",
    # The threads of this process belong to the trainer: no binding.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # rlgen's handlers receive vLLM's records.
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TQDM_DISABLE": "1",
}

# vLLM's parts speak to each other within this machine. Unsaid, gloo listens on the address that the host's name stands for.
LOOPBACK = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}

# Arguments that may never be dropped because an older vLLM does not know them: without them the numbers mean
# something else.
INDISPENSABLE = {"model", "dtype", "logprobs_mode", "enable_chunked_prefill", "generation_config", "max_model_len"}

# Arguments that an older vLLM does without: it waits half an hour for a process that hangs.
DISPENSABLE = {"distributed_timeout_seconds", "cpu_distributed_timeout_seconds"}


# `vllm serve` does not start where the distribution is called vllm-cpu; this module does, from 0.28 on.
SERVER_MODULE = "vllm.entrypoints.openai.api_server"


def server_environment(on_gpu: bool) -> dict[str, str]:
    """What a server of ours needs in its environment."""
    both = {
        "VLLM_SERVER_DEV_MODE": "1",  # routes that pause, and that call methods of the workers
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        **LOOPBACK,
    }
    cpu = {
        "VLLM_CPU_ATTN_SPLIT_KV": ENVIRONMENT["VLLM_CPU_ATTN_SPLIT_KV"],
        "VLLM_CPU_OMP_THREADS_BIND": ENVIRONMENT["VLLM_CPU_OMP_THREADS_BIND"],
        # Engine and worker in one process, as far as they can: ready 5 s sooner, 700 MB and a queue less.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Asking for log-probs would compile a rank count that nobody reads.
        "TORCHDYNAMO_DISABLE": "1",
    }
    return both if on_gpu else both | cpu


@contextmanager
def process_kept_as_is() -> Iterator[None]:
    """vLLM runs with its environment inside the block; random states, threads and environment are restored after it.

    Measured: building or running an engine in this process advances torch's and Python's random states, sets LD_PRELOAD
    and LOCAL_WORLD_SIZE, and replaces `torch.set_num_threads` by a function that does nothing.
    """
    environment = dict(os.environ)
    threads, set_num_threads = torch.get_num_threads(), torch.set_num_threads
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    os.environ.update(ENVIRONMENT)
    if os.environ.get("WORLD_SIZE", "1") == os.environ.get("LOCAL_WORLD_SIZE", "1"):  # else processes of other machines listen
        os.environ.update(LOOPBACK)
    try:
        yield
    finally:
        # Only what has changed: other threads read the environment, which C moves in memory when it grows.
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        for name, value in environment.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        torch.set_num_threads = set_num_threads
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if cuda_states is not None:
            torch.cuda.set_rng_state_all(cuda_states)


INSTALL = "install rlgen[cuda] on a machine with an NVIDIA GPU, rlgen[cpu] without, or set engine.kind: transformers"


def require_vllm() -> None:
    """Raises SetupError if vLLM is not installed. Does not import it."""
    if importlib.util.find_spec("vllm") is None:
        raise SetupError(f"engine.kind: server needs vLLM, which is not installed; {INSTALL}")


def import_vllm() -> Any:
    """The vllm module, patched. Call inside `process_kept_as_is`; costs seconds, so only when an engine is built.

    Raises:
        SetupError: vLLM is missing, broken, or of a version rlgen was not made for.
    """
    try:
        vllm = importlib.import_module("vllm")
    except ImportError as error:
        raise SetupError(f"engine.kind: colocated needs vLLM, which cannot be imported ({error}); {INSTALL}") from error
    # `importlib.metadata` knows the CPU build under another name; the module knows itself.
    version = tuple(int(part) for part in vllm.__version__.split("+")[0].split(".")[:2])
    if not OLDEST <= version <= NEWEST:
        raise SetupError(f"vLLM {vllm.__version__} is installed; rlgen works with 0.{OLDEST[1]} to 0.{NEWEST[1]}")
    if not torch.cuda.is_available():
        _count_ranks_without_compiler()
        _share_no_memory()
    return vllm


def _count_ranks_without_compiler() -> None:
    """Asking for log-probs compiles a rank count that nobody reads here: about 28 s on a fresh machine."""
    sampler = importlib.import_module("vllm.v1.sample.sampler")
    sampler.batched_count_greater_than = lambda logprobs, values: (logprobs >= values).sum(-1)  # type: ignore[attr-defined]


def arguments(
    *,
    on_gpu: bool,
    model: str,
    revision: str | None,
    dtype: str,
    fp32_head: bool,
    max_model_len: int,
    max_num_seqs: int,
    kv_cache_gib: float | None,
    gpu_memory_utilization: float | None,
    tensor_parallel_size: int,
    model_impl: str,
    quantization: str | None,
    structured_outputs: bool,
    enforce_eager: bool | None,
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    """vLLM's own arguments, the same for an engine in this process and for a server. `ColocatedEngine` says what each is."""
    chosen: dict[str, Any] = {
        **extra,
        "model": model,
        "revision": revision,
        "dtype": dtype,
        # The trainer computes logits in float32; so must the engine.
        "hf_overrides": {"head_dtype": "float32"} if fp32_head and dtype != "float32" else {},
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "tensor_parallel_size": tensor_parallel_size,
        "model_impl": model_impl,
        "quantization": quantization,
        "enforce_eager": not on_gpu if enforce_eager is None else enforce_eager,
        "use_tqdm_on_load": False,
        # The default mode reports log-probs of the raw logits, whatever the temperature.
        "logprobs_mode": "processed_logprobs",
        # A checkpoint's own sampling defaults stay out; its EOS ids still end a completion.
        "generation_config": "vllm",
        # Ids in, ids out. A regular expression is compiled against the tokenizer.
        "skip_tokenizer_init": not structured_outputs,
        "seed": 0,
    }
    if on_gpu:
        chosen["gpu_memory_utilization"] = LEAST_SHARE if kv_cache_gib is not None else gpu_memory_utilization or GPU_SHARE
    else:
        # A seeded request whose prompt is split over two steps crashes the CPU engine.
        chosen["enable_chunked_prefill"] = False
        chosen["max_num_batched_tokens"] = max(4096, max_model_len)
    if kv_cache_gib is not None:
        chosen["kv_cache_memory_bytes"] = int(kv_cache_gib * GIB)
    elif not on_gpu:
        chosen["kv_cache_memory_bytes"] = _kv_bytes(model, revision, dtype, max_num_seqs, max_model_len)
    return chosen


def what_helps(arguments: Mapping[str, Any]) -> list[str]:
    """The two settings that save most of the memory that an engine with these `arguments` takes."""
    if (cache := arguments.get("kv_cache_memory_bytes")) is not None:
        smaller = f"engine.kv_cache_gib={cache / 2 / GIB:.4g}"
    else:
        smaller = f"engine.gpu_memory_utilization={0.8 * arguments['gpu_memory_utilization']:.2f}"
    sequences = max(1, arguments["max_num_seqs"] // 2)
    return [f"--set {smaller} (a smaller KV cache)", f"--set engine.max_num_seqs={sequences} (fewer decoded at a time)"]


def _kv_bytes(model: str, revision: str | None, dtype: str, max_num_seqs: int, max_model_len: int) -> int:
    """Bytes for `max_num_seqs` sequences of full length: 2 * layers * kv_heads * head_dim * size of a number, a token."""
    config = AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=False).get_text_config()
    heads = config.num_key_value_heads or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    a_token = 2 * config.num_hidden_layers * heads * head_dim * getattr(torch, dtype).itemsize
    tokens = (max_num_seqs + 1) * math.ceil(max_model_len / CPU_BLOCK) * CPU_BLOCK
    return min(a_token * tokens, CPU_KV_LIMIT)


def _share_no_memory() -> None:
    """Processes that share a model on the CPU would talk through shared memory, waiting for each other without an end.

    Its name is the same for every run of a machine: two at a time would meet in it, and what a killed one leaves behind keeps the
    next from starting. With a name of its own for each process vLLM talks through torch's groups, which time out.
    """
    communicator = importlib.import_module("vllm.distributed.device_communicators.cpu_communicator")
    if hasattr(communicator, "_CPUSHMDistributed"):
        communicator._CPUSHMDistributed.make_group_name = staticmethod(lambda _: f"rlgen-{os.getpid()}")


def open_llm(vllm: Any, arguments: dict[str, Any]) -> Any:
    """`vllm.LLM(**arguments)`, without the arguments this version does not know.

    Raises:
        EngineError: an argument that rlgen cannot do without is unknown, or the engine does not start.
    """
    known = {field.name for field in fields(vllm.EngineArgs)}
    arguments = {name: value for name, value in arguments.items() if name in known or name not in DISPENSABLE}
    if unknown := sorted(set(arguments) & INDISPENSABLE - known):
        raise EngineError(f"vLLM {vllm.__version__} has no argument {', '.join(unknown)}; use another version")
    if unknown := sorted(set(arguments) - known):
        raise EngineError(
            f"vLLM {vllm.__version__} has no argument {', '.join(unknown)}; correct engine.extra, or use another version"
        )
    with transformers_classes_spared():
        try:
            return vllm.LLM(**arguments)
        except Exception as error:  # vLLM raises whatever its parts raise
            said = reason(error, "the engine's start", what_helps(arguments))
            raise EngineError(f"vLLM {vllm.__version__} did not start on {arguments['model']}: {said}") from error


@contextmanager
def transformers_classes_spared() -> Iterator[None]:
    """Where vLLM runs the model code of transformers, it wraps the class itself, and so the trainer's model of that class.

    Its `__init__` then demands a configuration of vLLM, and its `__call__` a flag that only vLLM's own models have. After the
    block the first is as before, and the flag on the class says: just call.
    """
    classes = list(subclasses(PreTrainedModel))
    before = [cls.__init__ for cls in classes]
    try:
        yield
    finally:
        for cls, init in zip(classes, before, strict=True):
            if cls.__init__ is not init:
                cls.__init__ = init
                cls.do_not_compile = True


def subclasses(cls: Any) -> Iterator[Any]:
    """All classes below `cls`."""
    for child in cls.__subclasses__():
        yield child
        yield from subclasses(child)


def sampling_params(vllm: Any, request: Request, sampling: Sampling) -> Any:
    """vLLM's settings for one completion: ids only, one log-prob a token, every stop id kept in the answer."""
    structured = None
    if sampling.regex is not None:
        structured = importlib.import_module("vllm.sampling_params").StructuredOutputsParams(regex=sampling.regex)
    return vllm.SamplingParams(
        n=1,
        temperature=sampling.temperature,
        max_tokens=sampling.max_tokens,
        seed=request.seed,
        stop_token_ids=list(sampling.stop_ids),
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        structured_outputs=structured,
    )


@contextmanager
def each_as_it_finishes(llm: Any, finished: Callable[[int, Any], None]) -> Iterator[None]:
    """For one `llm.generate` inside the block: `finished` receives place and output of each request, when vLLM has it."""
    engine = llm.llm_engine
    step = engine.step
    first = next(llm.request_counter) + 1  # requests are numbered in the order of the prompts

    def listening() -> list[Any]:
        outputs: list[Any] = step()
        for output in outputs:
            if output.finished:
                finished(int(output.request_id) - first, output)
        return outputs

    engine.step = listening
    try:
        yield
    finally:
        del engine.step


def prefill_params(vllm: Any) -> Any:
    """vLLM's settings for the log-probs of a prompt. It reports them at temperature 1, and must decode one token to do so."""
    return vllm.SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False)


def prompt_logp(output: Any, first: int) -> tuple[float, ...]:
    """Log-probs of a prompt's ids from place `first`, at least 1, on."""
    # The first id of a prompt has no log-prob, so that the flat list is one shorter than the prompt.
    return tuple(output.prompt_logprobs.logprobs[first - 1 :])


def facts(vllm: Any, model_config: Any, cache_config: Any) -> Facts:
    """What a running engine is, from its own configuration."""
    ends = model_config.try_get_generation_config().get("eos_token_id") or model_config.hf_config.eos_token_id
    return Facts(
        engine=f"vllm {vllm.__version__}",
        model=model_config.model,
        revision=model_config.revision,
        settings=Settings(
            dtype=str(model_config.dtype).removeprefix("torch."),
            head_dtype=str(model_config.head_dtype).removeprefix("torch."),
            logprobs_mode=str(model_config.logprobs_mode),
            vocab_size=model_config.get_vocab_size(),
        ),
        stop_ids=(ends,) if isinstance(ends, int) else tuple(ends or ()),
        max_model_len=model_config.max_model_len,
        cache_block=cache_config.block_size if cache_config.enable_prefix_caching else None,
    )


def load_into(model: nn.Module, model_config: Any, reload: Callable[[Weights], None], weights: Weights) -> tuple[str, ...]:
    """Replaces all weights of vLLM's `model`. Names are those of the checkpoint. Runs where the model is.

    The caller empties the prefix cache afterwards: what it holds was computed with the old weights. After an exception some
    weights are new and some old; another load heals that.

    Args:
        reload: vLLM's own `reload_weights`, which loads, packs and quantises as at the start.

    Returns:
        The engine's own names of tensors that the loader did not fill. Quantised tensors are loaded under other names than
        they are held: nothing is concluded from those.
    """
    if not torch.cuda.is_available():
        forget_expert_kernels(model)
    listen(model)
    try:
        reload(weights)
    except BaseException:
        stop_listening(model)
        put_back(model, model_config)
        raise
    return finish_listening(model, model_config)


def put_back(model: nn.Module, model_config: Any) -> None:
    """After a reload that failed, gives the layers that it did not finish the tensors that they had.

    vLLM leaves them half taken apart: the next reload fails where this one did, and the one after leaves a tied head without
    its weight.
    """
    layerwise = importlib.import_module("vllm.model_executor.model_loader.reload.layerwise")
    for layer in model.modules():
        found = layerwise.get_layerwise_info(layer)
        found.load_numel, found.loaded_weights = 0, []
    layerwise.finalize_layerwise_reload(model, model_config)


def listen(model: nn.Module, ledger: Ledger | None = None) -> None:
    """Has the model's loader take down what it fills: vLLM writes it to its log alone.

    Args:
        ledger: takes down what comes, before anything is packed. None: whoever sends it does.
    """
    load = model.load_weights
    missed = {name for name, _ in model.named_parameters()}

    def heard(weights: Iterable[tuple[str, Tensor]]) -> set[str] | None:
        loaded: set[str] | None = load(ledger.record(weights) if ledger else weights)  # type: ignore[operator]
        if loaded is None:  # it does not say
            missed.clear()
        else:
            missed.difference_update(loaded)
        return loaded

    model.__dict__.update(load_weights=heard, rlgen_missed=missed)


def is_listening(model: nn.Module) -> bool:
    return "rlgen_missed" in model.__dict__


def stop_listening(model: nn.Module) -> set[str]:
    """What `listen` took down."""
    del model.__dict__["load_weights"]
    missed: set[str] = model.__dict__.pop("rlgen_missed")
    return missed


def finish_listening(model: nn.Module, model_config: Any) -> tuple[str, ...]:
    """After a load while `listen` was on: makes the weights the ones that compute, and returns as `load_into`."""
    missed = stop_listening(model)
    repack_heads(model)
    return tuple(sorted(missed)) if model_config.quantization is None else ()


def load_weights(llm: Any, weights: Weights) -> tuple[str, ...]:
    """`load_into` for the engine of this process, whose prefix cache is empty afterwards.

    Raises:
        EngineError: the prefix cache could not be emptied.
    """
    (model,) = llm.apply_model(lambda model: model)  # the model itself: the worker lives in this process
    not_loaded = load_into(
        model,
        llm.llm_engine.model_config,
        lambda tensors: llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors}),
        weights,
    )
    if not reset_prefix_cache(llm):
        raise EngineError("vLLM did not empty its prefix cache after a weight sync: requests are still running")
    return not_loaded


def reset_prefix_cache(llm: Any) -> bool:
    """Whether the cached activations are gone."""
    done: bool = llm.reset_prefix_cache()
    return done


def forget_expert_kernels(model: nn.Module) -> None:
    """Makes the coming reload treat mixture-of-experts layers as the first load did.

    On the CPU the first load packs the experts' weights for its kernel; a reload into an existing kernel skips that, and the
    kernel reads unpacked weights as packed ones: log-probs are wrong by nats, silently. Without a kernel, it is built anew.
    """
    for module in model.modules():
        if type(module).__name__ == "RoutedExperts":
            module.quant_method.moe_kernel = None  # type: ignore[union-attr]


def repack_heads(model: nn.Module) -> int:
    """Refreshes the copy of the head's weight that the CPU kernels multiply with.

    On the CPU a head keeps its weight *and* a packed copy. A reload of a model whose head is tied to its embedding
    refreshes the embedding alone: log-probs are then wrong by nats, silently. Harmless where it is not needed.
    """
    heads = [module for module in model.modules() if type(module).__name__ == "ParallelLMHead"]
    for head in heads:
        head.quant_method.process_weights_after_loading(head)  # type: ignore[union-attr,operator]
    return len(heads)


def prompts_of(requests: Sequence[Request], salt: str) -> list[dict[str, Any]]:
    """The salt keeps activations of one weight version from serving another, should a cache outlive its reset."""
    return [{"prompt_token_ids": list(request.prompt_ids), "cache_salt": salt} for request in requests]


class NcclEndpoint:
    """Rank 0 of a group with the workers of servers that were started with --weight-transfer-config {"backend": "nccl"}.

    Its methods run in any thread: which GPU is current is a property of each.

    Args:
        nccl: vLLM's module.
        device: number of the GPU.

    Raises:
        SetupError: NCCL cannot be loaded: vLLM would then send nothing and say nothing.
    """

    def __init__(self, nccl: Any, device: int, host: str, port: int, world: int) -> None:
        self._device = torch.device("cuda", device)
        with torch.cuda.device(self._device):
            self._communicator = nccl.trainer_init({"master_address": host, "master_port": port, "world_size": world})
        if self._communicator.disabled:
            raise SetupError("engine.transfer nccl: vLLM cannot load NCCL here; set engine.transfer to files")

    def ready(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self._device).contiguous()

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()  # another thread's stream may still be writing them
            stream = torch.cuda.current_stream()
            for tensor in tensors:
                self._communicator.broadcast(tensor, src=0, stream=stream)
            stream.synchronize()

    def close(self) -> None:
        self._communicator.destroy()


def nccl_connector() -> Callable[[str, int, int], NcclEndpoint]:
    """Opens an endpoint on this thread's GPU, given host, port and number of ranks; waits until all ranks have joined.

    Raises:
        SetupError: this vLLM has no such transfer.
    """
    with process_kept_as_is():
        vllm = import_vllm()
        try:
            nccl = importlib.import_module("vllm.distributed.weight_transfer.nccl_common")
        except ImportError as error:
            raise SetupError(f"vLLM {vllm.__version__} has no NCCL transfer: {error}; set engine.transfer to files") from error
    return partial(NcclEndpoint, nccl, torch.cuda.current_device())
