"""How long a sync takes two real servers, as a share of the time that it takes one of them.

python scripts/fleet_sync.py [--model tiny:qwen3] [--rounds 20]

Both servers run on this machine, and loading needs its cores: with fewer than a core for each of the two and one for the trainer
the share says more about the machine than about the fleet.
"""

import argparse
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path

import torch

from rlgen.engines.base import EngineCapabilities, model_shape
from rlgen.engines.fleet import ServerPool
from rlgen.engines.open import open_servers
from rlgen.engines.transfer import FileTransfer
from rlgen.models.load import load_config, load_model, locate
from rlgen.models.weights import checkpoint_tensors
from rlgen.recipe import Recipe
from rlgen.recipe.engines import ServerEngineRecipe

WARM = 2  # rounds that are not counted


def recipe_of(model: str) -> Recipe:
    return Recipe.model_validate(
        {
            "run": {"name": "fleet"},
            "model": {"path": model, "dtype": "float32"},
            "data": {"source": "task:sort"},
            "rewards": [{"use": "exact_match"}],
            "engine": {"kind": "server", "launch": True, "servers": 2, "max_model_len": 256},
        }
    )


def measured(model: str, rounds: int) -> dict[int, list[float]]:
    """Seconds of each sync, by number of servers, in pairs: the machine is busier at some times than at others."""
    recipe, location = recipe_of(model), locate(model)
    assert isinstance(recipe.engine, ServerEngineRecipe)
    weights = load_model(location, None, torch.float32, "sdpa", torch.device("cpu"))
    took: dict[int, list[float]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as logs:
        both = open_servers(recipe.engine_needs, recipe.engine, location, Path(logs), print)
        one = ServerPool(
            servers=both.servers[:1],
            processes={},
            shape=model_shape(load_config(location, None)),
            row_tokens=0,
            abilities=EngineCapabilities(),
            restarts=0,
            carrier=FileTransfer(None),
            say=print,
        )
        try:
            with closing(both), closing(one):
                for turn in range(rounds + WARM):
                    for count, fleet in ((1, one), (2, both)) if turn % 2 else ((2, both), (1, one)):
                        began = time.perf_counter()
                        fleet.sync(checkpoint_tensors(weights), turn)
                        took[count].append(time.perf_counter() - began)
        finally:
            both.stop()
    return {count: seconds[WARM:] for count, seconds in took.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny:qwen3")
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    took = measured(given.model, given.rounds)
    for count, seconds in took.items():
        print(f"{count} server{'s' if count > 1 else ' '}  median {statistics.median(seconds):.3f} s of {len(seconds)} syncs")
    share = statistics.median(two / one for one, two in zip(took[1], took[2], strict=True))
    print(f"two take {share:.2f} of the time of one (median of pairs)")


if __name__ == "__main__":
    main()
