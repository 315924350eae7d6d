"""Several processes, or one, with a real vLLM that is opened once: a step of each trainer, through ladder, step and checkpoint.

process_worker.py RECIPE FOLDER TENSOR_PARALLEL_SIZE TRAINER...     alone or by torchrun; leaves a run directory for each trainer
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from helpers.in_processes import train_in
from helpers.samples import TEXTS

from rlgen.engines.colocated import ColocatedEngine
from rlgen.engines.open import build_engine
from rlgen.processes import Processes
from rlgen.recipe import Recipe, load_recipe
from rlgen.sentinel.sync import send_weights
from rlgen.setup import trainer_and_engine
from rlgen.setup.policy import build_policy
from rlgen.setup.settings import TrainSettings

# A reference in the reward, in the loss, and one of preferences.
TRAINERS = {
    "grpo": "{kind: grpo, updates_per_rollout: 1, beta: 0.05}",
    "rloo": "{kind: rloo, beta: 0.05}",
    "online_dpo": "{kind: online_dpo}",
}


class Kept:
    """An engine that stays open from run to run, and goes back to the weights it was opened with."""

    def __init__(self) -> None:
        self.recipe: Recipe
        self.engine: ColocatedEngine | None = None

    def build(self, needs, location, processes, logs, say):  # type: ignore[no-untyped-def]
        if self.engine is None:
            self.engine = build_engine(needs, location, processes, logs, say)
            self.close, self.engine.close = self.engine.close, lambda: None  # type: ignore[method-assign]
        else:
            policy = build_policy(TrainSettings.of(self.recipe, location, TEXTS), processes.device)
            send_weights(self.engine, policy.model, 0, Processes.alone())
        return self.engine


def main(recipe: Path, folder: Path, size: str, trainers: Sequence[str]) -> None:
    processes = Processes.open(60) if "RANK" in os.environ else Processes.alone()
    kept = Kept()
    trainer_and_engine.build_engine = kept.build  # type: ignore[assignment]
    for name in trainers:
        loaded = load_recipe(recipe, [f"trainer={TRAINERS[name]}", f"engine.tensor_parallel_size={size}", "run.steps=1"])
        kept.recipe = loaded.recipe
        train_in(folder / name, loaded, processes)
    kept.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
