"""Time and memory of something that runs on a GPU, or on the CPU in a rehearsal."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from rlgen.models.gpus import GPUS

# Dense bfloat16 TFLOP/s of the vendor's data sheets, by torch's name of the device.
VENDOR = {name: gpu.tflops for gpu in GPUS.values() for name in gpu.names}


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes of tensors, beyond those that were there before: the most at a time, and what is left."""

    most: int
    left: int


def settle(device: str) -> None:
    """Waits until the device has done all that it was given."""
    if device != "cpu":
        torch.cuda.synchronize()


def seconds_of(run: Callable[[], Any], device: str, repeats: int = 5, warm: int = 2) -> float:
    """Returns the median of `repeats` wall times, after `warm` runs that are not timed."""
    for _ in range(warm):
        run()
    times = []
    for _ in range(repeats):
        settle(device)
        began = time.perf_counter()
        run()
        settle(device)
        times.append(time.perf_counter() - began)
    return median(times)


def peak_of(run: Callable[[], Any], device: str) -> Peak:
    """Runs `run` once. What it returns is dropped, and what it puts elsewhere counts as left."""
    if device == "cpu":
        return peak_of_cpu(run)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return Peak(torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before)


def peak_of_cpu(run: Callable[[], Any]) -> Peak:
    """The CPU's allocator keeps no account: the profiler notes each of its steps."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return Peak(most, now)


def matmul_rate(device: str) -> float:
    """Returns the operations a second of a bfloat16 product of two [8192, 8192] matrices, on the CPU [1024, 1024]."""
    size = 1024 if device == "cpu" else 8192
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / seconds_of(lambda: left @ right, device, repeats=10, warm=3)


def copy_rate(device: str) -> float:
    """Returns the bytes a second, read and written, of a copy on the device that is larger than its caches."""
    source = torch.empty((1 << 26) if device == "cpu" else (1 << 32), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(lambda: target.copy_(source), device)


def device_name(device: str) -> str:
    """Returns the name of the GPU, or what the CPU can do."""
    return torch.cuda.get_device_name() if device != "cpu" else f"CPU ({torch.backends.cpu.get_cpu_capability()})"
