"""Rung 7: every batch of a run, before its weights move."""

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from rlgen.errors import EngineError, Fault, SentinelError
from rlgen.sentinel.bounds import FLOOR, Bounds
from rlgen.sentinel.diagnose import Cause, explain
from rlgen.sentinel.gap import compare
from rlgen.sentinel.probe import FEWER_TOKENS, Probe
from rlgen.sentinel.rungs import caught, changed_sync
from rlgen.sentinel.sync import send_weights
from rlgen.sentinel.verdict import Verdict
from rlgen.types import Sample

OnDrift = Literal["warn", "stop", "checkpoint_and_stop"]
PROBED = 8  # prompts that are answered to compare a sync by
WORST = 32  # samples of a batch that are looked at for a cause
MEMORY, LEAST_MEMORY, RISE = 20, 5, 3.0  # batches whose median counts, how many it needs, and how far above it is drift


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """Compares the log-probs of each batch; what a drift leads to is the recipe's choice.

    In float32 any gap above the bound is one. In bfloat16 healthy gaps differ from model to model, so a rise to three times
    the run's own median is one too.
    """

    probe: Probe
    on_drift: OnDrift
    sleeps: bool  # whether the engine's weights are gone while the trainer works
    probe_every: int | None  # syncs after which completions are sampled to be compared; None: the batches themselves are
    rest: Callable[[], None]  # waits for what the engine is doing in the background
    say: Callable[[str], None]
    means: deque[float] = field(default_factory=lambda: deque(maxlen=MEMORY))

    def __call__(self, samples: Sequence[Sample], logp: Sequence[Tensor], step: int) -> bool | None:
        """Whether engine and trainer have drifted apart on `samples`, as far as they are of version `step` - 1.

        What earlier weights sampled differs for an honest reason, and tells nothing: None if that is all of them.

        Args:
            logp: [L] of each sample, by the trainer, at the temperature of the engine's log-probs.

        Raises:
            SentinelError: they have, and the recipe says stop.
        """
        fresh = [row for row, sample in enumerate(samples) if sample.weight_version == step - 1]
        if not fresh:
            return None
        return self.drifted([samples[row] for row in fresh], [logp[row] for row in fresh], step, f"batch of step {step}")

    def after_sync(self, step: int) -> dict[str, Any]:
        """Compares a few completions of the weights that the sync of `step` brought, if it is their turn.

        The first sync of a run that is resumed is looked at too, but what is written depends on the step alone.

        Raises:
            SentinelError: as for a batch.
        """
        if self.probe_every is None:
            return {}
        due = step == 1 or step % self.probe_every == 0
        if not due and step != self.probe.version + 1:
            return {}
        probe, temperature = replace(self.probe, version=step), self.probe.sampling.logp_temperature
        samples = probe.sample(temperature, FEWER_TOKENS, probe.prompts[:PROBED])
        logp = probe.trainer.logp(samples, temperature)
        remembered = tuple(self.means)
        drifted = self.drifted(samples, logp, step + 1, f"weight sync of step {step}")
        if due:
            return {"sentinel/probe_delta": compare(samples, logp).max_delta, "sentinel/drift": drifted}
        self.means.clear()  # a run that was not resumed has not looked here
        self.means.extend(remembered)
        return {}

    def drifted(self, samples: Sequence[Sample], logp: Sequence[Tensor], step: int, where: str) -> bool:
        """Whether engine and trainer differ on samples of the weights before `step`, and what that leads to."""
        gap = compare(samples, logp)
        probe = replace(self.probe, bounds=self.bounds(), version=step - 1)
        self.means.append(gap.mean_delta)
        if probe.bounds.hold(gap):
            return False
        words = probe.bounds.words(gap)
        cause = explain(probe.trainer, worst(samples, logp), probe.sampling.logp_temperature, probe.bounds)
        if self.on_drift == "warn":
            fault, why = cause or (Fault.DRIFT, "no known cause fits; stop the run and see `rlgen doctor`")
            self.say(f"warning: {SentinelError(fault, f'{why}. {words}', where)}")
            return True
        fault, why = cause or self.look_again(probe)
        raise SentinelError(fault, f"{why}. {words}. Nothing was trained on it.", where)

    def bounds(self) -> Bounds:
        """The recipe's; where no single token is bounded, the run's own median tightens them."""
        bounds = self.probe.bounds
        if bounds.by_max or bounds.mean_delta is None or len(self.means) < LEAST_MEMORY:
            return bounds
        return Bounds(None, min(bounds.mean_delta, max(RISE * statistics.median(self.means), FLOOR)))

    def look_again(self, probe: Probe) -> Cause:
        """Climbs again on present weights: does the engine hold them, and does sending them once more help?"""
        self.rest()
        temperature = probe.sampling.logp_temperature
        if not self.sleeps and probe.bounds.hold(probe.trainer.gap(probe.sample(temperature, FEWER_TOKENS), temperature)):
            return (
                Fault.STALE_ROLLOUTS,
                f"the engine agrees on new samples of the present weights, so that this batch was sampled by other weights than"
                f" those of version {probe.version}, which it names",
            )
        try:
            if self.sleeps:  # it cannot sample before it has weights
                send_weights(probe.engine, probe.policy.model, probe.version, probe.processes)
            again = caught(3, "changed weights", lambda: changed_sync(probe))
        except SentinelError as error:
            return error.fault, error.sentence
        except EngineError as error:  # such as no memory to wake up in, between a backward pass and its step
            return Fault.DRIFT, f"the engine could not be looked at again: {error}"
        if again.verdict is not Verdict.FAILED:
            return (
                Fault.STALE_WEIGHTS,
                f"the engine agrees once version {probe.version} is sent again: it had other weights, though it named these",
            )
        if again.fault is not None and again.fault is not Fault.UNEXPLAINED:
            return again.fault, again.sentence
        return (
            Fault.DRIFT,
            "engine and trainer agreed before and do not any more, not even on weights that are sent anew; `rlgen doctor` on the"
            " last checkpoint looks further",
        )


def worst(samples: Sequence[Sample], logp: Sequence[Tensor]) -> list[Sample]:
    """The samples that differ most: enough to name a cause by."""
    gaps = [compare([sample], [logp_L]).max_delta for sample, logp_L in zip(samples, logp, strict=True)]
    return [samples[row] for row in sorted(range(len(samples)), key=lambda row: -gaps[row])[:WORST]]
