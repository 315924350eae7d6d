"""Checks of each engine answer against its request. They cost nothing beside sampling, so every rollout is checked."""

from collections import Counter
from collections.abc import Sequence
from itertools import chain, repeat

import numpy as np
from numpy.typing import NDArray

from rlgen.errors import Fault, SentinelError
from rlgen.types import Completion, FinishReason, Request, Sampling, mask_of, turns_of

ROUNDING = 1e-6  # a log-prob of a certain token may come out this much above 0


def check_answers(
    requests: Sequence[Request],
    answers: Sequence[Completion],
    sampling: Sampling,
    version: int,
    oldest: int | None = None,
    joined: bool = False,
    free: bool = False,
) -> None:
    """Checks count, prompts, order, ids, log-probs, stop tokens and weight versions of the answers. Raises SentinelError.

    Args:
        version: of the weights that the trainer holds.
        oldest: oldest version that may have sampled. None: `version` alone.
        joined: answers may be conversations, with ids between their turns that were not sampled.
        free: ids that were not sampled may stand anywhere: the answers come from rollout code of the user.
    """
    if not free and flattened(requests, answers, sampling):
        raise SentinelError(
            Fault.FLATTENED_COMPLETIONS,
            f"each of the {len(answers)} answers to {len(requests)} requests is a single token, though some did not end with it:"
            " a list of completions was flattened into a list of tokens",
        )
    if len(answers) != len(requests):
        raise SentinelError(
            Fault.MISSING_PROMPT,
            f"{len(requests)} completions were requested and {len(answers)} returned: a prompt was dropped or repeated",
        )
    check_prompts(requests, answers)
    check_ids(answers, sampling.vocab_size)
    for place, (request, answer) in enumerate(zip(requests, answers, strict=True)):
        if free:
            check_sampled(place, answer, mask_of(answer.spans, len(answer.token_ids)), "Exactly the sampled ids must have one")
        else:
            check_answer(place, answer, sampling, joined)
            if not joined:
                check_length(place, len(answer.token_ids), sampling.limit_of(request), answer.finish_reason)
        check_versions(place, answer, version if oldest is None else oldest, version, joined)


def check_length(place: int, tokens: int, limit: int, finish_reason: FinishReason) -> None:
    """Raises SentinelError if an answer is longer than was asked for, or was cut off before."""
    if tokens > limit:
        raise SentinelError(
            Fault.ENGINE_SETTINGS,
            f"answer {place} has {tokens} ids, but {limit} were asked for: the engine ignores the limit,"
            " or its answer was changed on the way",
        )
    if tokens < limit and finish_reason == "length":
        raise SentinelError(
            Fault.ENGINE_SETTINGS,
            f"the engine cut answer {place} off after {tokens} of {limit} ids: its rows may be shorter than this run's"
            " (max_model_len); start the engine with this recipe",
        )


def check_ids(answers: Sequence[Completion], vocab_size: int | None) -> None:
    """Raises SentinelError if an id is not one of the vocabulary."""
    for place, answer in enumerate(answers):
        wrong = answer.token_ids < 0
        if vocab_size is not None:
            wrong |= answer.token_ids >= vocab_size
        if wrong.any():
            size = "" if vocab_size is None else f" of {vocab_size:,} ids"
            raise SentinelError(
                Fault.UNKNOWN_IDS,
                f"answer {place} has the id {answer.token_ids[wrong][0]}, which is not in the vocabulary{size}: the engine"
                " serves another model, or its answer was changed on the way",
            )


def check_prompts(requests: Sequence[Request], answers: Sequence[Completion]) -> None:
    """Checks that each answer is to the prompt of its request. Raises SentinelError."""
    asked, told = [request.prompt_ids.tobytes() for request in requests], [answer.prompt_ids.tobytes() for answer in answers]
    if asked != told:
        if Counter(asked) == Counter(told):
            first = next(place for place, pair in enumerate(zip(asked, told, strict=True)) if pair[0] != pair[1])
            raise SentinelError(
                Fault.COMPLETION_ORDER,
                f"answer {first} and others belong to other prompts: the engine returned answers in another order; put them in"
                " the order of the requests, by request id",
            )
        lost, extra = Counter(asked) - Counter(told), Counter(told) - Counter(asked)
        raise SentinelError(
            Fault.MISSING_PROMPT,
            f"{lost.total()} of {len(asked)} requests have no answer, and {extra.total()} answers belong to no request or to one"
            " that has its answer already: a prompt was dropped, repeated or changed",
        )


def check_versions(place: int, answer: Completion, oldest: int, newest: int, joined: bool) -> None:
    """Checks that weights of versions from `oldest` to `newest` sampled an answer, in this order. Raises SentinelError."""
    versions = [span.version for span in answer.spans] or [-1]
    if not oldest <= min(versions) <= max(versions) <= newest:
        wrong = max(versions) if max(versions) > newest else min(versions)
        raise SentinelError(
            Fault.STALE_ROLLOUTS,
            f"answer {place} was sampled by weights of version {wrong}, but the trainer holds version {newest}",
        )
    if not joined and versions != sorted(versions):  # the turns of a conversation may be by several servers
        raise SentinelError(
            Fault.STALE_ROLLOUTS,
            f"the engine says that weights of versions {versions} sampled answer {place}, in this order; but no engine goes back"
            " to earlier weights",
        )


def flattened(requests: Sequence[Request], answers: Sequence[Completion], sampling: Sampling) -> bool:
    """Returns whether every answer has one token, though some may have more tokens and were ended by no stop token or text."""
    if not answers or any(len(answer.token_ids) != 1 for answer in answers):
        return False
    limits = chain(map(sampling.limit_of, requests), repeat(sampling.max_tokens))
    by_text = sampling.stop and len(answers) == len(requests)  # only `build_groups` can look for the text
    return not all(
        limit == 1 or (answer.finish_reason == "stop" and (by_text or answer.token_ids[0] in sampling.stop_ids))
        for answer, limit in zip(answers, limits, strict=False)
    )


def check_answer(place: int, answer: Completion, sampling: Sampling, joined: bool) -> None:
    """Raises SentinelError if an answer lacks its stop token or a log-prob, or its spans do not cover what was sampled."""
    ids = answer.token_ids
    if not len(ids):
        raise SentinelError(
            Fault.DROPPED_STOP_TOKEN, f"answer {place} has no ids, not even a stop token; make the engine keep it"
        )
    by_text = sampling.stop and not joined  # `build_groups` has the tokenizer, and looks for the text
    if answer.finish_reason == "stop" and sampling.regex is None and not by_text and ids[-1] not in sampling.stop_ids:
        raise SentinelError(
            Fault.DROPPED_STOP_TOKEN,
            f"the engine says that a stop token ended answer {place}, but its last id is {ids[-1]}:"
            " without that token the model never learns to stop; make the engine keep it",
        )
    if joined and len(turns := turns_of(answer.spans)) > 1:
        check_turns(place, answer, turns, sampling)
        return
    each = (
        "Each id needs the log-prob that it was sampled with, the stop token too: it proves which weights sampled the id. NaN,"
        " infinities and numbers above 0 do not count"
    )
    check_sampled(place, answer, np.ones(len(ids), dtype=bool), each)
    if (named := sum(span.stop - span.start for span in answer.spans)) not in (0, len(ids)):
        raise SentinelError(
            Fault.STALE_ROLLOUTS, f"answer {place} has {len(ids)} ids, but the engine names the weights of {named} of them"
        )


def check_sampled(place: int, answer: Completion, sampled: NDArray[np.bool_], wanted: str) -> None:
    """Raises SentinelError unless exactly the `sampled` ids [L] of an answer have log-probs, and there are some."""
    ids = answer.token_ids
    scored = np.isfinite(answer.logp) & (answer.logp <= ROUNDING)  # what can be the log-prob of an id that was sampled
    if not sampled.any() or not np.array_equal(scored, sampled) or not np.array_equal(np.isnan(answer.logp), ~sampled):
        raise SentinelError(
            Fault.MISSING_LOGPROBS,
            f"answer {place} has {len(ids)} ids, of which {int(sampled.sum())} were sampled, and {int(scored.sum())} log-probs."
            f" {wanted}",
        )


def check_turns(place: int, answer: Completion, turns: Sequence[tuple[int, int]], sampling: Sampling) -> None:
    """Raises SentinelError unless exactly the turns of a conversation have log-probs, and all but the last end by a stop id."""
    ids, sampled = answer.token_ids, mask_of(answer.spans, len(answer.token_ids))
    if not sampled[-1] or sum(stop - start for start, stop in turns) != sampled.sum():
        raise SentinelError(
            Fault.STALE_ROLLOUTS,
            f"answer {place} has {len(ids)} ids, but the spans of its turns overlap or do not reach its end: {turns}",
        )
    check_sampled(place, answer, sampled, "Each id of a turn needs the log-prob it was sampled with; ids between have none")
    for _, stop in turns[:-1]:
        if sampling.regex is None and ids[stop - 1] not in sampling.stop_ids:
            raise SentinelError(
                Fault.DROPPED_STOP_TOKEN,
                f"answer {place} has a turn that ends with id {ids[stop - 1]}, not with a stop token: keep the stop"
                " token when turns are joined, because without it the model never learns to end a turn",
            )
