"""Rows that compare the device's arithmetic with the CPU's, and a sharded policy with a whole one."""

import copy
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from gpu_rows.measure import peak_of, seconds_of
from gpu_rows.models import SMALL, config_of, random_batch, random_model, saved_model
from gpu_rows.record import GIB, Finding, Place, Value, judged, skipped
from gpu_rows.runs import recipe
from gpu_rows.update import GROUP, Shape, made_up, prompts_of

# Bounds of float32: a product in TF32 exceeds both.
LOGP_FLOAT32, GRADIENT_FLOAT32 = 1e-4, 1e-4
# bfloat16 rounds as much everywhere: the device may be as far from float64 as the CPU, times this.
OF_THE_CPU = 2.0
OF_PADDED = 1.5  # and packed rows as far from float32 as padded ones
SHARDED = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # of the gradient's norm


@dataclass(frozen=True, slots=True)
class Scored:
    """What one forward and backward pass gave, in float64 on the CPU."""

    logp: torch.Tensor  # [N] of the completions' tokens
    gradients: dict[str, torch.Tensor]  # of a fixed weighted mean of `logp`, by parameter


@dataclass(frozen=True, slots=True)
class Distance:
    """How far `Scored` is from that of float64."""

    mean: float  # of |Δ logp|, nats
    most: float
    gradient: float  # ‖Δ‖ / ‖gradient‖ over all parameters
    worst: float  # the same of the parameter where it is largest

    @classmethod
    def between(cls, one: Scored, exact: Scored) -> "Distance":
        """Compares with `exact`."""
        delta = (one.logp - exact.logp).abs()
        parts = [((one.gradients[name] - wanted).norm(), wanted.norm()) for name, wanted in exact.gradients.items()]
        off, norm = (torch.stack(column).norm().item() for column in zip(*parts, strict=True))
        worst = max((part / whole).item() for part, whole in parts if whole > 0)
        return cls(delta.mean().item(), delta.max().item(), off / norm, worst)


def scored(model: Any, dtype: torch.dtype, batch: Any, prompts: Any = None) -> Scored:
    """Runs the policy that computes in `dtype` on a batch; packed if there are `prompts` to try. Changes `model`."""
    from rlgen.models.policy import Policy
    from rlgen.types import WHOLE

    policy = Policy(model, dtype, fp32_head=True)
    if prompts is not None and (reason := policy.pack(prompts)):
        raise RuntimeError(f"its rows cannot be packed: {reason}")
    hidden, rows, columns = policy.hidden(batch)
    logp = policy.head.scores(hidden, batch.completion_ids[rows, columns], (WHOLE,), "none", True).logp[0]
    signs = torch.randn(len(logp), generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(logp)
    (signs * logp).mean().backward()
    gradients = {name: p.grad.double().cpu() for name, p in policy.model.named_parameters() if p.grad is not None}
    return Scored(logp.detach().double().cpu(), gradients)


def arithmetic(name: str) -> Callable[[Place], Finding]:
    """Log-probs and gradients in the dtype `name`, on the device and on the CPU, each beside float64 on the CPU."""
    dtype = getattr(torch, name)

    def check(place: Place) -> Finding:
        config = config_of(place, num_hidden_layers=12 if place.gpu else 2)  # float64 on the CPU takes its time
        model = random_model(config, "cpu")
        rows, length = (4, 96) if place.gpu else (4, 48)
        batches = {device: random_batch(rows, length, 16, config.vocab_size, device) for device in ("cpu", place.device)}
        exact = scored(copy.deepcopy(model).double(), torch.float64, batches["cpu"])
        of_cpu = Distance.between(scored(copy.deepcopy(model), dtype, batches["cpu"]), exact)
        of_device = Distance.between(scored(copy.deepcopy(model).to(place.device), dtype, batches[place.device]), exact)
        if dtype == torch.float32:
            values = [
                Value("log-probs: max |Δ| to float64", of_device.most, "nats", most=LOGP_FLOAT32),
                Value("gradient: ‖Δ‖/‖g‖ to float64", of_device.gradient, "", most=GRADIENT_FLOAT32),
                Value("gradient: the same, worst parameter", of_device.worst, ""),
            ]
        else:
            values = [
                Value("log-probs: mean |Δ| to float64", of_device.mean, "nats"),
                Value("log-probs: mean |Δ| ÷ mean |Δ| on the CPU", of_device.mean / of_cpu.mean, "×", most=OF_THE_CPU),
                Value("gradient: ‖Δ‖/‖g‖ to float64", of_device.gradient, ""),
                Value("gradient: ‖Δ‖/‖g‖ ÷ that on the CPU", of_device.gradient / of_cpu.gradient, "×", most=OF_THE_CPU),
            ]
        numbers = {"cpu": vars_of(of_cpu), "device": vars_of(of_device), "float32_products": torch.get_float32_matmul_precision()}
        layers = f"{config.num_hidden_layers} layers of {config.hidden_size}, {rows} rows of {length} tokens"
        return judged(values, layers, numbers)

    return check


def vars_of(distance: Distance) -> dict[str, float]:
    """Returns the fields by name."""
    return {name: getattr(distance, name) for name in Distance.__slots__}


def packed(place: Place) -> Finding:
    """Packed rows in bfloat16, by a GPU's kernel for rows of many lengths: as near to float32 as padded rows are. In one of two
    models half of the layers have a window that is shorter than a prompt."""
    from rlgen.models.packing import can_pack
    from rlgen.rollout.batch import collate

    device = torch.device(place.device)
    if not can_pack(device, torch.bfloat16):
        return skipped("this GPU has no kernel for packed rows: their rows are padded here")
    layers, length = (4, 512) if place.gpu else (2, 96)
    windowed = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": layers // 2}
    values, numbers = [], {}
    for name, window in (("full attention", dict[str, int]()), ("sliding window", windowed)):
        config = config_of(place, num_hidden_layers=layers, **({"vocab_size": 32_768} if place.gpu else {}), **window)
        samples = made_up(Shape(2 * GROUP, length), config.vocab_size, ragged=True)
        batch = collate(samples, range(2 * GROUP), device)
        model = random_model(config, place.device)
        exact = scored(copy.deepcopy(model), torch.float32, batch)
        padded = Distance.between(scored(copy.deepcopy(model), torch.bfloat16, batch), exact)
        own = Distance.between(scored(model, torch.bfloat16, batch, prompts_of(samples)), exact)
        values += [
            Value(f"{name}: log-probs, mean |Δ| to float32", own.mean, "nats"),
            Value(f"{name}: log-probs, mean |Δ| ÷ that of padded rows", own.mean / padded.mean, "×", most=OF_PADDED),
            Value(f"{name}: gradient, ‖Δ‖/‖g‖ to float32", own.gradient, ""),
            Value(f"{name}: gradient, ‖Δ‖/‖g‖ ÷ that of padded rows", own.gradient / padded.gradient, "×", most=OF_PADDED),
        ]
        numbers[name] = {"packed": vars_of(own), "padded": vars_of(padded), "layers": config.layer_types}
    return judged(values, f"{layers} layers, {2 * GROUP} rows of up to {length} tokens in two groups", numbers)


def sharded(place: Place) -> Finding:
    """FSDP on one device, opened as a run does, and packed where a run packs: the same log-probs and gradients as a whole policy,
    and what it costs in time and memory."""
    from rlgen.models.packing import can_pack
    from rlgen.models.sharding import Meshes
    from rlgen.processes import Processes
    from rlgen.recipe import load_recipe
    from rlgen.rollout.batch import collate
    from rlgen.setup.policy import build_policy, open_shards
    from rlgen.setup.settings import TrainSettings
    from rlgen.types import WHOLE

    device = torch.device(place.device)
    if place.gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if place.gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    processes = Processes(rank=0, world=1, device=device, timeout=60.0, group=None, store=None)
    folder = str(saved_model(place))
    samples = made_up(Shape(2 * GROUP, 512 if place.gpu else 96), SMALL["vocab_size"], ragged=True)
    batch, prompts = collate(samples, range(2 * GROUP), device), prompts_of(samples)
    values, numbers = [], {}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        path = recipe(place, folder, {"kind": "transformers"}, DTYPE=name)
        settings = TrainSettings.of(load_recipe(path, ["processes.strategy=fsdp"]).recipe, folder, prompts)
        seconds, most, gradients, logp, packs = {}, {}, {}, {}, {}
        for kind in ("whole", "sharded"):
            policy = (
                build_policy(settings, device)
                if kind == "whole"
                else open_shards(settings, Meshes.of(processes), processes, True, print)
            )
            packs[kind] = policy.packed

            def step(policy: Any = policy, kept: dict[str, torch.Tensor] = logp, kind: str = kind) -> None:
                found = policy(batch, (WHOLE,)).logp[0]
                found.mean().backward()
                kept[kind] = found.detach()

            step()
            gradients[kind] = {name: whole(p.grad).clone() for name, p in policy.model.named_parameters() if p.grad is not None}
            seconds[kind], most[kind] = seconds_of(step, place.device, repeats=3, warm=1), peak_of(step, place.device).most
            del policy, step
            gc.collect()  # a policy is part of a cycle
        pairs = [(gradients["sharded"][key] - wanted, wanted) for key, wanted in gradients["whole"].items()]
        off, norm = (torch.stack([part.double().norm() for part in column]).norm().item() for column in zip(*pairs, strict=True))
        unlike = sum(packs[kind] != can_pack(device, dtype) for kind in packs)
        delta = (logp["sharded"] - logp["whole"]).abs().max().item()
        values += [
            Value(f"{name}: gradient, ‖Δ‖/‖g‖ to the whole policy's", off / norm, "", most=SHARDED[dtype]),
            Value(f"{name}: time ÷ the whole policy's", seconds["sharded"] / seconds["whole"], "×"),
            Value(f"{name}: policies whose choice of packed or padded rows differs from a run's", unlike, "of 2", most=0),
        ]
        numbers[name] = {
            "max_delta_logp": delta,
            "packed": packs,
            "seconds": seconds,
            "gib": {kind: one / GIB for kind, one in most.items()},
        }
    dist.destroy_process_group()
    return judged(values, numbers=numbers)


def whole(tensor: Any) -> torch.Tensor:
    """Returns a gradient, gathered if it is sharded."""
    full: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach()
