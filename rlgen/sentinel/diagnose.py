"""Finds the cause of a gap between engine and trainer by rescoring.

The trainer scores the same ids as each possible fault would have made the engine score them; a fault under which both sides agree
again is the cause. The statistics of a gap alone say little: raw log-probs at temperature 0.7 have a mean Δ near 0.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlgen.errors import Fault
from rlgen.models.lora import adapted_layers, is_adapted, without_adapter
from rlgen.processes import Processes
from rlgen.sentinel.bounds import Gap, between, sampler_logp
from rlgen.sentinel.change import AddedNoise, earlier_head
from rlgen.sentinel.probe import Probe, TrainerSide
from rlgen.types import WHOLE, Distribution, Sample, no_experts

TEMPERATURES = tuple(step / 20 for step in range(1, 41))  # 0.05 to 2
FEW = 4  # number of samples that a search through many causes rescores
SEARCH_SECONDS = 60.0  # of one search through tensors: a large model has thousands of pairs
CLEAR = 1e-4  # probability of the last kept and the first dropped id above which their ranks can be told apart
OUTLIERS = 0.02  # share of tokens to ignore: equal probabilities at the edge of the kept set make its size ambiguous

T = TypeVar("T")
Cause = tuple[Fault, str]
ADAPTER_IGNORED: Cause = (
    Fault.ADAPTER_IGNORED,
    "the engine ignores the adapter: its log-probs are the base model's; send it merged weights",
)


def explain(probe: Probe, samples: Sequence[Sample], distribution: Distribution) -> Cause | None:
    """Returns the cause that brings the engine's log-probs of `samples` within the bounds; None if no known cause does."""
    for cause, gap in rivals(probe.trainer, samples, distribution):
        # The main process decides for all: a last bit may differ between processes.
        if probe.processes.gather([probe.bounds.hold(gap)])[0]:
            return cause
    return None


def rivals(trainer: TrainerSide, samples: Sequence[Sample], distribution: Distribution) -> Iterator[tuple[Cause, Gap]]:
    """Yields each possible cause, with the gap that would remain if it were the true one."""
    reported, own = sampler_logp(samples), trainer.logp(samples, distribution)
    if is_adapted(trainer.policy.model):
        with without_adapter(trainer.policy.model):
            yield ADAPTER_IGNORED, trainer.gap(samples, distribution)
    others = [other for t in TEMPERATURES if (other := Distribution(temperature=t)) != distribution]
    at_others = trainer.logp_at(samples, others)
    for k, other in enumerate(others):
        yield distribution_cause(trainer, samples, distribution, other), between([logp[k] for logp in at_others], reported)
    # The main process decides for all: if only some processes found a rule, their collectives would no longer match.
    if found := trainer.processes.gather([truncation_rule(trainer, samples, reported, distribution.whole)])[0]:
        rule, gap = found
        remedy = f"have it sample with {distribution}" if distribution.truncated else "switch that off"
        sentence = f"the engine samples from a truncated distribution ({rule}) and reports its log-probs; {remedy}"
        yield (Fault.TRUNCATED_SUPPORT, sentence), gap
    long = [row for row, logp in enumerate(own) if len(logp) > 2]
    if long:
        shifted = Fault.SHIFTED_LOGPROBS, "log-probs are shifted by one place: each token has that of its neighbour"
        yield shifted, between([own[row][1:] for row in long], [reported[row][:-1] for row in long])
        yield shifted, between([own[row][:-1] for row in long], [reported[row][1:] for row in long])
    exchanged = "log-probs belong to other completions of the same length: rows were exchanged after sampling"
    yield (Fault.COMPLETION_ORDER, exchanged), between(own, matched_rows(own, reported))
    attached = "completions are attached to prompts that they were not sampled for: rows were exchanged after sampling"
    yield (Fault.COMPLETION_ORDER, attached), other_prompts(trainer, samples, own, reported, distribution)


def distribution_cause(trainer: TrainerSide, samples: Sequence[Sample], ours: Distribution, theirs: Distribution) -> Cause:
    """Returns the cause of log-probs of the distribution `theirs`: raw log-probs, or sampling from it, too."""
    if theirs == ours.whole:
        return (
            Fault.TRUNCATED_SUPPORT,
            f"the engine reports log-probs of all ids, as if nothing was truncated, but rollout says {ours}; have it truncate"
            " and report processed log-probs (logprobs_mode)",
        )
    if theirs == WHOLE and surprise(trainer, samples, ours) < surprise(trainer, samples, theirs):
        return (
            Fault.RAW_LOGPROBS,
            f"the engine samples at temperature {ours.temperature:g}, but reports raw log-probs, those of temperature 1; have it"
            " report processed ones (logprobs_mode)",
        )
    return (
        Fault.WRONG_TEMPERATURE,
        f"the engine samples at temperature {theirs.temperature:g}, the trainer scores at {ours.temperature:g};"
        " both must use rollout.temperature",
    )


def surprise(trainer: TrainerSide, samples: Sequence[Sample], distribution: Distribution) -> float:
    """Returns how far the mean log-prob of the sampled ids is from that expected of sampling from `distribution`, in nats."""
    gaps = []
    for sample in samples[:FEW]:
        logp_LV = trainer.logp_of_all(sample, distribution)
        expected_L = -torch.special.entr(logp_LV.exp()).sum(-1)
        gaps.append(logp_LV.gather(-1, torch.from_numpy(sample.completion_ids).long()[:, None])[:, 0] - expected_L)
    return abs(torch.cat(gaps).mean().item())


def truncation_rule(
    trainer: TrainerSide, samples: Sequence[Sample], reported: list[Tensor], distribution: Distribution
) -> tuple[str, Gap] | None:
    """Returns a top-k, top-p or min-p that explains the reported log-probs, with the gap that remains; None if there is none.

    Under any of these rules the kept ids are the most probable ones, and a token's gap is the log of their total probability. So
    each token shows how many ids were kept, and one rule must fit all tokens. Where the ids at the edge have next to no
    probability, as after a sure choice from a large vocabulary, their number is lost in rounding: such tokens show nothing.
    """
    measured = []
    for sample, told_L in zip(samples[:FEW], reported, strict=False):
        logp_LV = trainer.logp_of_all(sample, distribution)
        logp_L = logp_LV.gather(-1, torch.from_numpy(sample.completion_ids).long()[:, None])[:, 0]
        ranked_LV = logp_LV.exp().sort(-1, descending=True).values
        mass_LV = ranked_LV.cumsum(-1)
        last_L1 = (mass_LV - (logp_L - told_L).exp()[:, None]).abs().argmin(-1, keepdim=True)
        mass_L, ranked_L = mass_LV.gather(-1, last_L1)[:, 0], ranked_LV.gather(-1, last_L1)[:, 0]
        next_L = torch.nn.functional.pad(ranked_LV, (0, 1)).gather(-1, last_L1 + 1)[:, 0]
        shows, first_L = (ranked_L > CLEAR) & (next_L > CLEAR), ranked_LV[:, 0]
        of_rules = last_L1[:, 0].double() + 1, mass_L, mass_L - ranked_L, ranked_L / first_L, next_L / first_L
        measured.append([logp_L - mass_L.log() - told_L, mass_L, *(values_L[shows] for values_L in of_rules)])
    left, all_mass, count, mass, mass_before, last_kept, first_dropped = map(torch.cat, zip(*measured, strict=True))
    gap = Gap.of(left)

    def edge(values: Tensor, quantile: float) -> float:
        return values.quantile(quantile).item()

    if not count.numel() or all_mass.mean() > 0.999:  # almost all of the probability is kept: not truncated
        return None
    if edge(count, OUTLIERS) == edge(count, 1 - OUTLIERS):
        return f"top-k {edge(count, 0.5):.0f}", gap
    if edge(mass_before, 1 - OUTLIERS) < edge(mass, OUTLIERS):
        return f"top-p {(edge(mass_before, 1 - OUTLIERS) + edge(mass, OUTLIERS)) / 2:.2g}", gap
    if edge(first_dropped, 1 - OUTLIERS) < edge(last_kept, OUTLIERS):
        return f"min-p {(edge(first_dropped, 1 - OUTLIERS) + edge(last_kept, OUTLIERS)) / 2:.2g}", gap
    return None


def matched_rows(own: list[Tensor], reported: list[Tensor]) -> list[Tensor]:
    """Returns for each row the reported log-probs, among those of equal length, that are nearest to the trainer's."""
    return [
        min((told for told in reported if len(told) == len(logp)), key=lambda told: (told - logp).abs().max().item())
        for logp in own
    ]


def other_prompts(
    trainer: TrainerSide, samples: Sequence[Sample], own: list[Tensor], reported: list[Tensor], distribution: Distribution
) -> Gap:
    """Returns the gap that remains if each of the worst rows is scored under whichever prompt of all samples fits it best."""
    off = [(told - logp).abs().max().item() for logp, told in zip(own, reported, strict=True)]
    worst = sorted(range(len(samples)), key=lambda row: -off[row])[:FEW]
    prompts = list({sample.prompt_ids.tobytes(): sample.prompt_ids for sample in samples}.values())
    left = []
    for row in worst:
        scored = trainer.logp(
            [replace(samples[row], prompt_ids=prompt, experts=no_experts()) for prompt in prompts], distribution
        )
        left.append(min((logp - reported[row] for logp in scored), key=lambda delta: delta.abs().max().item()))
    return Gap.of(torch.cat(left))


def explain_sync(probe: Probe, samples: Sequence[Sample], change: AddedNoise) -> Cause | None:
    """Returns why samples after a sync of changed weights do not fit them: lost or exchanged tensors. None: neither does.

    Args:
        change: the weights before the change (`saved`) and, in the policy, as they were sent.
    """
    few = sorted(samples, key=lambda sample: -len(sample.completion_ids))[:FEW]
    policy, names = probe.policy, list(change.parameters)
    head = policy.model.get_output_embeddings().weight
    # The module gathers a sharded head from its own embedding, so that it cannot be replaced by an earlier one.
    tied = policy.model.config.get_text_config().tie_word_embeddings and not isinstance(head, DTensor)
    for name in names:
        if tied and change.parameters[name].data_ptr() == head.data_ptr():
            with earlier_head(policy, change.saved[name]):
                if probe.fits(few):
                    return (
                        Fault.STALE_HEAD,
                        f"the engine's head multiplies with an earlier copy of {name}, to which it is tied: repack it after"
                        " each reload",
                    )
    if stale := explaining(probe, few, names, change.put_back):
        return Fault.STALE_TENSOR, f"the engine computes with earlier values of {named(stale)}"
    pairs = [(a, b) for a, b in combinations(names, 2) if change.parameters[a].shape == change.parameters[b].shape]
    place = {name: number for number, name in enumerate(names)}
    pairs.sort(key=lambda pair: place[pair[1]] - place[pair[0]])  # neighbours first: they are the ones that loaders exchange
    for one, other in in_time(pairs, probe.processes):
        with change.swapped(one, other):
            if probe.fits(few):
                return Fault.SWAPPED_TENSORS, f"the engine holds {one} in the place of {other}, and vice versa"
    return None


def in_time(causes: Iterable[T], processes: Processes) -> Iterator[T]:
    """Yields the causes until `SEARCH_SECONDS` are over, by the clock of the main process."""
    until = time.monotonic() + SEARCH_SECONDS
    for cause in causes:
        if not processes.gather([time.monotonic() < until])[0]:
            return
        yield cause


def named(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def explain_adapter(probe: Probe, samples: Sequence[Sample]) -> Cause | None:
    """Returns why samples after a sync of a changed adapter do not fit it; None if no cause is found.

    The causes are an engine that ignores the adapter in all layers, or in some.
    """
    model = probe.policy.model
    with without_adapter(model):
        if probe.fits(samples):
            return ADAPTER_IGNORED
    few = sorted(samples, key=lambda sample: -len(sample.completion_ids))[:FEW]
    if ignored := explaining(probe, few, list(adapted_layers(model)), partial(without_adapter, model)):
        return (
            Fault.ADAPTER_IGNORED,
            f"the engine ignores the adapter of {named(ignored)}: there its weights are the base model's",
        )
    return None


def explaining(
    probe: Probe, samples: Sequence[Sample], names: Sequence[str], without: Callable[[list[str]], AbstractContextManager[None]]
) -> list[str]:
    """Returns names for which the gap inside of `without(names)` is within the bounds; [] if there are none.

    Adds the names one by one, in the order of the gap that each leaves alone, and keeps those that reduce it.
    """

    def left(chosen: list[str]) -> Gap:
        with without(chosen):
            return probe.trainer.gap(samples, probe.whole)

    least = left([])
    alone = {name: left([name]).mean_delta for name in in_time(names, probe.processes)}
    stale: list[str] = []
    for name in in_time(sorted(alone, key=alone.__getitem__), probe.processes):
        gap = left([*stale, name])
        if gap.mean_delta < least.mean_delta:
            stale, least = [*stale, name], gap
            if probe.bounds.hold(least):
                return stale
    return []
