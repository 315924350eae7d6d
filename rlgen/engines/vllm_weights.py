"""Replaces the weights of vLLM's model, and sends weights to its servers: the part of `vllm_compat` that concerns weights."""

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlgen.engines.base import SyncRecorder, Weights
from rlgen.engines.vllm_compat import import_vllm, process_kept_as_is
from rlgen.errors import EngineError, SetupError


def load_into(model: nn.Module, model_config: Any, reload: Callable[[Weights], None], weights: Weights) -> tuple[str, ...]:
    """Replaces all weights of vLLM's `model`, in the process that holds the model. `weights` have the checkpoint's names.

    The caller must empty the prefix cache afterwards. After an exception some weights are new and some old; only another complete
    load repairs that.

    `reload` is vLLM's own `reload_weights`, which loads, packs and quantises as at the start. Returns the engine's own names of
    tensors that the loader did not fill; none for a quantised model, whose tensors are loaded under other names than held.
    """
    forgotten = {} if torch.cuda.is_available() else forget_expert_kernels(model)
    listen(model)
    try:
        reload(weights)
    except BaseException:
        stop_listening(model)
        put_back(model, model_config)
        raise
    # The loader of some architectures (gpt-oss) copies experts past the reload, which then builds no kernel.
    unbuilt = [name for name, layer in forgotten.items() if layer.quant_method.moe_kernel is None]  # type: ignore[union-attr]
    return (*finish_listening(model, model_config), *unbuilt)


def put_back(model: nn.Module, model_config: Any) -> None:
    """Restores the previous tensors of the layers that a failed reload did not finish.

    Without this, vLLM leaves these layers half loaded: the next reload fails at the same place, and the one after it leaves a
    tied head without its weight.
    """
    layerwise = importlib.import_module("vllm.model_executor.model_loader.reload.layerwise")
    for layer in model.modules():
        found = layerwise.get_layerwise_info(layer)
        found.load_numel, found.loaded_weights = 0, []
    layerwise.finalize_layerwise_reload(model, model_config)


def listen(model: nn.Module, ledger: SyncRecorder | None = None) -> None:
    """Wraps the model's loader so that it records which tensors it fills: vLLM itself only logs that.

    A `ledger` also records each tensor as it arrives, before anything is packed. Ends what an earlier `listen` has begun.
    """
    stop_listening(model)
    load = model.load_weights
    names: dict[int, set[str]] = {}  # all names of a tensor: where vLLM runs the code of transformers, some layers have two
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    aliases = {name: same for same in names.values() for name in same}
    missed = set(aliases)

    def heard(weights: Weights) -> set[str] | None:
        loaded: set[str] | None = load(ledger.record(weights) if ledger else weights)  # type: ignore[operator]
        if loaded is None:  # this loader does not report what it filled
            missed.clear()
        else:
            missed.difference_update(*(aliases.get(name, ()) for name in loaded))
        return loaded

    model.__dict__.update(load_weights=heard, rlgen_missed=missed)


def stop_listening(model: nn.Module) -> set[str]:
    """Undoes `listen` and returns the names of the parameters that the loader did not fill; does nothing without `listen`."""
    model.__dict__.pop("load_weights", None)
    missed: set[str] = model.__dict__.pop("rlgen_missed", set())
    return missed


def finish_listening(model: nn.Module, model_config: Any) -> tuple[str, ...]:
    """Undoes `listen` after a successful load, packs the heads' new weights for the CPU kernels, and returns as `load_into`."""
    missed = stop_listening(model)
    repack_heads(model)
    return tuple(sorted(missed)) if model_config.quantization is None else ()


def load_weights(llm: Any, weights: Weights) -> tuple[str, ...]:
    """Loads weights into the engine of this process as `load_into` does, and empties its caches of prefixes and of images.

    Raises EngineError if the prefix cache could not be emptied.
    """

    def reload(tensors: Weights) -> None:
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})

    not_loaded = load_into(model_in(llm), llm.llm_engine.model_config, reload, weights)
    # The reload has emptied the worker's cache of embedded images, but the scheduler still relies on its contents.
    if hasattr(llm.llm_engine, "reset_encoder_cache"):
        llm.llm_engine.reset_encoder_cache()
    if not llm.reset_prefix_cache():
        raise EngineError("vLLM did not empty its prefix cache after a weight sync: requests are still running")
    return not_loaded


def weights_in_files(vllm_config: Any, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights that the engine's `model` was opened with, as vLLM reads them at the start."""
    loaders = importlib.import_module("vllm.model_executor.model_loader")
    yield from loaders.get_model_loader(vllm_config.load_config).get_all_weights(vllm_config.model_config, model)


def model_in(llm: Any) -> nn.Module:
    """Returns vLLM's model itself, of an engine whose worker runs in this process."""
    (model,) = llm.apply_model(lambda model: model)
    return model


def forget_expert_kernels(model: nn.Module) -> dict[str, nn.Module]:
    """Removes the kernels of mixture-of-experts layers, so that the next reload builds them anew as the first load did.

    On the CPU the first load packs the experts' weights for its kernel; a reload into an existing kernel skips that, and the
    kernel reads unpacked weights as packed ones: log-probs are then wrong by nats, without any error. Returns the layers by name.
    """
    found = {}
    for name, layer in model.named_modules():
        # some architectures have a subclass
        if "RoutedExperts" in (kind.__name__ for kind in type(layer).__mro__) and layer.quant_method.moe_kernel is not None:
            layer.quant_method.moe_kernel = None
            found[name] = layer
    return found


def repack_heads(model: nn.Module) -> None:
    """Packs the heads' weights again for the CPU kernels.

    On the CPU a head keeps its weight *and* a packed copy. A reload of a model whose head is tied to its embedding refreshes only
    the embedding: log-probs are then wrong by nats, without any error. The call is harmless where it is not needed.
    """
    for module in model.modules():
        if type(module).__name__ == "ParallelLMHead":
            module.quant_method.process_weights_after_loading(module)  # type: ignore[union-attr,operator]


class NcclEndpoint:
    """Rank 0 of an NCCL group with the workers of servers that were started with --weight-transfer-config {"backend": "nccl"}.

    Its methods may be called from any thread: each sets the current GPU, which is a property of the thread. Raises SetupError if
    NCCL cannot be loaded: vLLM would then send nothing and raise no error.
    """

    def __init__(self, nccl: Any, device: int, host: str, port: int, world: int) -> None:
        self._device = torch.device("cuda", device)
        with torch.cuda.device(self._device):
            self._communicator = nccl.trainer_init({"master_address": host, "master_port": port, "world_size": world})
        if self._communicator.disabled:
            raise SetupError("engine.transfer nccl: vLLM cannot load NCCL here; set engine.transfer to files")

    def ready(self, tensor: Tensor) -> Tensor:
        """Returns the tensor on this rank's GPU, contiguous."""
        return tensor.detach().to(self._device).contiguous()

    def broadcast(self, tensor: Tensor) -> None:
        """Broadcasts a tensor and returns when it is sent. Waits for every worker."""
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()  # another thread's stream may still be writing it
            stream = torch.cuda.current_stream()
            self._communicator.broadcast(tensor, src=0, stream=stream)
            stream.synchronize()

    def close(self) -> None:
        """Leaves the group, even if other ranks still wait in it."""
        self._communicator.destroy()


def nccl_connector() -> Callable[[str, int, int], NcclEndpoint]:
    """Returns a function that joins a group as rank 0 with this thread's GPU, given host, port and number of ranks.

    That function waits until all ranks have joined. Raises SetupError if this vLLM version has no NCCL weight transfer.
    """
    with process_kept_as_is():
        vllm = import_vllm()
        try:
            nccl = importlib.import_module("vllm.distributed.weight_transfer.nccl_common")
        except ImportError as error:
            raise SetupError(f"vLLM {vllm.__version__} has no NCCL transfer: {error}; set engine.transfer to files") from error
    return partial(NcclEndpoint, nccl, torch.cuda.current_device())
