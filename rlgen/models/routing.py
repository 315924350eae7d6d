"""Forces the routers of a mixture of experts to given experts (`model.route_replay`; arXiv:2510.11370).

A router scores all experts of a token and takes the best few by `topk`, in all of transformers' routers that are known here. For
a batch with experts `topk` returns these, with their own scores. So the router's own code computes their weights, whatever it
does with the scores, and gradients flow through it as before.
"""

import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel

from rlgen.errors import SetupError
from rlgen.models.half import replaced
from rlgen.models.memory_errors import refused_with


class ChosenTopK(TorchFunctionMode):
    """Makes `topk` over `count` experts return the `experts` [N, k] of N tokens; where these are -1, the best ones."""

    def __init__(self, experts: Tensor, count: int) -> None:
        super().__init__()
        self.experts, self.count, self.calls = experts, count, 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if function not in (torch.topk, Tensor.topk) or args[0].shape != (len(self.experts), self.count):
            return found  # of groups of experts, before some among them are chosen
        self.calls += 1
        chosen = torch.where(self.experts < 0, found.indices, self.experts)
        return torch.return_types.topk((args[0].gather(-1, chosen), chosen))


def forced(router: Any, experts: Tensor, *given: Any) -> Any:
    """Runs a router that chooses `experts` [N, k]. Raises RuntimeError if it did not choose once among all experts."""
    with ChosenTopK(experts, len(router.weight)) as mode:
        found = type(router).forward(router, *given)
    if mode.calls != 1:
        raise RuntimeError(f"a router chose {mode.calls} times for {len(experts)} tokens")
    return found


@dataclass(slots=True, eq=False)
class Routes:
    """The experts that the routers of a model choose in the present forward pass, and in its backward pass."""

    experts: Tensor | None = None  # [N, layers, k]; None: each router chooses by itself

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Routes | str":
        """Prepares the routers of a model. Returns why they cannot be forced, and leaves the model as it was."""
        routers, kind, routes = routers_of(model), type(model).__name__, cls()
        layers = {name: int(found[1]) for name in routers if (found := re.search(r"layers\.(\d+)\.", name))}
        if not routers or len(layers) < len(routers):
            return f"rlgen finds no routers in the layers of {kind}"
        if why := next(filter(None, map(unforceable, routers.values())), None):
            return f"rlgen cannot force the routers of {kind}: {why}"
        for name, router in routers.items():
            router.forward = partial(routes.forward, router, layers[name])
        return routes

    def forward(self, router: Any, layer: int, *given: Any) -> Any:
        """Stands in for the `forward` of a router."""
        if self.experts is None:
            return type(router).forward(router, *given)
        return forced(router, self.experts[:, layer].long(), *given)


def routers_of(model: PreTrainedModel) -> dict[str, Any]:
    """Returns the routers of a model by name: modules with a matrix, a row for each expert, that choose `top_k` of them."""
    choosing = {name: module for name, module in model.named_modules() if isinstance(getattr(module, "top_k", None), int)}
    return {name: one for name, one in choosing.items() if getattr(one._parameters.get("weight"), "ndim", None) == 2}


@torch.no_grad()
def unforceable(router: Any) -> str | None:
    """Returns why a router does not take given experts, or has no finite weights for them; None: it takes them.

    It is tried with weights of its shape, because its own may be shards.
    """

    def waves(_: object, like: Tensor) -> Tensor:
        return torch.arange(like.numel(), device=like.device).cos().to(like.dtype).view(like.shape)

    try:
        with refused_with("{}"), replaced([(router, name) for name in router._parameters], waves):
            hidden = waves(None, router.weight[:4])  # of as many tokens
            wanted = torch.arange(len(hidden))[:, None] + torch.arange(router.top_k)
            wanted = wanted.to(hidden.device) % len(router.weight)
            given = [one for one in forced(router, wanted, hidden) if isinstance(one, Tensor) and one.shape == wanted.shape]
    except SetupError as error:
        return str(error)
    if not any(torch.equal(one, wanted) for one in given if not one.is_floating_point()):
        return "they return other experts than those that they were given"
    return None if all(one.isfinite().all() for one in given) else "the weights of given experts are not finite"


def is_mixture(config: PreTrainedConfig) -> bool:
    text = config.get_text_config()
    return any((getattr(text, name, None) or 0) > 1 for name in ("num_experts", "num_local_experts", "n_routed_experts"))
