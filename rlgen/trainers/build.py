"""From a recipe to a trainer: every part is made here and given what it needs."""

from collections.abc import Sequence
from pathlib import Path

from rlgen.data import Rows
from rlgen.models.lora import describe
from rlgen.recipe import Recipe
from rlgen.recipe.models import ColocatedEngineRecipe
from rlgen.rewards import Scorer, resolve
from rlgen.run.checkpoint import Checkpoints
from rlgen.run.console import Console
from rlgen.run.directory import RunDirectory
from rlgen.run.files import read_json, write_json
from rlgen.run.provenance import provenance
from rlgen.sentinel.ladder import climb, summary
from rlgen.sentinel.verdict import Rung, failed
from rlgen.sentinel.watch import Watch
from rlgen.trainers.loop import Trainer
from rlgen.trainers.sides import Data, load_data, open_sides


def build_trainer(recipe: Recipe, directory: RunDirectory, checkpoint: Path | None, console: Console) -> tuple[Trainer, int]:
    """Loads data, rewards, model and engine, in the order of their cost, and checks that trainer and engine agree.

    Args:
        checkpoint: to go on from, or None.

    Returns:
        The trainer and the number of steps that are done.

    Raises:
        RlgenError: whatever the parts raise; nothing has been trained.
    """
    data = load_data(recipe)
    scorer = build_scorer(recipe, data.rows)
    console.say(f"data: {', '.join(f'{count} {name}' for name, count in data.prompts.counts.items())}")
    console.say(f"model: {data.location}; opening the engine")
    sides = open_sides(recipe, data, checkpoint)
    rungs = list(climb(sides.probe))
    if wrong := failed(rungs):
        scorer.close()
        sides.probe.engine.close()
        raise wrong.error()
    if recipe.model.lora is not None:
        console.say(f"lora: {describe(sides.probe.policy.model)}")
    console.say(f"sentinel: {summary(rungs)}")
    record_attempt(directory, data, scorer, rungs, sides.done)
    watch = Watch(
        probe=sides.probe,
        on_drift=recipe.sentinel.on_drift,
        sleeps=isinstance(recipe.engine, ColocatedEngineRecipe) and recipe.engine.sleep,
        say=console.say,
    )
    trainer = Trainer(
        recipe=recipe,
        tokenizer=data.tokenizer,
        prompts=data.prompts,
        scorer=scorer,
        engine=sides.probe.engine,
        sampling=sides.probe.sampling,
        policy=sides.probe.policy,
        reference=sides.reference,
        algorithm=sides.algorithm,
        update=sides.updater(None if sides.probe.sampling.regex else watch),
        schedule=sides.schedule,
        directory=directory,
        checkpoints=Checkpoints(directory.checkpoints, recipe.checkpoint.keep, sides.base),
        console=console,
    )
    return trainer, sides.done


def build_scorer(recipe: Recipe, rows: Rows) -> Scorer:
    columns = {*rows.columns, "answer"} if recipe.data.columns.answer else set(rows.columns)
    return Scorer(tuple(resolve(entry, columns) for entry in recipe.rewards), recipe.rollout.max_completion_tokens)


def record_attempt(directory: RunDirectory, data: Data, scorer: Scorer, rungs: Sequence[Rung], done: int) -> None:
    """Adds this attempt to `provenance.json`."""
    earlier = read_json(directory.provenance) if directory.provenance.exists() else []
    rows = data.rows
    facts = {
        **provenance(),
        "model": data.location,
        "data": {"kind": rows.kind, "fingerprint": rows.fingerprint, "files": rows.files, **data.prompts.counts},
        "rewards": {reward.label: reward.sha256 for reward in scorer.rewards},
        "sentinel": [rung.as_json() for rung in rungs],
        "from_step": done,
    }
    write_json(directory.provenance, [*earlier, facts])
