"""Checks that a GPU has the free memory that vLLM will need, and finds the processes that hold the rest. Needs CUDA."""

import math
import os
import subprocess

import psutil
import torch

from rlgen.errors import SetupError

MIB, GIB = 1 << 20, 1 << 30
PATIENCE = 10.0  # timeout of nvidia-smi in seconds
QUERY = ("--query-compute-apps=pid,used_memory,process_name", "--format=csv,noheader,nounits")


def require_free(device: torch.device, share: float, kv_cache_gib: float | None) -> None:
    """Checks that the GPU has enough free memory for vLLM, beside what this process holds already.

    Args:
        share: fraction of the GPU's memory that vLLM takes.
        kv_cache_gib: size of the KV cache in GiB, if it is set; replaces `share`.

    Raises:
        SetupError: there is not enough free memory; names the processes that hold the rest.
    """
    torch.cuda.empty_cache()  # frees cached blocks of this process, which count as used otherwise
    free, total = torch.cuda.mem_get_info(device)
    if kv_cache_gib is None:
        wanted, setting, said = math.ceil(share * total), "gpu_memory_utilization", share
        fits = math.floor(100 * free / total) / 100
    else:
        wanted, setting, said = int(kv_cache_gib * GIB), "kv_cache_gib", kv_cache_gib
        fits = math.floor(10 * free / GIB) / 10
    if free >= wanted:
        return
    lower = f", or lower engine.{setting} to {fits:g} at most" if fits > 0 else ""
    raise SetupError(
        f"engine.{setting} {said:g} needs {wanted // MIB} MiB of {device}, but {free // MIB} of its {total // MIB} MiB are free:"
        f" {holders(device)}. End processes that are not needed, or use another GPU (CUDA_VISIBLE_DEVICES){lower}"
    )


def holders(device: torch.device) -> str:
    """Returns "process 4711 (python) holds 30000 MiB, this run holds 2000 MiB", or why that is not known."""
    own = f"this process has reserved {torch.cuda.memory_reserved(device) // MIB} MiB"
    # By uuid, because CUDA numbers only the visible GPUs, nvidia-smi all of them.
    command = ["nvidia-smi", f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}", *QUERY]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"{own}; nvidia-smi cannot tell which processes hold the rest ({error})"
    run = {str(pid) for pid in (os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True)))}
    rows = [[field.strip() for field in line.split(",", 2)] for line in listed.splitlines() if line.count(",") >= 2]
    others = [f"process {pid} ({name}) holds {used} MiB" for pid, used, name in rows if pid not in run]
    ours = sum(int(used) for pid, used, _ in rows if pid in run and used.isdigit())
    if ours:
        own = f"this run holds {ours} MiB"
    return ", ".join([*(others or ["nvidia-smi names no other process"]), own])
