"""Before step 1: the same log-probs, and the same again after a sync of *changed* weights.

Only a changed-weight sync is evidence: sending the weights that are already there passes with any stale copy.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlgen.engines.base import Engine
from rlgen.errors import SentinelError
from rlgen.models.policy import Policy
from rlgen.models.weights import checkpoint_tensors
from rlgen.rollout.sample import rollout
from rlgen.rollout.score import score
from rlgen.sentinel.bounds import Bounds
from rlgen.types import Prompt, Sample, Sampling

PROMPTS, TOKENS = 16, 32  # of a probe
NOISE = 0.05  # of a changed tensor, relative to its root mean square
POWER = 5.0  # a change must show by this many bounds, or a missing sync could not be seen


@dataclass(frozen=True, slots=True)
class Gap:
    """|engine - trainer| log-prob over the tokens of a probe, in nats."""

    max_delta: float
    mean_delta: float


@dataclass(frozen=True, slots=True)
class StartReport:
    """What the probes measured, for the log and `provenance.json`."""

    start: Gap  # with the weights both sides were opened with
    unsynced: Gap  # trainer changed, engine not: must be visible
    changed: Gap  # after the changed weights were synced
    restored: Gap  # after the original weights were synced back


def check_start(
    policy: Policy,
    engine: Engine,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    bounds: Bounds,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
    version: int,
    budget: int,
    device: torch.device,
) -> StartReport:
    """Compares engine and trainer on the prompts of the run, at the temperature of the run.

    The policy's weights are changed, and restored to the last bit; the engine is left with them under `version`.

    Raises:
        SentinelError: they disagree, or the check could not have seen it.
    """
    probe = Sampling(max_tokens=min(sampling.max_tokens, TOKENS), temperature=sampling.temperature, stop_ids=sampling.stop_ids)

    def sample() -> list[Sample]:
        groups = rollout(engine, prompts[:PROMPTS], probe, 1, seed, tokenizer)
        return [sample for group in groups for sample in group.samples]

    def gap(samples: list[Sample]) -> Gap:
        return compare(samples, score(policy, samples, sampling.temperature, budget, device))

    def check(where: str, measured: Gap, cause: str) -> Gap:
        bounds.check(where, measured.max_delta, measured.mean_delta, cause)
        return measured

    first = sample()
    start = check(
        "sentinel, before step 1",
        gap(first),
        "The weights are the same, so dtype, head precision, temperature or model code differ.",
    )
    with changed_weights(policy) as change:
        unsynced = gap(first)
        while not visible(unsynced, bounds):
            change()
            unsynced = gap(first)
        engine.sync(checkpoint_tensors(policy.model), version)
        changed = check(
            "sentinel, after a sync of changed weights",
            gap(sample()),
            f"The engine computes with other weights than it was sent: if the trainer alone had changed, the gap would be"
            f" {unsynced.max_delta:.3g}. Look for a tensor that a reload leaves stale, such as a tied or packed head.",
        )
    engine.sync(checkpoint_tensors(policy.model), version)
    restored = check(
        "sentinel, after the original weights were synced back",
        gap(sample()),
        "The engine did not return to the weights of the run.",
    )
    return StartReport(start, unsynced, changed, restored)


def compare(samples: Sequence[Sample], logp: Sequence[Tensor]) -> Gap:
    """The gap between what the engine reported and `logp`, one [L] tensor a sample."""
    sampler = torch.cat([torch.tensor(sample.sampler_logp, dtype=torch.float64) for sample in samples])
    delta = (torch.cat(list(logp)).double() - sampler).abs()
    return Gap(delta.max().item(), delta.mean().item())


def visible(gap: Gap, bounds: Bounds) -> bool:
    """Would the bounds see a gap like this with `POWER` to spare?"""
    pairs = ((gap.max_delta, bounds.max_delta), (gap.mean_delta, bounds.mean_delta))
    return any(bound is not None and value > POWER * bound for value, bound in pairs)


@contextmanager
def changed_weights(policy: Policy) -> Iterator["Change"]:
    """Every tensor of the policy is changed inside the block and restored to the last bit after it."""
    parameters = dict(policy.model.named_parameters())
    saved = {name: parameter.detach().cpu().clone() for name, parameter in parameters.items()}
    try:
        change = Change(parameters)
        change()
        yield change
    finally:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(saved[name])


class Change:
    """Each call adds noise to every tensor, twice as much as the call before."""

    attempts = 6

    def __init__(self, parameters: dict[str, torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._noise = NOISE
        self._generator = torch.Generator().manual_seed(0)
        self._calls = 0

    @torch.no_grad()
    def __call__(self) -> None:
        if self._calls == self.attempts:
            raise SentinelError(
                "sentinel: even large changes of all weights do not show in the log-probs of the probe by "
                f"{POWER:.0f} bounds; lower sentinel.max_delta or sentinel.mean_delta, which hide every fault"
            )
        for parameter in self._parameters.values():
            # A bias of zeros changes too.
            size = self._noise * max(parameter.float().square().mean().sqrt().item(), 0.02)
            noise = torch.randn(parameter.shape, generator=self._generator) * size
            parameter.add_(noise.to(parameter.device, parameter.dtype))
        self._noise *= 2
        self._calls += 1
