"""From a window of rows to optimizer steps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from rlgen.errors import DivergedError
from rlgen.losses.correction import importance_weight, mismatch
from rlgen.losses.inputs import LossInputs, Mean, Stats
from rlgen.models.policy import Policy
from rlgen.models.weights import whole
from rlgen.processes import Processes
from rlgen.rollout.batch import collate, pad_rows
from rlgen.sentinel.watch import Watch
from rlgen.trainers.base import Algorithm
from rlgen.trainers.window import Window
from rlgen.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one process makes of its micro-batches. Its gradients lie in the policy."""

    loss: float
    positions: int  # padding included
    finite: bool  # every log-prob is
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
            finite=all(part.finite for part in parts),
            stats=stats,
            sampled_logp={row: logp for part in parts for row, logp in part.sampled_logp.items()},
            with_gradient=frozenset().union(*(part.with_gradient for part in parts)),
        )


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

    def __call__(self, window: Window, step: int) -> dict[str, Any]:
        """Trains on `window` and returns its metrics, which are those of all processes.

        Raises:
            SentinelError: engine and trainer disagree about the rows; before any weight moves.
            DivergedError: the loss or the gradient is not finite; before that weight moves.
        """
        metrics: dict[str, Any] = {
            "loss": None,
            "grad_norm": None,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "tokens/trained": window.totals.tokens,
            "tokens/padding": 0,
        }
        if not window.samples:  # nothing to learn from: Adam would move weights on a gradient of zero
            return metrics
        if self.algorithm.top_entropy < 1:
            entropy: dict[int, Tensor] = {}
            for of_process in self.processes.together(partial(self._entropy, window), talks=self.sharded):
                entropy |= of_process
            window = window.select_tokens(entropy, self.algorithm.top_entropy)
        parts = []
        for update in range(self.updates):
            part = Part.sum(self.processes.together(partial(self._run, window, update), talks=self.sharded))
            if not part.finite:  # capped ratios could hide it from the loss
                raise DivergedError("a log-prob of the policy is not finite: its weights or activations have overflowed")
            if update == 0:
                metrics |= self._mismatch(window, part.sampled_logp, step)
                metrics["tokens/padding"] = window.padded(part.positions)
            metrics["grad_norm"] = self._step(part, step)
            parts.append(part)
        total = Part.sum(parts)
        metrics["loss"] = total.loss / len(parts)
        return metrics | {name: stat.value for name, stat in total.stats.items()}

    def gradient(self, window: Window) -> Tensor:
        """[N] float64 of the first update on `window`, on the CPU; no weight moves. For the sentinel, of one process."""
        self._run(window, 0)
        flat = torch.cat([p.grad.flatten().double().cpu() for p in self.policy.parameters() if p.grad is not None])
        self.optimizer.zero_grad()
        return flat

    @torch.no_grad()
    def _entropy(self, window: Window) -> dict[int, Tensor]:
        """The entropy of each token of this process, [L] by row: which tokens count depends on all of them."""
        entropy: dict[int, Tensor] = {}
        for rows in window.micro_batches:
            batch = collate(window.samples, rows, self.processes.device)
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
        loss_temperature = self.algorithm.loss_temperature or self.temperature
        both = (loss_temperature,) if loss_temperature == self.temperature else (loss_temperature, self.temperature)
        scores = self.policy(batch, both, "gradient" if self.algorithm.entropy_gradient else "value")
        policy_logp, at_sampling = scores.logp[0], scores.logp[-1].detach().cpu()
        finite = bool(policy_logp.isfinite().all())
        if not batch.rows:
            (0.0 * policy_logp.sum()).backward()
            return Part(loss=0.0, positions=batch.tokens, finite=finite, stats={}, sampled_logp={}, with_gradient=frozenset())
        sampled_logp: dict[int, Tensor] = {}
        if update == 0:
            window.freeze_old(batch, policy_logp)
            for row, values in zip(batch.rows, at_sampling, strict=True):
                sampled_logp[row] = values[: len(window.samples[row].completion_ids)].clone()  # what a view shows is sent whole
        old_logp = window.gather(window.old_logp, batch)
        rows = torch.tensor(batch.rows)
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
                weight=importance_weight(old_logp, batch.sampler_logp, batch.mask, self.algorithm.correction),
                group_tokens=window.group_tokens[rows].to(policy_logp.device),
                pair_id=window.pair_id[rows].to(policy_logp.device),
                totals=window.totals,
                max_tokens=self.max_tokens,
                epoch=window.epoch,
            )
        )
        # Sharded gradients are means over the processes; the loss is a sum.
        (loss * self.processes.world if self.sharded else loss).backward()
        return Part(
            loss=loss.item(),
            positions=batch.tokens,
            finite=finite,
            stats=stats,
            sampled_logp=sampled_logp,
            with_gradient=frozenset(),
        )

    def _mismatch(self, window: Window, sampled_logp: dict[int, Tensor], step: int) -> dict[str, Any]:
        """The gap between engine and trainer over the whole window; the sentinel looks at every one."""
        logp = [sampled_logp[row] for row in range(len(window.samples))]
        old_logp = pad_rows(logp, 0.0)
        sampler_logp = pad_rows([torch.tensor(sample.sampler_logp) for sample in window.samples], 0.0)
        mask = pad_rows([torch.tensor(sample.loss_mask) for sample in window.samples], False)
        correction = self.algorithm.correction
        weight = importance_weight(old_logp, sampler_logp, mask, correction)
        measured = mismatch(old_logp, sampler_logp, weight, mask, correction)
        if self.watch is not None:
            measured["sentinel/drift"] = self.watch(window.samples, logp, step)
        return measured

    def _step(self, part: Part, step: int) -> float:
        """Adds up the gradient, clips it, steps, and returns the norm before clipping."""
        if not self.sharded:
            self._add_gradients(part.with_gradient)
        norm = whole(clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)).item()
        if not (math.isfinite(part.loss) and math.isfinite(norm)):
            raise DivergedError(
                f"step {step}: loss {part.loss}, gradient norm {norm}: not finite. The weights are those before this step;"
                " lower optim.learning_rate, or look at the samples of this step in rollouts/"
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def _add_gradients(self, places: frozenset[int]) -> None:
        """Over all processes, of the parameters at `places`: those that have a gradient in one of them."""
        if self.processes.world == 1:
            return
        having = [parameter for place, parameter in enumerate(self.policy.parameters()) if place in places]
        for parameter in having:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.processes.sum_(parameter.grad for parameter in having if parameter.grad is not None)
