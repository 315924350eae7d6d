"""Sampling of one step: prompts -> requests -> engine -> groups."""

import hashlib
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from rlgen.engines.base import Engine
from rlgen.rollout.answers import check_answers
from rlgen.types import Completion, FinishReason, Group, Ids, Prompt, Request, Sample, Sampling


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
) -> list[Group]:
    """Samples `group_size` completions of each prompt. The engine takes and returns ids; text is decoded only for rewards.

    Args:
        version: of the weights that must have sampled.

    Returns:
        One group per prompt, in the order of the prompts; samples carry the prompt's position as `group_id`.

    Raises:
        EngineError: as `Engine.generate` raises it.
        SentinelError: an answer does not match its request.
    """
    requests = requests_for(prompts, group_size, run_seed)
    completions = engine.generate(requests, sampling)
    check_answers(requests, completions, sampling, version)
    return groups_of(prompts, requests, completions, sampling.stop_ids, tokenizer)


def requests_for(prompts: Sequence[Prompt], group_size: int, run_seed: int) -> list[Request]:
    """Returns the requests of all prompts; those of one prompt are contiguous, in the order of the sample index."""
    return [
        Request(prompt_ids=prompt.prompt_ids, seed=sample_seed(run_seed, prompt.position, index))
        for prompt in prompts
        for index in range(group_size)
    ]


def groups_of(
    prompts: Sequence[Prompt],
    requests: Sequence[Request],
    completions: Sequence[Completion],
    stop_ids: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
) -> list[Group]:
    """Builds one group per prompt from checked completions, which must be in the order of `requests_for`."""
    group_size = len(requests) // max(1, len(prompts))
    places = [(prompt, index) for prompt in prompts for index in range(group_size)]
    samples: dict[int, list[Sample]] = {prompt.position: [] for prompt in prompts}
    for (prompt, index), request, completion in zip(places, requests, completions, strict=True):
        samples[prompt.position].append(
            Sample(
                group_id=prompt.position,
                sample_index=index,
                prompt_ids=request.prompt_ids,
                completion_ids=completion.token_ids,
                sampler_logp=completion.logp,
                spans=completion.spans,
                finish_reason=completion.finish_reason,
                seed=request.seed,
                completion=completion_text(tokenizer, completion, stop_ids),
                rewards={},
                reward=None,
                cached_tokens=completion.cached_tokens,
            )
        )
    return [Group(group_id=prompt.position, prompt=prompt, samples=tuple(samples[prompt.position])) for prompt in prompts]


def completion_text(tokenizer: PreTrainedTokenizerBase, completion: Completion, stop_ids: Sequence[int]) -> str:
    """Decodes a completion for rewards and people, without the stop token that ended it and without special tokens."""
    ids = without_stop(completion.token_ids, completion.finish_reason, stop_ids)
    return tokenizer.decode(ids, skip_special_tokens=True)


def without_stop(ids: Ids, finish_reason: FinishReason, stop_ids: Sequence[int]) -> Ids:
    """Returns the ids of a completion without the stop token that ended it."""
    return ids[:-1] if finish_reason == "stop" and len(ids) and ids[-1] in stop_ids else ids
