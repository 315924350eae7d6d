"""From a recipe to a trainer: every part is made here and given what it needs."""

import copy
from dataclasses import asdict
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel, get_scheduler

from rlgen.data import PromptStream, Rows, build_prompts, load_rows
from rlgen.engines import build_engine
from rlgen.models.load import load_model, load_tokenizer, locate, stop_ids
from rlgen.models.policy import Policy
from rlgen.models.weights import checkpoint_tensors
from rlgen.recipe import Recipe
from rlgen.rewards import Scorer, resolve
from rlgen.run.checkpoint import Checkpoints
from rlgen.run.console import Console
from rlgen.run.directory import RunDirectory
from rlgen.run.files import read_json, write_json
from rlgen.run.provenance import provenance
from rlgen.sentinel.bounds import bounds_for
from rlgen.sentinel.start import StartReport, check_start
from rlgen.trainers.loop import Trainer
from rlgen.trainers.registry import build_algorithm
from rlgen.trainers.update import Updater
from rlgen.types import Sampling


def build_trainer(recipe: Recipe, directory: RunDirectory, checkpoint: Path | None, console: Console) -> tuple[Trainer, int]:
    """Loads data, rewards, model and engine, in the order of their cost, and checks that trainer and engine agree.

    Args:
        checkpoint: to go on from, or None.

    Returns:
        The trainer and the number of steps that are done.

    Raises:
        RlgenError: whatever the parts raise; nothing has been trained.
    """
    accelerator = Accelerator()
    location, revision = locate(recipe.model.path), recipe.model.revision
    tokenizer = load_tokenizer(location, revision)
    rows = load_rows(recipe.data, recipe.run.seed)
    prompts = build_prompts(recipe.data, rows, tokenizer, recipe.run.seed)
    columns = {*rows.columns, "answer"} if recipe.data.columns.answer else set(rows.columns)
    scorer = Scorer(tuple(resolve(entry, columns) for entry in recipe.rewards), recipe.rollout.max_completion_tokens)
    console.say(f"data: {', '.join(f'{count} {name}' for name, count in prompts.counts.items())}")

    algorithm = build_algorithm(recipe.trainer)
    policy = build_policy(recipe, location, accelerator.device)
    reference = copy.deepcopy(policy).requires_grad_(False) if algorithm.reference != "none" else None
    optim = recipe.optim
    optimizer = torch.optim.AdamW(policy.parameters(), lr=optim.learning_rate, weight_decay=optim.weight_decay)
    schedule = get_scheduler(optim.schedule, optimizer, optim.warmup_steps, recipe.run.steps)
    done = Checkpoints.load(checkpoint, policy.model, optimizer, schedule).step if checkpoint else 0
    policy, prepared = accelerator.prepare(policy, optimizer)

    console.say(f"model: {location}, {sum(p.numel() for p in policy.parameters()):,} parameters; opening the engine")
    engine = build_engine(recipe, location, accelerator.device)
    sampling = Sampling(
        max_tokens=recipe.rollout.max_completion_tokens,
        temperature=recipe.rollout.temperature,
        stop_ids=stop_ids(tokenizer, location, revision),
        regex=recipe.engine.structured_regex if recipe.engine.kind == "colocated" else None,
    )
    dtypes = recipe.model.dtype, recipe.engine.dtype or recipe.model.dtype
    bounds = bounds_for(dtypes, recipe.sentinel.max_delta, recipe.sentinel.mean_delta)
    if done:
        engine.sync(checkpoint_tensors(policy.model), done)
    probes = prompts.take(0, recipe.rollout.prompts_per_step)
    budget, seed = optim.micro_batch_tokens, recipe.run.seed
    agreement = check_start(policy, engine, probes, sampling, bounds, seed, tokenizer, done, budget, accelerator.device)
    console.say(
        f"sentinel: engine and trainer agree within {agreement.start.max_delta:.1e} nats at the start,"
        f" {agreement.changed.max_delta:.1e} after a sync of changed weights (unsynced: {agreement.unsynced.max_delta:.1g})"
    )
    record_attempt(directory, rows, prompts, scorer, agreement, location, done)
    update = Updater(
        accelerator=accelerator,
        policy=policy,
        optimizer=prepared,
        algorithm=algorithm,
        updates=recipe.trainer.updates_per_rollout,
        max_grad_norm=optim.max_grad_norm,
        temperature=sampling.temperature,
        max_tokens=sampling.max_tokens,
        bounds=None if sampling.regex else bounds,
    )
    trainer = Trainer(
        recipe=recipe,
        tokenizer=tokenizer,
        prompts=prompts,
        scorer=scorer,
        engine=engine,
        sampling=sampling,
        policy=policy,
        reference=reference,
        algorithm=algorithm,
        update=update,
        schedule=schedule,
        directory=directory,
        checkpoints=Checkpoints(directory.checkpoints, recipe.checkpoint.keep),
        console=console,
    )
    return trainer, done


def build_policy(recipe: Recipe, location: str, device: torch.device) -> Policy:
    """The model that is trained: weights in float32 whatever the forward computes in: bfloat16 swallows updates of 1e-6."""
    model = load_model(location, recipe.model.revision, torch.float32, recipe.model.attention, device)
    if recipe.model.gradient_checkpointing:
        checkpoint_activations(model)
    return Policy(model, getattr(torch, recipe.model.dtype), recipe.model.fp32_head)


def record_attempt(
    directory: RunDirectory,
    rows: Rows,
    prompts: PromptStream,
    scorer: Scorer,
    agreement: StartReport,
    location: str,
    done: int,
) -> None:
    """Adds this attempt to `provenance.json`."""
    earlier = read_json(directory.provenance) if directory.provenance.exists() else []
    facts = {
        **provenance(),
        "model": location,
        "data": {"kind": rows.kind, "fingerprint": rows.fingerprint, "files": rows.files, **prompts.counts},
        "rewards": {reward.label: reward.sha256 for reward in scorer.rewards},
        "sentinel": asdict(agreement),
        "from_step": done,
    }
    write_json(directory.provenance, [*earlier, facts])


def checkpoint_activations(model: PreTrainedModel) -> None:
    """transformers checkpoints in training mode only; dropout stays off, so that a forward is a function of ids and weights."""
    model.gradient_checkpointing_enable()
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
