"""prompts -> requests -> engine -> groups."""

import hashlib
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from rlgen.engines.base import Engine
from rlgen.rollout.answers import check_answers
from rlgen.types import Completion, Group, Prompt, Request, Sample, Sampling


def sample_seed(run_seed: int, group_id: int, sample_index: int) -> int:
    """A 62-bit seed from the position of a sample, never from call order: this is what makes a resumed run exact."""
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
    """Samples `group_size` completions of each prompt. Ids go into the engine and ids come out; text is derived for rewards.

    Args:
        version: of the weights that must have sampled.

    Returns:
        One group a prompt, in the order of the prompts; samples carry the prompt's position as `group_id`.

    Raises:
        EngineError: as `Engine.generate`.
        SentinelError: an answer is not one to its request.
    """
    places = [(prompt, index) for prompt in prompts for index in range(group_size)]
    requests = [
        Request(prompt_ids=prompt.prompt_ids, seed=sample_seed(run_seed, prompt.position, index)) for prompt, index in places
    ]
    completions = engine.generate(requests, sampling) if requests else []
    check_answers(requests, completions, sampling, version)
    samples: dict[int, list[Sample]] = {prompt.position: [] for prompt in prompts}
    for (prompt, index), request, completion in zip(places, requests, completions, strict=True):
        samples[prompt.position].append(
            Sample(
                group_id=prompt.position,
                sample_index=index,
                prompt_ids=request.prompt_ids,
                completion_ids=completion.token_ids,
                sampler_logp=completion.logp,
                loss_mask=(True,) * len(completion.token_ids),
                finish_reason=completion.finish_reason,
                weight_version=completion.weight_version,
                seed=request.seed,
                completion=completion_text(tokenizer, completion, sampling.stop_ids),
                rewards={},
                reward=None,
                cached_tokens=completion.cached_tokens,
            )
        )
    return [Group(group_id=prompt.position, prompt=prompt, samples=tuple(samples[prompt.position])) for prompt in prompts]


def completion_text(tokenizer: PreTrainedTokenizerBase, completion: Completion, stop_ids: Sequence[int]) -> str:
    """The completion for rewards and people: without the stop token that ended it, and without special tokens."""
    ids = completion.token_ids
    if completion.finish_reason == "stop" and ids[-1] in stop_ids:
        ids = ids[:-1]
    return tokenizer.decode(list(ids), skip_special_tokens=True)
