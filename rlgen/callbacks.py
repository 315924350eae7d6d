"""Callbacks: a program's own code at five points of a run. `rlgen.train("recipe.yaml", callbacks=[Mine()])`"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

    from rlgen.recipe import Recipe


class StopTraining(Exception):
    """Raised by a callback to end the run after the step that is going on. The run saves, and `--resume` goes on from there."""


class Callback:
    """Base of callbacks. Override the methods that you need.

    The methods are called in the main process, between two parts of the loop, and the loop waits for them. Their arguments are
    copies: what a method does to them changes nothing in the run. An exception ends the run with exit 5, and the run can be
    resumed.
    """

    def on_start(self, run: Path, recipe: "Recipe") -> None:
        """Is called when all parts are open, before the first step of this attempt. `run`: its folder."""

    def on_rollouts(self, step: int, rollouts: "pa.Table") -> None:
        """Is called when a step is sampled and scored, before it is trained on.

        `rollouts`: the samples of the main process, one a row: prompt, completion, ids, log-probs of the engine, rewards.
        """

    def on_update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Is called after the optimizer steps of a step, before the engine gets the new weights. `metrics`: loss and the like."""

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Is called at the end of a step. `metrics`: the line of metrics.jsonl."""

    def on_end(self, error: BaseException | None) -> None:
        """Is called once when the loop has ended, before the engine is closed. `error`: what ended it; None: it is done."""
