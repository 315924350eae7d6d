"""Defines the interface of every engine, and the records that engines and their callers exchange."""

import hashlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from rlgen.errors import EngineError
from rlgen.types import Completion, Ids, Image, LogProbs, Request, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Called with each finished completion and the index of its request in the call.
Finished: TypeAlias = Callable[[int, Completion], None]
Weights: TypeAlias = Iterable[tuple[str, Tensor]]  # by their names in a checkpoint
Pending: TypeAlias = Future[list[Completion]]  # completions that are being sampled in the background
Submit: TypeAlias = Callable[..., Pending]  # given what `Engine.generate` is given; several calls may run at a time

SHAPE = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "tie_word_embeddings"),
)


def model_shape(config: "PreTrainedConfig") -> dict[str, Any]:
    """Returns the config fields that must be equal in two copies of a model before weights can be copied between them."""
    text = config.get_text_config()
    # Where a field differs by layer (Gemma 4), only the configs of the layers have it.
    layers = list(getattr(text, "per_layer_config", None) or [text])
    values = {name: [getattr(layer, name, None) for layer in layers] for name in SHAPE}
    return {name: each[0] if each.count(each[0]) == len(each) else each for name, each in values.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings that decide how ids become log-probs; they must be equal in engine and trainer."""

    dtype: str  # of weights and activations
    head_dtype: str  # in which the head adds up its products
    logprobs_mode: str  # `processed_logprobs`: of the distribution that was sampled from
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """The description of an engine, read from the engine itself; the sentinel compares it with the trainer.

    EngineInfo(engine="vllm 0.32.0", plan="5f0c2b7a91d3e486", model="/models/tiny", revision=None, settings=Settings(...),
          stop_ids=(257, 259), max_model_len=640, cache_block=128)
    """

    engine: str  # kind and version
    plan: str  # digest of every setting that affects completions, see `EnginePlan.digest`
    model: str  # folder or hub id that it opened; holds its tokenizer too
    revision: str | None
    settings: Settings
    stop_ids: tuple[int, ...]  # the EOS ids that the engine's copy of the model names
    max_model_len: int | None  # longest row in tokens; None: not bounded
    cache_block: int | None  # tokens of a prefix-cache block, the smallest unit of reuse; None: no prefix cache
    runner: str | None = None  # which of vLLM's two model runners it has, `V1` or `V2`; None: not vLLM
    quantization: str | None = None  # vLLM's name for the quantisation of its weights, such as `fp8`; None: not quantised
    experts: bool = False  # whether its completions have the experts of their tokens
    wider: tuple[str, ...] = ()  # the engine's own names of parameters that it holds in a wider dtype than `settings.dtype`


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """The tensors that an engine received in a sync, recorded before anything is packed, cast or fused."""

    version: int
    received: Mapping[str, str]  # name -> fingerprint, see `fingerprint`
    not_loaded: tuple[str, ...]  # tensors of the engine that its loader did not fill


def fingerprint(tensor: Tensor, hashed: bool) -> str:
    """Returns "float32[4, 2]", followed by ":" and the SHA-256 of the tensor's bytes if `hashed`."""
    shape = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    if not hashed:
        return shape
    numbers = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{shape}:{hashlib.sha256(numbers.data).hexdigest()}"


def wider_parameters(model: nn.Module, dtype: torch.dtype) -> tuple[str, ...]:
    """Returns the names of the parameters of an engine's model that have a wider dtype than `dtype`, such as a router's.

    Scales of a quantised engine are left out: a checkpoint does not contain them.
    """
    floats = [(name, held) for name, held in model.named_parameters() if held.is_floating_point()]
    return tuple(name for name, held in floats if held.itemsize > dtype.itemsize and "scale" not in name.rpartition(".")[2])


def module_of(name: str) -> str:
    """Returns the name of a parameter's module from its layer on. Engines and checkpoints name the part before it differently.

    "language_model.model.layers.3.mlp.gate.weight" -> "layers.3.mlp.gate", "model.embed_tokens.weight" -> "embed_tokens"
    """
    module = name.rpartition(".")[0]
    found = re.search(r"\w+\.\d+(\..*|$)", module)
    return found[0] if found else module.rpartition(".")[2]


def cast_for(facts: EngineInfo, weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """Yields `weights` in the dtype in which the engine holds them, so that fewer bytes travel.

    The engine would round them in the same way when it loads them. Vectors keep their dtype. So do all weights of a module if the
    engine holds any of them in a wider dtype: it does not round these weights, or only after a computation.
    """
    dtype = getattr(torch, facts.settings.dtype)
    kept = {module_of(name) for name in facts.wider}
    for name, tensor in weights:
        rounded = tensor.is_floating_point() and tensor.dim() > 1 and tensor.itemsize > dtype.itemsize
        yield name, tensor.to(dtype) if rounded and module_of(name) not in kept else tensor


class SyncRecorder:
    """Records the fingerprints of tensors that pass through an iterator."""

    def __init__(self, hashed: bool) -> None:
        self.received: dict[str, str] = {}
        self._hashed = hashed

    def record(self, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            self.received[name] = fingerprint(tensor, self._hashed)
            yield name, tensor


class FollowUpQueue:
    """Further requests for one call of `Engine.generate`. Their indices continue those of the call, in the order of `put`.

    If another request may follow a finished completion, the callback `finished` calls `expect` before it returns. Later, `put` is
    called, from any thread. The engine takes the requests that are there. It is done when it has answered all of them and expects
    no more.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards the fields below
        self._there: list[Request] = []
        self._expected = 0
        self._failure: BaseException | None = None
        self._wake: Callable[[], object] | None = None

    def expect(self) -> None:
        """Announces that a `put` will follow."""
        with self._changed:
            self._expected += 1

    def put(self, request: Request | None) -> None:
        """Ends one `expect`: with the request that follows, or with None if none does."""
        with self._changed:
            self._expected -= 1
            self._there += [] if request is None else [request]
            self._notify()

    def fail(self, error: BaseException) -> None:
        """Makes the engine give up: `take` raises the error. Only the first one counts."""
        with self._changed:
            self._failure = self._failure or error
            self._notify()

    def _notify(self) -> None:  # the lock is held
        self._changed.notify_all()
        if self._wake is not None:
            self._wake()

    @property
    def expected(self) -> bool:
        """Returns whether there are requests that nobody has taken, or more may come."""
        with self._changed:
            return bool(self._expected or self._there or self._failure)

    def take(self) -> list[Request]:
        """Returns the requests that have come since the last call, without waiting. Raises the error of `fail`."""
        with self._changed:
            if self._failure is not None:
                raise self._failure
            there, self._there = self._there, []
            return there

    def wait(self, whole: bool = False) -> list[Request]:
        """Waits until a request is there, or with `whole` until none is expected any more, and returns as `take` does."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure or not self._expected or (self._there and not whole))
        return self.take()

    def call(self, wake: Callable[[], object] | None) -> None:
        """Sets a function that is called after each change, from any thread; None: no function. It must not wait or call back."""
        with self._changed:
            self._wake = wake


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapabilities:
    """What an engine can do and what it needs, so that callers need not test its kind."""

    sleeps: bool = False  # `sleep` frees its weights: it samples again only after the next `sync`
    submit: Submit | None = None  # samples in the background; None: the engine samples only while the caller waits
    whole_step: bool = False  # a completion's last bits depend on its batch: to repeat one, repeat all requests of the step
    elsewhere: bool = False  # sampling uses no cores of this process: rewards may run at the same time
    in_flight: bool = False  # a `sync` may change the weights while requests are sampled in the background
    keeps_cache: bool = False  # such requests go on with the KV cache of the earlier weights, see `Samples.spans_by`
    experts: bool = False  # completions have the experts of their tokens
    merges: bool = False  # `sync` takes the factors of an adapter alone, see `rlgen.models.factors`, and merges them itself


def require_experts(completion: Completion) -> None:
    """Raises EngineError if the experts of a token are missing that the engine has computed: of all but the last one."""
    computed = len(completion.prompt_ids) + len(completion.token_ids) - 1
    if len(completion.experts) != computed:
        raise EngineError(f"vLLM returned the experts of {len(completion.experts)} of the {computed} tokens that it computed")


class Engine(Protocol):
    """A copy of the model that samples: token ids in, token ids out.

    It leaves random states, thread settings and environment variables of the process as it found them.
    """

    @property
    def weight_version(self) -> int:
        """Returns 0 for the weights that the model was opened with, -1 for a server's before the first sync."""

    @property
    def abilities(self) -> EngineCapabilities:
        """Does not change while the engine is open."""

    def facts(self) -> EngineInfo:
        """Returns the description, read from the engine itself and not from the settings it was given."""

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        finished: Finished | None = None,
        further: FollowUpQueue | None = None,
    ) -> list[Completion]:
        """Samples one completion for each request and returns them in the order of the requests; `rollout.answers` checks that.

        Ids are drawn from `Sampling.distribution`; at temperature 0 the most probable id is taken, among equal ones the lowest.
        Log-probs are of that distribution. A completion depends only on its request and on the weights, not on the other requests
        of the call. Without requests the result is empty.

        Args:
            finished: called once for each completion as soon as it is finished, in the process that talks to the engine, possibly
                in another thread.
            further: requests that are added during the call. Their indices continue those of `requests`, and `finished` is
                called for them too. They join the requests that are being decoded. An engine whose completions depend on their
                batch (`EngineCapabilities.whole_step`) instead waits for all that are expected, and then answers them together.

        Raises:
            EngineError: the engine failed, or returned a completion of another prompt than the requested one.
        """

    def prefill_logp(self, rows: Sequence[tuple[Ids, Ids]], images: Sequence[tuple[Image, ...]] = ()) -> list[LogProbs]:
        """Computes log-probs [L] at temperature 1 of given completions, in one forward pass instead of decoding.

        `rows` are prompt ids and completion ids, together shorter than `EngineInfo.max_model_len`; `images` those of each prompt,
        () if no prompt has any. Raises EngineError if the engine failed.
        """

    def sync(self, weights: Weights, version: int, hashed: bool = False) -> SyncReport:
        """Loads *all* weights, under the names of the checkpoint, and empties the prefix cache, unless `keeps_cache`.

        Where `EngineCapabilities.merges` holds, `weights` may be the factors of an adapter alone: the others are then those of
        the files that the engine was opened with. With `hashed` the receipt holds a hash of every tensor, which costs a pass over
        all bytes. Raises EngineError if the weights were not loaded.
        """

    def sleep(self) -> None:
        """Frees memory until the next `sync`, which wakes the engine. Does nothing in engines that cannot sleep."""

    def close(self) -> None:
        """Frees all resources."""
