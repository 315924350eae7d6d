"""Trains on the rows of a train batch: micro-batches, then optimizer steps."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from rlgen.algorithms.base import Algorithm, loss_distribution
from rlgen.errors import DivergedError, SetupError
from rlgen.losses.correction import Mismatch, importance_weight
from rlgen.losses.inputs import LossInputs, onto
from rlgen.metrics import Metric
from rlgen.models.memory_errors import Phase, memory_for
from rlgen.models.parts import by_mesh, whole
from rlgen.models.parts import part as own_part
from rlgen.models.policy import Policy
from rlgen.models.sharding import send_gradients
from rlgen.models.weights import all_finite
from rlgen.processes import Processes
from rlgen.rollout.batch import collate
from rlgen.sentinel.watch import Watch
from rlgen.trainers.results import MicroBatchResult, SkippedUpdate, UpdateResult
from rlgen.trainers.train_batch import TrainBatch
from rlgen.types import Distribution, MicroBatch

Updated: TypeAlias = tuple[dict[str, Any], SkippedUpdate | None]  # metrics, and the update that was skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class Updater:
    """Runs forward, loss and backward over the micro-batches of a step, then one optimizer step; all of it `updates` times.

    The policy runs once per trained token and update. The log-probs of the first update, detached, are the `old_logp` of the
    rollout: the trainer's, before any weight changes. Later updates use the same ones. If samples are of earlier weights
    (`rollout.async_steps`), the correction accounts for that.

    Each process computes its own micro-batches. Gradients of unsharded weights are all-reduced once, after the last backward
    pass: forward and backward use no collectives, so that an error in one process can be raised in all. With sharded weights,
    both use collectives; the last backward pass leaves each process its shards of the sum.
    """

    processes: Processes
    sharded: bool
    defer_sync: bool = False  # of sharded weights: send gradients after the last micro-batch only
    policy: Policy
    optimizer: Optimizer
    algorithm: Algorithm
    updates: int
    max_grad_norm: float
    distribution: Distribution  # that the run samples from
    max_tokens: int
    watch: Watch | None  # None: the engine samples from a restricted distribution, which cannot be compared
    less_memory: Callable[[Phase], Sequence[str]]  # settings to suggest if memory does not suffice
    deterministic: bool  # kernels that give the same bits each time

    def __call__(self, train_batch: TrainBatch, step: int, first: UpdateResult | None = None) -> Updated:
        """Returns the metrics over all processes, and the skipped update or None, which is the same in all.

        Every update of the step counts in one metric: `updates/done`, `updates/empty` (nothing to learn: no tokens, or a gradient
        of exactly zero, on which Adam would move weights by its momentum) or `updates/skipped` (not finite).

        Args:
            first: the micro-batches of the first update, where they have run already (`rollout.stream`). None: they run here.

        Raises:
            SentinelError: engine and trainer differ on the rows; raised before any weight changes.
            DivergedError: an optimizer step has made weights that are not finite.
            SetupError: a process has too little memory.
        """
        with same_bits(self.deterministic):
            return self._train(train_batch, step, first)

    def _train(self, train_batch: TrainBatch, step: int, first: UpdateResult | None) -> Updated:
        metrics: dict[str, Any] = {
            Metric.LOSS: None,
            Metric.GRAD_NORM: None,
            Metric.LEARNING_RATE: self.optimizer.param_groups[0]["lr"],
            Metric.TOKENS_TRAINED: train_batch.totals.tokens,
            Metric.TOKENS_PADDING: 0,
            Metric.UPDATES_DONE: 0,
            Metric.UPDATES_EMPTY: 0,
            Metric.UPDATES_SKIPPED: 0,
        }
        if not train_batch.totals.tokens:
            return metrics | {Metric.UPDATES_EMPTY: self.updates}, None
        if self.algorithm.top_entropy < 1:
            self.processes.run_all(partial(self._entropy, train_batch), has_collectives=self.sharded)
            train_batch = train_batch.select_tokens(self.algorithm.top_entropy, self.processes)
        parts: list[UpdateResult] = []
        skipped: SkippedUpdate | None = None
        for update in range(self.updates):
            part = self._run_all(train_batch, update) if first is None or update else first
            if update == 0:
                metrics |= self._mismatch(train_batch, step)
                metrics[Metric.TOKENS_PADDING] = part.padding
            norm = None if part.nonfinite else self._add_up(part)
            size = None if norm is None else whole(norm).item()
            if norm is None or size is None or not (math.isfinite(part.loss) and math.isfinite(size)):
                skipped = self._skip(part, size, update)
                metrics[Metric.UPDATES_SKIPPED] = self.updates - update
                break
            if size:
                self._step(norm, step)
            self.optimizer.zero_grad()
            metrics[Metric.UPDATES_DONE if size else Metric.UPDATES_EMPTY] += 1
            metrics[Metric.GRAD_NORM] = size
            parts.append(part)
        if not parts:
            return metrics | {Metric.TOKENS_TRAINED: 0}, skipped
        total = UpdateResult.sum(parts)
        metrics[Metric.LOSS] = total.loss / len(parts)
        return metrics | {name: stat.value for name, stat in total.stats.items()}, skipped

    def run_first(self, train_batch: TrainBatch) -> UpdateResult:
        """Runs the micro-batches of a first update, and adds up their gradients in the parameters. For `trainers.groups`."""
        with same_bits(self.deterministic):
            return self._run(train_batch, 0)

    def gradient(self, train_batch: TrainBatch) -> Tensor:
        """Returns the gradient of the first update on `train_batch`, [N] on the CPU. Changes no weight.

        The sentinel uses it. If the weights are sharded, it is this process's shard.
        """
        self._add_gradients(self._run_all(train_batch, 0).with_gradient)
        grads = [own_part(p.grad) for p in self.policy.parameters() if p.grad is not None]
        flat = torch.cat([grad.flatten().cpu() for grad in grads])
        self.optimizer.zero_grad()
        return flat

    def attempt(self, train_batch: TrainBatch) -> None:
        """Runs forward and backward to see whether memory suffices. Discards the gradients, even after an error."""
        try:
            self._run(train_batch, 0)
        finally:
            self.optimizer.zero_grad()

    @torch.no_grad()
    def _entropy(self, train_batch: TrainBatch) -> None:
        """Stores the entropy of each token of this process: which ones are trained depends on that of all."""
        for rows in (*train_batch.micro_batches, *train_batch.idle):
            batch = collate(train_batch.samples, rows, self.processes.device)
            with memory_for(f"the entropy of {extent(batch)}", self.less_memory("forward"), SetupError):
                train_batch.put("entropy", batch, self.policy(batch, (self.distribution,), "value").entropy)

    def _run_all(self, train_batch: TrainBatch, update: int) -> UpdateResult:
        """Runs `_run` in all processes, and returns the sum of their results. Gradients are not added up."""
        return UpdateResult.sum(self.processes.gather_all(partial(self._run, train_batch, update), has_collectives=self.sharded))

    def _run(self, train_batch: TrainBatch, update: int) -> UpdateResult:
        """Computes the micro-batches of this process, and adds up their gradients. Idle rows only run forward."""
        device, samples = self.processes.device, train_batch.samples
        pieces, last = [], len(train_batch.micro_batches) - 1
        for place, rows in enumerate(train_batch.micro_batches):
            send_gradients(self.policy, place == last, self.defer_sync)
            pieces.append(self._backward(train_batch, collate(samples, rows, device), update))
        with torch.no_grad():
            for rows in train_batch.idle:
                batch = collate(samples, rows, device)
                with memory_for(f"the forward pass of {extent(batch)}", self.less_memory("forward"), SetupError):
                    pieces.append(self._forward(train_batch, batch, update)[1])
        having = frozenset(place for place, parameter in enumerate(self.policy.parameters()) if parameter.grad is not None)
        # An error of the device may show only here, where its numbers are read.
        with memory_for("the update", self.less_memory("backward"), SetupError):
            return UpdateResult.of(pieces, having)

    def _backward(self, train_batch: TrainBatch, batch: MicroBatch, update: int) -> MicroBatchResult:
        with memory_for(f"the forward pass of {extent(batch)}", self.less_memory("forward"), SetupError):
            loss, piece = self._forward(train_batch, batch, update)
        with memory_for(f"the backward pass of {extent(batch)}", self.less_memory("backward"), SetupError):
            loss.backward()
        return piece

    def _forward(self, train_batch: TrainBatch, batch: MicroBatch, update: int) -> tuple[Tensor, MicroBatchResult]:
        both = tuple(dict.fromkeys((loss_distribution(self.algorithm, self.distribution), self.distribution)))
        scores = self.policy(batch, both, "gradient" if self.algorithm.entropy_gradient else "value")
        policy_logp, at_sampling = scores.logp[0], scores.logp[-1].detach()
        if not batch.rows:
            nothing = 0.0 * policy_logp.sum()
            finite = batch.mask.new_ones(0)
            return nothing, MicroBatchResult(
                loss=nothing.detach(), finite=finite, places=(), padding=self.policy.padding(batch), stats={}
            )
        if update == 0:
            train_batch.put("old_logp", batch, policy_logp)
            train_batch.put("old_at_sampling", batch, at_sampling)
            if scores.sure is not None:
                train_batch.put("sure", batch, scores.sure)
        inputs = self._inputs(train_batch, batch, policy_logp, scores.entropy)
        if update == 0:
            gap = Mismatch.of(at_sampling, batch.sampler_logp, inputs.weight, batch.mask, self.algorithm.correction)
            train_batch.mismatches.append(gap)
        loss, stats = self.algorithm.loss(inputs)
        return loss, MicroBatchResult(
            loss=loss.detach(),
            finite=policy_logp.isfinite().all(dim=1),
            places=tuple(train_batch.rows[list(batch.rows)].tolist()),
            padding=self.policy.padding(batch),
            stats=stats,
        )

    def _inputs(self, train_batch: TrainBatch, batch: MicroBatch, policy_logp: Tensor, entropy: Tensor) -> LossInputs:
        rows, device = torch.tensor(batch.rows), policy_logp.device
        weight = importance_weight(
            train_batch.get("old_at_sampling", batch), batch.sampler_logp, batch.mask, self.algorithm.correction
        )
        return LossInputs(
            policy_logp=policy_logp,
            old_logp=train_batch.get("old_logp", batch),
            sampler_logp=batch.sampler_logp,
            ref_logp=train_batch.get("ref_logp", batch) if "ref_logp" in train_batch.frozen else None,
            entropy=entropy,
            mask=batch.mask,
            kept=train_batch.get("kept", batch) if "kept" in train_batch.frozen else batch.mask,
            advantages=train_batch.advantages[rows],
            weight=weight,
            group_tokens=onto(train_batch.group_tokens[rows], device),
            pair_id=train_batch.pair_id[rows],
            totals=train_batch.totals,
            max_tokens=self.max_tokens,
            epoch=train_batch.epoch,
        )

    def _mismatch(self, train_batch: TrainBatch, step: int) -> dict[str, Any]:
        """Returns the metrics of the gap between engine and trainer over the train batch, after the sentinel has checked it."""
        measured: dict[str, Any] = dict(Mismatch.of_train_batch(train_batch.mismatches).metrics(self.processes.total))
        if self.watch is not None and measured[Metric.SAMPLER_DELTA_MEAN] is not None:
            sure = train_batch.flat("sure").bool() if self.distribution.truncated else None
            measured[Metric.SENTINEL_DRIFT] = self.watch(train_batch.samples, train_batch.flat("old_at_sampling"), step, sure)
        return measured

    def _add_up(self, part: UpdateResult) -> Tensor:
        """All-reduces the gradients that are not sharded, and returns the norm of all over all processes, the same in each."""
        with memory_for("the sum of the gradients", self.less_memory("optimizer"), SetupError):
            self._add_gradients(part.with_gradient)
            gradients = by_mesh(parameter.grad for parameter in self.policy.parameters() if parameter.grad is not None)
            norms = [get_total_norm(some) for some in gradients or [[]]]  # nothing to learn: 0
            return norms[0] if len(norms) == 1 else torch.stack(list(map(whole, norms))).norm()

    def _skip(self, part: UpdateResult, norm: float | None, update: int) -> SkippedUpdate:
        gradients = [(name, parameter.grad) for name, parameter in self.policy.named_parameters()]
        skipped = SkippedUpdate(
            update=update,
            loss=part.loss,
            grad_norm=norm,
            rows=part.nonfinite,
            parameters=tuple(name for name, gradient in gradients if gradient is not None and not all_finite([gradient])),
        )
        self.optimizer.zero_grad()
        return skipped

    def _step(self, norm: Tensor, step: int) -> None:
        """Clips the gradient, whose norm is `norm`, and runs one optimizer step.

        Raises DivergedError in all processes if a weight in one is not finite after it.
        """

        def move() -> bool:
            with memory_for("the optimizer step", self.less_memory("optimizer"), SetupError):
                for some in by_mesh(self.policy.parameters()):
                    clip_grads_with_norm_(some, self.max_grad_norm, norm)
                self.optimizer.step()
            return all_finite(parameter for parameter in self.policy.parameters() if parameter.requires_grad)

        if not all(self.processes.gather_all(move, has_collectives=self.sharded)):
            raise DivergedError(
                f"step {step}: the optimizer step made weights that are not finite. They are not saved, and the last"
                " checkpoint is good: open it in a new run (model.path) with a lower optim.learning_rate"
            )

    def _add_gradients(self, places: frozenset[int]) -> None:
        """All-reduces the gradients of the parameters at `places`: those that have a gradient in at least one process.

        Leaves out those of shards, which the backward pass has added up.
        """
        if self.processes.world == 1:
            return
        having = [parameter for place, parameter in enumerate(self.policy.parameters()) if place in places]
        having = [parameter for parameter in having if not isinstance(parameter, DTensor)]
        for parameter in having:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.processes.sum_(parameter.grad for parameter in having if parameter.grad is not None)


@contextmanager
def same_bits(wanted: bool) -> Iterator[None]:
    """Makes torch choose deterministic kernels within the block, if `wanted`; an operation that has none raises an error.

    Only there: the engine in the same process has kernels that torch does not know.
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(wanted or before)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def extent(batch: MicroBatch) -> str:
    rows, tokens = batch.input_ids.shape
    return f"{rows} rows of {tokens} tokens"
