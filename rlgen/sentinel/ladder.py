"""Runs the checks of engine and trainer in order, each of which adds one more thing that can differ. The first failure ends them.

The code and its messages call check N rung N.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from rlgen.models.lora import is_adapted
from rlgen.sentinel import rungs
from rlgen.sentinel.bounds import Noise
from rlgen.sentinel.contract import contract
from rlgen.sentinel.probe import Probe
from rlgen.sentinel.verdict import Outcome, Rung


def climb(probe: Probe, gradient: rungs.Gradient | None = None) -> Iterator[Rung]:
    """Yields checks 0 to 4, with an adapter one more after check 3, and with `gradient` (see `rungs.loss_split`) checks 5 and 6.

    Stops after a failed check. The policy is left unchanged, and the engine holds its weights.
    """
    for step in steps(probe, gradient):
        yield step
        if step.verdict is Outcome.FAILED:
            return


def steps(probe: Probe, gradient: rungs.Gradient | None) -> Iterator[Rung]:
    yield rungs.caught(
        0, "contract", lambda: probe.processes.run_all(lambda: contract(probe), has_collectives=probe.engine_share.shared)
    )
    first = rungs.caught(1, "same weights", lambda: rungs.numerics(probe))
    yield first  # `climb` stops here if the check failed
    above = after_check_1(probe, [first])
    yield rungs.caught(2, "recipe's sampling", lambda: rungs.recipe_sampling(above))
    yield rungs.caught(3, "changed weights", lambda: rungs.changed_sync(above))
    if is_adapted(probe.policy.model):
        yield rungs.caught(3, "adapter", lambda: rungs.changed_adapter_sync(above))
    yield rungs.caught(4, "prefix cache", lambda: rungs.prefix_cache(above))
    if gradient is not None:
        yield rungs.caught(5, "paths", lambda: rungs.paths(above))
        yield rungs.caught(6, "loss", lambda: rungs.loss_split(gradient, probe.processes.total))


def after_check_1(probe: Probe, rungs: Sequence[Rung]) -> Probe:
    """Returns the probe with the noise that check 1 has measured. Where it could measure none, its gap takes that place."""
    for rung in rungs:
        if rung.number == 1:
            gap = rung.measured
            return replace(probe, noise=rung.noise or Noise(gap["mean_delta"], gap["rms_delta"]))
    return probe


def agreement(rungs: Sequence[Rung]) -> str:
    """Returns each measured value with its bound, and at check 3 also the value that a sync of no weights would have given:

    `engine and trainer agree: same weights 4.8e-07 of 1.9e-06, changed weights 5.3e-07 of 2.1e-06 (0.84 without a sync)`

    What a check could not measure follows in a sentence of its own.
    """
    parts, blind = [], ""
    for rung in rungs:
        power = f" ({rung.power:.2g} without a sync)" if rung.number == 3 and rung.power is not None else ""
        if rung.measured:
            parts.append(f"{rung.name} {next(iter(rung.measured.values())):.1e} of {rung.bound:.1e}{power}")
        if rung.verdict is Outcome.NOT_MEASURABLE:
            blind += f". Not measurable: {rung.name}. {rung.sentence.rstrip('.')}"
    return "engine and trainer agree: " + ", ".join(parts) + blind
