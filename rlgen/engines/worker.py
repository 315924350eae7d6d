"""What vLLM's workers can do for rlgen beyond their own: `vllm --worker-extension-cls rlgen.engines.worker.Worker`."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlgen.engines import vllm_compat
from rlgen.engines.base import Ledger
from rlgen.errors import EngineError, SetupError
from rlgen.models.load import model_shape


class Worker:
    """Methods that vLLM adds to its worker's class. Called with `POST /collective_rpc`, answered once per worker.

    An exception would come back as a bare status 500, its text in the server's log alone: what fails is told in the answer.
    """

    # The worker's own.
    vllm_config: Any
    model_runner: Any
    reload_weights: Any
    # Of `rlgen_listen`.
    rlgen_ledger: Ledger

    def rlgen_facts(self) -> dict[str, Any]:
        """The fields of `Facts`, from the running worker, and what else a trainer asks.

        "shape": of its model; "cuda": whether it runs on a GPU; "transfer": vLLM's transfer engine that it was started with.
        Or {"error"}: rlgen does not know this vLLM.
        """
        config = self.vllm_config
        try:
            vllm = vllm_compat.import_vllm()
        except SetupError as error:
            return {"error": str(error)}
        facts = vllm_compat.facts(vllm, config.model_config, config.cache_config)
        shape = model_shape(config.model_config.hf_config)
        transfer = config.weight_transfer_config and config.weight_transfer_config.backend
        more = {"shape": shape, "cuda": torch.cuda.is_available(), "transfer": transfer}
        return {**asdict(facts), "stop_ids": list(facts.stop_ids), **more}

    def rlgen_load(self, path: str, version: int, hashed: bool) -> dict[str, Any]:
        """Replaces all weights by those in folder `path`. The prefix cache is to be emptied afterwards, by its own route.

        Returns:
            {"version", "received", "not_loaded"}: a `Receipt`. Or {"error", "intact"}: what went wrong, and whether the old
            weights are still there, all of them; else only another load helps.
        """
        try:
            files = verified_files(Path(path), version)
        except EngineError as error:
            return {"error": str(error), "intact": True}
        ledger = Ledger(hashed)
        try:
            not_loaded = vllm_compat.load_into(
                self.model_runner.get_model(),
                self.vllm_config.model_config,
                lambda weights: self.reload_weights(weights_iterator=weights),
                ledger.record(read_tensors(files)),
            )
        except Exception as error:  # vLLM raises whatever its parts raise
            return {"error": f"{path}: {type(error).__name__}: {error}", "intact": False}
        return {"version": version, "received": ledger.received, "not_loaded": list(not_loaded)}

    def rlgen_listen(self, hashed: bool) -> dict[str, Any]:
        """Takes down every tensor that vLLM's own transfer loads from now on, until `rlgen_heard`."""
        model = self.model_runner.get_model()
        if vllm_compat.is_listening(model):  # for a trainer that ended in the middle
            vllm_compat.stop_listening(model)
        self.rlgen_ledger = Ledger(hashed)
        vllm_compat.listen(model, self.rlgen_ledger)
        return {}

    def rlgen_heard(self) -> dict[str, Any]:
        """Returns {"received", "not_loaded"} of a `Receipt`, or {"error"}. The prefix cache is to be emptied afterwards."""
        model = self.model_runner.get_model()
        if not vllm_compat.is_listening(model):
            return {"error": "rlgen_heard without rlgen_listen"}
        not_loaded = vllm_compat.finish_listening(model, self.vllm_config.model_config)
        return {"received": self.rlgen_ledger.received, "not_loaded": list(not_loaded)}


def verified_files(folder: Path, version: int) -> list[Path]:
    """The weight files of `folder`, once they are found to be whole: as `manifest.json` says that the sender wrote them.

    {"version": 3, "files": {"model.safetensors": {"bytes": 3301234}}, "tensors": 46}

    Raises:
        EngineError: a file is missing, cut off, left over, or of another version.
    """
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        said_version, said_tensors = manifest["version"], manifest["tensors"]
        said_bytes = {str(name): int(file["bytes"]) for name, file in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineError(
            f"{folder}: no readable manifest.json ({type(error).__name__}: {error}); trainer and server must see this"
            " folder under the same name: set engine.transfer_dir to one that both have"
        ) from error
    if said_version != version:
        raise EngineError(f"{folder}: the files are of version {said_version}, not {version}")
    found_bytes = {file.name: file.stat().st_size for file in folder.glob("*.safetensors")}
    for name in sorted(said_bytes.keys() | found_bytes.keys()):
        said, found = said_bytes.get(name, "no"), found_bytes.get(name, "no")
        if said != found:
            raise EngineError(f"{folder / name}: {found} bytes, but {said} were written")
    files = [folder / name for name in said_bytes]
    count = 0
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:  # checks its header against its length
                count += len(opened.keys())
        except (SafetensorError, OSError) as error:
            raise EngineError(f"{file}: not a whole safetensors file: {error}") from error
    if count != said_tensors:
        raise EngineError(f"{folder}: {count} tensors, but {said_tensors} were written")
    return files


def read_tensors(files: Sequence[Path]) -> Iterator[tuple[str, Tensor]]:
    """All tensors of `files`, one at a time, in the order of the bytes."""
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.offset_keys():
                yield name, opened.get_tensor(name)
