"""Estimates the GPU memory of a recipe in each phase, and which settings reduce it: `rlgen estimate`. Loads no weights."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlgen.cli.output import echo, plain_table
from rlgen.cli.step_time import Machines, step_time
from rlgen.cli.validate import can_open
from rlgen.errors import RecipeError, SetupError
from rlgen.models.gpus import GPUS, USABLE
from rlgen.recipe import Recipe, load_recipe
from rlgen.recipe.engines import EngineRecipe, ServerEngineRecipe, VllmRecipe
from rlgen.recipe.trainers import PolicyRecipe
from rlgen.run.console import Terminal

if TYPE_CHECKING:
    from rlgen.models.memory import Counts, MemoryPlan, Parts

GIB = 1 << 30
NOTHING = Machines()
NO_CACHE: dict[str, Any] = {"cache_gib": None, "share": None, "tensor_parallel": 1}  # for an engine that uses no share of a GPU


def estimate_command(
    path: Path, overrides: list[str], gpu_gib: float | None, as_json: bool, machines: Machines = NOTHING
) -> None:
    """Prints the table, whether it fits, and which settings to change; and the time of a step, if anything says how fast it is.

    Counts the prompts if they are on this machine.
    """
    recipe = load_recipe(path, overrides).recipe
    if machines.processes is not None:
        key = "processes.count" if recipe.cluster is None else "cluster.trainers"
        recipe = load_recipe(path, [*overrides, f"{key}={machines.processes}"]).recipe
    import torch

    from rlgen.models.load import locate

    # A config alone is enough for an estimate.
    if can_open(recipe) and (Path(locate(recipe.model.path)) / "tokenizer_config.json").exists():
        from rlgen.setup.data import open_data

        recipe = open_data(recipe).recipe
    device = int(gpu_gib * GIB) if gpu_gib else None
    if device is None and machines.gpu is not None:
        device = int(GPUS[machines.gpu].memory_gb * USABLE * GIB)
    if device is None and torch.cuda.is_available():
        device = torch.cuda.mem_get_info(0)[1]
    report = memory_report(recipe, device, machines)
    report["hints"] = [hint for hint in report["hints"] if is_valid(path, [*overrides, hint["setting"]])]
    echo(json.dumps(report, indent=2)) if as_json else print_report(report)


def is_valid(path: Path, overrides: list[str]) -> bool:
    """Returns whether the recipe is valid with these overrides, with any number of processes."""
    try:
        load_recipe(path, [*overrides, "processes.count=null"])
    except RecipeError:
        return False
    return True


def memory_report(recipe: Recipe, device: int | None, machines: Machines = NOTHING) -> dict[str, Any]:
    """Returns the whole report. All memory is in bytes; `device` is the GPU's memory, None if not known.

    The phases are those of rank 0; in a run of several processes no other one needs more.
    """
    import torch

    from rlgen.models.load import load_config, locate
    from rlgen.models.memory import HOW, cache_needed, count, engine_parts, hints, needs, peak

    if recipe.data.columns.images is not None:
        raise SetupError("data.columns.images: `rlgen estimate` cannot count a vision tower; it takes text models only")
    config = load_config(locate(recipe.model.path), recipe.model.revision)
    plan, dtype = plan_of(recipe, device), getattr(torch, recipe.model.dtype)

    def counted(rows: int) -> "Counts":
        return count(config, rows, plan.length, dtype, recipe.model.attention, recipe.processes.tensor)

    counts = counted(plan.rows)
    phases = needs(counts, plan)
    phase, most = peak(phases)
    # online_dpo always needs its reference
    offers = frozenset(["shards", "adapters", *(["no reference"] if isinstance(recipe.trainer, PolicyRecipe) else [])])
    found = hints(counts, counted(plan.rows // 2) if plan.rows > 1 else None, plan, offers)
    held = engine_parts(counts, plan).get("KV cache", 0)
    engine = recipe.engine
    launched = engine if isinstance(engine, ServerEngineRecipe) and engine.launch and plan.engine == "elsewhere" else None
    a_gpu = replace(plan, engine="beside", **cache_of(engine, device))
    sequence = cache_needed(counts, replace(plan, sequences=1))  # the KV cache of one sequence of full length
    return {
        "model": recipe.model.path,
        "parameters": counts.parameters,
        "micro_batch": {"rows": plan.rows, "tokens_a_row": plan.length},
        "device": device,
        "phases": phases,
        "peak": {"phase": phase, "bytes": most},
        "processes": {"count": plan.processes, "peak_of_others": peak(needs(counts, replace(plan, first=False)))[1]},
        "fits": None if device is None else most <= device and (plan.engine == "elsewhere" or held >= sequence),
        "servers": launched and {"count": launched.servers, "gpus": list(launched.gpus), "a_gpu": engine_parts(counts, a_gpu)},
        "sequences": {"decoded_together": plan.sequences, "cache_holds": held // max(1, sequence)},
        "hints": [hint._asdict() for hint in found],
        "how": {part: HOW[part] for parts in phases.values() for part in parts},
        "time": step_time(recipe, machines, counts, plan, packs(recipe, device)) if machines.rated else None,
    }


def plan_of(recipe: Recipe, device: int | None) -> "MemoryPlan":
    import torch

    from rlgen.algorithms.registry import build_algorithm
    from rlgen.models.memory import ADAMW, ADAMW_8BIT, QUANTIZED, MemoryPlan

    engine = recipe.engine
    processes = recipe.world or int(os.environ.get("WORLD_SIZE", "1"))  # without a number in the recipe, the launcher's
    rows, length = micro_batch(recipe, -(-recipe.samples_per_step // processes), device)
    return MemoryPlan(
        rows=rows,
        length=length,
        trainer_bytes=getattr(torch, recipe.model.dtype).itemsize,
        fp32_head=recipe.model.fp32_head,
        checkpointing=recipe.model.gradient_checkpointing,
        offload_activations=recipe.model.offload_activations,
        offload_moments=recipe.optim.offload,
        reference=build_algorithm(recipe.trainer).reference != "none",
        adapter_rank=recipe.model.lora.rank if recipe.model.lora else None,
        quantized=QUANTIZED[recipe.model.quantization] if recipe.model.quantization else None,
        processes=processes,
        moment_bytes=ADAMW_8BIT if recipe.optim.kind == "adamw_8bit" else ADAMW,
        sharded=recipe.processes.strategy == "fsdp",
        shard=recipe.processes.shard,
        defer_sync=recipe.processes.defer_sync,
        streams=recipe.rollout.stream,
        engine=engine.memory,
        engine_bytes=getattr(torch, engine.dtype or recipe.model.dtype).itemsize,
        sequences=min(engine.max_num_seqs, -(-recipe.samples_per_step // engine.copies)),
        model_len=(engine.max_model_len if isinstance(engine, VllmRecipe) else None) or recipe.engine_row_tokens,
        sleeps=engine.sleeps,
        device=device,
        **(cache_of(engine, device) if engine.memory != "elsewhere" else NO_CACHE),
    )


def micro_batch(recipe: Recipe, samples: int, device: int | None) -> tuple[int, int]:
    """Returns the rows of the largest micro-batch of a process with `samples` rows, and the tokens of each.

    A full micro-batch has as many tokens as the budget allows, whether its rows are many and short or few and long. Packed rows
    share the prompt of their group. Processes of one `processes.context` share out the tokens of their rows.
    """
    together = recipe.processes.sharing
    longest, budget, samples = recipe.max_row_tokens, recipe.optim.micro_batch_tokens * together, samples * together
    if packs(recipe, device):
        completion = recipe.rollout.max_completion_tokens
        longest = completion + -(-(longest - completion) // recipe.rollout.group_size)
    rows = min(max(1, budget // longest), samples)
    return rows, -(-(budget // rows if rows < samples else longest) // together)


def packs(recipe: Recipe, device: int | None) -> bool:
    """Returns whether rows are packed, as far as a recipe tells."""
    kernels = device is None or recipe.model.dtype == "bfloat16"  # as `can_pack`
    plain = not recipe.model.compile and recipe.model.attention == "sdpa" and recipe.data.columns.images is None
    return bool(recipe.optim.packing or (recipe.optim.packing is None and kernels and plain))


def cache_of(engine: EngineRecipe, device: int | None) -> "dict[str, Any]":
    """Returns the fields of `MemoryPlan` about an engine's share of a GPU."""
    from rlgen.engines.vllm_compat import GPU_SHARE

    if not isinstance(engine, VllmRecipe):
        return NO_CACHE
    by_share = engine.kv_cache_gib is None and device is not None
    return {
        "cache_gib": engine.kv_cache_gib,
        "share": (engine.gpu_memory_utilization or GPU_SHARE) if by_share else None,
        "tensor_parallel": engine.tensor_parallel_size,
    }


def print_report(report: dict[str, Any]) -> None:
    phases: dict[str, Parts] = report["phases"]
    batch = report["micro_batch"]
    console = Terminal(quiet=False)
    console.say(
        f"{report['model']}: {report['parameters']:,} parameters; micro-batches of {batch['rows']} rows of"
        f" {batch['tokens_a_row']} tokens; GiB " + ("on one GPU" if report["device"] else "of this machine's memory")
    )
    table = plain_table(["part"], list(phases))
    for part in dict.fromkeys(part for parts in phases.values() for part in parts):
        table.add_row(part, *(gib(parts[part]) if part in parts else "" for parts in phases.values()))
    table.add_section()
    table.add_row("together", *(gib(sum(parts.values())) for parts in phases.values()), style="bold")
    console.print(table)
    console.say("\n".join(conclusions(report)))


def conclusions(report: dict[str, Any]) -> list[str]:
    """Returns the lines under the table: the peak, whether it fits, and the settings to change."""
    most, phase, device = report["peak"]["bytes"], report["peak"]["phase"], report["device"]
    sequences = report["sequences"]
    lines = [f"peak: {gib(most)} GiB, in phase {phase}"]
    if (processes := report["processes"])["count"] > 1:
        lines[0] += f", of the first of {processes['count']} processes; {gib(processes['peak_of_others'])} GiB of each other one"
    if device is None:
        lines.append("no GPU here: pass --gpu-gib N to see whether it fits; the KV cache is counted for all sequences at once")
    else:
        room, verdict = device - most, "does not fit: the KV cache cannot hold one sequence of full length"
        if room < 0:
            verdict = f"does not fit, {gib(-room)} GiB too much"
        elif report["fits"]:
            verdict = f"fits, {gib(room)} GiB are left"
        lines.append(f"of {gib(device)} GiB: {verdict}")
    if 0 < sequences["cache_holds"] < sequences["decoded_together"]:
        lines.append(
            f"the KV cache holds {sequences['cache_holds']} of {sequences['decoded_together']} sequences of full length;"
            " longer completions wait for each other"
        )
    if servers := report["servers"]:
        each = gib(sum(servers["a_gpu"].values()))
        lines.append(
            f"launched servers: {servers['count']}, on GPUs {', '.join(servers['gpus'])}, not in this table: {each} GiB on each"
        )
    if report["hints"]:
        lines.append("settings that reduce it, with the GiB that each saves at the peak (and in that phase):")
        lines += [
            f"  --set {hint['setting']:<36} {gib(hint['saves']):>6} ({gib(hint['of_phase'])})  {hint['why']}"
            for hint in report["hints"]
        ]
    if time := report["time"]:
        parts = ", ".join(f"{name} {seconds:.3g}" for name, seconds in time["phases"].items() if name != "step" and seconds)
        lines.append(f"a step takes {time['phases']['step']:.3g} s ({parts}), if this holds:")
        lines += [f"  {sentence}" for sentence in time["assumed"]]
    lines.append("an estimate: parameters and activations are counted, overheads assumed; --json says how each part is known")
    return lines


def gib(number: int) -> str:
    """Returns a number of bytes as text in GiB."""
    return f"{number / GIB:.2f}"
