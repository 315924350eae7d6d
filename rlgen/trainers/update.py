"""From a window of rows to optimizer steps."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.optim import Optimizer

from rlgen.errors import DivergedError
from rlgen.losses.correction import importance_weight, mismatch
from rlgen.losses.inputs import LossInputs, Mean, Stats
from rlgen.models.policy import Policy
from rlgen.rollout.batch import collate, pad_rows
from rlgen.sentinel.watch import Watch
from rlgen.trainers.base import Algorithm
from rlgen.trainers.window import Window
from rlgen.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Updater:
    """Forward, loss and backward over the micro-batches of a window, then one optimizer step; `updates` times.

    The policy runs once for each trained token and update. The first update's log-probs, detached, are the `old_logp` of the
    rollout: the weights have not moved since it was sampled. They stay frozen for the updates after it.
    """

    accelerator: Accelerator
    policy: Policy
    optimizer: Optimizer
    algorithm: Algorithm
    updates: int
    max_grad_norm: float
    temperature: float  # of the engine's log-probs
    max_tokens: int
    watch: Watch | None  # None: the engine samples from a restricted distribution, which cannot be compared

    def __call__(self, window: Window, step: int) -> dict[str, Any]:
        """Trains on `window` and returns its metrics.

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
            window = window.select_tokens(self._entropy(window), self.algorithm.top_entropy)
        stats: Stats = {}
        losses: list[float] = []
        for update in range(self.updates):
            loss, scored = 0.0, 0
            sampled_logp: dict[int, Tensor] = {}
            for rows in window.micro_batches:
                batch = collate(window.samples, rows, self.accelerator.device)
                value, parts = self._backward(window, batch, update, sampled_logp)
                loss += value
                scored += batch.tokens
                for name, part in parts.items():
                    stats[name] = stats.get(name, Mean(0.0, 0.0)) + part
            if update == 0:
                metrics |= self._mismatch(window, sampled_logp, step)
                metrics["tokens/padding"] = window.padded(scored)
            metrics["grad_norm"] = self._step(loss, step)
            losses.append(loss)
        metrics["loss"] = sum(losses) / len(losses)
        return metrics | {name: stat.value for name, stat in stats.items()}

    def gradient(self, window: Window) -> Tensor:
        """[N] float64 of the first update on `window`, on the CPU; no weight moves. For the sentinel."""
        sampled_logp: dict[int, Tensor] = {}
        for rows in window.micro_batches:
            self._backward(window, collate(window.samples, rows, self.accelerator.device), 0, sampled_logp)
        flat = torch.cat([p.grad.flatten().double().cpu() for p in self.policy.parameters() if p.grad is not None])
        self.optimizer.zero_grad()
        return flat

    @torch.no_grad()
    def _entropy(self, window: Window) -> list[Tensor]:
        """The entropy of each token, one [L] tensor a row: which tokens count depends on all of them."""
        entropy: list[Tensor] = [torch.empty(0)] * len(window.samples)
        for rows in window.micro_batches:
            batch = collate(window.samples, rows, self.accelerator.device)
            for row, values in zip(rows, self.policy(batch, (self.temperature,), "value").entropy.cpu(), strict=True):
                entropy[row] = values[: len(window.samples[row].completion_ids)]
        return entropy

    def _backward(self, window: Window, batch: Batch, update: int, sampled_logp: dict[int, Tensor]) -> tuple[float, Stats]:
        """One micro-batch. Its log-probs at the engine's temperature go to `sampled_logp` on the first update."""
        loss_temperature = self.algorithm.loss_temperature or self.temperature
        both = (loss_temperature,) if loss_temperature == self.temperature else (loss_temperature, self.temperature)
        scores = self.policy(batch, both, "gradient" if self.algorithm.entropy_gradient else "value")
        policy_logp, at_sampling = scores.logp[0], scores.logp[-1].detach()
        if not policy_logp.isfinite().all():  # capped ratios could hide it from the loss
            raise DivergedError("a log-prob of the policy is not finite: its weights or activations have overflowed")
        if update == 0:
            window.freeze_old(batch, policy_logp)
            for row, values in zip(batch.rows, at_sampling, strict=True):
                sampled_logp[row] = values[: len(window.samples[row].completion_ids)]
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
        self.accelerator.backward(loss)
        return loss.item(), stats

    def _mismatch(self, window: Window, sampled_logp: dict[int, Tensor], step: int) -> dict[str, Any]:
        """The gap between engine and trainer over the whole window; the sentinel looks at every one."""
        order = range(len(window.samples))
        old_logp = pad_rows([sampled_logp[row].cpu() for row in order], 0.0)
        sampler_logp = pad_rows([torch.tensor(sample.sampler_logp) for sample in window.samples], 0.0)
        mask = pad_rows([torch.tensor(sample.loss_mask) for sample in window.samples], False)
        correction = self.algorithm.correction
        weight = importance_weight(old_logp, sampler_logp, mask, correction)
        measured = mismatch(old_logp, sampler_logp, weight, mask, correction)
        if self.watch is not None:
            measured["sentinel/drift"] = self.watch(window.samples, [sampled_logp[row].cpu() for row in order], step)
        return measured

    def _step(self, loss: float, step: int) -> float:
        """Clips the gradient, steps, and returns the norm before clipping."""
        norm = self.accelerator.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm).item()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise DivergedError(
                f"step {step}: loss {loss}, gradient norm {norm}: not finite. The weights are those before this step;"
                " lower optim.learning_rate, or look at the samples of this step in rollouts/"
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm
