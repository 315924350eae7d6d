"""Changes weights temporarily, because only a sync of changed weights shows that weights arrive."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from rlgen.models.lora import adapted_layers, adapter_names, adapter_tensors, base_weight, factors, scale
from rlgen.models.parts import part, part_like, whole
from rlgen.models.policy import Policy
from rlgen.models.weights import own_tensors

NOISE = 0.05  # standard deviation of the noise, relative to the tensor's root mean square
LEAST = 0.02  # minimum of that root mean square, so that a bias of zeros changes, too


@dataclass(slots=True)
class Change:
    """Adds noise to tensors on each call, twice as much as on the call before."""

    parameters: Mapping[str, Tensor]
    saved: Mapping[str, Tensor]  # the original values on the CPU; of sharded tensors, the local shard
    sizes: Mapping[str, float]  # the scale of the noise by name
    noise: float = NOISE

    @torch.no_grad()
    def __call__(self) -> None:
        device = next(iter(self.parameters.values())).device
        generator = torch.Generator(device).manual_seed(0)
        for name, parameter in self.parameters.items():
            # The noise is the same however the weights are sharded.
            noise = torch.randn(parameter.shape, generator=generator, device=device).mul_(self.noise * self.sizes[name])
            part(parameter).add_(part_like(noise.to(parameter.device, parameter.dtype), parameter))
        self.noise *= 2

    @contextmanager
    def put_back(self, *names: str) -> Iterator[None]:
        """Restores the original values of the tensors `names` inside the block."""
        now = {name: part(self.parameters[name]).detach().clone() for name in names}
        fill(self.parameters, {name: self.saved[name] for name in names})
        try:
            yield
        finally:
            fill(self.parameters, now)

    @contextmanager
    def swapped(self, one: str, other: str) -> Iterator[None]:
        """Exchanges the values of two tensors of equal shape inside the block."""
        now = {name: part(self.parameters[name]).detach().clone() for name in (one, other)}
        fill(self.parameters, {one: now[other], other: now[one]})
        try:
            yield
        finally:
            fill(self.parameters, now)


@torch.no_grad()
def fill(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        part(parameters[name]).copy_(value)


@contextmanager
def changed_weights(policy: Policy) -> Iterator[Change]:
    """Changes every tensor of the policy except those of an adapter inside the block, and restores them bit for bit after it."""
    parameters = own_tensors(policy.model)  # includes buffers, such as a router's bias
    with changed(parameters, {name: max(size(parameter), LEAST) for name, parameter in parameters.items()}) as change:
        yield change


@contextmanager
def changed_adapter(policy: Policy) -> Iterator[Change]:
    """Changes the adapter inside the block: each product of its factors by `NOISE` of its base weight. Then restores it.

    The noise is relative to the base weight, because one factor is zero at first: relative to its own size it would not change.
    """
    parameters, sizes = adapter_tensors(policy.model), {}
    for name, layer in adapted_layers(policy.model).items():
        first_name, second_name = adapter_names(name)
        first, _ = factors(layer)
        sizes[first_name] = size(first)
        sizes[second_name] = max(size(base_weight(layer)), LEAST) / (scale(layer) * len(first) ** 0.5 * size(first))
    with changed(parameters, sizes) as change:
        yield change


def size(tensor: Tensor) -> float:
    """Returns the root mean square of a tensor; gathers a sharded one, which is a collective."""
    return whole(tensor.detach()).float().square().mean().sqrt().item()


@contextmanager
def changed(parameters: Mapping[str, Tensor], sizes: Mapping[str, float]) -> Iterator[Change]:
    saved = {name: part(parameter).cpu().clone() for name, parameter in parameters.items()}
    try:
        change = Change(parameters, saved, sizes)
        change()
        yield change
    finally:
        fill(parameters, saved)


@contextmanager
def earlier_head(policy: Policy, weight: Tensor) -> Iterator[None]:
    """Makes a tied head multiply with `weight` [V, H] inside the block, while the embedding keeps its own weight."""
    embedding = policy.model.get_output_embeddings()
    own = embedding.weight
    embedding.weight = torch.nn.Parameter(weight.to(own.device, own.dtype), requires_grad=False)
    try:
        yield
    finally:
        embedding.weight = own
