"""Checks what cannot be used beside several turns (tools, environments), images, a regular expression, or `rollout.stream`."""

from collections.abc import Iterator

from rlgen.recipe.data import TASK_COLUMNS
from rlgen.recipe.engines import ColocatedEngineRecipe, TransformersEngineRecipe
from rlgen.recipe.models import ENVIRONMENT_REWARD, Recipe
from rlgen.recipe.paths import named_functions
from rlgen.recipe.rules import Finding, Findings, repeated
from rlgen.recipe.trainers import GRPORecipe, OwnRecipe, PolicyRecipe, RLOORecipe, TrainerRecipe


def beside(recipe: Recipe) -> Findings:
    """Yields what contradicts tools, an environment, the user's rollout, images, a regular expression, or `rollout.stream`."""
    yield from _tools(recipe)
    yield from _environment(recipe)
    yield from _own_rollout(recipe)
    yield from _images(recipe)
    if recipe.structured_regex is not None:
        yield from _regex(recipe.trainer)
    if recipe.rollout.stream:
        for path, why, hint in (*_not_streamed(recipe), *_needs_whole_batch(recipe)):
            what = f"{path} cannot be used with rollout.stream, which trains on groups while others are sampled: {why}"
            yield Finding(path, what, hint)


def _tools(recipe: Recipe) -> Findings:
    labels = [tool.label for tool in recipe.tools]
    for index in repeated(labels):
        what, hint = f"two tools are called `{labels[index]}`", f"set tools.{index}.name to another name"
        yield Finding(f"tools.{index}", what, hint)
    if recipe.tools and recipe.task is not None and not (recipe.data.chat or recipe.data.system):
        what = "the chat template shows tools to the model, but the prompts of a task are texts"
        yield Finding("tools", what, "set data.chat to true")
    if recipe.tools and recipe.structured_regex is not None:
        what = "engine.structured_regex restricts each turn to a regular expression, but tool calls do not match it"
        yield Finding("engine.structured_regex", what, "remove it, or tools")


def _environment(recipe: Recipe) -> Findings:
    """Yields contradictions of the `environment` section, and what no conversation can be used with."""
    given = [f"{'.'.join(map(str, place))}.use" for place, use, _ in named_functions(recipe) if use == ENVIRONMENT_REWARD]
    if recipe.environment is None:
        what = "the reward environment adds up the rewards of an environment, but there is none"
        yield from (Finding(path, what, "add the section environment, or remove the reward") for path in given)
    else:
        if not any(path.startswith("rewards.") for path in given):
            what = "environment: its rewards and failures would be ignored, because no entry of rewards uses them"
            yield Finding("environment", what, "add {use: environment} to rewards; with weight 0 it only measures")
        if recipe.tools:
            what = "environment and tools both answer the turns of the model"
            yield Finding("environment", what, "remove one of them; an environment may call functions itself")
        if recipe.task is not None and not (recipe.data.chat or recipe.data.system):
            what = "environment: the chat template puts observations between turns, but the prompts of a task are texts"
            yield Finding("environment", what, "set data.chat to true")
    if recipe.talks and recipe.engine.callers > 1:
        who = "tools: each process that shares the engine would call every tool"
        who = who if recipe.tools else "environment: each process that shares the engine would lead every conversation"
        what = f"engine.tensor_parallel_size above 1 does not go with {who}"
        yield Finding("engine.tensor_parallel_size", what, "set it to 1, or engine.kind to server")


def _own_rollout(recipe: Recipe) -> Findings:
    """Yields contradictions of `rollout.use`."""
    differ = "is not called by evaluations, so they would sample in a different way"
    early = "is called when a step needs its samples, not while another step trains"
    shared = "would be called once in each process that shares the engine"
    others = (
        ("tools", bool(recipe.tools), "leads conversations itself, and so do tools"),
        ("environment", recipe.environment is not None, "leads conversations itself, and so does an environment"),
        ("eval", recipe.eval is not None, differ),
        ("rollout.async_steps", recipe.rollout.async_steps > 0, early),
        ("engine.tensor_parallel_size", recipe.engine.callers > 1, shared),
    )
    for path, meets, what in others:
        if meets and recipe.rollout.use is not None:
            yield Finding(path, f"rollout.use {what}", f"remove rollout.use, or {path}")


def _images(recipe: Recipe) -> Findings:
    """Yields what cannot be used together with images."""
    columns = recipe.eval.columns if recipe.eval is not None else None
    if recipe.data.columns.images is None:
        if recipe.task is not None and "images" in TASK_COLUMNS.get(recipe.task, ()):
            what = f"{recipe.data.source} asks about pictures, but data.columns.images names no column"
            yield Finding("data.source", what, "add `columns: {images: images}` to data, and take a model that reads images")
        elif columns is not None and columns.images is not None:
            what = "eval.columns.images names a column, but data.columns.images none: the engine would be opened without images"
            yield Finding("eval.columns.images", what, "name a column in data.columns.images, too, or remove it")
        return
    engine, model = recipe.engine, recipe.model
    through_transformers = isinstance(engine, ColocatedEngineRecipe) and engine.model_impl == "transformers"
    untested = (
        (f"engine.kind {engine.kind}", not engine.images, "set engine.kind to colocated or transformers"),
        ("engine.tensor_parallel_size above 1", recipe.engine.callers > 1, "set it to 1"),
        ("engine.model_impl transformers", through_transformers, "remove it"),
        ("tools", bool(recipe.tools), "remove tools, or the column"),
        ("environment", recipe.environment is not None, "remove environment, or the column"),
        ("rollout.use", recipe.rollout.use is not None, "remove it, or the column"),
        ("rollout.stream true", recipe.rollout.stream, "remove it"),
        ("model.lora", model.lora is not None, "remove it: all weights of the language model are then trained"),
        ("model.compile", model.compile, "remove it"),
        ("optim.packing true", recipe.optim.packing is True, "remove it"),
        ("processes.strategy fsdp", recipe.processes.strategy == "fsdp", "set it to ddp"),
        ("run.probe_max", recipe.run.probe_max, "remove it: it tries rows of text only"),
    )
    for path, meets, hint in untested:
        if meets:
            what = f"data.columns.images: prompts with images are not tested with {path}"
            yield Finding(path.split()[0], what, hint)


def _regex(trainer: TrainerRecipe) -> Findings:
    """Yields what compares the engine's log-probs with others."""
    path, policy = "engine.structured_regex", trainer if isinstance(trainer, PolicyRecipe) else PolicyRecipe()
    for key, used, remedy in (
        ("trainer.correction", trainer.correction.corrects, "set trainer.correction to {mode: none}"),
        ("trainer.off_policy_max", policy.off_policy_max is not None, "remove it"),
        ("trainer.kl k1_in_reward", policy.beta > 0 and policy.kl == "k1_in_reward", "set trainer.kl to k3_is"),
    ):
        if used:
            why = f"{path} samples from a part of the vocabulary: the engine's log-probs are not the policy's"
            yield Finding(path, f"{why}, so {key} would be wrong", f"{remedy}, or remove {path}")


def _not_streamed(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    """Yields path, reason and hint of engines that cannot sample while the trainer works, and of samples that come otherwise."""
    engine, rollout, processes = recipe.engine, recipe.rollout, recipe.processes
    remove, another = "remove one of them", "or set rollout.stream to false"
    if isinstance(engine, TransformersEngineRecipe):
        why = "an engine of kind transformers samples batch by batch on the device on which the trainer computes"
        yield "engine.kind", why, f"set engine.kind to colocated or server, {another}"
    if isinstance(engine, ColocatedEngineRecipe):
        for path, meets, why in (
            ("engine.sleep", engine.sleep, "an engine that sleeps cannot sample while the trainer works"),
            ("run.deterministic", recipe.run.deterministic, "torch chooses kernels for the whole process, the engine included"),
            ("model.compile", recipe.model.compile, "torch compiles for the trainer while vLLM runs in the same process"),
        ):
            if meets:
                yield path, why, f"remove it, or set engine.kind to server, {another}"
    if rollout.async_steps:
        yield "rollout.async_steps", "its samples are complete before the step begins", remove
    if rollout.use is not None:
        yield "rollout.use", "a rollout of your own returns all samples of a step together", remove
    if rollout.dynamic_sampling:
        yield "rollout.dynamic_sampling", "groups are replaced once the rewards of all are known", remove
    if (processes.count or 1) > 1 or processes.strategy == "fsdp":
        path = "processes.strategy" if processes.strategy == "fsdp" else "processes.count"
        yield path, "several processes divide the rows of a whole step among them", f"run one process, {another}"


def _needs_whole_batch(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    """Yields path, reason and hint of advantages, tokens and denominators that follow from the whole batch."""
    trainer = recipe.trainer
    whole, hint = "is over the whole batch", "or set rollout.stream to false"
    if isinstance(trainer, OwnRecipe):
        why = "an algorithm from a file gets the denominators of its loss before it computes"
        yield "trainer.use", why, "set rollout.stream to false"
    if trainer.updates_per_rollout > 1:
        yield "trainer.updates_per_rollout", "the second update needs all samples again", f"set it to 1, {hint}"
    if isinstance(trainer, PolicyRecipe) and trainer.top_entropy < 1:
        yield "trainer.top_entropy", f"the quantile of the entropies {whole}", f"remove it, {hint}"
    if isinstance(trainer, PolicyRecipe) and trainer.entropy_bonus:
        aggregation = trainer.aggregation if isinstance(trainer, GRPORecipe) else "seq_sum"
        if aggregation != "token_mean":
            choice = ", or trainer.aggregation to token_mean" if isinstance(trainer, GRPORecipe) else ""
            why = f"the bonus divides by tokens and the loss by another count ({aggregation}), both known only at the end"
            yield "trainer.entropy_bonus", why, f"remove it, {hint}{choice}"
    if isinstance(trainer, GRPORecipe):
        if trainer.scale_rewards in ("batch", "batch_centered"):
            why = f"the standard deviation of scale_rewards {trainer.scale_rewards} {whole}"
            yield "trainer.scale_rewards", why, f"set it to group or none, {hint}"
        if trainer.combine_rewards == "normalize_then_sum":
            why = f"normalize_then_sum normalises the sum, which {whole}"
            yield "trainer.combine_rewards", why, f"set it to sum, {hint}"
    if isinstance(trainer, RLOORecipe) and trainer.normalize_advantages:
        yield "trainer.normalize_advantages", f"it centres and scales the advantages, which {whole}", f"remove it, {hint}"
