"""Opens an engine, and starts or connects to its servers."""

import math
import os
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import assert_never

import psutil
import torch

from rlgen.engines import vllm_compat, vllm_weights
from rlgen.engines.base import Engine, EngineCapabilities, model_shape
from rlgen.engines.colocated import ColocatedEngine
from rlgen.engines.fleet import ServerPool
from rlgen.engines.found import first_found, is_looked_up, listed_servers
from rlgen.engines.http import Server
from rlgen.engines.launch import ServerPlan, ServerProcess, new_token, start_servers
from rlgen.engines.nccl import NEEDS_GPU, Broadcast, own_address
from rlgen.engines.plan import EnginePlan
from rlgen.engines.server import ServerEngine
from rlgen.engines.shared_fleet import SharedServerPool
from rlgen.engines.transfer import FileTransfer
from rlgen.engines.transformers import TransformersEngine
from rlgen.errors import SetupError, UsageError
from rlgen.models.load import load_config, load_model, load_tokenizer
from rlgen.models.vision import Vision, reads_images
from rlgen.out_of_memory import GIB
from rlgen.processes import Processes, cores
from rlgen.recipe.engines import ColocatedEngineRecipe, EngineNeeds, ServerEngineRecipe, TransformersEngineRecipe
from rlgen.recipe.rules import servers

MIB = 1 << 20
PATIENCE = 10.0  # timeout of nvidia-smi in seconds
QUERY = ("--query-compute-apps=pid,used_memory,process_name", "--format=csv,noheader,nounits")


def build_engine(needs: EngineNeeds, location: str, processes: Processes, logs: Path, say: Callable[[str], None]) -> Engine:
    """Opens the engine on the model at `location` (a folder or hub id). All processes call this at the same time.

    Servers write their output into the folder `logs`; `say` receives a line whenever one was recovered.

    Raises:
        SetupError: a package that the engine needs is not installed, or its GPU has too little free memory.
        EngineError: the engine did not start.
    """
    settings, model = needs.engine, needs.model
    if isinstance(settings, ColocatedEngineRecipe):
        if processes.device.type == "cuda":
            share = settings.gpu_memory_utilization or vllm_compat.GPU_SHARE
            processes.run_all(lambda: require_free(processes.device, share, settings.kv_cache_gib))
        return ColocatedEngine(EnginePlan.of(needs, location), wait=processes.timeout if processes.world > 1 else None)
    if isinstance(settings, ServerEngineRecipe):
        opened = partial(open_servers, needs, settings, location, logs, say)
        pool = SharedServerPool(processes, opened) if processes.world > 1 else opened()
        return ServerEngine(pool, 1 + needs.rollout.async_steps)
    if not isinstance(settings, TransformersEngineRecipe):
        assert_never(settings)  # mypy: an engine of the recipe that nothing opens
    dtype = getattr(torch, settings.dtype or model.dtype)
    loaded = load_model(location, model.revision, dtype, model.attention, processes.device)
    return TransformersEngine(
        model=loaded,
        fp32_head=model.fp32_head,
        max_num_seqs=settings.max_num_seqs,
        vision=Vision.open(location, model.revision, loaded.config) if reads_images(loaded.config) else None,
        tokenizer=load_tokenizer(location, model.revision) if needs.rollout.stop else None,
    )


def open_servers(
    needs: EngineNeeds, settings: ServerEngineRecipe, location: str, logs: Path, say: Callable[[str], None]
) -> ServerPool:
    """Connects to the servers that `settings` name, or starts them.

    Raises:
        SetupError: the token's variable is not set, there is no GPU for nccl, or several servers would use the same GPUs.
        EngineError: a server cannot be reached, does not start, refuses, or serves another model.
    """
    token = servers_token(settings)
    if settings.transfer == "nccl" and not torch.cuda.is_available():
        raise SetupError(NEEDS_GPU)
    with ExitStack() as undo:
        carrier: FileTransfer | Broadcast | None = FileTransfer(settings.transfer_dir) if settings.transfer == "files" else None
        if carrier is not None:
            undo.callback(carrier.close)
        listed = partial(listed_servers, settings, token)
        looked_up = is_looked_up(settings)
        pool = first_found(listed, str(settings.url), needs.patience) if looked_up else listed()
        processes: dict[str, ServerProcess] = {}
        if settings.launch:
            plans = server_plans(needs, location)
            files = [logs / ("server.log" if len(plans) == 1 else f"server{number}.log") for number in range(len(plans))]
            for process in start_servers(plans, token, files, settings.start_timeout):
                undo.callback(process.stop)
                processes[process.url] = process
                pool.append(Server(process.url, token, settings.timeout))
        if carrier is None:
            at = own_address([server.url for server in pool])
            carrier = Broadcast(pool, at, vllm_weights.nccl_connector(), settings.timeout)
            undo.callback(carrier.close)
        opened = ServerPool(
            servers=pool,
            processes=processes,
            shape=model_shape(load_config(location, needs.model.revision)),
            row_tokens=needs.row_tokens,
            abilities=EngineCapabilities(
                elsewhere=True,
                in_flight=needs.in_flight,
                keeps_cache=settings.in_flight is not None and not settings.in_flight.recompute,
                experts=needs.experts,
                merges=settings.lora == "adapter",
            ),
            restarts=settings.restarts,
            carrier=carrier,
            say=say,
            found=listed if looked_up else None,
            patience=needs.patience if looked_up or (len(pool) > 1 and not settings.launch) else 0.0,
        )
        undo.pop_all()
    return opened


def servers_token(settings: ServerEngineRecipe) -> str:
    """Returns the token of the servers; a new one for servers that are launched, if its variable is not set.

    Raises SetupError if servers run already and it is not set, EngineError if no server is there.
    """
    token = os.environ.get(settings.token_env)
    if token is None and settings.url is not None:
        for url in () if is_looked_up(settings) else servers(settings):
            Server(url, "", settings.timeout).look(needs_token=False)
        raise SetupError(
            f"engine.token_env: the environment variable {settings.token_env} is not set; set it to the token of the server at"
            f" {settings.url}, which `rlgen serve` wrote to a file"
        )
    return token or new_token()


def server_plans(needs: EngineNeeds, location: str) -> list[ServerPlan]:
    """Returns one plan for each server to start, each with its own port, and its own GPUs or share of the cores.

    Raises UsageError if engine.kind is not server, and SetupError if several servers would use the same GPUs.
    """
    plan, settings = EnginePlan.of(needs, location), needs.engine
    if not isinstance(settings, ServerEngineRecipe):
        raise UsageError(f"engine.kind {settings.kind} has no server; set it to server")
    if settings.servers > 1 and plan.on_gpu and settings.devices is None:
        size = settings.servers * settings.tensor_parallel_size
        raise SetupError(
            f"engine.servers {settings.servers}: all servers would use the same GPU; set engine.devices to the numbers of"
            f" {size} GPUs, such as {list(range(size))}; the servers divide them"
        )
    # Two servers that each have a thread for every core wait for each other: they load weights in 2.6 times the time of one. With
    # `rollout.stream` the trainer works at the same time, on half of the cores, see `setup.train_state.build_groups`.
    stream = needs.rollout.stream
    shared = (settings.servers > 1 or stream) and not plan.on_gpu and "OMP_NUM_THREADS" not in os.environ
    free = cores() - cores() // 2 if stream else cores()
    return [
        ServerPlan(
            engine=plan,
            host=settings.host,
            port=settings.port + number if settings.port else 0,
            nccl=settings.transfer == "nccl",
            devices=settings.devices_of(number),
            threads=max(1, free // settings.servers) if shared else None,
        )
        for number in range(settings.servers)
    ]


def require_free(device: torch.device, share: float, kv_cache_gib: float | None) -> None:
    """Checks that the GPU has the free memory that vLLM takes: `share` of it all, or `kv_cache_gib` if that is set.

    Raises SetupError if it does not; it names the processes that hold the rest.
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
