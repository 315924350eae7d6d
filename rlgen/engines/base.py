"""What every engine promises."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from rlgen.types import Completion, Request, Sampling

# Receives each completion when it is finished, with the place of its request in the call.
Finished: TypeAlias = Callable[[int, Completion], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What decides how ids become log-probs; engine and trainer must have the same."""

    dtype: str  # of weights and activations
    head_dtype: str  # of the product with the head
    logprobs_mode: str  # `processed_logprobs`: of the distribution that was sampled from
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What an engine says about itself, for the sentinel to compare with the trainer.

    Facts(engine="vllm 0.32.0", model="/models/tiny", revision=None, settings=Settings(...), stop_ids=(257, 259),
          max_model_len=640, cache_block=128)
    """

    engine: str  # kind and version
    model: str  # folder or hub id that it opened, where its tokenizer lies too
    revision: str | None
    settings: Settings
    stop_ids: tuple[int, ...]  # that its copy of the model names
    max_model_len: int | None  # longest row in tokens; None: not bounded
    cache_block: int | None  # tokens of a block of the prefix cache, the least that is reused; None: it has no such cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What an engine received in a sync, taken down before anything is packed, cast or fused."""

    version: int
    received: Mapping[str, str]  # name -> fingerprint, see `fingerprint`
    not_loaded: tuple[str, ...]  # tensors of the engine that its loader says it did not fill


def fingerprint(tensor: Tensor, hashed: bool) -> str:
    """ "float32[4, 2]", and if `hashed` the SHA-256 of the bytes behind it."""
    shape = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    if not hashed:
        return shape
    numbers = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{shape}:{hashlib.sha256(numbers.data).hexdigest()}"


class Ledger:
    """Passes tensors on and takes down each as it goes by."""

    def __init__(self, hashed: bool) -> None:
        self.received: dict[str, str] = {}
        self._hashed = hashed

    def record(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            self.received[name] = fingerprint(tensor, self._hashed)
            yield name, tensor


class Pending(Protocol):
    """Answers that are on their way, see `ServerEngine.submit`."""

    def result(self) -> list[Completion]:
        """Waits for them. Raises EngineError."""
        ...

    def exception(self) -> BaseException | None:
        """Waits, and says what `result` would raise."""
        ...


class Engine(Protocol):
    """A copy of the model that samples: token ids in, token ids out.

    An engine knows a model, sampling settings and how to take weights. It knows no trainer and no recipe. It leaves
    random states, thread settings and environment variables of the process as it found them.
    """

    @property
    def weight_version(self) -> int:
        """Version of the weights that sample now; 0 for those the model was opened with, -1 for a server's before a sync."""
        ...

    def facts(self) -> Facts:
        """What the engine is, read from the engine itself and not from what it was asked to be."""
        ...

    def generate(self, requests: Sequence[Request], sampling: Sampling, finished: Finished | None = None) -> list[Completion]:
        """One completion for each request, in the order of the requests; `rollout.answers` checks that.

        The distribution is softmax(logits / temperature) over the whole vocabulary; at temperature 0 the most probable id is
        taken, of equal ones the lowest. Log-probs are those at `Sampling.logp_temperature`. A completion depends on its
        request and on the weights, not on the other requests of the call; no requests, no answers.

        Args:
            finished: told of each completion as soon as it is there, once, in the process that talks to the engine, perhaps in
                another thread.

        Raises:
            EngineError: the engine failed, or answered for another prompt than it was asked for.
        """
        ...

    def prefill_logp(self, rows: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[tuple[float, ...]]:
        """Log-probs at temperature 1 of given completions, from one pass over prompt and completion instead of decoding.

        Args:
            rows: prompt ids and completion ids; together shorter than `Facts.max_model_len`.

        Returns:
            [L] log-probs of each completion's ids.

        Raises:
            EngineError: the engine failed.
        """
        ...

    def sync(self, weights: Iterable[tuple[str, Tensor]], version: int, hashed: bool = False) -> Receipt:
        """Takes *all* weights, under the names of the checkpoint, and forgets every cached activation.

        Args:
            hashed: the receipt holds a hash of every tensor; costs a pass over all bytes.

        Raises:
            EngineError: the weights were not taken.
        """
        ...

    def sleep(self) -> None:
        """Frees what it can until the next `sync`, which wakes it. Nothing to do for most engines."""
        ...

    def close(self) -> None:
        """Frees everything. The engine cannot be used afterwards."""
        ...
