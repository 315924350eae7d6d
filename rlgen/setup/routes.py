"""Decides whether a run replays the experts of its engine in the trainer (`model.route_replay`), and prepares the trainer."""

from collections.abc import Callable

from rlgen.engines.plan import EnginePlan
from rlgen.engines.vllm_experts import without_experts
from rlgen.errors import SetupError
from rlgen.models.policy import Policy
from rlgen.models.routing import is_mixture
from rlgen.recipe import Recipe
from rlgen.recipe.rules import no_routes


def replays_routes(recipe: Recipe, policy: Policy, location: str, say: Callable[[str], None]) -> bool:
    """Returns whether answers are to have the experts of their tokens; the policy is then ready to compute by them.

    Raises SetupError if the recipe asks for it, and engine or model cannot do it. Where the recipe leaves it open, a line
    says why a mixture of experts is trained without it.
    """
    wanted, kind = recipe.model.route_replay, type(policy.model).__name__
    if wanted is False:
        return False
    if not is_mixture(policy.model.config):
        if wanted:
            raise SetupError(f"model.route_replay: {kind} has no experts to choose from; remove it")
        return False
    reason = no_routes(recipe) or without_experts(EnginePlan.of(recipe.engine_needs, location)) or policy.replay_routes()
    if reason is None:
        return True
    if wanted:
        raise SetupError(f"model.route_replay: {reason}; remove it, and the routers of the trainer choose by themselves")
    say(f"model.route_replay: off: {reason}")
    return False
