"""Checks recipes whose completions are more than one turn: tools, an environment, a rollout of the user."""

from collections.abc import Iterator

from rlgen.recipe.engines import ColocatedEngineRecipe
from rlgen.recipe.models import ENVIRONMENT_REWARD, Recipe
from rlgen.recipe.rules import Finding


def talk_contradictions(recipe: Recipe) -> list[Finding]:
    """Returns what contradicts `tools`, `environment` or `rollout.use`, and what they cannot be used together with."""
    found = [*_tool_contradictions(recipe), *_environment_contradictions(recipe), *_rollout_contradictions(recipe)]
    engine = recipe.engine
    if recipe.talks and isinstance(engine, ColocatedEngineRecipe) and engine.tensor_parallel_size > 1:
        who = "tools: processes that share an engine would all have to call each tool"
        who = who if recipe.tools else "environment: processes that share an engine would all have to lead each conversation"
        what = f"engine.tensor_parallel_size above 1 with {who}"
        found.append(Finding("engine.tensor_parallel_size", what, "set it to 1, or engine.kind to server"))
    return found


def _tool_contradictions(recipe: Recipe) -> Iterator[Finding]:
    """Yields contradictions of the `tools` section."""
    if not recipe.tools:
        return
    labels = [tool.label for tool in recipe.tools]
    for index, label in enumerate(labels):
        if label in labels[:index]:
            hint = f"set tools.{index}.name to another name"
            yield Finding(f"tools.{index}", f"two tools are called `{label}`", hint)
    if recipe.task is not None and not (recipe.data.chat or recipe.data.system):
        what = "tools are shown to the model by the chat template, but the prompts of a task are texts"
        yield Finding("tools", what, "set data.chat to true")
    if recipe.structured_regex is not None:
        what = "engine.structured_regex restricts each turn to one expression, which calls of tools do not match"
        yield Finding("engine.structured_regex", what, "remove it, or tools")


def _environment_contradictions(recipe: Recipe) -> Iterator[Finding]:
    """Yields contradictions of the `environment` section."""
    given = [place for place, reward in enumerate(recipe.rewards) if reward.use == ENVIRONMENT_REWARD]
    held = recipe.eval.rewards if recipe.eval is not None and recipe.eval.rewards is not None else []
    if recipe.environment is None:
        paths = [f"rewards.{place}.use" for place in given]
        paths += [f"eval.rewards.{place}.use" for place, reward in enumerate(held) if reward.use == ENVIRONMENT_REWARD]
        what = "the reward environment adds up the rewards of an environment, but there is none"
        yield from (Finding(path, what, "add the section environment, or remove the reward") for path in paths)
        return
    if not given:
        what = "environment: no entry of rewards uses its rewards, or its failed conversations"
        yield Finding("environment", what, "add {use: environment} to rewards; with weight 0 it only measures")
    if recipe.tools:
        what = "environment and tools both answer the turns of the model"
        yield Finding("environment", what, "remove one of them; an environment may call functions itself")
    if recipe.task is not None and not (recipe.data.chat or recipe.data.system):
        what = "environment: the chat template puts observations between turns, but the prompts of a task are texts"
        yield Finding("environment", what, "set data.chat to true")


def _rollout_contradictions(recipe: Recipe) -> list[Finding]:
    """Returns contradictions of `rollout.use`."""
    engine = recipe.engine
    if recipe.rollout.use is None:
        return []
    others = (
        ("tools", bool(recipe.tools), "leads conversations itself, and so do tools"),
        ("environment", recipe.environment is not None, "leads conversations itself, and so does an environment"),
        ("eval", recipe.eval is not None, "is not called by evaluations, so that their completions would differ in kind"),
        (
            "rollout.async_steps",
            recipe.rollout.async_steps > 0,
            "is called when a step needs its samples, not while another step trains",
        ),
        (
            "engine.tensor_parallel_size",
            isinstance(engine, ColocatedEngineRecipe) and engine.tensor_parallel_size > 1,
            "would be called by each of the processes that share an engine",
        ),
    )
    return [Finding(path, f"rollout.use {what}", f"remove rollout.use, or {path}") for path, meets, what in others if meets]
