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
from gpu_rows.models import config_of, random_batch, random_model
from gpu_rows.record import GIB, Finding, Place, Value, judged

# Bounds of float32: a product in TF32 exceeds both.
LOGP_FLOAT32, GRADIENT_FLOAT32 = 1e-4, 1e-4
# bfloat16 rounds as much everywhere: the device may be as far from float64 as the CPU, times this.
OF_THE_CPU = 2.0
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


def scored(model: Any, dtype: torch.dtype, batch: Any) -> Scored:
    """Runs the policy that computes in `dtype` on a batch. Changes how `model` computes."""
    from rlgen.models.policy import Policy

    policy = Policy(model, dtype, fp32_head=True)
    hidden, rows, columns = policy.hidden(batch)
    logp = policy.head.scores(hidden, batch.completion_ids[rows, columns], (1.0,), "none", True).logp[0]
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
                Value("log-probs: that by the CPU's", of_device.mean / of_cpu.mean, "×", most=OF_THE_CPU),
                Value("gradient: ‖Δ‖/‖g‖ to float64", of_device.gradient, ""),
                Value("gradient: that by the CPU's", of_device.gradient / of_cpu.gradient, "×", most=OF_THE_CPU),
            ]
        numbers = {"cpu": vars_of(of_cpu), "device": vars_of(of_device), "float32_products": torch.get_float32_matmul_precision()}
        layers = f"{config.num_hidden_layers} layers of {config.hidden_size}, {rows} rows of {length} tokens"
        return judged(values, layers, numbers)

    return check


def vars_of(distance: Distance) -> dict[str, float]:
    """Returns the fields by name."""
    return {name: getattr(distance, name) for name in Distance.__slots__}


def sharded(place: Place) -> Finding:
    """FSDP on one device: the same log-probs and gradients as a whole policy, and what it costs in time and memory."""
    from rlgen.models.policy import Policy
    from rlgen.models.sharding import mesh_of, shard
    from rlgen.processes import Processes

    device = torch.device(place.device)
    if place.gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if place.gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    processes = Processes(rank=0, world=1, device=device, timeout=60.0, group=None, store=None)
    config = config_of(place)
    rows, length = (8, 512) if place.gpu else (4, 48)
    batch = random_batch(rows, length, 16, config.vocab_size, place.device)
    values, numbers = [], {}
    for dtype in (torch.float32, torch.bfloat16):
        seconds, most, gradients, logp = {}, {}, {}, {}
        for kind in ("whole", "sharded"):
            policy = Policy(random_model(config, place.device), dtype, fp32_head=True)
            if kind == "sharded":
                shard(policy, mesh_of(processes, None))

            def step(policy: Any = policy, kept: dict[str, torch.Tensor] = logp, kind: str = kind) -> None:
                found = policy(batch, (1.0,)).logp[0]
                found.mean().backward()
                kept[kind] = found.detach()

            step()
            gradients[kind] = {name: whole(p.grad).clone() for name, p in policy.model.named_parameters() if p.grad is not None}
            seconds[kind], most[kind] = seconds_of(step, place.device, repeats=3, warm=1), peak_of(step, place.device).most
            del policy, step
            gc.collect()  # a policy is part of a cycle
        name = str(dtype).removeprefix("torch.")
        pairs = [(gradients["sharded"][key] - wanted, wanted) for key, wanted in gradients["whole"].items()]
        off, norm = (torch.stack([part.double().norm() for part in column]).norm().item() for column in zip(*pairs, strict=True))
        delta = (logp["sharded"] - logp["whole"]).abs().max().item()
        values += [
            Value(f"{name}: gradient, ‖Δ‖/‖g‖ to the whole policy's", off / norm, "", most=SHARDED[dtype]),
            Value(f"{name}: forward and backward, by the whole policy's", seconds["sharded"] / seconds["whole"], "× time"),
        ]
        numbers[name] = {"max_delta_logp": delta, "seconds": seconds, "gib": {kind: one / GIB for kind, one in most.items()}}
    dist.destroy_process_group()
    return judged(values, numbers=numbers)


def whole(tensor: Any) -> torch.Tensor:
    """Returns a gradient, gathered if it is sharded."""
    full: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach()
