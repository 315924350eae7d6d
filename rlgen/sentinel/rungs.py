"""Runs the checks of engine and trainer in order, each of which adds one more thing that can differ. The first failure ends them.

The code and its messages call check N rung N. Check 0 is `contract`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from rlgen.errors import Fault, SentinelError
from rlgen.models.lora import is_adapted, quantization_of, without_adapter
from rlgen.rollout.sample import first_tokens
from rlgen.sentinel.bounds import NONE_SURE, POWER, Gap, Noise, between, sampler_logp
from rlgen.sentinel.change import AddedNoise, changed_adapter, changed_weights
from rlgen.sentinel.contract import contract
from rlgen.sentinel.diagnose import Cause, explain, explain_adapter, explain_sync
from rlgen.sentinel.probe import FEWER_TOKENS, TOKENS, Probe
from rlgen.sentinel.verdict import Outcome, Rung
from rlgen.types import WHOLE, Prompt, Sample, no_experts

ATTEMPTS = 3  # further changes of all weights until the gap shows: by 10, 20 and 40 % of their size, after 5 % at first
# Bounds of the relative distance of two gradients: the least and the most, and in multiples of what rounding explains. A wrong
# denominator moves a gradient by a tenth of its size and more.
SPLIT_LEAST, SPLIT_MOST, SPLIT_FACTOR = 1e-5, 0.2, 10.0
# Returns the gradient [N] of a train batch by the run's own loss, in micro-batches of at most so many tokens, and, if true, with
# other rounding. If the weights are sharded, it is this process's shard.
Gradient = Callable[[int, bool], Tensor]
UNEXPLAINED: Cause = Fault.UNEXPLAINED, "no known cause fits"


def climb(probe: Probe, gradient: Gradient | None = None) -> Iterator[Rung]:
    """Yields checks 0 to 4, with an adapter one more after check 3, and with `gradient` (see `loss_split`) checks 5 and 6.

    Stops after a failed check. The policy is left unchanged, and the engine holds its weights.
    """
    for step in steps(probe, gradient):
        yield step
        if step.verdict is Outcome.FAILED:
            return


def steps(probe: Probe, gradient: Gradient | None) -> Iterator[Rung]:
    yield caught(
        0, "contract", lambda: probe.processes.run_all(lambda: contract(probe), has_collectives=probe.engine_share.shared)
    )
    first = caught(1, "same weights", lambda: numerics(probe))
    yield first  # `climb` stops here if the check failed
    above = after_check_1(probe, [first])
    yield caught(2, "recipe's sampling", lambda: recipe_sampling(above))
    yield caught(3, "changed weights", lambda: changed_sync(above))
    if is_adapted(probe.policy.model):
        yield caught(3, "adapter", lambda: changed_adapter_sync(above))
    yield caught(4, "prefix cache", lambda: prefix_cache(above))
    if gradient is not None:
        yield caught(5, "paths", lambda: paths(above))
        yield caught(6, "loss", lambda: loss_split(gradient, probe.processes.total))


def after_check_1(probe: Probe, rungs: Sequence[Rung]) -> Probe:
    """Returns the probe with the noise that check 1 has measured. Where it could measure none, its gap takes that place."""
    for rung in rungs:
        if rung.number == 1:
            gap = rung.measured
            return replace(probe, noise=rung.noise or Noise(gap["mean_delta"], gap["rms_delta"]))
    return probe


def rung_of(
    number: int, name: str, probe: Probe, gap: Gap, sentence: str, cause: Callable[[], Cause], power: Gap | None = None
) -> Rung:
    """Returns the result of a check by its gap: ok, failed, or not measurable.

    Args:
        sentence: what an ok result means.
        cause: finds the cause of a gap beyond the bounds.
        power: the gap that the fault would cause. If the bounds would not detect it, the result is not measurable.
    """
    bounds = probe.bounds
    verdict, fault = Outcome.OK, None
    if not bounds.hold(gap):
        verdict = Outcome.FAILED
        fault, why = cause()
        sentence = f"{why}. {bounds.words(gap)}."
    elif power is not None and not bounds.see(power):
        verdict = Outcome.NOT_MEASURABLE
        moved = f"this fault would move log-probs by {bounds.of(power):.2g} nats, which is less than {POWER:.0f} times the bound"
        sentence = f"This check is blind: {moved}."
    return Rung(
        number=number,
        name=name,
        verdict=verdict,
        sentence=sentence,
        measured={bounds.main: bounds.of(gap), **asdict(gap)},  # the one that `bound` applies to first
        bound=bounds.bound,
        bounds=bounds.as_json,
        noise=probe.noise,
        power=None if power is None else bounds.of(power),
        fault=fault,
    )


def instead(probe: Probe) -> str:
    """Returns advice for an architecture whose code in vLLM differs from the trainer's: the engine that has the same code."""
    on_vllm = probe.engine.facts().engine.startswith("vllm ")
    return "; if vLLM serves this architecture otherwise, engine.kind: transformers has the trainer's own code" if on_vllm else ""


def caught(number: int, name: str, rung: Callable[[], Rung]) -> Rung:
    """Runs a check, and turns a SentinelError into a failed result."""
    try:
        return rung()
    except SentinelError as error:
        return Rung(number=number, name=name, verdict=Outcome.FAILED, fault=error.fault, sentence=error.sentence)


def numerics(probe: Probe) -> Rung:
    """Check 1: compares log-probs of the same ids under the same weights at temperature 1, and measures the noise."""
    samples = probe.sample(WHOLE, TOKENS)
    probe = probe.measured(samples, WHOLE, probe.whole)
    unmeasured = "" if probe.given or probe.noise else " Rounding cannot be measured on this model, so the bounds are wide."
    gap = probe.trainer.gap(samples, WHOLE)
    probe = probe.looked_closer(gap, samples, WHOLE)
    sentence = f"Both sides give the sampled tokens the same log-probs.{unmeasured}"
    otherwise = f"at the start, with the same ids, log-probs differ: dtype, head precision or model code{instead(probe)}"
    return rung_of(1, "same weights", probe, gap, sentence, lambda: explain(probe, samples, WHOLE) or (Fault.NUMERICS, otherwise))


def recipe_sampling(probe: Probe) -> Rung:
    """Check 2: compares log-probs of the distribution that the recipe samples from."""
    greedy, distribution = probe.sampling.temperature == 0, probe.sampling.distribution
    if not greedy and distribution == WHOLE:
        sentence = "The recipe samples at temperature 1, as rung 1 did."
        return Rung(number=2, name="recipe's sampling", verdict=Outcome.NOT_NEEDED, sentence=sentence)
    samples = probe.sample(None, FEWER_TOKENS)
    own, sure = probe.trainer.logp(samples, distribution), probe.trainer.sure(samples, distribution)
    if sure is not None and not torch.cat(sure).any():
        sentence = f"Of {distribution}, {NONE_SURE}. Rung 3 compares log-probs of all ids."
        return Rung(number=2, name="recipe's sampling", verdict=Outcome.NOT_MEASURABLE, sentence=sentence)
    gap = between(own, sampler_logp(samples), sure)
    if distribution.truncated:
        probe = probe.measured(samples, distribution)
    probe = probe.looked_closer(gap, samples, distribution)
    # What a faulty engine would report: raw log-probs or, with greedy sampling, 0.
    faulty = [torch.zeros_like(logp) for logp in own] if greedy else probe.trainer.logp(samples, WHOLE)
    power = between(own, faulty, sure)
    sentence = f"Both sides mean log-probs of the same distribution: {distribution}."
    return rung_of(
        2, "recipe's sampling", probe, gap, sentence, lambda: explain(probe, samples, distribution) or UNEXPLAINED, power
    )


def changed_sync(probe: Probe) -> Rung:
    """Check 3: changes every tensor, syncs and compares; then restores the weights, syncs and compares again.

    The engine is left with the weights of the run.
    """
    name, whole, trainer = "changed weights", probe.whole, probe.trainer
    if quantization_of(probe.policy.model):
        sentence = "Weights that are held in few bits cannot be changed a little. Rung 1 compared what the engine holds of them."
        return Rung(number=3, name=name, verdict=Outcome.NOT_MEASURABLE, sentence=sentence)
    before = probe.sample(whole, FEWER_TOKENS)
    cause: Cause = Fault.UNEXPLAINED, f"after a sync the engine computes with other weights than it was sent{instead(probe)}"
    with changed_weights(probe.policy) as change:
        power, changed = enough(probe, change, before)
        probe.sync(hashed=True, whole=True)
        samples = probe.sample(whole, FEWER_TOKENS)
        gap = trainer.gap(samples, whole)
        changed = changed.looked_closer(gap, samples, whole)
        bounds = changed.bounds
        if not bounds.hold(gap):
            before, samples = worst_engine(changed, before, samples)
            if same_answers(before, samples):
                cause = Fault.STALE_WEIGHTS, "the engine answers as before, to the last bit: the sync reached none of its weights"
            else:
                cause = cached_only(changed, samples) or explain_sync(changed, samples, change) or cause
    if bounds.hold(gap):
        probe.sync()
        samples = probe.sample(whole, FEWER_TOKENS)
        if not same_answers(before, samples):  # otherwise the old weights are there again
            gap = bounds.worst(gap, trainer.gap(samples, whole))
    sentence = "The engine loaded all changed weights, and then all original ones again."
    return rung_of(3, name, changed, gap, sentence, lambda: cause, power)


def worst_engine(probe: Probe, before: list[Sample], after: list[Sample]) -> tuple[list[Sample], list[Sample]]:
    """Returns the samples before and after the sync of the engine with the largest gap: one may be wrong and the others right."""
    each = len(after) // probe.engine_share.engines
    pairs = [(before[start : start + each], after[start : start + each]) for start in range(0, len(after), each)]
    gaps = [probe.trainer.gap(samples, probe.whole) for _, samples in pairs]
    off = [probe.bounds.of(gap) for gap in gaps]
    return pairs[max(range(len(pairs)), key=lambda engine: (math.isnan(off[engine]), off[engine]))]


def enough(probe: Probe, change: AddedNoise, before: list[Sample]) -> tuple[Gap, Probe]:
    """Changes the weights further until the bounds would detect the gap to the samples `before`.

    Returns that gap, and a probe with the noise of the changed weights.

    Raises:
        SentinelError: the gap is still too small after `ATTEMPTS` changes.
    """
    whole = probe.whole
    for attempt in range(ATTEMPTS + 1):
        if attempt:
            change()
        power = probe.trainer.gap(before, whole)
        # Noise is measured where it decides: it takes a forward pass in a wider dtype.
        changed = probe.measured(before, whole) if probe.bounds.see(power) else probe
        if changed.bounds.see(power):
            return power, changed
    raise SentinelError(
        Fault.BLIND_BOUNDS,
        f"even strongly changed weights move log-probs by only {changed.bounds.of(power):.2g} nats, less than {POWER:.0f} times"
        f" the bound {changed.bounds.bound:.2g}: "
        + (
            "lower sentinel.max_delta or sentinel.mean_delta, which hide every fault"
            if probe.given
            else "rounding alone moves them nearly as much; use model.dtype float32, or set sentinel.mean_delta"
        ),
    )


def changed_adapter_sync(probe: Probe) -> Rung:
    """Check 3 of an adapter: changes the adapter, syncs and compares; then restores it, syncs and compares again.

    Measures the effect of the adapter in trainer and engine, too: the gap between log-probs of the sampled ids and those of the
    trainer's base model.
    """
    whole, trainer = probe.whole, probe.trainer
    cause: Cause = Fault.UNEXPLAINED, "the adapter has another effect in the engine than in the trainer"
    with changed_adapter(probe.policy) as change:
        _, changed = enough(probe, change, probe.sample(whole, FEWER_TOKENS))
        probe.sync(hashed=True)
        samples = probe.sample(whole, FEWER_TOKENS)
        own = trainer.logp(samples, whole)
        with without_adapter(probe.policy.model):
            base = trainer.logp(samples, whole)
        gap, effect, in_engine = between(own, sampler_logp(samples)), between(own, base), between(sampler_logp(samples), base)
        changed = changed.looked_closer(gap, samples, whole)
        bounds = changed.bounds
        if not bounds.hold(gap):
            cause = cached_only(changed, samples) or explain_adapter(changed, samples) or cause
    probe.sync()
    if bounds.hold(gap):
        gap = bounds.worst(gap, trainer.gap(probe.sample(whole, FEWER_TOKENS), whole))
    rung = rung_of(3, "adapter", changed, gap, "The adapter has the same effect on both sides.", lambda: cause, effect)
    effects = {"effect": bounds.of(effect), "effect_in_engine": bounds.of(in_engine)}
    return replace(rung, measured={**rung.measured, **effects})


def same_answers(before: list[Sample], after: list[Sample]) -> bool:
    """Returns whether the engine, with the same seeds, gives bit for bit the same answers after a sync."""
    answers, others = (
        [(sample.completion_ids.tobytes(), sample.sampler_logp.tobytes()) for sample in samples] for samples in (before, after)
    )
    return answers == others


def cached_only(probe: Probe, samples: list[Sample]) -> Cause | None:
    """Returns a cause if only rows differ whose prompts came from the prefix cache; or None."""
    fresh = [sample for sample in samples if not sample.cached_tokens]
    if not fresh or len(fresh) == len(samples) or not probe.fits(fresh):
        return None
    return Fault.STALE_PREFIX_CACHE, "only completions of cached prompts differ: the cache holds activations of earlier weights"


def prefix_cache(probe: Probe) -> Rung:
    """Check 4: samples a prompt that is in the prefix cache after its weights have changed."""
    skipped = partial(Rung, number=4, name="prefix cache")
    facts, whole, tokens = probe.engine.facts(), probe.whole, 8
    if facts.cache_block is None:
        return skipped(verdict=Outcome.NOT_NEEDED, sentence="The engine keeps no prefix cache.")
    length, longest = facts.cache_block + 1, facts.max_model_len
    if longest is not None and length + tokens > longest:
        sentence = f"The prefix cache is not used: it needs rows of {length + tokens} tokens, but they have at most {longest}."
        return skipped(verdict=Outcome.NOT_NEEDED, sentence=sentence)
    prompt = long_prompt(probe, length)
    first, again = (probe.sample(whole, tokens, [prompt]) for _ in range(2))
    if not all(sample.cached_tokens for sample in again):
        sentence = f"A prompt of {length} tokens was sampled twice and not cached: the cache cannot be checked."
        return skipped(verdict=Outcome.NOT_MEASURABLE, sentence=sentence)
    with (changed_adapter if quantization_of(probe.policy.model) else changed_weights)(probe.policy) as change:
        power, probe = enough(probe, change, first)
        probe.sync(whole=True)
        after = probe.sample(whole, tokens, [prompt])
        gap = probe.trainer.gap(after, whole)
        probe = probe.looked_closer(gap, after, whole)
    probe.sync()
    cause = UNEXPLAINED
    if reused := max(sample.cached_tokens for sample in after):
        stale = f"{reused} tokens of a prompt came from the cache right after a sync: it holds activations of earlier weights"
        cause = Fault.STALE_PREFIX_CACHE, f"{stale}; empty it with each sync, and salt it with the version"
    return rung_of(4, "prefix cache", probe, gap, "A cached prompt is computed anew after a sync.", lambda: cause, power)


def long_prompt(probe: Probe, length: int) -> Prompt:
    """Returns a prompt of `length` ids: the texts of the probe's prompts one after another, repeated if they are too short."""
    texts = []
    for prompt in probe.prompts:
        of_images = [np.arange(image.start, image.stop) for image in prompt.images]
        texts.append(np.delete(prompt.prompt_ids, np.concatenate(of_images)) if of_images else prompt.prompt_ids)
    ids = np.concatenate(texts)
    return Prompt(position=0, row=0, text="", prompt_ids=np.resize(ids, length), columns={})


def paths(probe: Probe) -> Rung:
    """Check 5: compares decoding with prefilling the same ids, and decoding in a batch with decoding alone."""
    samples = probe.sample(WHOLE, FEWER_TOKENS)
    if (most := probe.engine.facts().max_model_len) is not None:  # an engine prefills only rows to which it could add a token
        samples = [first_tokens(one, most - 1) for one in samples if len(one.prompt_ids) < most - 1]
    if not samples:
        sentence = f"The engine prefills no prompt with a token more: its rows have at most {most} tokens."
        return Rung(number=5, name="paths", verdict=Outcome.NOT_MEASURABLE, sentence=sentence)
    decoded = sampler_logp(samples)
    rows = [(sample.prompt_ids, sample.completion_ids) for sample in samples]
    images = [sample.images for sample in samples]

    def prefilled() -> Gap:
        found = probe.engine.prefill_logp(rows, images if any(images) else ())
        return between(decoded, [torch.from_numpy(logp).double() for logp in found])

    gaps = probe.processes.gather_all(prefilled, has_collectives=probe.engine_share.shared, keepalive=True)
    gap = probe.bounds.worst(*gaps)  # of all engines, so that all processes reach the same verdict
    # Each path chooses experts by itself, so that rounding explains more than where the trainer is given those of the samples.
    probe = probe.looked_closer(gap, [replace(sample, experts=no_experts()) for sample in samples], WHOLE)
    cause: Cause = (Fault.DECODE_PREFILL, "decoding and prefilling the same ids give different log-probs")
    if probe.bounds.hold(gap):
        deltas = [sampled_alone(probe, sample) for sample in samples[:4]]
        others = sum(not len(delta) for delta in deltas)
        # In half precision rounding decides between two tokens that are nearly as probable, but not for most prompts.
        if others > (0 if probe.trainer.engine_dtype == torch.float32 else len(deltas) // 2):
            sentence = f"{others} of {len(deltas)} prompts alone start with another token than in a batch, with the same seed"
            raise SentinelError(Fault.BATCH_DEPENDENCE, sentence)
        batch = Gap.of(torch.cat(deltas))
        if not probe.bounds.hold(batch):
            cause = (Fault.BATCH_DEPENDENCE, "a request alone and the same request in a batch give different log-probs")
        gap = probe.bounds.worst(gap, batch)
    return rung_of(5, "paths", probe, gap, "Decoding, prefilling and sampling alone agree.", lambda: cause)


def sampled_alone(probe: Probe, sample: Sample) -> Tensor:
    """Samples the prompt of `sample` again without a batch, and returns [L] differences of the log-probs.

    Compares only tokens before the first that differs: rounding may change a sampled token, and what follows is another text.
    """
    prompt = next(one for one in probe.prompts if one.position == sample.group_id)
    single, *_ = probe.sample(WHOLE, FEWER_TOKENS, [prompt])  # the first engine's, as are the rows
    shorter = min(len(sample.completion_ids), len(single.completion_ids))
    differs = (sample.completion_ids[:shorter] != single.completion_ids[:shorter]).nonzero()[0]
    same = int(differs[0]) if len(differs) else shorter
    one, other = (torch.from_numpy(s.sampler_logp[:same]).double() for s in (sample, single))
    return one - other


def loss_split(gradient: Gradient, total: Callable[[Tensor], Tensor]) -> Rung:
    """Check 6: compares the gradient of one train batch in one micro-batch a process with that in many.

    A split changes the shapes of products, and so their rounding. Where the gradients of good and bad completions nearly cancel,
    that shows. How much it explains follows from the same gradient with other rounding.

    Args:
        total: adds up over the processes.
    """
    whole = gradient(1 << 30, False)

    def norm(vector: Tensor) -> float:
        # What several processes hold counts several times, in all norms alike.
        return total(torch.linalg.vector_norm(vector, dtype=torch.float64).square()).sqrt().item()

    power = norm(whole)
    distance, noise, bound = norm(gradient(1, False).sub_(whole)) / max(power, 1e-30), 0.0, SPLIT_LEAST
    if distance > bound:
        noise = norm(gradient(1 << 30, True).sub_(whole)) / max(power, 1e-30)
        bound = min(max(SPLIT_FACTOR * noise, SPLIT_LEAST), SPLIT_MOST)
    verdict, fault, sentence = Outcome.OK, None, "The gradient does not depend on micro-batches."
    if not distance <= bound:
        verdict, fault = Outcome.FAILED, Fault.SPLIT_DEPENDENCE
        sentence = f"the gradient depends on the split: in micro-batches it differs by {distance:.3g} of its norm"
    elif not power > 0:
        verdict, sentence = Outcome.NOT_MEASURABLE, "The gradient of the toy batch is zero."
    return Rung(
        number=6,
        name="loss",
        verdict=verdict,
        sentence=sentence,
        measured={"relative_distance": distance, "other_rounding": noise},
        bound=bound,
        bounds={"relative_distance": bound},
        fault=fault,
    )
