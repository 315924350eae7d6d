"""Checks what cannot be used beside several turns (tools, environments), images, or `rollout.stream`."""

from collections.abc import Iterator

from rlgen.recipe.data import TASK_COLUMNS
from rlgen.recipe.engines import ColocatedEngineRecipe, ServerEngineRecipe, TransformersEngineRecipe
from rlgen.recipe.models import ENVIRONMENT_REWARD, Recipe
from rlgen.recipe.rules import Finding
from rlgen.recipe.trainers import GRPORecipe, OwnRecipe, PolicyRecipe, RLOORecipe


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


def image_contradictions(recipe: Recipe) -> list[Finding]:
    """Returns what cannot be used together with images."""
    columns = recipe.eval.columns if recipe.eval is not None else None
    if recipe.data.columns.images is None:
        if recipe.task is not None and "images" in TASK_COLUMNS.get(recipe.task, ()):
            what = f"{recipe.data.source} asks about pictures, but data.columns.images names no column"
            return [Finding("data.source", what, "add `columns: {images: images}` to data, and take a model that reads images")]
        if columns is None or columns.images is None:
            return []
        what = "eval.columns.images names a column, but data.columns.images none: the engine would be opened without images"
        return [Finding("eval.columns.images", what, "name a column in data.columns.images, too, or remove it")]
    engine, model, processes = recipe.engine, recipe.model, recipe.processes
    here = engine if isinstance(engine, ColocatedEngineRecipe) else None
    untested = (
        ("engine.kind server", isinstance(engine, ServerEngineRecipe), "set engine.kind to colocated or transformers"),
        ("engine.tensor_parallel_size above 1", here is not None and here.tensor_parallel_size > 1, "set it to 1"),
        ("engine.model_impl transformers", here is not None and here.model_impl == "transformers", "remove it"),
        ("tools", bool(recipe.tools), "remove tools, or the column"),
        ("environment", recipe.environment is not None, "remove environment, or the column"),
        ("rollout.use", recipe.rollout.use is not None, "remove it, or the column"),
        ("rollout.stream true", recipe.rollout.stream, "remove it"),
        ("model.lora", model.lora is not None, "remove it: all weights of the language model are then trained"),
        ("model.compile", model.compile, "remove it"),
        ("optim.packing true", recipe.optim.packing is True, "remove it"),
        ("processes.strategy fsdp", processes.strategy == "fsdp", "set it to ddp"),
        ("run.probe_max", recipe.run.probe_max, "remove it: it tries rows of text only"),
    )
    what = "data.columns.images: prompts with images are not tested with"
    return [Finding(path.split()[0], f"{what} {path}", hint) for path, meets, hint in untested if meets]


def stream_contradictions(recipe: Recipe) -> list[Finding]:
    """Returns what contradicts `rollout.stream`. Each finding has what the field needs, and what to change."""
    if not recipe.rollout.stream:
        return []
    return [
        Finding(path, f"{path} cannot be used with rollout.stream, which trains on groups while others are sampled: {what}", hint)
        for path, what, hint in (*_of_the_engine(recipe), *_of_the_rollout(recipe), *_of_the_trainer(recipe))
    ]


def _of_the_engine(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    """Yields path, reason and hint of what keeps the trainer from working beside the engine."""
    engine, another = recipe.engine, "or set rollout.stream to false"
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


def _of_the_rollout(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    """Yields path, reason and hint of samples that come otherwise, and of processes."""
    rollout, processes = recipe.rollout, recipe.processes
    remove, alone = "remove one of them", "run one process, or set rollout.stream to false"
    if rollout.async_steps:
        yield "rollout.async_steps", "its samples are complete before the step begins", remove
    if rollout.use is not None:
        yield "rollout.use", "a rollout of your own returns all samples of a step together", remove
    if rollout.dynamic_sampling:
        yield "rollout.dynamic_sampling", "groups are replaced once the rewards of all are known", remove
    if (processes.count or 1) > 1 or processes.strategy == "fsdp":
        path = "processes.strategy" if processes.strategy == "fsdp" else "processes.count"
        yield path, "several processes divide the rows of a whole step among them", alone


def _of_the_trainer(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    """Yields path, reason and hint of advantages, tokens and denominators that follow from the whole batch."""
    trainer = recipe.trainer
    whole, hint = "is over the whole batch", "or set rollout.stream to false"
    if isinstance(trainer, OwnRecipe):
        why = "an algorithm from a file gets the denominators of its loss before it computes"
        yield "trainer.use", why, "set rollout.stream to false"
    if trainer.updates_per_rollout > 1:
        why = "the second update needs all samples again"
        yield "trainer.updates_per_rollout", why, f"set it to 1, {hint}"
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
