"""From a recipe to a trainer: every part is made here and given what it needs."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from rlgen.data import Rows, listed
from rlgen.engines.server import ServerEngine
from rlgen.engines.shared import SharedEngine
from rlgen.errors import UsageError
from rlgen.files import write_json
from rlgen.models.lora import describe
from rlgen.models.weights import bits
from rlgen.processes import Processes
from rlgen.recipe import Recipe
from rlgen.recipe.models import ColocatedEngineRecipe, ServerEngineRecipe
from rlgen.rewards.score import Scorer, open_scorer
from rlgen.rollout.journal import Journal
from rlgen.rollout.sampler import Sampler
from rlgen.run.checkpoint import Checkpoints, saved_processes, seed_random
from rlgen.run.console import Console
from rlgen.run.directory import RunDirectory
from rlgen.run.health import Health, rules_of
from rlgen.run.launch import launched_by
from rlgen.run.manifest import check_model_files
from rlgen.run.provenance import provenance
from rlgen.sentinel.ladder import climb, summary
from rlgen.sentinel.sync import send_weights
from rlgen.sentinel.verdict import Rung, failed
from rlgen.sentinel.watch import Watch
from rlgen.trainers.collect import Collector
from rlgen.trainers.longest import try_longest
from rlgen.trainers.loop import Progress, Trainer
from rlgen.trainers.report import Reporter
from rlgen.trainers.sides import Data, Sides, load_data, open_sides
from rlgen.trainers.window import WindowBuilder


def build_trainer(
    recipe: Recipe,
    directory: RunDirectory,
    checkpoint: Path | None,
    console: Console,
    processes: Processes,
    notices: Sequence[str] = (),
    changed_rewards: bool = False,
    between: Callable[[], None] = lambda: None,
) -> tuple[Trainer, Progress]:
    """Loads data, rewards, model and engine, in the order of their cost, and checks that trainer and engine agree.

    Args:
        checkpoint: to go on from, or None.
        notices: what was said about the choice of it.
        changed_rewards: the files of rewards may be others than before.
        between: called by all processes between one part and the next; it may raise, such as StopNow.

    Returns:
        The trainer and where it goes on from.

    Raises:
        RlgenError: whatever the parts raise; nothing has been trained.
    """
    device = processes.device
    console.say(f"device: {torch.cuda.get_device_name(device) if device.type == 'cuda' else device.type}, {recipe.model.dtype}")
    seed_random(f"{recipe.run.seed}/{processes.rank}")  # a checkpoint brings its own states
    processes.patiently(lambda: check_model_files(Path(recipe.model.path)))
    data = processes.main_first(lambda: load_data(recipe))
    for notice in data.notices:
        console.say(notice)
    between()
    scorer = processes.agreed(lambda: build_scorer(recipe, data.rows, directory, processes.rank))
    for reward in scorer.rewards:
        if reward.sha256 is not None:
            console.say(f"reward {reward.label}: {reward.use} (sha256 {reward.sha256[:12]})")
    console.say(f"data: {listed(data.prompts.counts)}")
    if twice := data.prompts.counts["duplicates"]:
        console.say(f"warning: {twice} of {data.prompts.counts['used']} prompts are the same as an earlier one")
    with ExitStack() as undo:
        undo.callback(scorer.close)
        began_with = None
        if checkpoint:
            rewards = {} if changed_rewards else reward_files(scorer)
            began_with = processes.on_main(lambda: same_inputs(directory, data, rewards))
        console.say(f"model: {data.location}; opening the engine")
        sides = open_sides(recipe, data, checkpoint, processes, directory.logs, console.say, began_with)
        undo.callback(sides.probe.engine.close)
        if checkpoint and (stored := saved_processes(checkpoint)) != processes.world:
            console.say(f"the checkpoint is of {stored} processes and {processes.world} run: some random states are made anew")
        between()
        rungs = []
        for rung in climb(sides.probe):
            rungs.append(rung)
            between()
        if wrong := failed(rungs):
            raise wrong.error()
        if recipe.model.lora is not None:
            console.say(f"lora: {describe(sides.probe.policy.model)}")
        console.say(f"sentinel: {summary(rungs)}")
        processes.on_main(lambda: record_attempt(directory, data, scorer, sides, rungs, notices))
        if recipe.run.probe_max:
            sleeps = isinstance(recipe.engine, ColocatedEngineRecipe) and recipe.engine.sleep
            if sleeps:  # as in a step
                processes.agreed(sides.probe.engine.sleep, talks=sides.probe.seat.shared)
            console.say(try_longest(recipe, sides.updater(None), processes))
            if sleeps:
                send_weights(sides.probe.engine, sides.probe.policy.model, sides.done, processes)
        trainer = assemble(recipe, directory, console, processes, data, scorer, sides)
        undo.pop_all()
    return trainer, Progress(sides.done, sides.position, sides.nonfinite)


def assemble(
    recipe: Recipe, directory: RunDirectory, console: Console, processes: Processes, data: Data, scorer: Scorer, sides: Sides
) -> Trainer:
    """The parts of the loop, from what is open."""
    count = recipe.rollout.prompts_per_step
    engine = sides.probe.engine
    judge = [(reward.label, reward.sha256, reward.weight) for reward in scorer.rewards]
    beside = [sides.base, *(getattr(recipe.engine, name, None) for name in ("quantization", "extra"))]
    journal = Journal.open(directory.journal, sides.done, processes, engine.facts(), judge, console.say, beside)
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
        journal=journal,
        journals=sides.probe.seat.speaks,
        all_or_none=recipe.engine.kind == "transformers",
        say=console.say,
    )
    watch = Watch(
        probe=sides.probe,
        on_drift=recipe.sentinel.on_drift,
        sleeps=isinstance(recipe.engine, ColocatedEngineRecipe) and recipe.engine.sleep,
        probe_every=recipe.sentinel.probe_every if recipe.rollout.ahead else None,
        rest=lambda: processes.patiently(sampler.rest),
        say=console.say,
    )
    weights = bits(sides.probe.policy.model, processes)
    watch.means.extend(processes.agreed(lambda: journal.starts_from(sides.done, weights, ())))
    return Trainer(
        recipe=recipe,
        processes=processes,
        tokenizer=data.tokenizer,
        policy=sides.probe.policy,
        engine=engine,
        journal=journal,
        collect=Collector(
            recipe=recipe.rollout,
            processes=processes,
            seat=sides.probe.seat,
            prompts=data.prompts,
            engine=engine,
            sampler=sampler,
            scorer=scorer,
            journal=journal,
            algorithm=sides.algorithm,
        ),
        windows=WindowBuilder(
            processes=processes,
            algorithm=sides.algorithm,
            weights=scorer.weights,
            reference=sides.reference,
            temperature=sides.probe.sampling.logp_temperature,
            budget=recipe.optim.micro_batch_tokens,
        ),
        update=sides.updater(None if sides.probe.sampling.regex else watch),
        schedule=sides.schedule,
        checkpoints=Checkpoints(directory.checkpoints, recipe.checkpoint.keep, processes, sides.base, recipe.trainer.kind),
        report=Reporter(
            steps=recipe.run.steps,
            processes=processes,
            directory=directory,
            health=Health(rules_of(recipe), directory.read_metrics() if sides.done and processes.is_main else ()),
            console=console,
        ),
    )


def build_scorer(recipe: Recipe, rows: Rows, directory: RunDirectory, rank: int) -> Scorer:
    columns = {*rows.columns, "answer"} if recipe.data.columns.answer else set(rows.columns)
    output = directory.logs / (f"rewards.rank{rank}.log" if rank else "rewards.log")
    longest, failures = recipe.rollout.max_completion_tokens, directory.failed_rewards
    return open_scorer(recipe.rewards, columns, longest, recipe.scoring, output, failures)


def reward_files(scorer: Scorer) -> dict[str, str | None]:
    """SHA-256 of the user's code of each reward."""
    return {reward.label: reward.sha256 for reward in scorer.rewards}


def same_inputs(directory: RunDirectory, data: Data, now: Mapping[str, str | None]) -> str | None:
    """The digest of the weights that were in model.path at the last attempt; None: it was not taken down.

    Raises:
        UsageError: the data, the ids of its prompts, or the code of a reward, are not what the last attempt was trained on.
    """
    attempts = directory.attempts(directory.path)
    if not attempts:
        return None
    last = attempts[-1]
    before, fingerprint = last["rewards"], data.rows.fingerprint
    if (was := last["data"]["fingerprint"]) != fingerprint:
        raise UsageError(
            f"--resume: the data has changed since the last attempt (fingerprint {was}, now {fingerprint}): the prompts would"
            " come in another order, some of them twice. Bring the data back, or start a new run with model.path at a checkpoint"
            " of this one"
        )
    for key, ids in ids_of(data).items():
        if (was := last.get(key, ids)) != ids:  # earlier versions did not take them down
            raise UsageError(
                f"--resume: {key} have changed since the last attempt (were {was}, now {ids}): tokenizer, chat template or"
                f" generation config in model.path {data.location} are others. Bring them back, or start a new run with"
                " model.path at a checkpoint of this one"
            )
    changed = [
        f"{name} (SHA-256 {str(before.get(name))[:12]}, now {str(now[name])[:12]})"
        for name in now
        if before.get(name) != now[name]
    ]
    if changed:
        raise UsageError(
            f"--resume: the file of reward {', '.join(changed)}, or a module beside it, was edited since the last attempt:"
            " earlier and later steps would be rewarded differently. Undo it, or add --allow-changed-rewards"
        )
    return last.get("weights")


def ids_of(data: Data) -> dict[str, Any]:
    """What the tokenizer in model.path decides."""
    return {"prompt_ids": data.prompts.digest(), "stop_ids": list(data.stop_ids)}


def record_attempt(
    directory: RunDirectory, data: Data, scorer: Scorer, sides: Sides, rungs: Sequence[Rung], notices: Sequence[str]
) -> None:
    """Adds this attempt to `provenance.json`."""
    rows = data.rows
    facts = {
        **provenance(),
        "launcher": launched_by(),
        "model": data.location,
        "weights": sides.began_with,
        **ids_of(data),
        "data": {"kind": rows.kind, "fingerprint": rows.fingerprint, "files": rows.files, **data.prompts.counts},
        "rewards": reward_files(scorer),
        "sentinel": [rung.as_json() for rung in rungs],
        "from_step": sides.done,
        "notices": list(notices),
    }
    write_json(directory.provenance, [*directory.attempts(directory.path), facts])
