"""Samples made by hand."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlgen.types import Completion, FinishReason, Request, Sample, Span, ids_of, logp_of, one_span

# Ids of three prompts, on which packed rows are tried.
TEXTS = [np.array([5 + (7 * place + 11 * text) % 90 for place in range(40)], dtype=np.int32) for text in range(3)]


def make_sample(**changes: Any) -> Sample:
    """A sample of three tokens, the last of them a stop token. Ids and log-probs may be given as tuples.

    Instead of spans there may be a `loss_mask` and a `weight_version`.
    """
    values: dict[str, Any] = {
        "group_id": 0,
        "sample_index": 0,
        "prompt_ids": (5, 6),
        "completion_ids": (7, 8, 259),
        "sampler_logp": (-0.5, -1.0, -0.25),
        "finish_reason": "stop",
        "seed": 1,
        "completion": "x",
        "rewards": {},
        "reward": None,
        **changes,
    }
    mask, version = values.pop("loss_mask", None), values.pop("weight_version", 0)
    values.setdefault("spans", spans_of([True] * len(values["completion_ids"]) if mask is None else mask, version))
    values |= {name: ids_of(values[name]) for name in ("prompt_ids", "completion_ids")}
    return Sample(**{**values, "sampler_logp": logp_of(values["sampler_logp"])})


def spans_of(mask: Sequence[bool], version: int) -> tuple[Span, ...]:
    """The spans whose mask this is."""
    edges = [place for place in range(len(mask) + 1) if (place > 0 and mask[place - 1]) != (place < len(mask) and mask[place])]
    return tuple(Span(start, stop, version) for start, stop in zip(edges[::2], edges[1::2], strict=True))


def request(prompt_ids: Sequence[int], seed: int) -> Request:
    """What an engine is asked for."""
    return Request(prompt_ids=ids_of(prompt_ids), seed=seed)


def completion(
    token_ids: Sequence[int],
    logp: Sequence[float],
    prompt_ids: Sequence[int],
    version: int = 0,
    finish_reason: FinishReason = "stop",
    cached_tokens: int = 0,
) -> Completion:
    """What an engine answers, sampled by weights of one version."""
    return Completion(
        token_ids=ids_of(token_ids),
        logp=logp_of(logp),
        finish_reason=finish_reason,
        spans=one_span(len(token_ids), version),
        prompt_ids=ids_of(prompt_ids),
        cached_tokens=cached_tokens,
    )


def answered(asked: Request, answer: Completion) -> Sample:
    """The sample of a request's answer."""
    return make_sample(prompt_ids=asked.prompt_ids, completion_ids=answer.token_ids, sampler_logp=answer.logp, spans=answer.spans)
