"""Builds the trainer of one attempt: opens every part, the cheapest first, and passes to each what it needs."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rlgen.data import listed
from rlgen.errors import SetupError
from rlgen.models.lora import describe
from rlgen.models.weights import bits
from rlgen.processes import Processes
from rlgen.recipe import Recipe
from rlgen.rewards.score import EarlyScoring, Scorer, open_scorer
from rlgen.rollout.custom import CustomRollout
from rlgen.rollout.journal import Journal
from rlgen.rollout.sampler import Ahead, Sampler
from rlgen.run.checkpoint import Checkpoints, little_space, seed_random
from rlgen.run.checkpoint_folder import ChosenCheckpoint
from rlgen.run.console import Console
from rlgen.run.directory import RunDirectory, best_saved
from rlgen.run.health import Health, rules_of
from rlgen.run.manifest import check_model_files, read_manifest
from rlgen.run.rollouts import RolloutWriter
from rlgen.run.sinks.open import Sinks, open_sinks
from rlgen.sentinel.probe import Probe
from rlgen.sentinel.rungs import after_check_1, climb
from rlgen.sentinel.sync import send_weights
from rlgen.sentinel.verdict import Rung, agreement, failed
from rlgen.sentinel.watch import Watch
from rlgen.setup.data import Data, open_data, open_dialogue
from rlgen.setup.evaluation import build_evaluator, open_eval_scorer, words_of
from rlgen.setup.inputs import UserCode, record_attempt, same_inputs
from rlgen.setup.largest import Largest, try_largest
from rlgen.setup.probe import probe_of
from rlgen.setup.reopen import PLAIN, TrainOptions
from rlgen.setup.train_state import build_learning, build_updater
from rlgen.setup.trainer_and_engine import TrainerAndEngine, open_trainer_and_engine
from rlgen.trainers.callbacks import Callbacks
from rlgen.trainers.collect import Collector
from rlgen.trainers.evaluate import Evaluator
from rlgen.trainers.groups import Groups, Stream
from rlgen.trainers.loop import Trainer
from rlgen.trainers.report import Reporter
from rlgen.trainers.saving import Saver
from rlgen.types import Position


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """One start of a run: its recipe, its directory, and the checkpoint that it resumes from."""

    recipe: Recipe
    directory: RunDirectory
    console: Console
    processes: Processes
    start: ChosenCheckpoint
    options: TrainOptions = PLAIN


def open_trainer(attempt: RunContext, between: Callable[[], None] = lambda: None) -> tuple[Trainer, Position]:
    """Opens data, rewards, model and engine, and checks that trainer and engine agree. After an error everything is closed again.

    Args:
        between: called on all ranks after each part is opened; it may raise, such as StopNow.
    """
    recipe, console, processes = attempt.recipe, attempt.console, attempt.processes
    with ExitStack() as undo:
        data, scorer = open_inputs(attempt, between)
        undo.callback(scorer.close)
        recipe, checkpoint = data.recipe, attempt.start.path
        attempt = replace(attempt, recipe=recipe)
        code = open_code(attempt, data, scorer, undo)
        digests = processes.run_all(lambda: code.digests(recipe.trainer))
        began_with = None
        if checkpoint:
            unchanged = {} if attempt.options.changed_rewards else digests
            began_with = processes.on_main(lambda: same_inputs(attempt.directory, data, unchanged))
        both = open_trainer_and_engine(data, checkpoint, processes, attempt.directory.logs, console.say, began_with)
        undo.callback(both.close)
        if checkpoint and (stored := read_manifest(checkpoint).processes) != processes.world:
            console.say(f"the checkpoint is of {stored} processes, but {processes.world} run: some random states are new")
        between()
        console.say("sentinel: comparing engine and trainer …")
        rungs, probe = list[Rung](), probe_of(both)
        for rung in climb(probe):
            rungs.append(rung)
            between()
        if wrong := failed(rungs):
            raise wrong.error()
        probe = after_check_1(probe, rungs)
        if recipe.model.lora is not None:
            console.say(f"lora: {describe(both.state.policy.model)}")
        console.say(f"sentinel: {agreement(rungs)}")
        if processes.is_main and (warning := little_space(attempt.directory.checkpoints, both.state.policy.model)):
            console.say(f"warning: {warning}")
        engine = both.engine.facts()
        processes.on_main(lambda: record_attempt(attempt.directory, both, digests, rungs, attempt.start.notices, engine))
        if recipe.run.probe_max:
            console.say(try_memory(both))
        trainer = build_trainer(attempt, both, code, probe)
        undo.pop_all()
    return trainer, both.position


def open_inputs(attempt: RunContext, between: Callable[[], None]) -> tuple[Data, Scorer]:
    recipe, console, processes = attempt.recipe, attempt.console, attempt.processes
    device = processes.device
    console.say(f"device: {torch.cuda.get_device_name(device) if device.type == 'cuda' else device.type}, {recipe.model.dtype}")
    seed_random(f"{recipe.run.seed}/{processes.rank}")  # a checkpoint restores its own random states later
    console.say(f"data: reading {recipe.data.source} …")
    processes.on_main(lambda: check_model_files(Path(recipe.model.path)), keepalive=True)
    data = processes.main_first(lambda: open_data(recipe))
    for notice in data.notices:
        console.say(notice)
    between()
    scorer = processes.run_all(lambda: build_scorer(data, attempt.directory, processes.rank))
    for reward in scorer.rewards:
        if reward.sha256 is not None:
            console.say(f"reward {reward.label}: {reward.entry.use} (sha256 {reward.sha256[:12]})")
    console.say(f"data: {listed({name: count for name, count in data.prompts.counts.items() if count})}")
    for warning in data.warnings:
        console.say(f"warning: {warning}")
    return data, scorer


def open_code(attempt: RunContext, data: Data, scorer: Scorer, undo: ExitStack) -> UserCode:
    """Opens what runs the user's code beside the rewards of training; `undo` gets what closes it."""
    recipe, directory, processes = attempt.recipe, attempt.directory, attempt.processes
    judge, held_out, own = None, data.held_out, recipe.rollout.use
    if held_out is not None:
        attempt.console.say(f"eval: {words_of(held_out)}")
        output = directory.logs / f"rewards.eval.rank{processes.rank}.log"
        failures, answers = directory.failed_rewards / "eval", directory.judge / "eval"
        judge = processes.run_all(lambda: open_eval_scorer(data, held_out, output, failures, answers))
        undo.callback(judge.close)
    tools_log = directory.logs / (f"tools.rank{processes.rank}.log" if processes.rank else "tools.log")
    dialogue = processes.run_all(lambda: open_dialogue(recipe, data.tokenizer, data.stop_ids, tools_log))
    if dialogue is not None:
        undo.callback(dialogue.turns.close)
    custom = None if own is None else processes.run_all(lambda: CustomRollout.load(own))
    return UserCode(scorer=scorer, judge=judge, dialogue=dialogue, custom=custom)


def build_scorer(data: Data, directory: RunDirectory, rank: int) -> Scorer:
    recipe = data.recipe
    columns = {*data.rows.columns, "answer"} if recipe.data.columns.answer else set(data.rows.columns)
    output = directory.logs / (f"rewards.rank{rank}.log" if rank else "rewards.log")
    longest, failures = recipe.rollout.max_completion_tokens, directory.failed_rewards
    size, turns = recipe.rollout.group_size, recipe.talks
    return open_scorer(recipe.rewards, columns, longest, recipe.scoring, output, failures, turns, directory.judge, size)


def try_memory(both: TrainerAndEngine) -> str:
    """Tries the largest micro-batches while the engine sleeps, as in a step, and returns a message with what was tried."""
    sleeps, policy = both.engine.abilities.sleeps, both.state.policy
    if sleeps:
        both.processes.run_all(both.engine.sleep, has_collectives=both.engine_share.shared)
    most = Largest.of(both.data.recipe, both.processes.world, policy.packed, policy.sharing)
    tried = try_largest(most, build_updater(both.state, both.sampling, both.processes, None), both.processes)
    if sleeps:
        send_weights(both.engine, policy.model, both.position.step, both.processes)
    return tried


def build_trainer(attempt: RunContext, both: TrainerAndEngine, code: UserCode, probe: Probe) -> Trainer:
    recipe, directory, processes = attempt.recipe, attempt.directory, attempt.processes
    state, done, scorer, dialogue = both.state, both.position.step, code.scorer, code.dialogue
    journal = open_journal(attempt, both, code)
    early = EarlyScoring(scorer)
    sampler = build_sampler(attempt, both, journal, early, code)
    watch = build_watch(attempt, both, probe, sampler)
    checkpoints = Checkpoints(
        directory.checkpoints,
        recipe.checkpoint.keep,
        processes,
        base=state.models.base,
        trainer=recipe.trainer.kind,
        held=state.models.held,
        tokenizer=both.data.tokenizer,
        processor=None if state.policy.vision is None else state.policy.vision.processor,
    )
    evaluate, held_out = None, both.data.held_out
    if code.judge is not None and held_out is not None:
        best = processes.on_main(lambda: best_saved(directory.path)) if held_out.settings.best else None
        evaluate = build_evaluator(both, code.judge, watch, directory.evals, best, dialogue)
    sinks = open_sinks(recipe, directory, done, attempt.console.say) if processes.is_main else Sinks(recipe.run.steps)
    weights = bits(state.policy.model, processes)
    processes.run_all(lambda: journal.starts_from(done, weights))
    compared = None if both.sampling.regex else watch
    learn = build_learning(state, both.sampling, processes, scorer.weights, compared)
    report = Reporter(
        steps=recipe.run.steps,
        max_nonfinite=recipe.optim.max_nonfinite,
        processes=processes,
        directory=directory,
        health=Health(rules_of(recipe), directory.read_metrics() if done and processes.is_main else ()),
        console=attempt.console,
        writer=build_writer(attempt, both, journal, checkpoints, sinks, dialogue is not None),
        sinks=sinks,
    )
    return Trainer(
        steps=recipe.run.steps,
        processes=processes,
        collect=Collector(
            recipe=recipe.rollout,
            processes=processes,
            engine_share=both.engine_share,
            prompts=both.data.prompts,
            sampler=sampler,
            scorer=scorer,
            early=early,
            algorithm=state.algorithm,
            stream=build_stream(both, sampler, early, scorer.weights, learn.groups),
        ),
        learn=learn,
        evaluate=evaluate,
        report=report,
        save=build_saver(both, checkpoints, sampler, report, evaluate),
        callbacks=Callbacks.of(attempt.options.callbacks, processes),
    )


def build_saver(
    both: TrainerAndEngine, checkpoints: Checkpoints, sampler: Sampler, report: Reporter, evaluate: Evaluator | None
) -> Saver:
    recipe, state = both.data.recipe, both.state
    return Saver(
        every=recipe.checkpoint.every,
        on_drift=recipe.sentinel.on_drift == "checkpoint_and_stop",
        processes=both.processes,
        policy=state.policy,
        optimizer=state.optimizer,
        schedule=state.schedule,
        checkpoints=checkpoints,
        sampler=sampler,
        report=report,
        evaluate=evaluate,
    )


def open_journal(attempt: RunContext, both: TrainerAndEngine, code: UserCode) -> Journal:
    """Opens the journal, with what earlier attempts sampled and scored after the checkpoint."""
    judge = [(reward.label, reward.sha256, reward.entry.weight) for reward in code.scorer.rewards]
    folder, say = attempt.directory.journal, attempt.console.say
    beside = [both.state.models.base, *([] if code.dialogue is None else [code.dialogue.digest])]
    beside += [] if code.custom is None else [Path(code.custom.use).name, code.custom.sha256]
    versions = max(1, attempt.recipe.rollout.async_steps)
    done, facts, writes = both.position.step, both.engine.facts(), both.engine_share.first
    return Journal.open(folder, done, attempt.processes, facts, judge, say, beside, versions, writes)


def build_sampler(attempt: RunContext, both: TrainerAndEngine, journal: Journal, early: EarlyScoring, code: UserCode) -> Sampler:
    recipe, prompts = attempt.recipe, both.data.prompts
    count, steps = recipe.rollout.prompts_per_step, recipe.run.steps
    abilities = both.engine.abilities
    # Rewards would only slow down an engine that needs the cores of this machine, unless groups are trained on meanwhile.
    early_pays = (abilities.elsewhere or recipe.rollout.stream) and code.custom is None
    ahead = None
    if recipe.rollout.async_steps and abilities.submit is not None:
        ahead = Ahead(
            submit_to=abilities.submit,
            prompts_of=lambda step: both.engine_share.share(prompts.take((step - 1) * count, count if step <= steps else 0)),
            steps=recipe.rollout.async_steps,
            max_staleness=recipe.oldest_sample,
            in_flight=abilities.in_flight,
        )
    return Sampler(
        engine=both.engine,
        sampling=both.sampling,
        group_size=recipe.rollout.group_size,
        run_seed=recipe.run.seed,
        tokenizer=both.data.tokenizer,
        journal=journal,
        all_or_none=abilities.whole_step or code.custom is not None,
        ahead=ahead,
        group_finished=early.add if early_pays and both.engine_share.first else None,
        dialogue=code.dialogue,
        custom=code.custom,
        interruptible=recipe.rollout.stream,
    )


def build_stream(
    both: TrainerAndEngine, sampler: Sampler, early: EarlyScoring, weights: Mapping[str, float], groups: Groups | None
) -> Stream | None:
    """Returns None if the recipe does not stream."""
    if groups is None:
        return None
    processes = both.processes
    if processes.world > 1:
        raise SetupError("rollout.stream works in one process only; start one, or set it to false")
    if not both.engine.abilities.elsewhere and processes.device.type == "cuda":
        raise SetupError("rollout.stream: on one GPU engine and trainer would wait for each other; set engine.kind to server")
    return Stream(processes=processes, sampler=sampler, early=early, labels=tuple(weights), groups=groups)


def build_writer(
    attempt: RunContext, both: TrainerAndEngine, journal: Journal, checkpoints: Checkpoints, sinks: Sinks, turns: bool
) -> RolloutWriter:
    """Returns the object that writes the samples of each step, and tells the journal and the sinks when they are on disk."""
    recipe, processes = attempt.recipe, attempt.processes

    def on_disk(step: int, path: Path) -> None:
        journal.retire(step, path)
        sinks.samples(step, path)

    return RolloutWriter(
        folder=attempt.directory.rollouts,
        rank=processes.rank,
        world=processes.world,
        prompt_at=both.data.prompts.at,
        tokenizer=both.data.tokenizer,
        stop_ids=both.sampling.stop_ids,
        every=recipe.rollouts.every,
        keep=recipe.rollouts.keep,
        needed=checkpoints.oldest,
        stamp=lambda rollout: journal.stamp(rollout, both.sampling),
        on_disk=on_disk,
        turns=turns,
    )


def build_watch(attempt: RunContext, both: TrainerAndEngine, probe: Probe, sampler: Sampler) -> Watch:
    recipe = attempt.recipe
    return Watch(
        probe=probe,
        warns=recipe.sentinel.on_drift == "warn",
        sleeps=both.engine.abilities.sleeps,
        probe_every=recipe.sentinel.probe_every if recipe.rollout.async_steps else None,
        drain=lambda: both.processes.run_all(sampler.drain, keepalive=True),
        say=attempt.console.say,
    )
