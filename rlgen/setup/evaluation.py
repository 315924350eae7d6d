"""Opens what evaluates: for the evaluations of a run, and for `rlgen eval`, which evaluates a model by itself."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlgen.models.lora import load_adapter
from rlgen.models.weights import base_digest
from rlgen.processes import Processes
from rlgen.recipe import Recipe
from rlgen.recipe.trainers import GRPORecipe
from rlgen.rewards.score import Scorer, open_scorer
from rlgen.rollout.conversations import Dialogue
from rlgen.run.directory import Best
from rlgen.run.manifest import check_model_files
from rlgen.run.rollouts import RolloutWriter
from rlgen.sentinel.sync import send_weights
from rlgen.sentinel.watch import Watch
from rlgen.setup.data import Data, HeldOut, open_data, open_dialogue
from rlgen.setup.probe import probe_of
from rlgen.setup.trainer_and_engine import TrainerAndEngine, open_trainer_and_engine
from rlgen.trainers.evaluate import Evaluator


def open_eval_scorer(data: Data, held_out: HeldOut, output: Path, failures: Path | None, answers: Path | None) -> Scorer:
    """Returns the rewards of evaluations, checked against the columns of their data.

    They have processes of their own. Those of the training may score the next step meanwhile: with `rollout.async_steps`, or when
    a resumed run takes it from the journal.
    """
    rewards, columns, size = held_out.rewards, held_out.columns, held_out.settings.group_size
    scoring, turns = data.recipe.scoring, data.recipe.talks
    return open_scorer(rewards, columns, held_out.max_tokens, scoring, output, failures, turns, answers, size)


def build_evaluator(
    both: TrainerAndEngine, scorer: Scorer, watch: Watch, folder: Path | None, best: Best | None, dialogue: Dialogue | None
) -> Evaluator:
    """`folder` is that of the samples, from which the journal takes nothing; None: they are not written."""
    recipe, held_out, processes = both.data.recipe, both.data.held_out, both.processes
    assert held_out is not None  # as there is a scorer
    sampling = replace(
        both.sampling,
        max_tokens=held_out.max_tokens,
        temperature=held_out.temperature,
        top_p=both.sampling.top_p if held_out.settings.top_p is None else held_out.settings.top_p,
    )
    comparable = sampling.regex is None and (recipe.rounds_alike or not sampling.distribution.truncated)
    writer = None
    if folder is not None:
        writer = RolloutWriter(
            folder=folder,
            rank=processes.rank,
            world=processes.world,
            prompt_at=held_out.prompts.at,
            tokenizer=both.data.tokenizer,
            stop_ids=both.sampling.stop_ids,
            turns=dialogue is not None,
        )
    return Evaluator(
        settings=held_out.settings,
        steps=recipe.run.steps,
        processes=processes,
        engine_share=both.engine_share,
        prompts=held_out.prompts,
        engine=both.engine,
        sampling=sampling,
        seed=held_out.seed,
        tokenizer=both.data.tokenizer,
        scorer=scorer,
        watch=watch if comparable else None,
        budget=recipe.optim.micro_batch_tokens,
        writer=writer,
        best=best,
        dialogue=dialogue,
    )


def words_of(held_out: HeldOut) -> str:
    """Returns "64 prompts, greedy, at the start and every 20 steps; 0 are trained on, too"."""
    settings = held_out.settings
    how = "greedy" if held_out.temperature == 0 else f"{settings.group_size} completions each"
    steps = "step" if settings.every == 1 else f"{settings.every} steps"
    when = f"{'at the start and ' if settings.at_start else ''}every {steps}"
    return f"{len(held_out.prompts)} prompts, {how}, {when}; {held_out.overlap} are trained on, too"


def evaluate_model(
    recipe: Recipe, adapter: Path | None, step: int, logs: Path, out: Path | None, say: Callable[[str], None]
) -> tuple[HeldOut, dict[str, Any]]:
    """Evaluates the model in model.path as the recipe's `eval` section says. Trains nothing. Returns the prompts and the metrics.

    Args:
        adapter: checkpoint of an adapter, which is applied to the model; None: no adapter.
        step: of the weights; rewards receive it, and it names the file of the samples.
        logs: folder for what servers and rewards print.
        out: folder for the samples; None: they are not written.
    """
    processes = Processes.alone()
    check_model_files(Path(recipe.model.path))
    data = open_data(recipe)
    # Nothing is learned: no reference is needed, whatever the trainer of the recipe.
    data, held_out = replace(data, recipe=data.recipe.model_copy(update={"trainer": GRPORecipe()})), data.held_out
    assert held_out is not None  # the caller has seen the section
    for line in (*data.notices, *(f"warning: {warning}" for warning in held_out.warnings)):
        say(line)
    with ExitStack() as open_parts:
        scorer = open_eval_scorer(data, held_out, logs / "rewards.log", None, None)
        open_parts.callback(scorer.close)
        dialogue = open_dialogue(data.recipe, data.tokenizer, data.stop_ids, logs / "tools.log")
        if dialogue is not None:
            open_parts.callback(dialogue.turns.close)
        both = open_trainer_and_engine(data, None, processes, logs, say)
        open_parts.callback(both.close)
        model = both.state.policy.model
        if adapter is not None:
            load_adapter(adapter, model, base_digest(model))
        if adapter is not None or step:
            send_weights(both.engine, model, step, processes)
        watch = Watch(
            probe=replace(probe_of(both), version=step), warns=False, sleeps=False, probe_every=None, drain=lambda: None, say=say
        )
        evaluator = build_evaluator(both, scorer, watch, out, None, dialogue)
        open_parts.callback(evaluator.close)
        return held_out, evaluator(step)
