"""Forces the routers of a mixture of experts to given experts (`model.route_replay`; arXiv:2510.11370).

A router scores all experts of a token and takes the best few. Its last step is `topk`, in all of transformers' routers that are
known here. While a batch has experts, `topk` returns these in place of the best ones, with their own scores: so the router's own
code computes their weights, whatever it does with the scores, and gradients flow through it as before.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel

from rlgen.models.half import replaced
from rlgen.out_of_memory import is_out_of_memory, one_line


class ChosenTopK(TorchFunctionMode):
    """Makes `topk` over all experts return the `experts` [N, k] of N tokens; where these are -1, it returns the best ones."""

    def __init__(self, experts: Tensor, count: int) -> None:
        super().__init__()
        self.experts, self.count, self.calls = experts, count, 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if function not in (torch.topk, Tensor.topk) or args[0].shape != (len(self.experts), self.count):
            return found
        if found.indices.shape != self.experts.shape:
            return found  # of groups of experts, before one among them is chosen
        self.calls += 1
        chosen = torch.where(self.experts < 0, found.indices, self.experts)
        return torch.return_types.topk((args[0].gather(-1, chosen), chosen))


@dataclass(slots=True, eq=False)
class Routes:
    """The routers of a model, and the experts that they choose in the present forward pass, and in its backward pass."""

    routers: list[nn.Module]
    layers: list[int]  # of each router
    experts: Tensor | None = None  # [N, layers, k]; None: each router chooses by itself

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Routes | str":
        """Prepares the routers of a model. Returns why they cannot be forced, and leaves the model as it was."""
        named, kind = routers_of(model), type(model).__name__
        layers = [int(found[1]) for name in named if (found := re.search(r"layers\.(\d+)\.", name))]
        if not named or len(layers) < len(named):
            return f"rlgen finds no routers in the layers of {kind}"
        if why := next(filter(None, map(unforceable, named.values())), None):
            return f"rlgen cannot force the routers of {kind}: {why}"
        routes = cls(list(named.values()), layers)
        for layer, router in zip(layers, routes.routers, strict=True):
            router.forward = ReplayedForward(router, routes, layer)
        return routes


@dataclass(frozen=True, slots=True, eq=False)
class ReplayedForward:
    """Stands in for the `forward` of a router."""

    router: nn.Module
    routes: Routes
    layer: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = type(self.router).forward
        if self.routes.experts is None:
            return forward(self.router, *args, **kwargs)
        return forced(self.router, self.routes.experts[:, self.layer].long(), *args, **kwargs)


def forced(router: nn.Module, experts: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Runs a router that chooses `experts` [N, k]. Raises RuntimeError if it did not choose once among all experts."""
    with ChosenTopK(experts, len(router.weight)) as mode:  # type: ignore[arg-type]
        found = type(router).forward(router, *args, **kwargs)
    if mode.calls != 1:
        raise RuntimeError(f"a router chose {mode.calls} times for {len(experts)} tokens")
    return found


def routers_of(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Returns the routers of a model by name: modules with one score vector for each expert, which choose `top_k` of them."""
    found = {}
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if isinstance(getattr(module, "top_k", None), int) and weight is not None and weight.ndim == 2:
            found[name] = module
    return found


@torch.no_grad()
def unforceable(router: nn.Module) -> str | None:
    """Returns why a router does not take given experts; None: it takes them, and has finite weights for them.

    It is tried with weights of its shape, because its own may be shards.
    """

    def waves(_: object, like: Tensor) -> Tensor:
        return torch.arange(like.numel(), device=like.device).cos().to(like.dtype).view(like.shape)

    places = [(router, name) for name in router._parameters]
    try:
        with replaced(places, waves):
            like: Any = router.weight
            hidden = waves(None, like[:4])  # of as many tokens
            k: Any = router.top_k
            wanted = (torch.arange(len(hidden))[:, None] + torch.arange(k)).to(like.device) % len(like)
            given = [one for one in forced(router, wanted, hidden) if isinstance(one, Tensor) and one.shape == wanted.shape]
    except Exception as error:  # each architecture has code of its own, and may fail in any way
        if is_out_of_memory(error):
            raise
        return one_line(error)
    if not any(torch.equal(one, wanted) for one in given if not one.is_floating_point()):
        return "they return other experts than those that they were given"
    return None if all(one.isfinite().all() for one in given) else "the weights of given experts are not finite"


def is_mixture(config: PreTrainedConfig) -> bool:
    """Returns whether a model of `config` has routers."""
    text = config.get_text_config()
    return any((getattr(text, name, None) or 0) > 1 for name in ("num_experts", "num_local_experts", "n_routed_experts"))
