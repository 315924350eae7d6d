"""Weights that are changed for a while: only a sync of *changed* weights is evidence."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from rlgen.models.policy import Policy
from rlgen.models.weights import own_tensors, part, part_like, whole

NOISE = 0.05  # of a changed tensor, relative to its root mean square
LEAST = 0.02  # taken for the root mean square of smaller ones: a bias of zeros changes too


@dataclass(slots=True)
class Change:
    """Each call adds noise to every tensor of the policy, twice as much as the call before."""

    parameters: Mapping[str, Tensor]
    saved: Mapping[str, Tensor]  # on the CPU, as they were: what this process holds of each
    noise: float = NOISE

    @torch.no_grad()
    def __call__(self) -> None:
        device = next(iter(self.parameters.values())).device
        generator = torch.Generator(device).manual_seed(0)
        for parameter in self.parameters.values():
            full = whole(parameter)  # the noise is the same however the weights are sharded
            size = self.noise * max(full.float().square().mean().sqrt().item(), LEAST)
            noise = torch.randn(full.shape, generator=generator, device=device) * size
            part(parameter).add_(part_like(noise.to(full.device, full.dtype), parameter))
        self.noise *= 2

    @contextmanager
    def put_back(self, *names: str) -> Iterator[None]:
        """Inside the block, the tensors `names` have their old values."""
        now = {name: part(self.parameters[name]).detach().clone() for name in names}
        fill(self.parameters, {name: self.saved[name] for name in names})
        try:
            yield
        finally:
            fill(self.parameters, now)

    @contextmanager
    def swapped(self, one: str, other: str) -> Iterator[None]:
        """Inside the block, two tensors of equal shape have each other's values."""
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
    """Every tensor of the policy is changed inside the block and restored to the last bit after it."""
    parameters = own_tensors(policy.model)  # a router's bias is a buffer
    saved = {name: part(parameter).cpu().clone() for name, parameter in parameters.items()}
    try:
        change = Change(parameters, saved)
        change()
        yield change
    finally:
        fill(parameters, saved)


@contextmanager
def earlier_head(policy: Policy, weight: Tensor) -> Iterator[None]:
    """Inside the block a tied head multiplies with `weight` [V, H], while the embedding keeps its own."""
    embedding = policy.model.get_output_embeddings()
    own = embedding.weight
    embedding.weight = torch.nn.Parameter(weight.to(own.device, own.dtype), requires_grad=False)
    try:
        yield
    finally:
        embedding.weight = own
