"""Rows about an update of the policy: how fast it is for what the device can do, and how much memory its phases take."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gpu_rows.measure import VENDOR, device_name, matmul_rate, peak_of, seconds_of
from gpu_rows.models import config_of, random_batch, random_model
from gpu_rows.record import GIB, Finding, Place, Value, judged

GROUP = 8
PROMPT = 64
# An estimate may be too large rather than too small. With gradient checkpointing it knows a layer's size on average alone.
LEAST, MOST = 0.85, {"activations kept": 1.5, "checkpointed": 2.2, "offloaded": 2.2}


@dataclass(frozen=True, slots=True)
class Shape:
    """A micro-batch: as many tokens as `optim.micro_batch_tokens` has by default."""

    rows: int
    length: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length


def shape_of(place: Place) -> Shape:
    """Returns 16 rows of 1,024 tokens; fewer rows on a GPU of less than 64 GiB, 8 of 128 tokens in a rehearsal."""
    if not place.gpu:
        return Shape(GROUP, 128)
    small = torch.cuda.get_device_properties(0).total_memory < 64 * GIB
    return Shape(GROUP if small else 2 * GROUP, 1024)


def update(place: Place) -> Finding:
    """The trainer's own update with GRPO on one micro-batch: time, and its share of the device's bfloat16 rate (MFU).

    Packed, padded, and padded with compiled layers. Only the packed one computes each prompt once."""
    shape, config = shape_of(place), config_of(place)
    rate, name = matmul_rate(place.device), device_name(place.device)
    values, numbers = list[Value](), dict[str, Any](parameters=parameters(config), products_tflops=rate / 1e12)
    for kind in ("packed", "padded", "compiled"):
        seconds, passes = update_seconds(place, config, shape, kind)
        gc.collect()  # a policy is part of a cycle
        work = flops(config, shape, kind == "packed")
        values.append(Value(f"{kind}: MFU, relative to the measured matrix product", 100 * work / seconds / rate, "%"))
        if name in VENDOR:
            of_vendor = 100 * work / seconds / VENDOR[name] / 1e12
            values.append(Value(f"{kind}: MFU, relative to the vendor's {VENDOR[name]:g} TFLOP/s", of_vendor, "%"))
        values += [
            Value(f"{kind}: an update", 1e3 * seconds, "ms"),
            Value(f"{kind}: forward and backward within the update", 1e3 * passes, "ms"),
            Value(f"{kind}: tokens", shape.tokens / seconds, "a second"),
        ]
        numbers[f"{kind}_tflop"] = work / 1e12
    return judged(values, f"{said(config)}, {shape.rows} rows of {shape.length} tokens, bfloat16, GRPO", numbers)


def update_seconds(place: Place, config: Any, shape: Shape, kind: str) -> tuple[float, float]:
    """Returns the seconds of an update, and of its forward and backward pass."""
    updater, train_batch = open_updater(place, config, shape, kind)

    def train() -> None:
        metrics, skipped = updater(train_batch, 1)
        train_batch.mismatches.clear()
        if skipped is not None or metrics["updates/done"] != 1:
            raise RuntimeError(f"the update was not made: {metrics}, {skipped}")

    seconds = seconds_of(train, place.device, repeats=5, warm=3)
    passes = seconds_of(lambda: updater.attempt(train_batch), place.device, repeats=5, warm=1)
    return seconds, passes


def open_updater(place: Place, config: Any, shape: Shape, kind: str) -> tuple[Any, Any]:
    """Returns an updater as a run has it, and a train batch of one micro-batch of made-up samples."""
    from rlgen.algorithms.grpo import GRPO
    from rlgen.models.compiled import compile_layers
    from rlgen.models.policy import Policy
    from rlgen.processes import Processes
    from rlgen.recipe.trainers import GRPORecipe
    from rlgen.rollout.table import RowTable
    from rlgen.trainers.train_batch import TrainBatch
    from rlgen.trainers.update import Updater
    from rlgen.types import WHOLE

    processes = (
        Processes.alone()
        if place.gpu
        else Processes(rank=0, world=1, device=torch.device("cpu"), timeout=0.0, group=None, store=None)
    )
    policy = Policy(random_model(config, place.device), torch.bfloat16, fp32_head=True)
    algorithm = GRPO(GRPORecipe())
    samples = made_up(shape, config.vocab_size)
    if kind == "packed" and (reason := policy.pack(prompts_of(samples))):
        raise RuntimeError(f"its rows cannot be packed: {reason}")
    if kind == "compiled":
        compile_layers(policy.model)
    table = RowTable.gather(samples, processes)
    advantages = algorithm.advantages(table.scores({"made up": 1.0}))
    train_batch = TrainBatch.of(table, samples, advantages, 0.0, shape.tokens, processes, packed=policy.packed)
    updater = Updater(
        processes=processes,
        sharded=False,
        policy=policy,
        optimizer=torch.optim.AdamW(policy.parameters(), lr=1e-6, weight_decay=0.0, fused=place.gpu),
        algorithm=algorithm,
        updates=1,
        max_grad_norm=1.0,
        distribution=WHOLE,
        max_tokens=shape.length - PROMPT,
        watch=None,
        less_memory=lambda phase: (),
        deterministic=False,
    )
    return updater, train_batch


def made_up(shape: Shape, vocabulary: int, ragged: bool = False) -> Any:
    """Returns samples of random ids, in groups of eight with one prompt whose rewards differ; `ragged`: and whose lengths do."""
    import numpy as np

    from rlgen.rollout.samples import Samples
    from rlgen.types import Sample, ids_of, logp_of, one_span

    random = np.random.default_rng(0)
    prompts = random.integers(0, vocabulary, (-(-shape.rows // GROUP), PROMPT)).tolist()
    counts = [(shape.length - PROMPT) * (row % GROUP + 1 if ragged else GROUP) // GROUP for row in range(shape.rows)]
    samples = [
        Sample(
            group_id=row // GROUP,
            sample_index=row % GROUP,
            prompt_ids=ids_of(prompts[row // GROUP]),
            completion_ids=ids_of(random.integers(0, vocabulary, count).tolist()),
            sampler_logp=logp_of([-8.0] * count),
            spans=one_span(count, 0),
            finish_reason="length",
            seed=row,
            completion="",
            rewards={"made up": float(row % GROUP)},
            reward=float(row % GROUP),
        )
        for row, count in enumerate(counts)
    ]
    return Samples.of(samples)


def prompts_of(samples: Any) -> list[Any]:
    """Returns the prompt of each group: on these a policy finds out whether it can pack."""
    return [samples.prompt_ids[row] for row in range(0, len(samples.prompt_ids), GROUP)]


def parameters(config: Any) -> int:
    """Returns the parameters of a model of `config`, embedding included."""
    return sum(parameter.numel() for parameter in random_model(config, "meta").parameters())


def flops(config: Any, shape: Shape, packed: bool) -> float:
    """Returns the operations that an update needs, none of them counted twice: 6 a weight and token, and causal attention.

    The embedding is looked up, and the head runs for the tokens of completions alone. Packed rows of a group share their prompt.
    """
    head = config.vocab_size * config.hidden_size
    layers = parameters(config) - head
    trained = shape.rows * (shape.length - PROMPT)
    shared = shape.rows - shape.rows // GROUP if packed else 0  # prompts that are not computed again
    pairs = (shape.rows * shape.length**2 - shared * PROMPT**2) / 2
    scores = 12 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * pairs
    return float(6 * layers * (shape.tokens - shared * PROMPT) + 6 * head * trained + scores)


def said(config: Any) -> str:
    """Returns the model's size in words."""
    return f"{parameters(config) / 1e6:,.1f} million parameters"


def memory(place: Place) -> Finding:
    """What each phase of a step takes, beside `rlgen estimate`; with activations kept; computed again; and, with what is
    kept and the moments, in the machine's memory."""
    from rlgen.models.memory import count, needs

    shape, config = shape_of(place), config_of(place)
    counts = count(config, shape.rows, shape.length, torch.bfloat16, "sdpa")
    values, numbers = [], {}
    for kind in MOST:
        phases = {name: measurable(parts) for name, parts in needs(counts, plan_of(place, shape, kind)).items()}
        measured = phases_of(place, config, shape, kind)
        gc.collect()  # a policy is part of a cycle
        numbers[kind] = {name: {"gib": most / GIB, "estimated_gib": phases[name] / GIB} for name, most in measured.items()}
        for name, most in measured.items():
            bounds = (LEAST, MOST[kind])
            values.append(Value(f"{kind}, {name}: estimate ÷ the {size(most)} measured", phases[name] / most, "×", *bounds))
    if place.gpu:  # what no tensor of the trainer has: of the estimate this is the 1 GiB of `overhead`
        reserved = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        free, total = torch.cuda.mem_get_info()
        numbers["beside_tensors"] = {"kept_by_the_allocator_gib": reserved / GIB, "in_use_gib": (total - free) / GIB}
    return judged(values, f"{said(config)}, {shape.rows} rows of {shape.length} tokens, bfloat16", numbers)


def measurable(parts: dict[str, int]) -> int:
    """Returns the bytes of a phase that this row can measure: it saves no checkpoint, and an overhead is no tensor."""
    return sum(count for part, count in parts.items() if part not in ("overhead", "copy to save"))


def size(count: int) -> str:
    """Returns bytes in GiB, or in MiB where they are few."""
    return f"{count / GIB:.2f} GiB" if count >= GIB // 10 else f"{count / (1 << 20):.1f} MiB"


def plan_of(place: Place, shape: Shape, kind: str) -> Any:
    """Returns what `rlgen estimate` makes of a recipe whose engine is elsewhere."""
    from rlgen.models.memory import MemoryPlan

    return MemoryPlan(
        rows=shape.rows,
        length=shape.length,
        trainer_bytes=2,
        fp32_head=True,
        checkpointing=kind != "activations kept",
        offload_activations=kind == "offloaded",
        offload_moments=kind == "offloaded",
        reference=False,
        adapter_rank=None,
        processes=1,
        sharded=False,
        engine="elsewhere",
        engine_bytes=2,
        sequences=1,
        model_len=shape.length,
        cache_gib=None,
        share=None,
        tensor_parallel=1,
        sleeps=False,
        device=torch.cuda.mem_get_info()[1] if place.gpu else None,
    )


def phases_of(place: Place, config: Any, shape: Shape, kind: str) -> dict[str, int]:
    """Returns the most bytes of tensors in each phase of a step that is not the first: moments and gradients exist."""
    from rlgen.models.policy import Policy
    from rlgen.setup.policy import checkpoint_activations
    from rlgen.setup.train_state import offload_moments
    from rlgen.types import WHOLE

    model = random_model(config, place.device)
    if kind != "activations kept":
        checkpoint_activations(model)
    policy, offloads = Policy(model, torch.bfloat16, fp32_head=True), kind == "offloaded"
    policy.offload_activations = offloads
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=place.gpu)
    if offloads:
        offload_moments(optimizer, place.device)
    batch = random_batch(shape.rows, shape.length, 1, config.vocab_size, place.device)
    kept: list[torch.Tensor] = []

    def forward() -> None:
        kept.append(policy(batch, (WHOLE,), "value").logp.sum())

    def backward() -> None:
        kept.pop().backward()

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()

    for run in (forward, backward, step, forward, backward):  # moments and gradients exist from here on
        run()
    each = 8 if offloads and place.gpu else 16  # bytes of weights and gradients, and of two moments
    held = each * sum(parameter.numel() for parameter in policy.parameters())
    found, now = {}, held
    phases: dict[str, Callable[[], None]] = {"forward": forward, "backward": backward, "optimizer": step}
    for name, run in phases.items():
        peak = peak_of(run, place.device)
        found[name] = now + peak.most
        now += peak.left
    return found
