"""Engines sample: ids in, ids out. `build_engine` opens the one that the recipe names."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from rlgen.engines import vllm_compat
from rlgen.engines.base import Engine
from rlgen.engines.colocated import ColocatedEngine
from rlgen.engines.http import Server
from rlgen.engines.launch import ServerPlan, new_token
from rlgen.engines.nccl import Broadcast, own_address, require_gpu
from rlgen.engines.server import Member, ServerEngine, Supervisor
from rlgen.engines.shared import SharedEngine
from rlgen.engines.transfer import Outbox
from rlgen.engines.transformers import TransformersEngine
from rlgen.engines.vacancy import require_free
from rlgen.errors import EngineError, SetupError
from rlgen.models.load import load_config, load_model, model_shape
from rlgen.models.shortage import memory_for, what_helps
from rlgen.processes import Processes
from rlgen.recipe import Recipe
from rlgen.recipe.models import ColocatedEngineRecipe, ServerEngineRecipe
from rlgen.recipe.rules import servers

__all__ = ["Engine", "build_engine"]


def build_engine(recipe: Recipe, location: str, processes: Processes, logs: Path, say: Callable[[str], None]) -> Engine:
    """Opens the engine of `recipe` on the model at `location` (a folder or hub id). All processes do so at the same time.

    Args:
        logs: folder for what a server prints.
        say: receives a line whenever a server had to be brought back.

    Raises:
        SetupError: what the engine needs is not installed, or the memory of its GPU is not free.
        EngineError: the engine did not start.
    """
    settings = recipe.engine
    dtype = settings.dtype or recipe.model.dtype
    if isinstance(settings, ColocatedEngineRecipe):
        if processes.device.type == "cuda":
            share = settings.gpu_memory_utilization or vllm_compat.GPU_SHARE
            processes.agreed(lambda: require_free(processes.device, share, settings.kv_cache_gib))
        return ColocatedEngine(
            model=location,
            revision=recipe.model.revision,
            dtype=dtype,
            fp32_head=recipe.model.fp32_head,
            max_model_len=settings.max_model_len or recipe.max_row_tokens,
            max_num_seqs=min(settings.max_num_seqs, recipe.samples_per_step),
            kv_cache_gib=settings.kv_cache_gib,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            tensor_parallel_size=settings.tensor_parallel_size,
            wait=processes.timeout if processes.world > 1 else None,
            sleep=settings.sleep,
            model_impl=settings.model_impl,
            quantization=settings.quantization,
            structured_outputs=settings.structured_regex is not None,
            enforce_eager=settings.enforce_eager,
            extra=settings.extra,
        )
    if isinstance(settings, ServerEngineRecipe):
        if processes.world > 1:
            return SharedEngine(processes, lambda: open_servers(recipe, settings, location, logs, say))
        return open_servers(recipe, settings, location, logs, say)
    revision, attention = recipe.model.revision, recipe.model.attention
    with memory_for("the engine's start", what_helps(recipe, "load"), EngineError):
        model = load_model(location, revision, getattr(torch, dtype), attention, processes.device)
    return TransformersEngine(model=model, fp32_head=recipe.model.fp32_head, max_num_seqs=settings.max_num_seqs)


def open_servers(
    recipe: Recipe, settings: ServerEngineRecipe, location: str, logs: Path, say: Callable[[str], None]
) -> ServerEngine:
    """Connects to the servers that the recipe names, or starts one.

    Raises:
        SetupError: the token's environment variable is not set, or weights shall go from GPU to GPU, and there is none.
        EngineError: a server is not there, does not start, refuses, or serves another model.
    """
    token = os.environ.get(settings.token_env)
    if token is None and settings.url is not None:
        raise SetupError(
            f"engine.token_env: the environment variable {settings.token_env} is not set; it holds the token of the server at"
            f" {settings.url}, which `rlgen serve` wrote to a file"
        )
    token = token or new_token()
    if settings.transfer == "nccl":
        require_gpu()
    with ExitStack() as undo:
        carrier: Outbox | Broadcast | None = Outbox(settings.transfer_dir) if settings.transfer == "files" else None
        if carrier is not None:
            undo.callback(carrier.close)
        supervisor = None
        if settings.launch:
            plan = server_plan(recipe, settings, location)
            supervisor = Supervisor(plan, token, logs / "server.log", settings.start_timeout)
            undo.callback(supervisor.stop)
        urls = [supervisor.url] if supervisor else servers(settings)
        members = [Member(Server(url, token, settings.timeout), supervisor) for url in urls]
        if carrier is None:
            at = own_address(urls)
            carrier = Broadcast([m.server for m in members], at, vllm_compat.nccl_connector(), settings.timeout)
            undo.callback(carrier.close)
        engine = ServerEngine(
            members=members,
            shape=model_shape(load_config(location, recipe.model.revision)),
            in_flight=settings.in_flight,
            restarts=settings.restarts,
            carrier=carrier,
            say=say,
        )
        undo.pop_all()
    return engine


def server_plan(recipe: Recipe, settings: ServerEngineRecipe, location: str) -> ServerPlan:
    """The server that a recipe asks for."""
    return ServerPlan(
        model=location,
        revision=recipe.model.revision,
        dtype=settings.dtype or recipe.model.dtype,
        fp32_head=recipe.model.fp32_head,
        max_model_len=settings.max_model_len or recipe.max_row_tokens,
        max_num_seqs=min(settings.max_num_seqs, recipe.samples_per_step),
        kv_cache_gib=settings.kv_cache_gib,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        tensor_parallel_size=settings.tensor_parallel_size,
        host=settings.host,
        port=settings.port or 0,
        model_impl=settings.model_impl,
        quantization=settings.quantization,
        enforce_eager=settings.enforce_eager,
        extra=settings.extra,
        nccl=settings.transfer == "nccl",
        devices=settings.devices,
    )
