"""From a recipe to a trainer: every part is made here and given what it needs."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rlgen.data import Rows, listed
from rlgen.engines.server import ServerEngine
from rlgen.engines.shared import SharedEngine
from rlgen.models.lora import describe
from rlgen.processes import Processes
from rlgen.recipe import Recipe
from rlgen.recipe.models import ColocatedEngineRecipe, ServerEngineRecipe
from rlgen.rewards import Scorer, resolve
from rlgen.rollout.sampler import Sampler
from rlgen.run.checkpoint import Checkpoints, saved_processes
from rlgen.run.console import Console
from rlgen.run.directory import RunDirectory
from rlgen.run.files import read_json, write_json
from rlgen.run.provenance import provenance
from rlgen.sentinel.ladder import climb, summary
from rlgen.sentinel.verdict import Rung, failed
from rlgen.sentinel.watch import Watch
from rlgen.trainers.loop import Trainer
from rlgen.trainers.sides import Data, load_data, open_sides


def build_trainer(
    recipe: Recipe, directory: RunDirectory, checkpoint: Path | None, console: Console, processes: Processes
) -> tuple[Trainer, int]:
    """Loads data, rewards, model and engine, in the order of their cost, and checks that trainer and engine agree.

    Args:
        checkpoint: to go on from, or None.

    Returns:
        The trainer and the number of steps that are done.

    Raises:
        RlgenError: whatever the parts raise; nothing has been trained.
    """
    data = processes.main_first(lambda: load_data(recipe))
    scorer = processes.agreed(lambda: build_scorer(recipe, data.rows))
    console.say(f"data: {listed(data.prompts.counts)}")
    if twice := data.prompts.counts["duplicates"]:
        console.say(f"warning: {twice} of {data.prompts.counts['used']} prompts are the same as an earlier one")
    console.say(f"model: {data.location}; opening the engine")
    with ExitStack() as undo:
        undo.callback(scorer.close)
        sides = open_sides(recipe, data, checkpoint, processes, directory.logs, console.say)
        undo.callback(sides.probe.engine.close)
        if checkpoint and (stored := saved_processes(checkpoint)) != processes.world:
            console.say(f"the checkpoint is of {stored} processes and {processes.world} run: some random states are made anew")
        rungs = list(climb(sides.probe))
        if wrong := failed(rungs):
            raise wrong.error()
        if recipe.model.lora is not None:
            console.say(f"lora: {describe(sides.probe.policy.model)}")
        console.say(f"sentinel: {summary(rungs)}")
        if processes.is_main:
            record_attempt(directory, data, scorer, rungs, sides.done)
        count = recipe.rollout.prompts_per_step
        engine = sides.probe.engine
        sampler = Sampler(
            engine=engine,
            prompts_of=lambda step: sides.probe.seat.share(
                data.prompts.take((step - 1) * count, count if step <= recipe.run.steps else 0)
            ),
            sampling=sides.probe.sampling,
            group_size=recipe.rollout.group_size,
            run_seed=recipe.run.seed,
            tokenizer=data.tokenizer,
            submit_to=engine.submit if recipe.rollout.ahead and isinstance(engine, ServerEngine | SharedEngine) else None,
            max_staleness=recipe.rollout.max_staleness,
            in_flight=isinstance(recipe.engine, ServerEngineRecipe) and recipe.engine.in_flight,
        )
        watch = Watch(
            probe=sides.probe,
            on_drift=recipe.sentinel.on_drift,
            sleeps=isinstance(recipe.engine, ColocatedEngineRecipe) and recipe.engine.sleep,
            probe_every=recipe.sentinel.probe_every if recipe.rollout.ahead else None,
            rest=sampler.rest,
            say=console.say,
        )
        trainer = Trainer(
            recipe=recipe,
            processes=processes,
            seat=sides.probe.seat,
            tokenizer=data.tokenizer,
            prompts=data.prompts,
            scorer=scorer,
            engine=sides.probe.engine,
            sampler=sampler,
            sampling=sides.probe.sampling,
            policy=sides.probe.policy,
            reference=sides.reference,
            algorithm=sides.algorithm,
            update=sides.updater(None if sides.probe.sampling.regex else watch),
            schedule=sides.schedule,
            directory=directory,
            checkpoints=Checkpoints(directory.checkpoints, recipe.checkpoint.keep, processes, sides.base),
            console=console,
        )
        undo.pop_all()
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
