"""Trains language models with online RL, and checks that what it trains on is what the model sampled.

`train`, `evaluate`, `rollouts`, `load_recipe`, `Callback` and `StopTraining` are `rlgen.api`'s, imported when they are used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlgen.api import Callback, StopTraining, evaluate, load_recipe, rollouts, train

__version__ = "0.1.0"
__all__ = ["Callback", "StopTraining", "evaluate", "load_recipe", "rollouts", "train"]


def __getattr__(name: str) -> Any:
    """Imports the Python interface at its first use: `import rlgen` alone stays quick."""
    if name not in __all__:
        raise AttributeError(f"module rlgen has no {name}; it has {', '.join(__all__)}")
    from rlgen import api

    return getattr(api, name)
