"""Holds a scheduler and a worker for vLLM's CPU build that spend less Python on decode steps, with the same results.

Only vLLM imports this package. `vllm_compat.arguments` names it only to the version that it was compared with; without it
everything works the same, more slowly with small models.
"""
