"""Models of the section `engine`, by its kind."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, StrictBool, StrictInt, StrictStr

from rlgen.recipe.fields import Count, Dtype, Share, Strict, Text, Variable

if TYPE_CHECKING:
    from rlgen.recipe.models import ModelRecipe, RolloutRecipe


class AnyEngineRecipe(Strict):
    """What other rooms ask of an engine's settings, whatever its kind. A kind overrides what differs."""

    starts: ClassVar[str]
    """What opening the engine takes, in words."""
    images: ClassVar[bool] = False
    """Whether prompts may have images."""
    waves: ClassVar[bool] = False
    """Whether all requests that are decoded together must end before others begin."""

    @property
    def memory(self) -> str:
        """Returns where weights and cache of the engine are: `engine` of `rlgen.models.memory.MemoryPlan`."""
        return "elsewhere"

    @property
    def copies(self) -> int:
        """Returns the number of engines that share the requests."""
        return 1

    @property
    def callers(self) -> int:
        """Returns the number of processes that call one engine together."""
        return 1

    @property
    def shares_cores(self) -> bool:
        """Returns whether an engine without a GPU computes on the cores on which the trainer does."""
        return False

    @property
    def sleeps(self) -> bool:
        """Returns whether the engine's memory is free while the trainer works."""
        return False


class VllmRecipe(AnyEngineRecipe):
    """Settings of vLLM that are the same in a colocated engine and in a server."""

    dtype: Dtype | None = None
    """Dtype in which the engine computes. None: model.dtype."""
    max_model_len: Count | None = None
    """Longest row, prompt and completion together. None: max_prompt_tokens + max_completion_tokens, of training or of eval,
    whichever sum is larger."""
    max_num_seqs: Annotated[StrictInt, Field(ge=1, le=65536)] = 256
    """Completions decoded at the same time."""
    kv_cache_gib: Annotated[float, Field(strict=True, gt=0, le=10000)] | None = None
    """Memory of the KV cache. None: on a CPU as much as needed, up to 4 GiB; on a GPU the part of gpu_memory_utilization that the
    weights do not take."""
    gpu_memory_utilization: Share | None = None
    """Share of the GPU for weights and KV cache. None: 0.45."""
    tensor_parallel_size: Annotated[StrictInt, Field(ge=1, le=1024)] = 1
    """GPUs that hold one copy of the engine's weights together."""
    model_impl: Literal["auto", "vllm", "transformers"] = "auto"
    """Whose code runs the model inside vLLM: vLLM's own, that of transformers, or (auto) vLLM's own if it exists."""
    quantization: Text | None = None
    """How vLLM quantizes the weights that it receives, such as fp8 (GPU only). None: not at all."""
    enforce_eager: StrictBool | None = None
    """Run without graph capture. None: true on the CPU, false on a GPU."""
    extra: dict[StrictStr, Any] = {}
    """Further arguments of vLLM. rlgen refuses arguments that it sets itself."""


class ColocatedEngineRecipe(VllmRecipe):
    starts = "loading vLLM, and starting it in this process"
    memory: ClassVar[str] = "colocated"
    images: ClassVar[bool] = True
    shares_cores: ClassVar[bool] = True

    kind: Literal["colocated"] = "colocated"
    """colocated: vLLM in this process."""
    sleep: StrictBool = False
    """Free the engine's memory while the trainer works. GPU only."""
    structured_regex: Text | None = None
    """Restrict completions to this regular expression."""

    @property
    def callers(self) -> int:
        return self.tensor_parallel_size

    @property
    def sleeps(self) -> bool:
        return self.sleep


def joined_devices(value: Any) -> Any:
    """Joins a list of GPU numbers or names: [4, 5] -> "4,5". Returns anything else unchanged."""
    listed = isinstance(value, list) and value and all(type(name) in (int, str) for name in value)
    return ",".join(map(str, value)) if listed else value


Devices = Annotated[
    StrictStr,
    Field(pattern=r"^[A-Za-z0-9-]+(,[A-Za-z0-9-]+)*$"),
    BeforeValidator(joined_devices, json_schema_input_type=StrictStr | list[StrictInt | StrictStr]),
]


class InFlightRecipe(Strict):
    """What a weight sync does to requests that a server is answering. `true` and `false` stand for `allowed`."""

    allowed: StrictBool = True
    """Change the weights while a server answers requests (true), or after it has answered them (false)."""
    recompute: StrictBool = True
    """Compute the KV cache of running completions again with the new weights (true), or continue with the earlier one (false)."""

    @classmethod
    def read(cls, given: object) -> object:
        return {"allowed": given} if isinstance(given, bool) else given


InFlight = Annotated[InFlightRecipe, BeforeValidator(InFlightRecipe.read, json_schema_input_type=StrictBool | InFlightRecipe)]


class ServerEngineRecipe(VllmRecipe):
    starts = "connecting to vLLM's server, or starting it"

    kind: Literal["server"]
    """server: vLLM in processes of its own, here or on other machines."""
    url: Text | Annotated[list[Text], Field(min_length=1, max_length=1000)] | None = None
    """Address of a running server (`rlgen serve`), or a list of addresses. With dns://NAME:PORT or file:///PATH, rlgen looks up
    the addresses again at each sync of weights. PATH is a file of addresses, or the FOLDER of `rlgen serve --announce FOLDER`."""
    launch: StrictBool = False
    """Start the servers, restart one that dies, and stop them when the run ends."""
    servers: Annotated[StrictInt, Field(ge=1, le=1000)] = 1
    """Servers to launch. They share the work. On GPUs, each gets an equal part of `devices`."""
    host: Text = "127.0.0.1"
    """Address on which a launched server listens."""
    port: Annotated[StrictInt, Field(ge=1, le=65535)] | None = None
    """Port of the first launched server; the others have the next ones. None: free ports."""
    token_env: Variable = "RLGEN_SERVER_TOKEN"
    """Environment variable that holds the servers' token. If it is not set, a launched server gets a new token."""
    timeout: Annotated[float, Field(strict=True, gt=0, le=1e6)] = 600.0
    """A server that gives no answer for this many seconds counts as dead."""
    start_timeout: Annotated[float, Field(strict=True, gt=0, le=1e6)] = 600.0
    """Seconds that a launched server may take to get ready."""
    restarts: Annotated[StrictInt, Field(ge=0, le=1000)] = 2
    """How often a run recovers a server that died or lost its weights."""
    devices: Devices | None = None
    """GPUs of launched servers, such as "1" or [4, 5, 6, 7]; each server gets an equal part. None: the GPUs of the trainer."""
    transfer: Literal["files", "nccl"] = "files"
    """How weights get to the servers: through files, or from GPU to GPU (nccl). With nccl each server needs GPUs of its own."""
    transfer_dir: Text | None = None
    """Folder that trainer and servers share, for weights. None: shared memory of this machine."""
    lora: Literal["merged", "adapter"] = "merged"
    """With model.lora: send all weights, with the adapter merged in (merged); or only the adapter, which each server merges into
    its weights (adapter)."""
    in_flight: InFlight | None = None
    """With rollout.async_steps: change the weights while a server answers requests (true), or after it has answered them (false).
    None: true if rollout.async_steps is 2 or more. {recompute: false}: as true, but running requests keep their KV cache."""

    @property
    def memory(self) -> str:
        """A launched server without GPUs of its own shares the trainer's GPU."""
        return "beside" if self.launch and not self.gpus else "elsewhere"

    @property
    def copies(self) -> int:
        return len(self.url) if isinstance(self.url, list) else self.servers

    @property
    def shares_cores(self) -> bool:
        return self.launch

    @property
    def gpus(self) -> tuple[str, ...]:
        """Returns the names in `devices`, in order; an empty tuple if it is not set."""
        return tuple(self.devices.split(",")) if self.devices else ()

    def devices_of(self, server: int) -> str | None:
        """Returns CUDA_VISIBLE_DEVICES of launched server number `server`. None: the GPUs that the trainer sees."""
        size = len(self.gpus) // self.servers
        return ",".join(self.gpus[server * size : (server + 1) * size]) or None


# Arguments of vLLM that rlgen sets itself: its guarantees depend on them, or they follow from another key.
RESERVED_ENGINE_ARGUMENTS = frozenset(
    [
        *VllmRecipe.model_fields,  # most have the name that vLLM has for them
        *("model", "tokenizer", "revision", "skip_tokenizer_init", "seed", "hf_overrides", "load_format"),
        *("max_num_batched_tokens", "enable_chunked_prefill", "kv_cache_memory_bytes", "enable_sleep_mode"),
        *("logprobs_mode", "max_logprobs", "generation_config", "trust_remote_code"),
        *("distributed_executor_backend", "async_scheduling", "enable_lora", "use_tqdm_on_load"),
        *("distributed_timeout_seconds", "cpu_distributed_timeout_seconds", "enable_return_routed_experts", "aux_output_config"),
        # Arguments of a server.
        *("host", "port", "uds", "root_path", "ssl_keyfile", "ssl_certfile", "api_key", "middleware", "enable_scale_out"),
        *("worker_extension_cls", "headless", "api_server_count", "data_parallel_size", "disable_uvicorn_access_log"),
        *("weight_transfer_config", "enable_prompt_tokens_details", "disable_log_stats"),
    ]
)


class TransformersEngineRecipe(AnyEngineRecipe):
    starts = "loading the model again, to sample"
    memory: ClassVar[str] = "transformers"
    images: ClassVar[bool] = True
    waves: ClassVar[bool] = True

    kind: Literal["transformers"]
    """transformers: slow generation, but without vLLM."""
    dtype: Dtype | None = None
    """Dtype in which the engine computes. None: model.dtype."""
    max_num_seqs: Annotated[StrictInt, Field(ge=1, le=65536)] = 64
    """Completions decoded at the same time."""


EngineRecipe = Annotated[ColocatedEngineRecipe | ServerEngineRecipe | TransformersEngineRecipe, Field(discriminator="kind")]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNeeds:
    """What an engine is opened with: its own settings, and what it needs of the other sections."""

    engine: EngineRecipe
    model: "ModelRecipe"
    rollout: "RolloutRecipe"
    samples: int  # asked for at the same time, of all steps that are under way
    row_tokens: int  # longest prompt and completion together
    images: bool  # whether prompts have images
    in_flight: bool  # whether weights change under requests that are being answered
    patience: float  # seconds to wait for a server when none of several is left, or none is found
    experts: bool = False  # whether answers have the experts of their tokens (`model.route_replay`)
