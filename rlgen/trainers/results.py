"""Results of a micro-batch, an update and a step, which are added up and reported."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlgen.algorithms.base import Signal
from rlgen.losses.inputs import Mean, Stats
from rlgen.rollout.parquet import Rollout
from rlgen.run.records import as_text
from rlgen.trainers.window import Window
from rlgen.types import Ragged, Samples


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """The result of one process's micro-batches. Their gradients are in the policy's parameters."""

    loss: float
    padding: int  # positions that were computed for it
    # Places in the step's table: rows with a log-prob that is not finite, or else the rows of a micro-batch whose loss is not.
    nonfinite: frozenset[int]
    stats: Stats
    with_gradient: frozenset[int]  # indices of the parameters that have a gradient

    @classmethod
    def of(cls, pieces: Sequence["MicroBatchResult"], with_gradient: frozenset[int]) -> "UpdateResult":
        """Adds up the micro-batches. Waits for the device, once for all of them."""
        wanted = [value for piece in pieces for value in piece.values() if isinstance(value, Tensor)]
        fetched = iter(torch.cat([value.double().flatten() for value in wanted]).tolist() if wanted else ())
        stats: Stats = {}
        losses: list[float] = []
        nonfinite: set[int] = set()
        for piece in pieces:
            loss = next(fetched)
            places = {place for place in piece.places if not next(fetched)}
            # Log-probs are checked by themselves: a capped ratio could keep one that is not finite out of the loss.
            nonfinite |= places if places or math.isfinite(loss) else set(piece.places)
            losses.append(loss)
            for name, stat in piece.stats.items():
                total, count = (next(fetched) if isinstance(value, Tensor) else value for value in (stat.total, stat.count))
                stats[name] = stats.get(name, Mean(0.0, 0.0)) + Mean(total, count)
        return cls(
            loss=sum(losses),
            padding=sum(piece.padding for piece in pieces),
            nonfinite=frozenset(nonfinite),
            stats=stats,
            with_gradient=with_gradient,
        )

    @classmethod
    def sum(cls, parts: Sequence["UpdateResult"]) -> "UpdateResult":
        stats: Stats = {}
        for part in parts:
            for name, stat in part.stats.items():
                stats[name] = stats.get(name, Mean(0.0, 0.0)) + stat
        return cls(
            loss=sum(part.loss for part in parts),
            padding=sum(part.padding for part in parts),
            nonfinite=frozenset().union(*(part.nonfinite for part in parts)),
            stats=stats,
            with_gradient=frozenset().union(*(part.with_gradient for part in parts)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchResult:
    """What one micro-batch has measured. Tensors stay on their device, so that the program need not wait for it."""

    loss: Tensor  # scalar, detached
    finite: Tensor  # [B] bool: rows whose log-probs are all finite
    places: tuple[int, ...]  # [B] of the rows in the step's table
    padding: int  # positions that were computed for it
    stats: Stats

    def values(self) -> list[Tensor | float]:
        """Returns all numbers, in the order in which `UpdateResult.of` reads them."""
        return [self.loss, self.finite, *(value for stat in self.stats.values() for value in (stat.total, stat.count))]


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedUpdate:
    """An update that was not made because one of its numbers is not finite. It has changed no weight and left no gradient."""

    update: int  # index within the step, from 0; later ones would see the same weights and are not tried
    loss: float
    grad_norm: float | None  # None: not computed, because the loss or a log-prob is not finite
    rows: frozenset[int]  # as `UpdateResult.nonfinite`
    parameters: tuple[str, ...]  # parameters of this process whose gradient is not finite

    def words(self) -> str:
        if not math.isfinite(self.loss):
            return f"the loss is {self.loss}"
        if self.grad_norm is None:
            return f"log-probs or losses of {len(self.rows)} samples are not finite"
        return f"the gradient's norm is {self.grad_norm}, first in {next(iter(self.parameters), 'another process')}"

    def consequence(self) -> str:
        if self.update:
            return f"the updates after the first {self.update} of the step were skipped"
        return "the update was skipped and no weight has moved"

    def verdict(self) -> dict[str, Any]:
        return {
            "update": self.update,
            "loss": as_text(self.loss),
            "grad_norm": as_text(self.grad_norm),
            "parameters": list(self.parameters),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step has learned from its samples."""

    window: Window
    signal: Signal  # of the rows that were not replaced
    metrics: dict[str, Any]
    skipped: SkippedUpdate | None  # the same in all processes; None: no update was skipped


def untrained(step: int, samples: Samples) -> Rollout:
    """Returns samples as they are written, without what follows from an update."""
    count = len(samples)
    nothing = Ragged(np.zeros(0, dtype=np.float32), np.zeros(count + 1, dtype=np.int64))
    advantage, trained = np.zeros(count), np.zeros(count, dtype=bool)
    return Rollout(step=step, samples=samples, policy_logp=nothing, advantage=advantage, trained=trained)
