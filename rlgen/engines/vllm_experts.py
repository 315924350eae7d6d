"""Makes vLLM return the experts of each token, prompts and what the prefix cache has included (`model.route_replay`).

vLLM does so from its model runner V2 on, which needs Triton, and Triton has no backend for CPUs in vLLM's CPU build. There
`rlgen.engines.cpu_decode` feeds vLLM's own collector of experts from the runner V1.
"""

from typing import TYPE_CHECKING, Any

from rlgen.engines.vllm_compat import COMPARED

if TYPE_CHECKING:
    from rlgen.engines.plan import EnginePlan  # a worker imports this file and needs no recipe

KEY = "rlgen_experts"  # in `additional_config`, which vLLM hands to scheduler and worker
FIRST = (0, 32)  # the first version that returns the experts of cached tokens, too


def arguments(plan: "EnginePlan") -> dict[str, Any]:
    """Returns the arguments of vLLM by which it returns experts; none if `plan` wants no experts."""
    if not plan.experts:
        return {}
    if plan.on_gpu:
        return {"enable_return_routed_experts": True}
    return {"additional_config": {**plan.extra.get("additional_config", {}), KEY: True}}


def without_experts(plan: "EnginePlan") -> str | None:
    """Returns why vLLM cannot return experts; None: it can. On a GPU it may still refuse when it starts."""
    version = plan.vllm or "0.0"
    if tuple(map(int, version.split(".")[:2])) < FIRST or not (plan.on_gpu or version.startswith(COMPARED)):
        return f"vLLM {version} does not return the experts of a token here, but 0.32 does"
    if plan.keeps_states() or not plan.extra.get("enable_prefix_caching", True):
        return "vLLM returns the experts of a token only with its prefix cache, which this model or engine.extra leaves out"
    if not plan.on_gpu and (taken := {"scheduler_cls", "worker_cls"} & plan.extra.keys()):
        return f"engine.extra.{min(taken)} takes the place of what returns the experts of a token on a CPU"
    return None
