"""Compares engine and trainer on every batch of a run, before its weights change (check 7)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlgen.errors import EngineError, Fault, SentinelError
from rlgen.metrics import Metric
from rlgen.rollout.sample import turns_apart
from rlgen.rollout.samples import Samples
from rlgen.sentinel.bounds import NONE_SURE, Gap, engine_gap
from rlgen.sentinel.diagnose import Cause, explain
from rlgen.sentinel.probe import FEWER_TOKENS, Probe
from rlgen.sentinel.rungs import caught, changed_sync
from rlgen.sentinel.sync import send_weights
from rlgen.sentinel.verdict import Outcome
from rlgen.types import Distribution, Sample, Sampling

WORST = 32  # number of samples of a batch that are used to find a cause
MEASURED = 8  # of these, those whose noise is measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """Compares the log-probs of each batch. What happens on a drift is set in the recipe.

    A gap is first compared with the bounds of the probe, whose noise was measured when the run opened. Weights change, and so
    does what rounding explains. So a gap beyond these bounds is a drift only if it is also beyond those that follow from the
    noise of the rows with the largest gaps, under the present weights.
    """

    probe: Probe
    warns: bool  # of a drift, instead of raising an error
    sleeps: bool  # whether the engine frees its weights while the trainer works
    probe_every: int | None  # syncs between two comparisons of new completions; None: only batches are compared
    drain: Callable[[], None]  # waits until the engine has no work in the background
    say: Callable[[str], None]
    said: set[Distribution] = field(default_factory=set)  # those of `say_once`; copies share it

    def __call__(self, samples: Samples, logp: Tensor, step: int, sure: Tensor | None = None) -> bool | None:
        """Returns whether engine and trainer differ on the tokens that version `step` - 1 sampled; None if there are none.

        Tokens of earlier weights are left out, because they differ legitimately. Those that follow them in a row count, if the
        engine computes what is before them again, with its new weights (not with `EngineCapabilities.keeps_cache`). Rows that
        the policy could not compute (NaN) are left out too: they say nothing about the engine. Raises SentinelError as `drifted`
        does.

        Args:
            samples: those of this process; all processes call this at the same time with theirs.
            logp: [N] log-probs of the trainer, of the distribution that the run samples from.
            sure: [N] bool, the tokens to compare: see `Truncation.sure`. None: all.
        """
        mask = torch.from_numpy(samples.loss_mask.values)
        delta = torch.where(mask, logp.double() - torch.from_numpy(samples.sampler_logp.values).double(), 0.0)
        row_of = torch.from_numpy(np.repeat(np.arange(len(samples)), samples.completion_ids.lengths))
        unknown = torch.zeros(len(samples)).index_add(0, row_of, delta.isnan().float()) > 0
        spans = samples.spans_by(step - 1, whole=self.probe.engine.abilities.keeps_cache)
        sampled = torch.from_numpy(samples.covered(spans.values).values) & ~unknown[row_of]
        total = self.probe.processes.total
        if not int(total(sampled.sum(), "sum")):
            return None
        if sure is not None:
            sampled &= sure
            if not int(total(sampled.sum(), "sum")):
                self.say_once(f"batch of step {step}")
                return None
        gap = Gap.of(delta[sampled], total)
        sizes = torch.where(sampled, delta.abs(), -1.0)
        largest = torch.full((len(samples),), -1.0, dtype=torch.float64).scatter_reduce(0, row_of, sizes, "amax")
        rows = largest.argsort(descending=True, stable=True)[:WORST].tolist()
        off = [(largest[row].item(), part_of(samples[row], spans[row])) for row in rows if largest[row] >= 0]
        return self.drifted(gap, lambda: self.worst(off), self.probe.sampling.distribution, step, f"batch of step {step}")

    def after_sync(self, step: int) -> dict[str, Any]:
        """Samples a few completions with the weights of `step`, compares them, and returns metrics; {} if no comparison is due.

        The first sync of a resumed run is always compared, but whether metrics are returned depends on the step alone. Raises
        SentinelError as `drifted` does.
        """
        if self.probe_every is None:
            return {}
        due = step == 1 or step % self.probe_every == 0
        if not due and step != self.probe.version + 1:
            return {}
        probe = replace(self.probe, version=step)
        samples = probe.sample(probe.whole, FEWER_TOKENS)
        logp = probe.trainer.logp(samples, probe.whole)
        gap = engine_gap(samples, logp)
        drifted = self.drifted(gap, lambda: worst(samples, logp), probe.whole, step + 1, f"weight sync of step {step}")
        return {Metric.SENTINEL_PROBE_DELTA: gap.max_delta, Metric.SENTINEL_DRIFT: drifted} if due else {}

    def aside(self, sampling: Sampling) -> "Watch":
        """Returns a copy for completions of other settings."""
        return replace(self, probe=replace(self.probe, sampling=sampling))

    def evaluated(self, samples: Sequence[Sample], step: int) -> dict[str, Any]:
        """Compares completions of an evaluation by the weights of `step`, and returns metrics; {} if no token can be compared.

        The samples are the same in all processes. Raises SentinelError as `drifted` does.
        """
        if not samples:
            return {}
        samples = [turn for sample in samples for turn in turns_apart(sample)]
        trainer, distribution = self.probe.trainer, self.probe.sampling.distribution
        logp, sure = trainer.logp(samples, distribution), trainer.sure(samples, distribution)
        where = f"evaluation after step {step}"
        if sure is not None and not torch.cat(sure).any():
            self.say_once(where)
            return {}
        gap = engine_gap(samples, logp, sure)
        self.drifted(gap, lambda: worst(samples, logp), distribution, step + 1, where)
        return {Metric.EVAL_DELTA_MEAN: gap.mean_delta, Metric.EVAL_DELTA_MAX: gap.max_delta}

    def say_once(self, where: str) -> None:
        """Says that `where` was not compared, unless that was said of the same distribution."""
        if (distribution := self.probe.sampling.distribution) not in self.said:
            self.said.add(distribution)
            self.say(f"sentinel: {where}, {distribution}: {NONE_SURE}; said once")

    def worst(self, off: Sequence[tuple[float, Sample]]) -> list[Sample]:
        """Returns the samples that differ most among those of all processes, turn by turn; the same in every process."""
        found = sorted(self.probe.processes.gather(off), key=lambda pair: -pair[0])
        return [turn for _, sample in found[:WORST] for turn in turns_apart(sample)]

    def drifted(self, gap: Gap, worst: Callable[[], list[Sample]], distribution: Distribution, step: int, where: str) -> bool:
        """Returns whether engine and trainer differ by `gap` on samples of the weights before `step`. Warns or raises if they do.

        Args:
            worst: returns the samples to find a cause with, the same in all processes.
            distribution: from which they were sampled.
            where: what was compared, for the message.

        Raises:
            SentinelError: they differ, and the recipe does not set warn.
        """
        probe = replace(self.probe, version=step - 1)
        if (probe.given or probe.noise) and probe.bounds.hold(gap):
            return False
        samples = worst()
        probe = probe.looked_closer(gap, samples[:MEASURED], distribution)
        if not probe.given and probe.bounds.hold(gap):
            return False
        words = probe.bounds.words(gap)
        cause = explain(probe, samples, distribution)
        if self.warns:
            fault, why = cause or (Fault.DRIFT, "no known cause fits; stop the run, and run `rlgen doctor`")
            self.say(f"warning: {SentinelError(fault, f'{why}. {words}', where)}")
            return True
        fault, why = cause or self.look_again(probe, gap)
        raise SentinelError(fault, f"{why}. {words}. Nothing was trained on it.", where)

    def look_again(self, probe: Probe, gap: Gap) -> Cause:
        """Finds the cause of a drift by `gap`: does the engine hold the current weights, and does sending them again help?"""
        self.drain()
        if not self.sleeps and probe.fits(probe.sample(probe.whole, FEWER_TOKENS)):
            if probe.bounds.mean_delta is not None and gap.mean_delta <= probe.bounds.mean_delta:
                # Other weights would move most tokens.
                return Fault.DRIFT, "engine and trainer agree on new samples, and here on most tokens, but not on a few"
            return (
                Fault.STALE_ROLLOUTS,
                f"engine and trainer agree on new samples of the present weights. So this batch was sampled by other weights than"
                f" those of version {probe.version}, which the engine names",
            )
        try:
            if self.sleeps:  # it has no weights to sample with
                send_weights(probe.engine, probe.policy.model, probe.version, probe.processes)
            again = caught(3, "changed weights", lambda: changed_sync(probe))
        except SentinelError as error:
            return error.fault, error.sentence
        except EngineError as error:  # such as too little free memory, as gradients are allocated
            return Fault.DRIFT, f"the engine could not be checked again: {error}"
        if again.verdict is not Outcome.FAILED:
            return (
                Fault.STALE_WEIGHTS,
                f"engine and trainer agree once version {probe.version} is sent again: the engine had other weights, though it"
                " named these",
            )
        if again.fault is not None and again.fault is not Fault.UNEXPLAINED:
            return again.fault, again.sentence
        return (
            Fault.DRIFT,
            "engine and trainer agreed before and no longer do, not even after the weights were sent again; run `rlgen doctor` on"
            " the last checkpoint",
        )


def part_of(sample: Sample, chosen: NDArray[np.bool_]) -> Sample:
    """Returns the sample with only the tokens of the `chosen` spans marked as sampled."""
    return replace(sample, spans=tuple(compress(sample.spans, chosen)))


def worst(samples: Sequence[Sample], logp: Sequence[Tensor]) -> list[Sample]:
    """Returns the `WORST` samples that differ most, to find a cause with."""
    gaps = [engine_gap([sample], [logp_L]).max_delta for sample, logp_L in zip(samples, logp, strict=True)]
    return [samples[row] for row in sorted(range(len(samples)), key=lambda row: -gaps[row])[:WORST]]
