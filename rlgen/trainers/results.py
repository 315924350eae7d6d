"""Records of what an update has computed: of a micro-batch, of all of a process, of a step, and why one was skipped."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlgen.algorithms.base import Advantages
from rlgen.losses.inputs import Mean, Stats
from rlgen.run.records import finite_or_text
from rlgen.trainers.train_batch import TrainBatch


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
        parts: list[UpdateResult] = []
        for piece in pieces:
            loss = next(fetched)
            places = {place for place in piece.places if not next(fetched)}
            stats: Stats = {}
            for name, stat in piece.stats.items():
                total, count = (next(fetched) if isinstance(value, Tensor) else value for value in (stat.total, stat.count))
                stats[name] = Mean(total, count)
            # Log-probs are checked by themselves: a capped ratio could keep one that is not finite out of the loss.
            nonfinite = frozenset(places if places or math.isfinite(loss) else piece.places)
            parts.append(cls(loss=loss, padding=piece.padding, nonfinite=nonfinite, stats=stats, with_gradient=with_gradient))
        return replace(cls.sum(parts), with_gradient=with_gradient)

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
        """Returns why the update was skipped, and what follows."""
        if not math.isfinite(self.loss):
            why = f"the loss is {self.loss}"
        elif self.grad_norm is None:
            why = f"log-probs or losses of {len(self.rows)} samples are not finite"
        else:
            why = f"the gradient's norm is {self.grad_norm}, first in {next(iter(self.parameters), 'another process')}"
        later = f"the updates after the first {self.update} of the step were skipped"
        return f"{why}: {later if self.update else 'the update was skipped and no weight has moved'}"

    def verdict(self) -> dict[str, Any]:
        return {
            "update": self.update,
            "loss": finite_or_text(self.loss),
            "grad_norm": finite_or_text(self.grad_norm),
            "parameters": list(self.parameters),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step has learned from its samples."""

    train_batch: TrainBatch
    advantages: Advantages  # of the rows that were not replaced
    metrics: dict[str, Any]
    skipped: SkippedUpdate | None  # the same in all processes; None: no update was skipped
