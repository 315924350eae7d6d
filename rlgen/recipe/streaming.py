"""Checks what a recipe with `rollout.stream` cannot have: whatever needs the whole batch before the first backward pass."""

from collections.abc import Iterator

from rlgen.recipe.engines import ColocatedEngineRecipe, TransformersEngineRecipe
from rlgen.recipe.models import Recipe
from rlgen.recipe.rules import Finding
from rlgen.recipe.trainers import GRPORecipe, OwnRecipe, PolicyRecipe, RLOORecipe


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
        yield (
            "engine.kind",
            "an engine of kind transformers samples batch by batch on the device on which the trainer computes",
            "set engine.kind to colocated or server, " + another,
        )
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
        yield (
            path,
            "several processes divide the rows of a whole step among them",
            alone,
        )


def _of_the_trainer(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    """Yields path, reason and hint of advantages, tokens and denominators that follow from the whole batch."""
    trainer = recipe.trainer
    whole, hint = "is over the whole batch", "or set rollout.stream to false"
    if isinstance(trainer, OwnRecipe):
        yield (
            "trainer.use",
            "an algorithm from a file gets the denominators of its loss before it computes",
            "set rollout.stream to false",
        )
    if trainer.updates_per_rollout > 1:
        why = "the second update needs all samples again"
        yield "trainer.updates_per_rollout", why, f"set it to 1, {hint}"
    if isinstance(trainer, PolicyRecipe) and trainer.top_entropy < 1:
        yield "trainer.top_entropy", f"the quantile of the entropies {whole}", f"remove it, {hint}"
    if isinstance(trainer, PolicyRecipe) and trainer.entropy_bonus:
        aggregation = trainer.aggregation if isinstance(trainer, GRPORecipe) else "seq_sum"
        if aggregation != "token_mean":
            why = f"the bonus divides by tokens and the loss by another count ({aggregation}), both known only at the end"
            yield "trainer.entropy_bonus", why, f"remove it, or set rollout.stream to false{or_token_mean(trainer)}"
    if isinstance(trainer, GRPORecipe):
        if trainer.scale_rewards in ("batch", "batch_centered"):
            why = f"the standard deviation of scale_rewards {trainer.scale_rewards} {whole}"
            yield "trainer.scale_rewards", why, f"set it to group or none, {hint}"
        if trainer.combine_rewards == "normalize_then_sum":
            why = f"normalize_then_sum normalises the sum, which {whole}"
            yield "trainer.combine_rewards", why, f"set it to sum, {hint}"
    if isinstance(trainer, RLOORecipe) and trainer.normalize_advantages:
        yield "trainer.normalize_advantages", f"it centres and scales the advantages, which {whole}", f"remove it, {hint}"


def or_token_mean(trainer: PolicyRecipe) -> str:
    """Returns the words for the aggregation that allows a bonus, if the trainer has a choice of aggregation."""
    return ", or trainer.aggregation to token_mean" if isinstance(trainer, GRPORecipe) else ""
