"""Two processes open models as a sharded run does.

sharded_opening_worker.py tensors OUTPUT FOLDER...         compares every tensor with what `from_pretrained` gives
sharded_opening_worker.py memory OUTPUT SMALL FOLDER BETA  measures the memory of each process while it opens FOLDER
sharded_opening_worker.py sync OUTPUT SMALL FOLDER           the same, while it sends the weights of FOLDER in bfloat16
"""

import sys
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from helpers.anonymous import watched
from helpers.engines import engine_info
from helpers.recipes import recipe_for
from helpers.samples import TEXTS
from transformers import AutoModelForCausalLM, PreTrainedModel

from rlgen.algorithms.registry import build_algorithm
from rlgen.engines.base import SyncRecorder, SyncReport
from rlgen.engines.transfer import FileTransfer
from rlgen.files import write_json
from rlgen.models.parts import whole
from rlgen.models.weights import checkpoint_tensors, own_tensors
from rlgen.processes import Processes
from rlgen.recipe import Recipe
from rlgen.sentinel.sync import send_weights
from rlgen.setup.policy import Policies, open_policies
from rlgen.setup.settings import TrainSettings


def sharded(folder: str, beta: float = 0.0, **sections: Any) -> Recipe:
    trainer = {"kind": "grpo", "beta": beta}
    return recipe_for(folder, engine={"kind": "transformers"}, trainer=trainer, processes={"strategy": "fsdp"}, **sections)


def opened(folder: str, beta: float, processes: Processes, say: Callable[[str], object] = print) -> Policies:
    recipe = sharded(folder, beta)
    return open_policies(TrainSettings.of(recipe, folder, TEXTS), build_algorithm(recipe.trainer), None, processes, None, say)


def measured(folder: str, beta: float, processes: Processes) -> dict[str, int]:
    """Memory of opening."""
    found = dict[str, int]()
    with watched(found):
        policies = opened(folder, beta, processes)
    assert (policies.reference is not None) == (beta > 0)
    return found


class Outbox:
    """An engine as far as a sync to servers goes: the main process writes the files, and nobody loads them."""

    weight_version = 1
    abilities = SimpleNamespace(merges=False)

    def __init__(self, processes: Processes) -> None:
        self.files = FileTransfer(tempfile.gettempdir()) if processes.is_main else None
        self.facts = lambda: engine_info("bfloat16")

    def sync(self, weights: Any, version: int, hashed: bool) -> SyncReport:
        recorder = SyncRecorder(hashed)
        if self.files is not None:
            self.files.write(recorder.record(weights), version)
        else:
            deque(recorder.record(weights), maxlen=0)
        return SyncReport(version=version, received=recorder.received, not_loaded=())


def sent(folder: str, processes: Processes) -> dict[str, int]:
    """Memory of a sync."""
    policies, found = opened(folder, 0.0, processes), dict[str, int]()
    outbox: Any = Outbox(processes)
    with watched(found):
        send_weights(outbox, policies.policy.model, 1, processes)
    if outbox.files is not None:
        outbox.files.close()
    return found


def compared(folder: str, processes: Processes) -> dict[str, Any]:
    """What differs between a model opened by shards and one that `from_pretrained` has loaded; and what was said."""
    said: list[str] = []
    policies = opened(folder, 0.1, processes, said.append)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {
        "policy": differences(policies.policy.model, expected),
        "reference": differences(policies.reference.model, expected),
        "trained": sorted({one.requires_grad for one in policies.policy.parameters()}),
        "frozen": sorted({one.requires_grad for one in policies.reference.parameters()}),
        "said": said,
    }


def differences(model: PreTrainedModel, expected: PreTrainedModel) -> list[str]:
    """Names of parameters, tied ones twice, and buffers whose values, dtypes or names differ; and of other facts."""
    sides = []
    for one in (model, expected):
        named = dict(one.named_parameters(remove_duplicate=False)) | dict(one.named_buffers())
        sides.append({name: whole(tensor.detach()) for name, tensor in named.items()})
    ours, theirs = sides
    found = sorted(ours.keys() ^ theirs.keys())
    pairs = {name: (ours[name], theirs[name]) for name in ours.keys() & theirs.keys()}
    found += [name for name, (one, other) in pairs.items() if one.dtype != other.dtype or not torch.equal(one, other)]
    for what, fact in {
        "config": lambda one: one.config.to_dict(),
        "generation_config": lambda one: one.generation_config.to_dict(),
        "own tensors": lambda one: list(own_tensors(one)),
        "sent": lambda one: len(dict(checkpoint_tensors(one))),
        "training": lambda one: one.training,
    }.items():
        if (own := fact(model)) != (wanted := fact(expected)):
            found.append(f"{what}: {own} and not {wanted}")
    return found


def main(what: str, output: Path, folders: list[str]) -> None:
    torch.set_num_threads(1)
    processes = Processes.open(60)
    if what == "tensors":
        found: Any = {folder: compared(folder, processes) for folder in folders}
    elif what == "sync":
        sent(folders[0], processes)
        found = processes.gather([sent(folders[1], processes)])
    else:
        measured(folders[0], 0.1, processes)  # imports what it takes
        found = processes.gather([measured(folders[1], float(folders[2]), processes)])
    if processes.is_main:
        write_json(output, found)
    processes.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
