"""Trainer and engine, opened from a recipe: what a run trains with and `rlgen doctor` compares."""

import copy
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel, PreTrainedTokenizerBase, get_scheduler

from rlgen.data import PromptStream, Rows, build_prompts, cached_rows, listed, load_rows
from rlgen.engines import build_engine
from rlgen.engines.base import Settings
from rlgen.errors import DataError, SetupError, UsageError
from rlgen.models.load import cached_model, check_model, load_model, load_tokenizer, locate, stop_ids
from rlgen.models.lora import add_adapter, is_adapted
from rlgen.models.policy import Policy
from rlgen.models.sharding import shard
from rlgen.models.shortage import memory_for, what_helps
from rlgen.models.weights import base_digest, bits
from rlgen.processes import Processes, Seat
from rlgen.recipe import Recipe
from rlgen.run.checkpoint import Checkpoints, check_fit
from rlgen.sentinel.bounds import bounds_for
from rlgen.sentinel.probe import FEWER_TOKENS, PROMPTS, Probe, TrainerSide
from rlgen.sentinel.sync import send_weights
from rlgen.sentinel.watch import Watch
from rlgen.trainers.base import Algorithm, Scores
from rlgen.trainers.registry import build_algorithm
from rlgen.trainers.update import Updater
from rlgen.trainers.window import Window
from rlgen.types import Sample, Sampling

TOY_ROWS, TOY_TOKENS = 8, 5  # of the window whose gradient is taken whole and in pieces; the least tokens of a row


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """What the model is asked, and its tokenizer."""

    location: str  # of the model: folder or hub id
    tokenizer: PreTrainedTokenizerBase
    rows: Rows
    prompts: PromptStream
    stop_ids: tuple[int, ...]  # each ends a completion
    notices: tuple[str, ...]  # for the user


def load_data(recipe: Recipe) -> Data:
    """Reads what is cheap to read, so that what is wrong with it is said before a weight is loaded.

    Raises:
        SetupError: the model or its tokenizer is not there, or cannot be used.
        RecipeError: its rows may be longer than the model has positions.
        DataError: there are no rows, or not enough for a step.
    """
    location = locate(recipe.model.path)
    tokenizer = load_tokenizer(location, recipe.model.revision)
    check_model(location, recipe.model.revision, tokenizer, recipe.max_row_tokens)
    rows = load_rows(recipe.data, recipe.run.seed)
    prompts = build_prompts(recipe.data, rows, tokenizer, recipe.run.seed)
    if (used := prompts.counts["used"]) < recipe.rollout.prompts_per_step:
        raise DataError(
            f"data.source: {rows.source}: {listed(prompts.counts)}: less than rollout.prompts_per_step"
            f" {recipe.rollout.prompts_per_step}, so a step would ask the same twice; set it to {used} or less"
        )
    said = cached_model(location, recipe.model.revision), cached_rows(rows, recipe.data.revision)
    return Data(
        location=location,
        tokenizer=tokenizer,
        rows=rows,
        prompts=prompts,
        stop_ids=stop_ids(tokenizer, location, recipe.model.revision),
        notices=tuple(filter(None, said)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """Trainer and engine, holding the same weights."""

    recipe: Recipe
    sharded: bool
    algorithm: Algorithm
    reference: Policy | None
    optimizer: Optimizer
    schedule: LRScheduler
    probe: Probe
    base: str | None  # digest of the frozen weights under an adapter
    began_with: str  # digest of the weights in model.path
    done: int  # steps
    position: int  # in the data's order: prompts taken
    nonfinite: int  # steps in a row, up to `done`, whose update was skipped

    def updater(self, watch: Watch | None) -> Updater:
        """What trains the policy."""
        return Updater(
            processes=self.probe.processes,
            sharded=self.sharded,
            policy=self.probe.policy,
            optimizer=self.optimizer,
            algorithm=self.algorithm,
            updates=self.recipe.trainer.updates_per_rollout,
            max_grad_norm=self.recipe.optim.max_grad_norm,
            temperature=self.probe.sampling.logp_temperature,
            max_tokens=self.probe.sampling.max_tokens,
            watch=watch,
            less_memory=partial(what_helps, self.recipe),
        )


def open_sides(
    recipe: Recipe,
    data: Data,
    checkpoint: Path | None,
    processes: Processes,
    logs: Path,
    say: Callable[[str], None],
    began_with: str | None = None,
) -> Sides:
    """Raises RlgenError, as the model and the engine do; SetupError where the memory does not suffice for the trainer's side.

    Args:
        logs: folder for what a server prints.
        say: receives a line when the engine had to be brought back.
        began_with: digest of the weights that were in model.path when the run began; None: not known.
    """
    seat = Seat.of(processes, processes_an_engine(recipe, processes))
    algorithm = build_algorithm(recipe.trainer)
    policy = processes.agreed(lambda: build_policy(recipe, data.location, processes.device))
    if checkpoint:
        processes.agreed(lambda: check_fit(checkpoint, policy.model, recipe.trainer.kind))
    needs_reference, reference = algorithm.reference != "none", None
    base = base_digest(policy.model) if is_adapted(policy.model) else None
    weights = base or bits(policy.model, processes)
    if needs_reference and base is None:  # a checkpoint holds all other weights, and knows the base of its adapter
        processes.agreed(lambda: same_reference(data.location, weights, began_with))
    sharded = recipe.processes.strategy == "fsdp" and processes.world > 1
    if sharded:
        reference = build_reference(recipe, policy) if needs_reference else None
        for one in [policy] if reference is None else [policy, reference]:
            shard(one, processes)
    # On a GPU vLLM starts only if its share of the memory is free. Beside the policy alone that is as true of a resumed run as
    # of a fresh one: a whole reference and the optimizer's state come after it. All processes build at once, waiting for each
    # other inside of vLLM.
    engine = build_engine(recipe, data.location, processes, logs, say)
    with ExitStack() as undo:
        undo.callback(engine.close)
        if needs_reference and reference is None:
            reference = build_reference(recipe, policy)
        optim = recipe.optim
        trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=optim.learning_rate, weight_decay=optim.weight_decay)
        # By the name `constant` transformers takes no notice of a warm-up.
        name = "constant_with_warmup" if optim.schedule == "constant" and optim.warmup_steps else optim.schedule
        schedule = get_scheduler(name, optimizer, optim.warmup_steps, recipe.run.steps)
        with memory_for("the checkpoint's optimizer state", what_helps(recipe, "optimizer"), SetupError):
            state = Checkpoints.load(checkpoint, policy.model, optimizer, schedule, processes) if checkpoint else None
        done = 0 if state is None else state.step
        dtypes = recipe.model.dtype, recipe.engine.dtype or recipe.model.dtype
        probe = Probe(
            trainer=TrainerSide(policy=policy, budget=optim.micro_batch_tokens, processes=processes),
            engine=engine,
            seat=seat,
            expected=Settings(
                dtype=dtypes[1],
                head_dtype="float32" if recipe.model.fp32_head else dtypes[1],
                logprobs_mode="processed_logprobs",
                vocab_size=policy.head.weight.shape[0],
            ),
            tokenizer=data.tokenizer,
            prompts=data.prompts.take(0, PROMPTS),
            sampling=Sampling(
                max_tokens=recipe.rollout.max_completion_tokens,
                temperature=recipe.rollout.temperature,
                stop_ids=data.stop_ids,
                regex=recipe.engine.structured_regex if recipe.engine.kind == "colocated" else None,
            ),
            bounds=bounds_for(dtypes, recipe.sentinel.max_delta, recipe.sentinel.mean_delta),
            seed=recipe.run.seed,
            version=done,
        )
        if engine.weight_version != done or recipe.model.quantization:  # the engine opened other weights
            send_weights(engine, policy.model, done, processes)
        sides = Sides(
            recipe=recipe,
            sharded=sharded,
            algorithm=algorithm,
            reference=reference,
            optimizer=optimizer,
            schedule=schedule,
            probe=probe,
            base=base,
            began_with=weights,
            done=done,
            position=0 if state is None else state.position,
            nonfinite=0 if state is None else state.nonfinite,
        )
        undo.pop_all()
    return sides


def processes_an_engine(recipe: Recipe, processes: Processes) -> int:
    """How many processes ask the same engine."""
    if recipe.engine.kind == "server":
        return processes.world
    return recipe.engine.tensor_parallel_size if recipe.engine.kind == "colocated" else 1


def toy_gradient(sides: Sides) -> Callable[[int], Tensor]:
    """The gradient of the recipe's own loss on made-up rewards, as a function of the tokens of a micro-batch.

    For `rungs.loss_split`, in one process: pairs of completions of unequal lengths, one of each better than the other.
    """
    probe, update = sides.probe, sides.updater(None)

    def gradient(budget: int) -> Tensor:
        samples = [
            replace(sample, group_id=place // 2, sample_index=place % 2, **first_tokens(sample, TOY_TOKENS + 3 * place))
            for place, sample in enumerate(probe.sample(probe.sampling.logp_temperature, FEWER_TOKENS)[:TOY_ROWS])
        ]
        rewarded = [
            replace(sample, rewards={"toy": reward}, reward=reward, finish_reason="stop")
            for sample in samples
            for reward in [float(sample.sample_index)]
        ]
        kl = torch.zeros(len(samples)) if sides.algorithm.reference == "reward" else None
        signal = sides.algorithm.advantages(Scores.of(rewarded, {"toy": 1.0}, kl))
        window = Window.of(samples, signal, 0.0, budget, probe.processes)
        if sides.algorithm.reference == "loss":
            window.ref_logp.update((row, torch.tensor(sample.sampler_logp)) for row, sample in enumerate(window.samples))
        return update.gradient(window)

    return gradient


def first_tokens(sample: Sample, count: int) -> dict[str, Any]:
    """The fields of a completion that are one value a token, cut."""
    return {name: getattr(sample, name)[:count] for name in ("completion_ids", "sampler_logp", "loss_mask")}


def build_policy(recipe: Recipe, location: str, device: torch.device) -> Policy:
    """The model that is trained: weights in float32 whatever the forward computes in: bfloat16 swallows updates of 1e-6.

    Under an adapter the model's own weights are frozen, and held as the forward needs them.
    """
    settings = recipe.model
    dtype = getattr(torch, settings.dtype)
    held = torch.float32 if settings.lora is None else dtype
    with memory_for("the model", what_helps(recipe, "load"), SetupError):
        model = load_model(location, settings.revision, held, settings.attention, device, settings.quantization)
        if settings.lora is not None:
            add_adapter(model, settings.lora, recipe.run.seed, settings.revision)
    if settings.gradient_checkpointing:
        checkpoint_activations(model)
    return Policy(model, dtype, settings.fp32_head)


def same_reference(location: str, weights: str, began_with: str | None) -> None:
    """Raises UsageError where the reference would not be the one that the run began with."""
    if began_with not in (None, weights):
        raise UsageError(
            f"--resume: the weights in model.path {location} have changed since the last attempt (digest {began_with}, now"
            f" {weights}): the policy would be compared with another reference. Bring them back, or start a new run with"
            " model.path at a checkpoint of this one"
        )


def build_reference(recipe: Recipe, policy: Policy) -> Policy:
    """The frozen model as it is now: a copy, or the base of an adapted policy, which needs none."""
    if recipe.model.lora is not None:
        return Policy(policy.model, policy.dtype, policy.fp32_head, adapter=False)
    with memory_for("the reference, a copy of the model", what_helps(recipe, "load"), SetupError):
        return copy.deepcopy(policy).requires_grad_(False)


def checkpoint_activations(model: PreTrainedModel) -> None:
    """transformers checkpoints layers that are in training mode; the rest stays out of it, and dropout is off in those layers.

    A forward is a function of ids and weights.
    """
    model.gradient_checkpointing_enable()
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.training = True
            for name in [name for name, value in vars(module).items() if "dropout" in name and isinstance(value, float)]:
                setattr(module, name, 0.0)
