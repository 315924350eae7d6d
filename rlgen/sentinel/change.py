"""Changes weights temporarily, because only a sync of changed weights shows that weights arrive."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from rlgen.models.half import replaced
from rlgen.models.lora import adapted_layers, adapter_names, adapter_tensors, base_weight, factors, scale
from rlgen.models.parts import part, part_of_stored, whole
from rlgen.models.policy import Policy
from rlgen.models.weights import own_tensors

NOISE = 0.05  # standard deviation of the noise, relative to the tensor's root mean square
LEAST = 0.02  # minimum of that root mean square, so that a bias of zeros changes, too


@dataclass(slots=True)
class AddedNoise:
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
            part(parameter).add_(part_of_stored(noise.to(parameter.device, parameter.dtype), parameter))
        self.noise *= 2

    def put_back(self, names: Sequence[str]) -> AbstractContextManager[None]:
        """Restores the original values of the tensors `names` inside the block."""
        return overwritten(self.parameters, {name: self.saved[name] for name in names})

    def swapped(self, one: str, other: str) -> AbstractContextManager[None]:
        """Exchanges the values of two tensors of equal shape inside the block."""
        pairs = (one, other), (other, one)  # each as it is sharded: equal shapes may be split along other dimensions
        shards = {to: part_of_stored(whole(self.parameters[of]), self.parameters[to]).detach().clone() for to, of in pairs}
        return overwritten(self.parameters, shards)


@torch.no_grad()
def overwrite(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        part(parameters[name]).copy_(value)


@contextmanager
def overwritten(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Gives the tensors that `values` names those values inside the block."""
    now = {name: part(parameters[name]).detach().clone() for name in values}
    overwrite(parameters, values)
    try:
        yield
    finally:
        overwrite(parameters, now)


def changed_weights(policy: Policy) -> AbstractContextManager[AddedNoise]:
    """Changes every tensor of the policy except those of an adapter inside the block, and restores them bit for bit after it."""
    parameters = own_tensors(policy.model)  # includes buffers, such as a router's bias
    return changed(parameters, {name: max(root_mean_square(parameter), LEAST) for name, parameter in parameters.items()})


def changed_adapter(policy: Policy) -> AbstractContextManager[AddedNoise]:
    """Changes the adapter inside the block: each product of its factors by `NOISE` of its base weight. Then restores it.

    The noise is relative to the base weight, because one factor is zero at first: relative to its own size it would not change.
    """
    parameters, sizes = adapter_tensors(policy.model), {}
    for name, layer in adapted_layers(policy.model).items():
        first_name, second_name = adapter_names(name)
        first, _ = factors(layer)
        of_first = sizes[first_name] = root_mean_square(first)
        of_base = max(root_mean_square(base_weight(layer)), LEAST)
        sizes[second_name] = of_base / (scale(layer) * len(first) ** 0.5 * of_first)
    return changed(parameters, sizes)


def root_mean_square(tensor: Tensor) -> float:
    """Returns the root mean square of a tensor; gathers a sharded one, which is a collective."""
    return whole(tensor.detach()).float().square().mean().sqrt().item()


@contextmanager
def changed(parameters: Mapping[str, Tensor], sizes: Mapping[str, float]) -> Iterator[AddedNoise]:
    saved = {name: part(parameter).cpu().clone() for name, parameter in parameters.items()}
    try:
        change = AddedNoise(parameters, saved, sizes)
        change()
        yield change
    finally:
        overwrite(parameters, saved)


def earlier_head(policy: Policy, weight: Tensor) -> AbstractContextManager[None]:
    """Makes a tied head multiply with `weight` [V, H] inside the block, while the embedding keeps its own weight."""
    head = policy.model.get_output_embeddings()
    return replaced([(head, "weight")], lambda _, own: weight.to(own.device, own.dtype))
