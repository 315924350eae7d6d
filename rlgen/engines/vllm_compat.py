"""Holds everything that depends on vLLM's version: arguments, environment, patches. Tested with 0.32 (CPU); accepts 0.28 to 0.33.

Each patch says which problem it solves. The tests in `tests/engines` run on the real vLLM and fail when upstream changes what
a patch relies on.
"""

import importlib
import importlib.util
import os
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlgen.engines.base import EngineInfo, Settings, SyncRecorder, wider_parameters
from rlgen.errors import EngineError, SetupError
from rlgen.heap import importing
from rlgen.models.vision import decoded, with_placeholders
from rlgen.out_of_memory import GIB, is_out_of_memory, reason
from rlgen.types import Image, Request, Sampling

if TYPE_CHECKING:
    from rlgen.engines.plan import EnginePlan  # a server's worker imports this file and needs no recipe

OLDEST, NEWEST = (0, 28), (0, 33)

# Share of a GPU's memory for weights and KV cache, if the recipe sets none.
GPU_SHARE = 0.45
# vLLM does not start unless this share of the GPU's memory is free. With a KV cache of fixed size the share is not needed,
# so the least is passed.
LEAST_SHARE = 0.01

# Size of the cache of processed images, so that none is processed for each completion of its group.
IMAGE_CACHE_GIB = 1.0

Weights = Iterable[tuple[str, Tensor]]
# Returns further prompts and their settings; given True, it waits until there are some, and returns none if none will come.
More = Callable[[bool], tuple[list[dict[str, Any]], list[Any]]]

ENVIRONMENT = {
    # Engine and worker run in this process: a weight sync needs no transport.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # The default attention kernel splits long sequences by load, so that a completion depends on the rest of its batch.
    "VLLM_CPU_ATTN_SPLIT_KV": "0",
    # vLLM must not bind the threads of this process to cores: the trainer uses them too.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # vLLM's log records go to rlgen's handlers.
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TQDM_DISABLE": "1",
}

# vLLM's processes communicate within this machine. By default gloo listens on the address that the host name resolves to.
LOOPBACK = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}

# Arguments that must not be dropped if an older vLLM does not know them: without them its log-probs would mean something else.
INDISPENSABLE = {"model", "dtype", "logprobs_mode", "enable_chunked_prefill", "generation_config", "max_model_len"}

# Arguments that are dropped if an older vLLM does not know them: it then waits half an hour for a process that hangs.
DISPENSABLE = {"distributed_timeout_seconds", "cpu_distributed_timeout_seconds"}


# The version that `rlgen.engines.decode` and `rlgen.engines.decode_worker` were compared with.
COMPARED = "0.32."

# If `SamplingParams.extra_args` has this key, `rlgen.engines.decode` returns all tokens of a request together with the last one.
# Other schedulers ignore the key. The weights must not change meanwhile: a server labels tokens with the weights that it has when
# it receives them.
HELD = "rlgen_held"

# What serves a model that vLLM's CPU build does not.
ELSEWHERE = (
    "vLLM's CPU build lacks kernels of some architectures: set engine.kind to transformers here, or run on an NVIDIA GPU with"
    " rlgen[cuda]"
)

# `vllm serve` does not start if the distribution is called vllm-cpu; this module does, from 0.28 on.
SERVER_MODULE = "vllm.entrypoints.openai.api_server"


def exact_products(plan: "EnginePlan") -> dict[str, str]:
    """Returns the environment variables that make a float32 engine on a GPU multiply in float32; none for others.

    vLLM's attention kernel sets no precision, and Triton then uses TF32 of 10 bits: on a tiny model log-probs were off by 1e-3,
    ten times the sentinel's bound (TF32 simulated on a CPU). Triton reads its variable when it compiles a kernel, and caches
    kernels separately for each value. vLLM has a setting of its own for matrix products.
    """
    if not (plan.on_gpu and plan.dtype == "float32"):
        return {}
    return {"TRITON_F32_DEFAULT": "ieee", "VLLM_FLOAT32_MATMUL_PRECISION": "highest"}


def server_environment(plan: "EnginePlan") -> dict[str, str]:
    """Returns the environment variables that a server started by rlgen needs."""
    both = {
        "VLLM_SERVER_DEV_MODE": "1",  # routes that pause, and that call methods of the workers
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        **LOOPBACK,
        **exact_products(plan),
    }
    cpu = {
        "VLLM_CPU_ATTN_SPLIT_KV": ENVIRONMENT["VLLM_CPU_ATTN_SPLIT_KV"],
        "VLLM_CPU_OMP_THREADS_BIND": ENVIRONMENT["VLLM_CPU_OMP_THREADS_BIND"],
        # Engine and worker in one process, where possible: ready 5 s sooner, 700 MB and one queue less.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Otherwise asking for log-probs compiles a count of token ranks that rlgen does not read.
        "TORCHDYNAMO_DISABLE": "1",
    }
    return both if plan.on_gpu else both | cpu


NOTHING_MORE: Mapping[str, str] = MappingProxyType({})


@contextmanager
def process_kept_as_is(more: Mapping[str, str] = NOTHING_MORE) -> Iterator[None]:
    """Sets vLLM's environment inside the block and restores random states, thread settings and environment after it.

    Args:
        more: further variables, see `exact_products`. A kernel may be compiled whenever the engine runs.

    Measured: building or running an engine in this process advances torch's and Python's random states, sets LD_PRELOAD
    and LOCAL_WORLD_SIZE, and replaces `torch.set_num_threads` by a function that does nothing.
    """
    environment = dict(os.environ)
    threads, set_num_threads = torch.get_num_threads(), torch.set_num_threads
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    os.environ.update({**ENVIRONMENT, **more})
    if os.environ.get("WORLD_SIZE", "1") == os.environ.get("LOCAL_WORLD_SIZE", "1"):  # else other machines connect
        os.environ.update(LOOPBACK)
    try:
        yield
    finally:
        # Restores only changed variables: other threads read the environment, which C moves in memory when it grows.
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
    """Imports vLLM, patches it and returns the module. Takes seconds, so it is called only when an engine is built.

    Must be called inside `process_kept_as_is`.

    Raises:
        SetupError: vLLM is missing, broken, or of a version that rlgen does not support.
    """
    with importing():
        try:
            vllm = importlib.import_module("vllm")
        except ImportError as error:
            raise SetupError(f"engine.kind: colocated needs vLLM, which cannot be imported ({error}); {INSTALL}") from error
        # From the module, because `importlib.metadata` knows the CPU build under another name.
        version = tuple(int(part) for part in vllm.__version__.split("+")[0].split(".")[:2])
        if not OLDEST <= version <= NEWEST:
            raise SetupError(
                f"vLLM {vllm.__version__} is installed, but rlgen needs 0.{OLDEST[1]} to 0.{NEWEST[1]}; install one of these"
            )
        if not torch.cuda.is_available():
            _count_ranks_without_compiler()
            _share_no_memory()
    return vllm


def _count_ranks_without_compiler() -> None:
    """Replaces vLLM's compiled function that counts the rank of each sampled token, which rlgen does not read.

    Without the patch, asking for log-probs compiles that function: about 28 s on a fresh machine.
    """
    sampler = importlib.import_module("vllm.v1.sample.sampler")
    sampler.batched_count_greater_than = lambda logprobs, values: (logprobs >= values).sum(-1)  # type: ignore[attr-defined]


def arguments(plan: "EnginePlan") -> dict[str, Any]:
    """Returns the vLLM arguments for `plan`, the same for an engine in this process and for a server.

    Raises:
        SetupError: the weights cannot be quantised here, or the size of the KV cache depends on the model, whose config cannot be
            read.
    """
    if plan.quantization and not plan.on_gpu:
        raise SetupError(
            f"engine.quantization: {plan.quantization} needs an NVIDIA GPU; remove it: on a CPU the engine holds the weights"
            " in engine.dtype"
        )
    chosen: dict[str, Any] = {
        **plan.extra,
        "model": plan.model,
        "revision": plan.revision,
        "dtype": plan.dtype,
        # The trainer computes logits in float32; so must the engine.
        "hf_overrides": {"head_dtype": "float32"} if plan.fp32_head and plan.dtype != "float32" else {},
        "max_model_len": plan.max_model_len,
        "max_num_seqs": plan.max_num_seqs,
        "tensor_parallel_size": plan.tensor_parallel_size,
        "model_impl": plan.model_impl,
        "quantization": plan.quantization,
        "enforce_eager": plan.eager,
        "use_tqdm_on_load": False,
        # The default mode reports log-probs of the raw logits, whatever the temperature.
        "logprobs_mode": "processed_logprobs",
        # Ignores the checkpoint's own sampling defaults; its EOS ids still end a completion.
        "generation_config": "vllm",
        # rlgen sends and receives ids. A regular expression is compiled with the tokenizer; stop strings are looked for in text.
        "skip_tokenizer_init": not (plan.structured_outputs or plan.stops_at_text) and plan.image_token is None,
        "enable_sleep_mode": plan.sleep,
        "seed": 0,
    }
    if plan.on_gpu:
        share = plan.gpu_memory_utilization or GPU_SHARE
        chosen["gpu_memory_utilization"] = LEAST_SHARE if plan.kv_cache_gib is not None else share
    else:
        # A seeded request whose prompt is split over two steps crashes the CPU engine.
        chosen["enable_chunked_prefill"] = False
        chosen["max_num_batched_tokens"] = max(4096, plan.max_model_len)
        if (plan.vllm or "").startswith(COMPARED) and not plan.structured_outputs:
            chosen.setdefault("scheduler_cls", "rlgen.engines.decode.DecodeScheduler")
            chosen.setdefault("worker_cls", "rlgen.engines.decode_worker.DecodeWorker")
        if plan.keeps_states() and "enable_prefix_caching" not in plan.extra:
            chosen["enable_prefix_caching"] = False  # with recurrent layers it requires chunked prefill
    if plan.image_token is not None:
        chosen.setdefault("mm_processor_cache_gb", IMAGE_CACHE_GIB)
    if (cache := plan.kv_cache_bytes()) is not None:
        chosen["kv_cache_memory_bytes"] = cache
    return chosen


def what_helps(arguments: Mapping[str, Any]) -> list[str]:
    """Returns the two settings that save most of the memory that an engine with these `arguments` takes."""
    if (cache := arguments.get("kv_cache_memory_bytes")) is not None:
        smaller = f"engine.kv_cache_gib={cache / 2 / GIB:.4g}"
    else:
        smaller = f"engine.gpu_memory_utilization={0.8 * arguments['gpu_memory_utilization']:.2f}"
    sequences = max(1, arguments["max_num_seqs"] // 2)
    return [f"--set {smaller} (a smaller KV cache)", f"--set engine.max_num_seqs={sequences} (fewer decoded at a time)"]


def _share_no_memory() -> None:
    """Gives vLLM's shared-memory group a name unique to each process, so that vLLM uses torch's groups, which have timeouts.

    Without the patch, processes that share a model on the CPU communicate through shared memory and wait for each other without a
    timeout. Its name is the same for every run on a machine: two runs at a time would use the same memory, and what a killed run
    leaves behind keeps the next one from starting.
    """
    communicator = importlib.import_module("vllm.distributed.device_communicators.cpu_communicator")
    if hasattr(communicator, "_CPUSHMDistributed"):
        communicator._CPUSHMDistributed.make_group_name = staticmethod(lambda _: f"rlgen-{os.getpid()}")


def open_llm(vllm: Any, arguments: dict[str, Any]) -> Any:
    """Returns `vllm.LLM(**arguments)`, without those arguments of DISPENSABLE that this vLLM version does not know.

    Raises:
        EngineError: vLLM does not know one of the other arguments, or the engine does not start.
    """
    with importing():  # vLLM imports a class as it is named
        known, llm = {field.name for field in fields(vllm.EngineArgs)}, vllm.LLM
    arguments = {name: value for name, value in arguments.items() if name in known or name not in DISPENSABLE}
    if unknown := sorted(set(arguments) & INDISPENSABLE - known):
        raise EngineError(f"vLLM {vllm.__version__} has no argument {', '.join(unknown)}; use another version")
    if unknown := sorted(set(arguments) - known):
        raise EngineError(
            f"vLLM {vllm.__version__} has no argument {', '.join(unknown)}; correct engine.extra, or use another version"
        )
    with transformers_classes_spared():
        try:
            return llm(**arguments)
        except Exception as error:  # vLLM does not wrap the errors of its libraries
            said = refusal(error, "the engine's start", what_helps(arguments))
            raise EngineError(f"vLLM {vllm.__version__} did not start on {arguments['model']}: {said}") from error


def refusal(error: Exception, what: str, helps: Sequence[str]) -> str:
    """Returns, on one line, the message of an error before vLLM's first answer; on the CPU also what may serve the model."""
    said = without_lists(" ".join(reason(error, what, helps).split()))
    return said if torch.cuda.is_available() or is_out_of_memory(error) else f"{said}; {ELSEWHERE}"


def without_lists(said: str) -> str:
    """Removes from vLLM's message its list of all architectures, and what pydantic adds to an error: thousands of characters."""
    without = re.sub(r"^\d+ validation errors? for \w+ (Value error, )?| Supported architectures: dict_keys\(\[.*?\]\)", "", said)
    return re.sub(r" \[type=\w+, input_value=.*? For further information visit \S+", "", without)


@contextmanager
def transformers_classes_spared() -> Iterator[None]:
    """Restores the `__init__` of transformers' model classes after the block, to protect the trainer's models from vLLM.

    Where vLLM runs the model code of transformers, it wraps the class itself, and so the class of the trainer's model. The
    wrapped `__init__` demands a vLLM configuration, and the wrapped `__call__` reads a flag that only vLLM's own models have.
    After the block `__init__` is restored, and the flag `do_not_compile` is set on the class, so that `__call__` calls the model
    directly.
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
    """Yields all direct and indirect subclasses of `cls`."""
    for child in cls.__subclasses__():
        yield child
        yield from subclasses(child)


def sampling_params(vllm: Any, request: Request, sampling: Sampling) -> Any:
    """Returns vLLM's settings for one completion: ids only, one log-prob per token, stop ids kept in the output."""
    structured = None
    if sampling.regex is not None:
        structured = importlib.import_module("vllm.sampling_params").StructuredOutputsParams(regex=sampling.regex)
    return vllm.SamplingParams(
        n=1,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        max_tokens=sampling.limit_of(request),
        seed=request.seed,
        stop_token_ids=list(sampling.stop_ids),
        stop=list(sampling.stop),
        logprobs=0,
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        structured_outputs=structured,
        extra_args={HELD: True},
    )


@contextmanager
def each_as_it_finishes(llm: Any, finished: Callable[[int, Any], None], further: More | None = None) -> Iterator[None]:
    """Calls `finished` with index and output of each request as soon as it is done, for one `llm.generate` in the block.

    Args:
        further: asked after each of vLLM's steps for prompts that join the others; `llm.generate` returns their outputs too.
    """
    engine = llm.llm_engine
    step = engine.step
    first = next(llm.request_counter) + 1  # requests are numbered in the order of the prompts

    def listening() -> list[Any]:
        outputs: list[Any] = step()
        for output in outputs:
            if output.finished:
                finished(int(output.request_id) - first, output)
        if further is not None:
            prompts, params = further(not engine.has_unfinished_requests())
            if prompts:
                llm.enqueue(prompts, params, use_tqdm=False)
        return outputs

    engine.step = listening
    try:
        yield
    finally:
        del engine.step


async def completed(engine: Any, prompt: Mapping[str, Any], params: Mapping[str, Any], request_id: str) -> Any:
    """Returns the whole output for one request, from the engine inside a server. Cancelling the call aborts the request.

    Args:
        engine: vLLM's `EngineClient`.
        prompt: as `prompts_of` returns it.
        params: arguments of vLLM's `SamplingParams`.
    """
    sampling = importlib.import_module("vllm.sampling_params")
    whole = sampling.RequestOutputKind.FINAL_ONLY
    output = None
    async for output in engine.generate(  # noqa: B007  the last output is the complete one
        prompt, sampling.SamplingParams(**params, flat_logprobs=True, output_kind=whole), request_id
    ):
        pass
    return output


def is_refusal(error: Exception) -> bool:
    """Returns whether the error that vLLM raised inside a server is about an invalid request, not a failure of vLLM."""
    ours = getattr(importlib.import_module("vllm.exceptions"), "VLLMClientError", ValueError)  # older versions raise ValueError
    return isinstance(error, ValueError | TypeError | ours)


def prefill_params(vllm: Any) -> Any:
    """Returns vLLM's settings for the log-probs of a prompt, at temperature 1, the only one at which vLLM reports them.

    vLLM must decode one token to report them.
    """
    return vllm.SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False)


def prompt_logp(output: Any, first: int) -> tuple[float, ...]:
    """Returns the log-probs of a prompt's ids from index `first` on, which is at least 1."""
    # The first id of a prompt has no log-prob, so the flat list is one shorter than the prompt.
    return tuple(output.prompt_logprobs.logprobs[first - 1 :])


def facts(vllm: Any, plan: str, model_config: Any, cache_config: Any, model: nn.Module, runner: str) -> EngineInfo:
    """Returns the description of a running engine, read from its own configuration.

    Args:
        plan: digest of the settings that it was started with.
        runner: as `runner_of` returns it.
    """
    ends = model_config.try_get_generation_config().get("eos_token_id") or model_config.hf_config.eos_token_id
    return EngineInfo(
        engine=f"vllm {vllm.__version__}",
        plan=plan,
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
        runner=runner,
        quantization=model_config.quantization,
        wider=wider_parameters(model, model_config.dtype),
    )


def runner_of(worker: Any) -> str:
    """Returns which of vLLM's two model runners a worker has, `V1` or `V2`: each has sampling code of its own."""
    # V2 and the classes that platforms derive from it are in one package for each kind of device; V1 is in one file.
    found = any(
        re.match(r"vllm\.v1\.worker\.[a-z]+\.model_runner$", kind.__module__) for kind in type(worker.model_runner).__mro__
    )
    return "V2" if found else "V1"


def runner_in(llm: Any) -> str:
    """Returns `runner_of` the worker of an engine in this process."""
    runner: str = llm.collective_rpc(runner_of)[0]
    return runner


def load_into(model: nn.Module, model_config: Any, reload: Callable[[Weights], None], weights: Weights) -> tuple[str, ...]:
    """Replaces all weights of vLLM's `model`, in the process that holds the model. `weights` have the checkpoint's names.

    The caller must empty the prefix cache afterwards, because it was computed with the old weights. After an exception some
    weights are new and some old; only another complete load repairs that.

    Args:
        reload: vLLM's own `reload_weights`, which loads, packs and quantises as at the start.

    Returns:
        The engine's own names of tensors that the loader did not fill. Empty for a quantised model, whose tensors are loaded
        under other names than they are held.
    """
    forgotten = {} if torch.cuda.is_available() else forget_expert_kernels(model)
    listen(model)
    try:
        reload(weights)
    except BaseException:
        stop_listening(model)
        put_back(model, model_config)
        raise
    # The loader of some architectures (gpt-oss) copies experts past the reload, which then builds no kernel.
    unbuilt = [name for name, layer in forgotten.items() if layer.quant_method.moe_kernel is None]  # type: ignore[union-attr]
    return (*finish_listening(model, model_config), *unbuilt)


def put_back(model: nn.Module, model_config: Any) -> None:
    """Restores the previous tensors of the layers that a failed reload did not finish.

    Without this, vLLM leaves these layers half loaded: the next reload fails at the same place, and the one after it leaves a
    tied head without its weight.
    """
    layerwise = importlib.import_module("vllm.model_executor.model_loader.reload.layerwise")
    for layer in model.modules():
        found = layerwise.get_layerwise_info(layer)
        found.load_numel, found.loaded_weights = 0, []
    layerwise.finalize_layerwise_reload(model, model_config)


def listen(model: nn.Module, ledger: SyncRecorder | None = None) -> None:
    """Wraps the model's loader so that it records which tensors it fills: vLLM itself only logs that.

    Args:
        ledger: records each tensor as it arrives, before anything is packed. None: the sender records them.
    """
    load = model.load_weights
    names: dict[int, set[str]] = {}  # all names of a tensor: where vLLM runs the code of transformers, some layers have two
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    aliases = {name: same for same in names.values() for name in same}
    missed = set(aliases)

    def heard(weights: Iterable[tuple[str, Tensor]]) -> set[str] | None:
        loaded: set[str] | None = load(ledger.record(weights) if ledger else weights)  # type: ignore[operator]
        if loaded is None:  # this loader does not report what it filled
            missed.clear()
        else:
            missed.difference_update(*(aliases.get(name, ()) for name in loaded))
        return loaded

    model.__dict__.update(load_weights=heard, rlgen_missed=missed)


def is_listening(model: nn.Module) -> bool:
    """Returns whether `listen` is active on the model."""
    return "rlgen_missed" in model.__dict__


def stop_listening(model: nn.Module) -> set[str]:
    """Undoes `listen` and returns the names of the parameters that the loader did not fill."""
    del model.__dict__["load_weights"]
    missed: set[str] = model.__dict__.pop("rlgen_missed")
    return missed


def finish_listening(model: nn.Module, model_config: Any) -> tuple[str, ...]:
    """Undoes `listen` after a successful load and packs the heads' new weights for the CPU kernels.

    Returns:
        The names of tensors that were not filled, as `load_into` does.
    """
    missed = stop_listening(model)
    repack_heads(model)
    return tuple(sorted(missed)) if model_config.quantization is None else ()


def load_weights(llm: Any, weights: Weights) -> tuple[str, ...]:
    """Loads weights into the engine of this process as `load_into` does, and empties its caches of prefixes and of images.

    Raises:
        EngineError: the prefix cache could not be emptied.
    """
    not_loaded = load_into(
        model_in(llm),
        llm.llm_engine.model_config,
        lambda tensors: llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors}),
        weights,
    )
    # The reload has emptied the worker's cache of embedded images, but the scheduler still relies on its contents.
    if hasattr(llm.llm_engine, "reset_encoder_cache"):
        llm.llm_engine.reset_encoder_cache()
    if not reset_prefix_cache(llm):
        raise EngineError("vLLM did not empty its prefix cache after a weight sync: requests are still running")
    return not_loaded


def weights_in_files(vllm_config: Any, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights that the engine's `model` was opened with, as vLLM reads them at the start."""
    loaders = importlib.import_module("vllm.model_executor.model_loader")
    yield from loaders.get_model_loader(vllm_config.load_config).get_all_weights(vllm_config.model_config, model)


def model_in(llm: Any) -> nn.Module:
    """Returns vLLM's model itself, of an engine whose worker runs in this process."""
    (model,) = llm.apply_model(lambda model: model)
    return model


def reset_prefix_cache(llm: Any) -> bool:
    """Empties the prefix cache; returns whether that succeeded."""
    done: bool = llm.reset_prefix_cache()
    return done


def forget_expert_kernels(model: nn.Module) -> dict[str, nn.Module]:
    """Removes the kernels of mixture-of-experts layers, so that the next reload builds them anew as the first load did.

    On the CPU the first load packs the experts' weights for its kernel; a reload into an existing kernel skips that, and the
    kernel reads unpacked weights as packed ones: log-probs are then wrong by nats, without any error.

    Returns:
        The layers whose kernels were removed, by name.
    """
    found = {}
    for name, layer in model.named_modules():
        # some architectures have a subclass
        if "RoutedExperts" in (kind.__name__ for kind in type(layer).__mro__) and layer.quant_method.moe_kernel is not None:
            layer.quant_method.moe_kernel = None
            found[name] = layer
    return found


def repack_heads(model: nn.Module) -> int:
    """Packs the heads' weights again for the CPU kernels, and returns the number of heads.

    On the CPU a head keeps its weight *and* a packed copy. A reload of a model whose head is tied to its embedding refreshes only
    the embedding: log-probs are then wrong by nats, without any error. The call is harmless where it is not needed.
    """
    heads = [module for module in model.modules() if type(module).__name__ == "ParallelLMHead"]
    for head in heads:
        head.quant_method.process_weights_after_loading(head)  # type: ignore[union-attr,operator]
    return len(heads)


def prompts_of(requests: Sequence[Request], salt: str) -> list[dict[str, Any]]:
    """Returns the requests as vLLM prompts, with `salt` in each one's prefix-cache key.

    The salt keeps cached activations of one weight version from being used with another if the cache is not emptied.
    """
    return [{"prompt_token_ids": request.prompt_ids.tolist(), "cache_salt": salt} for request in requests]


def with_images(prompts: list[dict[str, Any]], images: Sequence[Sequence[Image]], token: int | None) -> list[dict[str, Any]]:
    """Returns vLLM prompts with the images of each, whose SHA-256 is then in the prefix-cache key, too.

    vLLM expands a placeholder to the ids of its image again, and reports with the answer which ids it used.

    Args:
        token: id of a placeholder; None: no prompt has images.
    """
    opened: dict[str, Any] = {}
    made: list[dict[str, Any]] = []
    for prompt, own in zip(prompts, images, strict=True):
        if not own:
            made.append(prompt)
            continue
        assert token is not None  # the recipe names images
        for image in own:
            if image.sha256 not in opened:
                opened[image.sha256] = decoded(image.data)
        made.append(
            {
                **prompt,
                "prompt_token_ids": with_placeholders(prompt["prompt_token_ids"], own, token),
                "multi_modal_data": {"image": [opened[image.sha256] for image in own]},
                "multi_modal_uuids": {"image": [image.sha256 for image in own]},
            }
        )
    return made


class NcclEndpoint:
    """Rank 0 of an NCCL group with the workers of servers that were started with --weight-transfer-config {"backend": "nccl"}.

    Its methods may be called from any thread: each sets the current GPU, which is a property of the thread.

    Args:
        nccl: vLLM's module.
        device: number of the GPU.

    Raises:
        SetupError: NCCL cannot be loaded: vLLM would then send nothing and raise no error.
    """

    def __init__(self, nccl: Any, device: int, host: str, port: int, world: int) -> None:
        self._device = torch.device("cuda", device)
        with torch.cuda.device(self._device):
            self._communicator = nccl.trainer_init({"master_address": host, "master_port": port, "world_size": world})
        if self._communicator.disabled:
            raise SetupError("engine.transfer nccl: vLLM cannot load NCCL here; set engine.transfer to files")

    def ready(self, tensor: Tensor) -> Tensor:
        """Returns the tensor on this rank's GPU, contiguous."""
        return tensor.detach().to(self._device).contiguous()

    def broadcast(self, tensor: Tensor) -> None:
        """Broadcasts a tensor and returns when it is sent. Waits for every worker."""
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()  # another thread's stream may still be writing it
            stream = torch.cuda.current_stream()
            self._communicator.broadcast(tensor, src=0, stream=stream)
            stream.synchronize()

    def close(self) -> None:
        """Destroys the communicator."""
        self._communicator.destroy()


def nccl_connector() -> Callable[[str, int, int], NcclEndpoint]:
    """Returns a function that joins a group as rank 0 with this thread's GPU, given host, port and number of ranks.

    That function waits until all ranks have joined.

    Raises:
        SetupError: this vLLM version has no NCCL weight transfer.
    """
    with process_kept_as_is():
        vllm = import_vllm()
        try:
            nccl = importlib.import_module("vllm.distributed.weight_transfer.nccl_common")
        except ImportError as error:
            raise SetupError(f"vLLM {vllm.__version__} has no NCCL transfer: {error}; set engine.transfer to files") from error
    return partial(NcclEndpoint, nccl, torch.cuda.current_device())
