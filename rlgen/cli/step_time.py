"""The time of a step in `rlgen estimate`: what a recipe has to do, and rates that are measured, published or given."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

from rlgen.analysis.run import Run, number, read_run
from rlgen.errors import UsageError
from rlgen.metrics import Metric
from rlgen.models.gpus import GPUS
from rlgen.models.step_time import SPREAD, Rates, Work, decoding_steps, drawn_lengths, fit, simulate
from rlgen.recipe import Recipe
from rlgen.recipe.models import ASSUMED_PROMPT
from rlgen.run.find import find_run

if TYPE_CHECKING:
    from rlgen.models.memory import Counts, MemoryPlan

FLOAT32 = 4  # bytes
# Assumed: shares of a GPU's published memory bandwidth and operations that sampling and training reach.
DECODES, LEARNS = 0.6, 0.3
GROWS = 0.5  # assumed, where a run's steps do not tell: the share of decoding whose time grows with the sequences
NETWORK_GBS = 50.0  # assumed: one network card of 400 Gbit/s for each GPU
TIMES = (Metric.TIME_GENERATE, Metric.TIME_REWARD, Metric.TIME_TRAIN, Metric.TIME_SYNC, Metric.TIME_STEP)
ALIKE = 0.3  # relative range of the sequences that are decoded together, below which steps do not tell what one costs
LEAST = 3  # steps of a run from which rates are taken, after the first one, which is slower


@dataclass(frozen=True, slots=True)
class Machines:
    """What the options of `rlgen estimate` say about machines and rates. None: nothing."""

    nodes: int | None = None
    gpus: int | None = None  # of each node
    gpu: str | None = None  # a key of `GPUS`
    like: Sequence[Path] = ()  # runs
    tokens_per_second: float | None = None  # of an engine with all its sequences
    train_flops: float | None = None  # operations a second of a process
    bandwidth: float | None = None  # GB a second between processes
    mean_tokens: float | None = None  # of a completion

    def __post_init__(self) -> None:
        """Raises UsageError if options contradict or miss one another."""
        if self.gpu is not None and self.gpu not in GPUS:
            raise UsageError(
                f"--gpu {self.gpu}: known are {', '.join(GPUS)}; for others pass --tokens-per-second and --train-flops"
            )
        if self.gpu is not None and self.like:
            raise UsageError("--gpu and --like both say how fast it is: pass one of them")
        if self.rated != (self.tokens_per_second is not None and self.train_flops is not None) and not (self.gpu or self.like):
            raise UsageError("--tokens-per-second and --train-flops go together, without --gpu or --like")

    @property
    def processes(self) -> int | None:
        return None if self.nodes is None and self.gpus is None else (self.nodes or 1) * (self.gpus or 1)

    @property
    def rated(self) -> bool:
        """Returns whether anything says how fast it is."""
        return bool(self.gpu or self.like or self.tokens_per_second or self.train_flops)


def step_time(recipe: Recipe, machines: Machines, counts: "Counts", plan: "MemoryPlan", packed: bool) -> dict[str, Any]:
    """Returns {"phases": seconds by phase, "rates": ..., "work": ..., "assumed": sentences}.

    Raises UsageError if a run of `--like` is no measure for the recipe.
    """
    said = ["lengths of completions are log-normal, cut off at rollout.max_completion_tokens"]
    runs = [read_run(find_run(path)) for path in machines.like]
    work = work_of(recipe, plan.processes, packed)
    if runs:
        mean, spread = seen(runs, said)
        work = replace(work, mean_tokens=mean, spread=spread)
    if machines.mean_tokens is not None:
        work = replace(work, mean_tokens=min(machines.mean_tokens, work.most_tokens))
    elif not runs:
        said.append(f"completions have {work.mean_tokens:g} tokens in the mean, half of the most (--mean-tokens)")
    if work.ahead and recipe.engine.shares_cores and plan.device is None and machines.gpu is None:
        work = replace(work, ahead=0)
        said.append("sampling ahead saves nothing where engine and trainer compute on the same cores")
    for key in ("stream", "dynamic_sampling"):
        if getattr(recipe.rollout, key):
            said.append(f"what rollout.{key} changes is not counted")
    rates = (
        measured(recipe, runs, plan.processes, packed, said) if runs else published(recipe, machines, counts, plan, work, said)
    )
    if machines.tokens_per_second is not None:
        full = min(work.slots, -(-work.completions // work.engines))
        rates = replace(rates, decode_step=full / machines.tokens_per_second, decode_token=0.0)
        said.append("an engine decodes as often in a second with few sequences as with all")
    if machines.train_flops is not None:
        rates = replace(rates, train_token=operations_a_token(counts, plan) / machines.train_flops)
    return {"phases": simulate(work, rates), "rates": asdict(rates), "work": asdict(work), "assumed": said}


def work_of(recipe: Recipe, processes: int, packed: bool) -> Work:
    rollout, engine = recipe.rollout, recipe.engine
    remote = recipe.cluster.servers if recipe.cluster is not None else 0
    return Work(
        completions=recipe.samples_per_step,
        prompts=rollout.prompts_per_step,
        prompt_tokens=recipe.data.max_prompt_tokens or ASSUMED_PROMPT,
        packed=packed,
        mean_tokens=rollout.max_completion_tokens / 2,
        spread=SPREAD,
        most_tokens=rollout.max_completion_tokens,
        engines=remote or (engine.copies if engine.kind == "server" else max(1, processes // engine.callers)),
        slots=engine.max_num_seqs,
        waves=engine.waves,
        processes=processes,
        micro_batch_tokens=recipe.optim.micro_batch_tokens,
        updates=recipe.trainer.updates_per_rollout,
        ahead=rollout.async_steps,
        in_flight=recipe.in_flight,
    )


def measured_steps(run: Run) -> list[dict[Metric, float]]:
    """Returns what the steps after the first measured. Raises UsageError if there are too few."""
    keys = [*TIMES, Metric.TOKENS_GENERATED, Metric.COMPLETIONS_MEAN_TOKENS, Metric.COMPLETIONS_MAX_TOKENS]
    found = [{key: value for key in keys if (value := number(record, key)) is not None} for record in run.metrics[1:]]
    steps = [record for record in found if len(record) == len(keys)]
    if len(steps) < LEAST:
        raise UsageError(f"--like {run.path}: it has {len(steps)} measured steps after the first one; {LEAST} or more are needed")
    return steps


def seen(runs: Sequence[Run], said: list[str]) -> tuple[float, float]:
    """Returns mean and spread of the lengths that the runs sampled."""
    steps = [step for run in runs for step in measured_steps(run)]
    mean, longest = (
        float(np.mean([step[key] for step in steps])) for key in (Metric.COMPLETIONS_MEAN_TOKENS, Metric.COMPLETIONS_MAX_TOKENS)
    )
    then, spread = runs[0].recipe, SPREAD
    if longest < then.rollout.max_completion_tokens and then.samples_per_step > 1:
        # The largest of n normal numbers is about z; of log-normal ones, by their mean, exp(spread z - spread^2 / 2).
        z = NormalDist().inv_cdf((then.samples_per_step - 0.375) / (then.samples_per_step + 0.25))  # Blom 1958
        spread = float(z - np.sqrt(max(0.0, z**2 - 2 * np.log(longest / mean))))
    said.append(f"completions are as long as in the run: {mean:.4g} tokens in the mean, the longest of a step {longest:.4g}")
    return mean, spread


def measured(recipe: Recipe, runs: Sequence[Run], processes: int, packed: bool, said: list[str]) -> Rates:
    """Returns rates of the runs' steps. Raises UsageError if they train another model or sample with another engine."""
    rows = list[tuple[float, ...]]()  # of each step: decoding steps, tokens of an engine and of a process, passes, rows, seconds
    for run in runs:
        then = run.recipe
        for what, ours, theirs in (
            ("model.path", recipe.model.path, then.model.path),
            ("model.dtype", recipe.model.dtype, then.model.dtype),
            ("engine.kind", recipe.engine.kind, then.engine.kind),
            ("rollout.async_steps", 0, then.rollout.async_steps),  # otherwise its times overlap
        ):
            if ours != theirs:
                raise UsageError(f"--like {run.path}: its {what} is {theirs}, and {ours} is needed")
        work = work_of(then, then.world or processes, packed)
        each = -(-work.completions // work.engines)
        for step in measured_steps(run):
            generated, most = step[Metric.TOKENS_GENERATED], step[Metric.COMPLETIONS_MAX_TOKENS]
            if each > work.slots:
                like = replace(work, mean_tokens=step[Metric.COMPLETIONS_MEAN_TOKENS])
                most = decoding_steps(drawn_lengths(like, np.random.default_rng(0), each).tolist(), work.slots, work.waves)
            own = work.updates * work.trained(generated)
            rows.append((most, generated / work.engines, own, work.updates, work.completions, *(step[key] for key in TIMES)))
    decoding, tokens, own_tokens, passes, completions, generate, reward, train, sync, whole = np.array(rows).T
    decode_step, decode_token = fit(decoding, tokens, generate, GROWS)
    train_token, update = fit(own_tokens, passes, train, 0.0)
    names = ", ".join(run.name for run in runs)
    if np.ptp(tokens / decoding) < ALIKE * np.mean(tokens / decoding):
        said.append(f"its steps are alike: {GROWS:.0%} of the sampling grows with the sequences (two --like of other sizes tell)")
    said.append(
        f"rates are measured in {len(rows)} steps of {names}, with {processes} processes unless its recipe says otherwise"
    )
    rest, a_reward = np.median(whole - generate - reward - train - sync), np.median(reward / completions)
    return Rates(decode_step, decode_token, float(a_reward), train_token, 0.0, update, float(np.median(sync)), float(rest))


def published(recipe: Recipe, machines: Machines, counts: "Counts", plan: "MemoryPlan", work: Work, said: list[str]) -> Rates:
    """Returns rates from a GPU's data sheet; without one those of sampling and training are 0, which options then give."""
    gpu = GPUS[machines.gpu] if machines.gpu else None
    shards = (plan.shard or plan.processes) if plan.sharded else 1
    together = shards if plan.sharded else plan.processes
    near = gpu is not None and together <= (machines.gpus or (1 if machines.nodes else together))
    link = 1e9 * (machines.bandwidth or (gpu.link_gbs if gpu is not None and near else NETWORK_GBS))
    said += [f"processes send each other {link / 1e9:g} GB a second (--bandwidth)", "rewards and saving take no time"]
    trained = counts.sides * plan.adapter_rank if plan.adapter_rank else counts.parameters
    weights = plan.engine_bytes * counts.parameters
    gathers = (2 * plan.trainer_bytes * counts.parameters + FLOAT32 * trained) / link if shards > 1 else 0.0
    sends = 2 * FLOAT32 * trained / link if plan.processes > 1 and not plan.sharded else 0.0
    sync = weights / link if plan.processes > 1 or recipe.engine.memory == "elsewhere" else 0.0
    if gpu is None:
        return Rates(0.0, 0.0, 0.0, 0.0, gathers, sends, sync, 0.0)
    memory, operations = DECODES * 1e9 * gpu.memory_gbs, LEARNS * 1e12 * gpu.tflops
    said.append(
        f"{machines.gpu}: of the published {gpu.tflops:g} TFLOP/s training reaches {LEARNS:.0%}, and of {gpu.memory_gbs:g} GB a"
        f" second of memory decoding reaches {DECODES:.0%}"
    )
    cache = plan.engine_bytes * counts.cache_token * (work.prompt_tokens + work.mean_tokens / 2)
    decode_step, decode_token = (size / plan.tensor_parallel / memory for size in (weights, cache))
    optimizer = 7 * FLOAT32 * trained / shards / memory  # reads and writes weights and moments, and reads gradients
    a_token = operations_a_token(counts, plan) / operations
    return Rates(decode_step, decode_token, 0.0, a_token, gathers, sends + optimizer, sync, 0.0)


def operations_a_token(counts: "Counts", plan: "MemoryPlan") -> float:
    """Returns the operations of training on a token: 6 a weight, 4 with adapters, 2 more for checkpointing and a reference."""
    return counts.parameters * ((4.0 if plan.adapter_rank else 6.0) + 2 * plan.checkpointing + 2 * plan.reference)
