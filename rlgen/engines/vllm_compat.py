"""Holds what depends on vLLM's version: arguments, environment, patches. Tested with 0.32 (CPU); accepts 0.28 to 0.33.

What concerns weights is in `vllm_weights`. Each patch says which problem it solves. The tests in `tests/engines` run on the real
vLLM and fail when upstream changes what a patch relies on.
"""

import importlib
import importlib.util
import os
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import nn
from transformers import PreTrainedModel

from rlgen.engines.base import EngineInfo, Settings, wider_parameters
from rlgen.errors import EngineError, SetupError
from rlgen.heap import importing
from rlgen.models.vision import decoded, with_placeholders
from rlgen.out_of_memory import GIB, failure_reason, is_out_of_memory
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

# Arguments that are dropped if an older vLLM does not know them: it then waits half an hour for a process that hangs. No others
# are: without `logprobs_mode`, for example, its log-probs would mean something else.
DISPENSABLE = {"distributed_timeout_seconds", "cpu_distributed_timeout_seconds"}


# The version that `rlgen.engines.cpu_decode` was compared with.
COMPARED = "0.32."

# With this key in `SamplingParams.extra_args`, `rlgen.engines.cpu_decode` returns all tokens of a request together with the last
# one. Other schedulers ignore it. The weights must not change meanwhile: a server labels tokens with the weights that it has when
# it receives them.
HELD = "rlgen_held"

EXPERTS = "rlgen_experts"  # with this key in `additional_config`, `rlgen.engines.cpu_decode` returns the experts of each token

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
    names = ["VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"]
    if not plan.on_gpu:
        # Engine and worker in one process, where possible: ready 5 s sooner, 700 MB and one queue less.
        names += ["VLLM_CPU_ATTN_SPLIT_KV", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_ENABLE_V1_MULTIPROCESSING"]
    found = {
        "VLLM_SERVER_DEV_MODE": "1",  # routes that pause, and that call methods of the workers
        **{name: ENVIRONMENT[name] for name in names},
        **LOOPBACK,
        **exact_products(plan),
    }
    # Otherwise asking for log-probs compiles a count of token ranks that rlgen does not read.
    return found if plan.on_gpu else {**found, "TORCHDYNAMO_DISABLE": "1"}


@contextmanager
def process_kept_as_is(more: Mapping[str, str] | None = None) -> Iterator[None]:
    """Sets vLLM's environment inside the block and restores random states, thread settings and environment after it.

    `more` are further variables, see `exact_products`: a kernel may be compiled whenever the engine runs.

    Measured: building or running an engine in this process advances torch's and Python's random states, sets LD_PRELOAD
    and LOCAL_WORLD_SIZE, and replaces `torch.set_num_threads` by a function that does nothing.
    """
    environment = dict(os.environ)
    threads, set_num_threads = torch.get_num_threads(), torch.set_num_threads
    states = random.getstate(), numpy.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    os.environ.update({**ENVIRONMENT, **(more or {})})
    if os.environ.get("WORLD_SIZE", "1") == os.environ.get("LOCAL_WORLD_SIZE", "1"):  # else other machines connect
        os.environ.update(LOOPBACK)
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        # Restores only changed variables: other threads read the environment, which C moves in memory when it grows.
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update({name: value for name, value in environment.items() if os.environ.get(name) != value})
        torch.set_num_threads = set_num_threads
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        random.setstate(states[0])
        numpy.random.set_state(states[1])


INSTALL = "install rlgen[cuda] on a machine with an NVIDIA GPU, rlgen[cpu] without, or set engine.kind: transformers"


def require_vllm() -> None:
    """Raises SetupError if vLLM is not installed. Does not import it."""
    if importlib.util.find_spec("vllm") is None:
        raise SetupError(f"engine.kind: server needs vLLM, which is not installed; {INSTALL}")


def import_vllm() -> Any:
    """Imports vLLM, patches it and returns the module. Takes seconds, so it is called only when an engine is built.

    Must be called inside `process_kept_as_is`. Raises SetupError if vLLM is missing, broken, or of a version that rlgen does not
    support.
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
            _patch_for_cpu()
    return vllm


def _patch_for_cpu() -> None:
    """Patches vLLM's CPU build where it would compile needlessly, and where it would wait without a timeout."""
    # The rank of each sampled token, which rlgen does not read: to compile its count takes about 28 s on a fresh machine.
    sampler = importlib.import_module("vllm.v1.sample.sampler")
    sampler.batched_count_greater_than = lambda logprobs, values: (logprobs >= values).sum(-1)  # type: ignore[attr-defined]
    # Processes that share a model on the CPU communicate through shared memory and wait for each other without a timeout. Its
    # name is the same for every run on a machine: two runs at a time would use the same memory, and what a killed run leaves
    # behind keeps the next one from starting. With a name of its own for each process vLLM uses torch's groups instead.
    communicator = importlib.import_module("vllm.distributed.device_communicators.cpu_communicator")
    if hasattr(communicator, "_CPUSHMDistributed"):
        communicator._CPUSHMDistributed.make_group_name = staticmethod(lambda _: f"rlgen-{os.getpid()}")


def arguments(plan: "EnginePlan") -> dict[str, Any]:
    """Returns the vLLM arguments for `plan`, the same for an engine in this process and for a server.

    Raises SetupError if the weights cannot be quantised here, or a config that decides the cache cannot be read.
    """
    if plan.quantization and not plan.on_gpu:
        raise SetupError(
            f"engine.quantization: {plan.quantization} needs an NVIDIA GPU; remove it: on a CPU the engine holds the weights"
            " in engine.dtype"
        )
    chosen: dict[str, Any] = {
        **plan.extra,
        **plan.experts_arguments(),
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
            chosen.setdefault("scheduler_cls", "rlgen.engines.cpu_decode.scheduler.DecodeScheduler")
            chosen.setdefault("worker_cls", "rlgen.engines.cpu_decode.worker.DecodeWorker")
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


def open_llm(vllm: Any, arguments: dict[str, Any]) -> Any:
    """Returns `vllm.LLM(**arguments)`, without those arguments of DISPENSABLE that this vLLM version does not know.

    Raises EngineError if vLLM does not know one of the other arguments, or the engine does not start.
    """
    with importing():  # vLLM imports a class as it is named
        known, llm = {field.name for field in fields(vllm.EngineArgs)}, vllm.LLM
    arguments = {name: value for name, value in arguments.items() if name in known or name not in DISPENSABLE}
    if unknown := ", ".join(sorted(set(arguments) - known)):
        hint = "remove it from engine.extra, or, if it is not there, use another version"
        raise EngineError(f"vLLM {vllm.__version__} has no argument {unknown}; {hint}")
    with transformers_classes_spared():
        try:
            return llm(**arguments)
        except Exception as error:  # vLLM does not wrap the errors of its libraries
            said = refusal(error, "the engine's start", what_helps(arguments))
            said += "; or set model.route_replay to false" if arguments.get("enable_return_routed_experts") else ""
            raise EngineError(f"vLLM {vllm.__version__} did not start on {arguments['model']}: {said}") from error


def refusal(error: Exception, what: str, helps: Sequence[str]) -> str:
    """Returns, on one line, the message of an error before vLLM's first answer; on the CPU also what may serve the model."""
    said = without_lists(" ".join(failure_reason(error, what, helps).split()))
    return said if torch.cuda.is_available() or is_out_of_memory(error) else f"{said}; {ELSEWHERE}"


def without_lists(said: str) -> str:
    """Removes from vLLM's message its list of all architectures, and what pydantic adds to an error: thousands of characters."""
    without = re.sub(r"^\d+ validation errors? for \w+ (Value error, )?| Supported architectures: dict_keys\(\[.*?\]\)", "", said)
    return re.sub(r" \[type=\w+, input_value=.*? For further information visit \S+", "", without)


@contextmanager
def transformers_classes_spared() -> Iterator[None]:
    """Restores the `__init__` of transformers' model classes after the block, to protect the trainer's models from vLLM.

    Where vLLM runs the model code of transformers, it wraps the class itself, and so the class of the trainer's model. The
    wrapped `__init__` demands a vLLM configuration, and the wrapped `__call__` reads a flag that only vLLM's own models have: it
    is set, so that `__call__` calls the model directly.
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
    for child in cls.__subclasses__():
        yield child
        yield from subclasses(child)


def sampling_arguments(sampling: Sampling, held: bool) -> dict[str, Any]:
    """Returns the arguments of vLLM's `SamplingParams`, except a request's seed and limit: every one that affects sampling.

    vLLM then returns ids only, one log-prob per token, and keeps stop ids in the output. `held`: see `HELD`.
    """
    return {
        "n": 1,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": list(sampling.stop_ids),
        "stop": list(sampling.stop),
        "logprobs": 0,
        "detokenize": bool(sampling.stop),
        "extra_args": {HELD: held},
    }


def sampling_params(vllm: Any, request: Request, sampling: Sampling) -> Any:
    """Returns vLLM's settings for one completion of an engine in this process."""
    own: dict[str, Any] = {"seed": request.seed, "max_tokens": sampling.limit_of(request), "flat_logprobs": True}
    if sampling.regex is not None:
        params = importlib.import_module("vllm.sampling_params")
        own["structured_outputs"] = params.StructuredOutputsParams(regex=sampling.regex)
    return vllm.SamplingParams(**sampling_arguments(sampling, held=True), **own)


@contextmanager
def each_as_it_finishes(llm: Any, finished: Callable[[int, Any], None], further: More | None = None) -> Iterator[None]:
    """Calls `finished` with index and output of each request as soon as it is done, for one `llm.generate` in the block.

    After each of vLLM's steps, `further` is asked for prompts that join the others; `llm.generate` returns their outputs too.
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
    """Returns the whole output for one request from vLLM's `EngineClient`. Cancelling the call aborts the request.

    The prompt is as in `vllm_prompts`; `params` are arguments of vLLM's `SamplingParams`.
    """
    sampling = importlib.import_module("vllm.sampling_params")
    asked = sampling.SamplingParams(**params, flat_logprobs=True, output_kind=sampling.RequestOutputKind.FINAL_ONLY)
    return [output async for output in engine.generate(prompt, asked, request_id)][-1]


def is_refusal(error: Exception) -> bool:
    """Returns whether the error that vLLM raised inside a server is about an invalid request, not a failure of vLLM."""
    ours = getattr(importlib.import_module("vllm.exceptions"), "VLLMClientError", ValueError)  # older versions raise ValueError
    return isinstance(error, ValueError | TypeError | ours)


def facts(vllm: Any, plan: str, config: Any, model: nn.Module, runner: str) -> EngineInfo:
    """Returns the description of a running engine, read from its own configuration, except its plan's digest and `runner_of`."""
    model_config, cache_config = config.model_config, config.cache_config
    on_gpu = getattr(getattr(config, "aux_output_config", None), "enable_return_routed_experts", False)
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
        experts=bool(on_gpu or (config.additional_config or {}).get(EXPERTS)),
        wider=wider_parameters(model, model_config.dtype),
    )


def runner_of(worker: Any) -> str:
    """Returns which of vLLM's two model runners a worker has, `V1` or `V2`: each has sampling code of its own."""
    # V2 and the classes that platforms derive from it are in one package for each kind of device; V1 is in one file.
    modules = [kind.__module__ for kind in type(worker.model_runner).__mro__]
    return "V2" if any(re.match(r"vllm\.v1\.worker\.[a-z]+\.model_runner$", module) for module in modules) else "V1"


def vllm_prompts(requests: Sequence[Request], salt: str) -> list[dict[str, Any]]:
    """Returns the requests as vLLM prompts, with `salt` in each one's prefix-cache key.

    The salt keeps cached activations of one weight version from being used with another if the cache is not emptied.
    """
    return [{"prompt_token_ids": request.prompt_ids.tolist(), "cache_salt": salt} for request in requests]


def with_images(prompts: list[dict[str, Any]], images: Sequence[Sequence[Image]], token: int | None) -> list[dict[str, Any]]:
    """Returns vLLM prompts with the images of each, whose SHA-256 is then in the prefix-cache key, too.

    vLLM expands a placeholder, of which `token` is the id, to the ids of its image again, and reports which ids it used.
    """
    opened = {image.sha256: image.data for own in images for image in own}
    shown = {digest: decoded(data) for digest, data in opened.items()}
    made: list[dict[str, Any]] = []
    for prompt, own in zip(prompts, images, strict=True):
        more: dict[str, Any] = {}
        if own:
            assert token is not None  # the recipe names images
            digests = [image.sha256 for image in own]
            more["prompt_token_ids"] = with_placeholders(prompt["prompt_token_ids"], own, token)
            more["multi_modal_data"] = {"image": [shown[digest] for digest in digests]}
            more["multi_modal_uuids"] = {"image": digests}
        made.append({**prompt, **more})
    return made
