"""What every engine promises."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor

from rlgen.types import Completion, Request, Sampling


class Engine(Protocol):
    """A copy of the model that samples: token ids in, token ids out.

    An engine knows a model, sampling settings and how to take weights. It knows no trainer and no recipe. It leaves
    random states, thread settings and environment variables of the process as it found them.
    """

    @property
    def weight_version(self) -> int:
        """Version of the weights that sample now; 0 for those the model was opened with."""
        ...

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """One completion for each request, in the order of the requests.

        The distribution is softmax(logits / temperature) over the whole vocabulary. A completion depends on its request
        and on the weights, not on the other requests of the call.

        Raises:
            EngineError: the engine failed, or answered for another prompt than it was asked for.
        """
        ...

    def sync(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Takes *all* weights, under the names of the checkpoint, and forgets every cached activation.

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
