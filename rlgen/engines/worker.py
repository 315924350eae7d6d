"""Adds rlgen's methods to vLLM's workers: `vllm --worker-extension-cls rlgen.engines.worker.Worker`."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlgen.engines import vllm_compat, vllm_weights
from rlgen.engines.base import SyncRecorder, model_shape
from rlgen.engines.gate import PLAN_VARIABLE
from rlgen.errors import EngineError, SetupError
from rlgen.models.factors import is_factors, merged


class Worker:
    """Methods that vLLM adds to its worker class.

    They are called with `POST /collective_rpc`, which returns one result per worker. Errors are returned in the result: an
    exception would become a status 500, with its text only in the server's log.
    """

    # Attributes of vLLM's worker.
    vllm_config: Any
    model_runner: Any
    reload_weights: Any
    # Set by `rlgen_listen`.
    rlgen_ledger: SyncRecorder

    def rlgen_facts(self) -> dict[str, Any]:
        """Returns the fields of `EngineInfo`, read from the running worker, and three more.

        "shape": of its model; "cuda": whether it runs on a GPU; "transfer": vLLM's transfer engine that it was started with.
        Or {"error"}: rlgen does not support this vLLM version.
        """
        config = self.vllm_config
        try:
            vllm = vllm_compat.import_vllm()
        except SetupError as error:
            return {"error": str(error)}
        # A server that rlgen did not start has no plan, so vLLM's own hash of its settings is used.
        plan = os.environ.get(PLAN_VARIABLE) or f"vllm:{config.compute_hash()}"
        facts = vllm_compat.facts(vllm, plan, config, self.model_runner.get_model(), vllm_compat.runner_of(self))
        shape = model_shape(config.model_config.hf_config)
        transfer = config.weight_transfer_config and config.weight_transfer_config.backend
        more = {"shape": shape, "cuda": torch.cuda.is_available(), "transfer": transfer}
        return {**asdict(facts), "stop_ids": list(facts.stop_ids), **more}

    def rlgen_load(self, path: str, version: int, hashed: bool) -> dict[str, Any]:
        """Replaces all weights by those in folder `path`, or by those of the engine's model with the adapter in that folder.

        The caller must empty the prefix cache afterwards. Returns the fields of a `SyncReport`, or {"error", "intact"}: what went
        wrong, and whether all old weights are still loaded; if not, only another load helps.
        """
        try:
            files, names = verified_files(Path(path), version)
        except EngineError as error:
            return {"error": str(error), "intact": True}
        ledger = SyncRecorder(hashed)
        model, config = self.model_runner.get_model(), self.vllm_config
        weights = ledger.record(read_tensors(files))
        try:
            if is_factors(names):  # merged into the weights of the engine's model as its files have them
                device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
                base = vllm_weights.weights_in_files(config, model)
                weights = merged(base, dict(weights), config.model_config.dtype, device)
            not_loaded = vllm_weights.load_into(
                model, config.model_config, lambda weights: self.reload_weights(weights_iterator=weights), weights
            )
        except Exception as error:  # vLLM does not wrap the errors of its libraries
            return {"error": f"{path}: {type(error).__name__}: {error}", "intact": False}
        return {"version": version, "received": ledger.received, "not_loaded": list(not_loaded)}

    def rlgen_listen(self, hashed: bool) -> dict[str, Any]:
        """Starts recording every tensor that vLLM's own transfer loads, until `rlgen_heard`."""
        self.rlgen_ledger = SyncRecorder(hashed)
        vllm_weights.listen(self.model_runner.get_model(), self.rlgen_ledger)
        return {}

    def rlgen_heard(self) -> dict[str, Any]:
        """Stops recording and returns {"received", "not_loaded"} of a `SyncReport`, or {"error"}.

        The caller must empty the prefix cache afterwards.
        """
        model = self.model_runner.get_model()
        if "rlgen_missed" not in model.__dict__:
            return {"error": "rlgen_heard without rlgen_listen"}
        not_loaded = vllm_weights.finish_listening(model, self.vllm_config.model_config)
        return {"received": self.rlgen_ledger.received, "not_loaded": list(not_loaded)}


def verified_files(folder: Path, version: int) -> tuple[list[Path], list[str]]:
    """Returns the weight files of `folder` and the names of their tensors, if complete as `manifest.json` describes them.

    {"version": 3, "files": {"model.safetensors": {"bytes": 3301234}}, "tensors": 46}

    Raises EngineError if a file is missing, incomplete, left over, or of another version.
    """
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        said_version, said_tensors = manifest["version"], manifest["tensors"]
        said_bytes = {str(name): int(file["bytes"]) for name, file in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineError(
            f"{folder}: no readable manifest.json ({type(error).__name__}: {error}); trainer and server must see this"
            " folder under the same path: set engine.transfer_dir to a folder that both can read"
        ) from error
    if said_version != version:
        raise EngineError(f"{folder}: the files are of version {said_version}, not {version}")
    found_bytes = {file.name: file.stat().st_size for file in folder.glob("*.safetensors")}
    for name in sorted(said_bytes.keys() | found_bytes.keys()):
        said, found = said_bytes.get(name, "no"), found_bytes.get(name, "no")
        if said != found:
            raise EngineError(f"{folder / name}: {found} bytes, but {said} were written")
    files = [folder / name for name in said_bytes]
    names: list[str] = []
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:  # checks the header against the file's length
                names += opened.keys()
        except (SafetensorError, OSError) as error:
            raise EngineError(f"{file}: not a complete safetensors file: {error}") from error
    if len(names) != said_tensors:
        raise EngineError(f"{folder}: {len(names)} tensors, but {said_tensors} were written")
    return files, names


def read_tensors(files: Sequence[Path]) -> Iterator[tuple[str, Tensor]]:
    """Yields all tensors, one at a time, in the order in which they are stored."""
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.offset_keys():
                yield name, opened.get_tensor(name)
