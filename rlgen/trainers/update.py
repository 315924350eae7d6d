"""From a window of rows to optimizer steps."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from rlgen.errors import DivergedError, SetupError
from rlgen.losses.correction import importance_weight, mismatch
from rlgen.losses.inputs import LossInputs, Mean, Stats
from rlgen.models.policy import Policy
from rlgen.models.shortage import Phase, memory_for
from rlgen.models.weights import all_finite, whole
from rlgen.processes import Processes
from rlgen.rollout.batch import collate, pad_rows
from rlgen.run.records import as_text
from rlgen.sentinel.watch import Watch
from rlgen.trainers.base import Algorithm
from rlgen.trainers.window import Window
from rlgen.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one process makes of its micro-batches. Its gradients lie in the policy."""

    loss: float
    positions: int  # padding included
    nonfinite: frozenset[int]  # rows with a log-prob that is not finite; without any, those of a loss that is not
    stats: Stats
    sampled_logp: dict[int, Tensor]  # [L] by row on the CPU, at the sampling temperature; of the first update
    with_gradient: frozenset[int]  # places of parameters that have one

    @classmethod
    def sum(cls, parts: Sequence["Part"]) -> "Part":
        stats: Stats = {}
        for part in parts:
            for name, stat in part.stats.items():
                stats[name] = stats.get(name, Mean(0.0, 0.0)) + stat
        return cls(
            loss=sum(part.loss for part in parts),
            positions=sum(part.positions for part in parts),
            nonfinite=frozenset().union(*(part.nonfinite for part in parts)),
            stats=stats,
            sampled_logp={row: logp for part in parts for row, logp in part.sampled_logp.items()},
            with_gradient=frozenset().union(*(part.with_gradient for part in parts)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """An update that was not made, because one of its numbers is not finite. It has moved no weight and left no gradient."""

    update: int  # of the step, from 0; those after it see the same weights and are not tried
    loss: float
    grad_norm: float | None  # None: not computed, the loss or a log-prob is enough
    rows: frozenset[int]  # with a log-prob that is not finite; without any, those of a micro-batch whose loss is not
    parameters: tuple[str, ...]  # with a gradient that is not, as far as this process holds them
    old_logp: dict[int, Tensor]  # [L] by row, from before the first update

    def words(self) -> str:
        """`the gradient's norm is nan`"""
        if not math.isfinite(self.loss):
            return f"the loss is {self.loss}"
        if self.grad_norm is None:
            return f"log-probs or losses of {len(self.rows)} samples are not finite"
        return f"the gradient's norm is {self.grad_norm}, first in {next(iter(self.parameters), 'another process')}"

    def consequence(self) -> str:
        """`the update was skipped and no weight has moved`"""
        if self.update:
            return f"the updates after the first {self.update} of the step were skipped"
        return "the update was skipped and no weight has moved"

    def verdict(self) -> dict[str, Any]:
        """What was not finite."""
        return {
            "update": self.update,
            "loss": as_text(self.loss),
            "grad_norm": as_text(self.grad_norm),
            "rows": sorted(self.rows),
            "parameters": list(self.parameters),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Updater:
    """Forward, loss and backward over the micro-batches of a window, then one optimizer step; `updates` times.

    The policy runs once for each trained token and update. The first update's log-probs, detached, are the `old_logp` of the
    rollout: the trainer's before any weight moves. They stay frozen for the updates after it. Where samples are of
    earlier weights (`rollout.ahead`), the correction makes up for that.

    Each process computes its own micro-batches. Where every process has all weights, gradients are added up once, after the
    last backward: nothing waits inside of forward or backward, so that an error in one process is agreed on there. Sharded
    weights do wait in both.
    """

    processes: Processes
    sharded: bool
    policy: Policy
    optimizer: Optimizer
    algorithm: Algorithm
    updates: int
    max_grad_norm: float
    temperature: float  # of the engine's log-probs
    max_tokens: int
    watch: Watch | None  # None: the engine samples from a restricted distribution, which cannot be compared
    less_memory: Callable[[Phase], Sequence[str]]  # settings that help where memory does not suffice

    def __call__(self, window: Window, step: int) -> tuple[dict[str, Any], Skipped | None]:
        """Trains on `window`. The metrics are those of all processes, who skip the same update or none.

        Every update of the step is counted once: `updates/done`, `updates/empty` (there is nothing to learn from: no tokens, or a
        gradient of exactly zero, on which Adam would move weights by its momentum), or `updates/skipped` (not finite).

        Raises:
            SentinelError: engine and trainer disagree about the rows; before any weight moves.
            DivergedError: an optimizer step has made weights that are not finite.
            SetupError: the memory of a process does not suffice.
        """
        metrics: dict[str, Any] = {
            "loss": None,
            "grad_norm": None,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "tokens/trained": window.totals.tokens,
            "tokens/padding": 0,
            "updates/done": 0,
            "updates/empty": 0,
            "updates/skipped": 0,
        }
        if not window.totals.tokens:
            return metrics | {"updates/empty": self.updates}, None
        if self.algorithm.top_entropy < 1:
            entropy: dict[int, Tensor] = {}
            for of_process in self.processes.together(partial(self._entropy, window), talks=self.sharded):
                entropy |= of_process
            window = window.select_tokens(entropy, self.algorithm.top_entropy)
        parts: list[Part] = []
        skipped: Skipped | None = None
        old_logp: dict[int, Tensor] = {}
        for update in range(self.updates):
            part = Part.sum(self.processes.together(partial(self._run, window, update), talks=self.sharded))
            if update == 0:
                old_logp = part.sampled_logp
                metrics |= self._mismatch(window, old_logp, step)
                metrics["tokens/padding"] = window.padded(part.positions)
            norm = None if part.nonfinite else self._add_up(part)
            size = None if norm is None else whole(norm).item()
            if norm is None or size is None or not (math.isfinite(part.loss) and math.isfinite(size)):
                skipped = self._skip(part, size, update, old_logp)
                metrics["updates/skipped"] = self.updates - update
                break
            if size:
                self._step(norm, step)
            self.optimizer.zero_grad()
            metrics["updates/done" if size else "updates/empty"] += 1
            metrics["grad_norm"] = size
            parts.append(part)
        if not parts:
            return metrics | {"tokens/trained": 0}, skipped
        total = Part.sum(parts)
        metrics["loss"] = total.loss / len(parts)
        return metrics | {name: stat.value for name, stat in total.stats.items()}, skipped

    def gradient(self, window: Window) -> Tensor:
        """[N] float64 of the first update on `window`, on the CPU; no weight moves. For the sentinel, of one process."""
        self._run(window, 0)
        flat = torch.cat([p.grad.flatten().double().cpu() for p in self.policy.parameters() if p.grad is not None])
        self.optimizer.zero_grad()
        return flat

    def attempt(self, window: Window) -> None:
        """Forward and backward of `window`, for what they need; nothing is left of them, even if they fail."""
        try:
            self._run(window, 0)
        finally:
            self.optimizer.zero_grad()

    @torch.no_grad()
    def _entropy(self, window: Window) -> dict[int, Tensor]:
        """The entropy of each token of this process, [L] by row: which tokens count depends on all of them."""
        entropy: dict[int, Tensor] = {}
        for rows in window.micro_batches:
            batch = collate(window.samples, rows, self.processes.device)
            with memory_for(f"the entropy of {extent(batch)}", self.less_memory("forward"), SetupError):
                values = self.policy(batch, (self.temperature,), "value").entropy.cpu()
            entropy |= {row: values[place, : len(window.samples[row].completion_ids)].clone() for place, row in enumerate(rows)}
        return entropy

    def _run(self, window: Window, update: int) -> Part:
        """The micro-batches of this process: gradients of their sum."""
        parts = [
            self._backward(window, collate(window.samples, rows, self.processes.device), update) for rows in window.micro_batches
        ]
        total = Part.sum(parts)
        having = frozenset(place for place, parameter in enumerate(self.policy.parameters()) if parameter.grad is not None)
        return replace(total, with_gradient=having)

    def _backward(self, window: Window, batch: Batch, update: int) -> Part:
        """One micro-batch."""
        with memory_for(f"the forward pass of {extent(batch)}", self.less_memory("forward"), SetupError):
            loss, part = self._forward(window, batch, update)
        with memory_for(f"the backward pass of {extent(batch)}", self.less_memory("backward"), SetupError):
            # Sharded gradients are means over the processes; the loss is a sum.
            (loss * self.processes.world if self.sharded else loss).backward()
        return part

    def _forward(self, window: Window, batch: Batch, update: int) -> tuple[Tensor, Part]:
        """The loss of a micro-batch; its gradient is still to be computed."""
        loss_temperature = self.algorithm.loss_temperature or self.temperature
        both = (loss_temperature,) if loss_temperature == self.temperature else (loss_temperature, self.temperature)
        scores = self.policy(batch, both, "gradient" if self.algorithm.entropy_gradient else "value")
        policy_logp, at_sampling = scores.logp[0], scores.logp[-1].detach()
        if not batch.rows:
            return 0.0 * policy_logp.sum(), Part(
                loss=0.0, positions=batch.tokens, nonfinite=frozenset(), stats={}, sampled_logp={}, with_gradient=frozenset()
            )
        sampled_logp: dict[int, Tensor] = {}
        if update == 0:
            window.freeze_old(batch, policy_logp, at_sampling)
            for row, values in zip(batch.rows, at_sampling.cpu(), strict=True):
                sampled_logp[row] = values[: len(window.samples[row].completion_ids)].clone()  # what a view shows is sent whole
        old_logp = window.gather(window.old_logp, batch)
        rows, correction = torch.tensor(batch.rows), self.algorithm.correction
        old_at_sampling = window.gather(window.old_at_sampling, batch)
        loss, stats = self.algorithm.loss(
            LossInputs(
                policy_logp=policy_logp,
                old_logp=old_logp,
                sampler_logp=batch.sampler_logp,
                ref_logp=window.gather(window.ref_logp, batch) if window.ref_logp else None,
                entropy=scores.entropy,
                mask=batch.mask,
                kept=window.gather(window.kept, batch) if window.kept else batch.mask,
                advantages=window.advantages[rows].to(policy_logp.device),
                weight=importance_weight(old_at_sampling, batch.sampler_logp, batch.mask, correction),
                group_tokens=window.group_tokens[rows].to(policy_logp.device),
                pair_id=window.pair_id[rows].to(policy_logp.device),
                totals=window.totals,
                max_tokens=self.max_tokens,
                epoch=window.epoch,
            )
        )
        # A log-prob counts by itself: capped ratios could hide it from the loss.
        finite = policy_logp.isfinite().all(dim=1).tolist()
        nonfinite = frozenset(row for row, is_finite in zip(batch.rows, finite, strict=True) if not is_finite)
        if not nonfinite and not loss.isfinite():
            nonfinite = frozenset(batch.rows)
        return loss, Part(
            loss=loss.item(),
            positions=batch.tokens,
            nonfinite=nonfinite,
            stats=stats,
            sampled_logp=sampled_logp,
            with_gradient=frozenset(),
        )

    def _mismatch(self, window: Window, sampled_logp: dict[int, Tensor], step: int) -> dict[str, Any]:
        """The gap between engine and trainer over the whole window; the sentinel looks at every one.

        Rows whose log-probs are not numbers are left out: the policy could not compute them, which says nothing about the engine.
        An infinite one stays: a token was sampled that the policy never samples.
        """
        rows = [row for row in range(len(window.samples)) if not sampled_logp[row].isnan().any()]
        if not rows:
            return {}
        samples, logp = [window.samples[row] for row in rows], [sampled_logp[row] for row in rows]
        old_logp = pad_rows(logp, 0.0)
        sampler_logp = pad_rows([torch.tensor(sample.sampler_logp) for sample in samples], 0.0)
        mask = pad_rows([torch.tensor(sample.loss_mask) for sample in samples], False)
        correction = self.algorithm.correction
        weight = importance_weight(old_logp, sampler_logp, mask, correction)
        measured: dict[str, Any] = dict(mismatch(old_logp, sampler_logp, weight, mask, correction))
        if self.watch is not None:
            measured["sentinel/drift"] = self.watch(samples, logp, step)
        return measured

    def _add_up(self, part: Part) -> Tensor:
        """The norm of the gradient over all processes, who have the same: they decide alike what is done with it."""
        with memory_for("the sum of the gradients", self.less_memory("optimizer"), SetupError):
            if not self.sharded:
                self._add_gradients(part.with_gradient)
            return get_total_norm([parameter.grad for parameter in self.policy.parameters() if parameter.grad is not None])

    def _skip(self, part: Part, norm: float | None, update: int, old_logp: dict[int, Tensor]) -> Skipped:
        gradients = [(name, parameter.grad) for name, parameter in self.policy.named_parameters()]
        skipped = Skipped(
            update=update,
            loss=part.loss,
            grad_norm=norm,
            rows=part.nonfinite,
            parameters=tuple(name for name, gradient in gradients if gradient is not None and not all_finite([gradient])),
            old_logp=old_logp,
        )
        self.optimizer.zero_grad()
        return skipped

    def _step(self, norm: Tensor, step: int) -> None:
        """One optimizer step on the gradient of this norm, clipped.

        Raises:
            DivergedError: in all processes, if a weight of one is not finite after it.
            SetupError: in all processes, if the memory of one does not suffice.
        """

        def move() -> bool:
            with memory_for("the optimizer step", self.less_memory("optimizer"), SetupError):
                clip_grads_with_norm_(self.policy.parameters(), self.max_grad_norm, norm)
                self.optimizer.step()
            return all_finite(parameter for parameter in self.policy.parameters() if parameter.requires_grad)

        if not all(self.processes.together(move, talks=self.sharded)):
            raise DivergedError(
                f"step {step}: the optimizer step has made weights that are not finite. They are not saved, and the last"
                " checkpoint is good: open it in a new run (model.path) with a lower optim.learning_rate"
            )

    def _add_gradients(self, places: frozenset[int]) -> None:
        """Over all processes, of the parameters at `places`: those that have a gradient in one of them."""
        if self.processes.world == 1:
            return
        having = [parameter for place, parameter in enumerate(self.policy.parameters()) if place in places]
        for parameter in having:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.processes.sum_(parameter.grad for parameter in having if parameter.grad is not None)


def extent(batch: Batch) -> str:
    """`4 rows of 72 tokens`"""
    rows, tokens = batch.input_ids.shape
    return f"{rows} rows of {tokens} tokens"
