"""Sampling of one step: prompts -> requests -> engine -> groups."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlgen.engines.base import Engine
from rlgen.errors import Fault, SentinelError
from rlgen.rollout.answers import check_answers
from rlgen.rollout.conversations import Conversations, Dialogue
from rlgen.types import Completion, Group, Ids, Prompt, Request, Sample, Sampling, Span, turns_of


def sample_seed(run_seed: int, group_id: int, sample_index: int) -> int:
    """Returns a 62-bit seed from the position of a sample, never from call order, so that a resumed run samples the same."""
    digest = hashlib.sha256(f"{run_seed}/{group_id}/{sample_index}".encode()).digest()
    return int.from_bytes(digest[:8]) >> 2


def rollout(
    engine: Engine,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    group_size: int,
    run_seed: int,
    version: int,
    tokenizer: PreTrainedTokenizerBase,
    dialogue: Dialogue | None = None,
) -> list[Group]:
    """Samples `group_size` completions of each prompt. The engine takes and returns ids; text is decoded only for rewards.

    Args:
        version: of the weights that must have sampled.
        dialogue: how conversations of several turns are led; None: a completion is one turn.

    Raises as `Engine.generate` and `check_answers`.
    """
    requests = requests_for(prompts, group_size, run_seed)
    if dialogue is None:
        completions = engine.generate(requests, sampling)
    else:
        talks = Conversations(dialogue, in_request_order(prompts, group_size), requests, sampling, version, version)
        completions = talks.sampled(lambda: engine.generate(requests, sampling, talks.finished, talks.further))
    check_answers(requests, completions, sampling, version, joined=dialogue is not None)
    return build_groups(prompts, requests, completions, sampling, tokenizer)


def requests_for(prompts: Sequence[Prompt], group_size: int, run_seed: int) -> list[Request]:
    """Returns the requests of all prompts; those of one prompt are contiguous, in the order of the sample index."""
    return [
        Request(prompt_ids=prompt.prompt_ids, seed=sample_seed(run_seed, prompt.position, index), images=prompt.images)
        for prompt, index in in_request_order(prompts, group_size)
    ]


def in_request_order(prompts: Sequence[Prompt], group_size: int) -> list[tuple[Prompt, int]]:
    """Returns prompt and sample index of each request, in the order of `requests_for`."""
    return [(prompt, index) for prompt in prompts for index in range(group_size)]


def build_groups(
    prompts: Sequence[Prompt],
    requests: Sequence[Request],
    completions: Sequence[Completion],
    sampling: Sampling,
    tokenizer: PreTrainedTokenizerBase,
) -> list[Group]:
    """Builds one group per prompt from checked completions, which must be in the order of `requests_for`.

    Raises SentinelError if nothing ended a completion of which the engine says so.
    """
    places = in_request_order(prompts, len(requests) // max(1, len(prompts)))
    samples: dict[int, list[Sample]] = {prompt.position: [] for prompt in prompts}
    for (prompt, index), request, completion in zip(places, requests, completions, strict=True):
        last = last_turn(completion.token_ids, completion.spans, completion.messages, sampling.stop_ids)
        text = tokenizer.decode(last, skip_special_tokens=True)  # for rewards and people
        ended = sampling.regex is not None or int(completion.token_ids[-1]) in sampling.stop_ids
        if sampling.stop and completion.finish_reason == "stop" and not ended and not any(one in text for one in sampling.stop):
            raise SentinelError(
                Fault.DROPPED_STOP_TOKEN,
                f"the engine says that completion {index} of prompt {prompt.position} has ended, but neither a stop token nor a"
                " text of rollout.stop is at its end; make the engine keep all ids",
            )
        samples[prompt.position].append(sample_of(prompt, index, request.seed, completion, text))
    return [Group(group_id=prompt.position, prompt=prompt, samples=tuple(samples[prompt.position])) for prompt in prompts]


def sample_of(prompt: Prompt, index: int, seed: int, completion: Completion, text: str) -> Sample:
    """Returns a completion of a prompt as a sample without rewards."""
    return Sample(
        group_id=prompt.position,
        sample_index=index,
        prompt_ids=prompt.prompt_ids,
        completion_ids=completion.token_ids,
        sampler_logp=completion.logp,
        spans=completion.spans,
        finish_reason=completion.finish_reason,
        seed=seed,
        completion=text,
        rewards={},
        reward=None,
        cached_tokens=completion.cached_tokens,
        messages=completion.messages,
        counts=completion.counts,
        images=prompt.images,
        experts=completion.experts,
    )


def turns_apart(sample: Sample) -> list[Sample]:
    """Returns each turn of a completion as a sample of its own: what comes before it is its prompt, and all of it was sampled."""
    return [part_of_sample(sample, start, stop) for start, stop in turns_of(sample.spans)]


def first_tokens(sample: Sample, most: int) -> Sample:
    """Returns a sample whose completion is cut, so that prompt and completion have `most` tokens at most."""
    return part_of_sample(sample, 0, min(len(sample.completion_ids), most - len(sample.prompt_ids)))


def part_of_sample(sample: Sample, start: int, stop: int) -> Sample:
    """Returns a part of a completion as a sample of its own: what comes before it is its prompt."""
    first = len(sample.prompt_ids)
    return replace(
        sample,
        prompt_ids=np.concatenate([sample.prompt_ids, sample.completion_ids[:start]], dtype=np.int32),
        completion_ids=sample.completion_ids[start:stop],
        sampler_logp=sample.sampler_logp[start:stop],
        experts=sample.experts[: first + stop - 1],
        spans=tuple(Span(s.start - start, min(s.stop, stop) - start, s.version) for s in sample.spans if start <= s.start < stop),
    )


def last_turn(ids: Ids, spans: Sequence[Span], messages: str, stop_ids: Sequence[int]) -> Ids:
    """Returns the ids of the last turn of a completion, without the stop token that ended it.

    Without `messages`, a completion is one turn: rollout code of the user may put ids anywhere in it.
    """
    turns = turns_of(spans) if messages else []
    ids = ids[turns[-1][0] :] if turns else ids
    return ids[:-1] if len(ids) and ids[-1] in stop_ids else ids
