"""Checks of each engine answer against its request. They cost nothing beside sampling, so every rollout is checked."""

from collections import Counter
from collections.abc import Sequence

from rlgen.errors import Fault, SentinelError
from rlgen.types import Completion, Request, Sampling

ROUNDING = 1e-6  # a log-prob of a certain token may come out this much above 0


def check_answers(
    requests: Sequence[Request], answers: Sequence[Completion], sampling: Sampling, version: int, oldest: int | None = None
) -> None:
    """Checks count, prompts, order, ids, log-probs, stop tokens and weight versions of the answers against the requests.

    Args:
        version: of the weights that the trainer holds.
        oldest: oldest version that may have sampled. None: `version` alone.

    Raises:
        SentinelError: an answer does not match its request, or lacks what training needs.
    """
    if flattened(answers, sampling):
        raise SentinelError(
            Fault.FLATTENED_COMPLETIONS,
            f"every one of {len(answers)} answers to {len(requests)} requests has a single token, and not every one was ended"
            " by it: a list of completions was flattened into a list of tokens",
        )
    if len(answers) != len(requests):
        raise SentinelError(
            Fault.MISSING_PROMPT,
            f"{len(requests)} completions were asked for, {len(answers)} came: a prompt was dropped or repeated",
        )
    asked, told = [request.prompt_ids.tobytes() for request in requests], [answer.prompt_ids.tobytes() for answer in answers]
    if asked != told:
        if Counter(asked) == Counter(told):
            first = next(place for place, pair in enumerate(zip(asked, told, strict=True)) if pair[0] != pair[1])
            raise SentinelError(
                Fault.COMPLETION_ORDER,
                f"answer {first} and others belong to other prompts: the engine answers in another order than it was asked; put"
                " the answers in the order of the requests, by request id",
            )
        lost, extra = Counter(asked) - Counter(told), Counter(told) - Counter(asked)
        raise SentinelError(
            Fault.MISSING_PROMPT,
            f"{lost.total()} of {len(asked)} requests have no answer to their prompt and {extra.total()} answers are to prompts"
            " that were not asked, or not so often: a prompt was dropped, repeated or changed",
        )
    for place, answer in enumerate(answers):
        check_answer(place, answer, sampling)
        if not (version if oldest is None else oldest) <= answer.weight_version <= version:
            raise SentinelError(
                Fault.STALE_ROLLOUTS,
                f"answer {place} was sampled by weights of version {answer.weight_version}, the trainer holds version {version}",
            )


def flattened(answers: Sequence[Completion], sampling: Sampling) -> bool:
    """Returns whether every answer has one token, though `max_tokens` allows more and not every one ended with a stop token."""
    if not answers or sampling.max_tokens == 1 or any(len(answer.token_ids) != 1 for answer in answers):
        return False
    return not all(answer.finish_reason == "stop" and answer.token_ids[0] in sampling.stop_ids for answer in answers)


def check_answer(place: int, answer: Completion, sampling: Sampling) -> None:
    """Raises SentinelError if an answer lacks its stop token or a log-prob, or its spans cover only a part of its ids."""
    ids, logp = answer.token_ids, answer.logp
    if not len(ids) or (answer.finish_reason == "stop" and sampling.regex is None and ids[-1] not in sampling.stop_ids):
        raise SentinelError(
            Fault.DROPPED_STOP_TOKEN,
            f"answer {place} was ended by a stop token, says the engine, but its last id is {ids[-1] if len(ids) else 'none'}:"
            " without that token the model never learns to stop; make the engine keep it",
        )
    scored = int((logp <= ROUNDING).sum())
    if len(logp) != len(ids) or scored != len(ids):
        raise SentinelError(
            Fault.MISSING_LOGPROBS,
            f"answer {place} has {len(ids)} ids and {scored} log-probs: each id needs the one that it was sampled with, the stop"
            " token too; without it nothing proves what sampled it",
        )
    if (named := sum(span.stop - span.start for span in answer.spans)) not in (0, len(ids)):
        raise SentinelError(
            Fault.STALE_ROLLOUTS, f"answer {place} has {len(ids)} ids, and the engine says of {named} which weights sampled them"
        )
