"""`rlgen` with a fault in one of its processes: faulty.py FAULT train RECIPE …"""

import os
import sys

from rlgen.cli.app import main
from rlgen.engines.transformers import TransformersEngine
from rlgen.trainers.update import Updater


def one_engine_loses_a_tensor() -> None:
    """Silently: its receipt says that it came."""
    sync = TransformersEngine.sync

    def without(engine, weights, version, hashed=False):  # type: ignore[no-untyped-def]
        own = engine._model.get_parameter("model.layers.1.mlp.up_proj.weight")
        before = own.detach().clone()
        receipt = sync(engine, weights, version, hashed)
        own.data.copy_(before)
        return receipt

    TransformersEngine.sync = without  # type: ignore[method-assign]


def one_backward_fails() -> None:
    run = Updater._run

    def failing(updater, window, update):  # type: ignore[no-untyped-def]
        part = run(updater, window, update)
        raise MemoryError(f"no memory after {part.positions} positions")

    Updater._run = failing  # type: ignore[method-assign]


if __name__ == "__main__":
    fault = sys.argv.pop(1)
    if os.environ["RANK"] == "1":
        globals()[fault]()
    main()
