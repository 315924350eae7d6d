"""Rung 0: do both sides see the same tokens? Nothing is computed with; every answer is compared with its question."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from rlgen.engines.base import Facts
from rlgen.models.load import load_tokenizer
from rlgen.rollout.sample import sample_seed
from rlgen.sentinel.probe import Probe
from rlgen.sentinel.verdict import Fault, Finding, Rung, Verdict
from rlgen.types import Completion, Request, Sampling

PROMPTS, SAMPLES, TOKENS = 3, 2, 8
FIELDS = {
    "dtype": Fault.ENGINE_SETTINGS,
    "head_dtype": Fault.ENGINE_SETTINGS,
    "vocab_size": Fault.ENGINE_SETTINGS,
    "logprobs_mode": Fault.RAW_LOGPROBS,
}
CHAT = [{"role": "user", "content": "Sort 3 1 2, then say: done."}]


def contract(probe: Probe) -> Rung:
    """Compares settings, tokenizers, and six answers with their requests; twice, the second time with stop ids that occur."""
    finding = next(findings(probe), None)
    if finding is None:
        return Rung(number=0, name="contract", verdict=Verdict.OK, sentence="Engine and trainer see the same tokens.")
    return Rung(number=0, name="contract", verdict=Verdict.FAILED, fault=finding.fault, sentence=finding.sentence)


def findings(probe: Probe) -> Iterator[Finding]:
    """All that is wrong, the telling things first."""
    yield from compare_facts(probe.facts, probe.expected)
    theirs = load_tokenizer(probe.facts.model, probe.facts.revision)
    yield from compare_tokenizers(theirs, probe.tokenizer, [prompt.text for prompt in probe.prompts[:PROMPTS]])
    if set(probe.facts.stop_ids) - set(probe.sampling.stop_ids):
        yield disagreement(Fault.SPECIAL_TOKENS, "the ids that end a completion", probe.facts.stop_ids, probe.sampling.stop_ids)
    uneven = sorted(probe.prompts, key=lambda prompt: len(prompt.prompt_ids))
    chosen = [uneven[0], uneven[-1], uneven[len(uneven) // 2]]
    requests = [
        Request(prompt_ids=prompt.prompt_ids, seed=sample_seed(probe.seed, prompt.position, index))
        for prompt in chosen
        for index in range(SAMPLES)
    ]
    sampling = Sampling(max_tokens=min(TOKENS, probe.sampling.max_tokens), temperature=1.0, stop_ids=probe.sampling.stop_ids)
    answers = probe.engine.generate(requests, sampling)
    yield from check_answers(requests, answers, sampling, probe.version, probe.expected.vocab_size)
    # Few models end an answer soon: ids that are sure to occur are made stop ids, so that stopping is seen.
    occurring = {answer.token_ids[len(answer.token_ids) // 2] for answer in answers if answer.token_ids}
    sampling = replace(sampling, stop_ids=tuple(sorted({*sampling.stop_ids, *occurring})))
    answers = probe.engine.generate(requests, sampling)
    yield from check_answers(requests, answers, sampling, probe.version, probe.expected.vocab_size)
    if not any(answer.finish_reason == "stop" for answer in answers):
        yield Finding(
            fault=Fault.DROPPED_STOP_TOKEN,
            sentence="no completion ended at ids that were made stop ids because they had just been sampled: the engine"
            " does not take stop ids, or not its seeds.",
        )


def compare_facts(theirs: Facts, ours: Facts) -> Iterator[Finding]:
    """Settings that change what a log-prob means."""
    pairs = {"dtype": (theirs.dtype, ours.dtype), "head_dtype": (theirs.head_dtype, ours.head_dtype)}
    pairs |= {"logprobs_mode": (theirs.logprobs_mode, ours.logprobs_mode)}
    numbers = {"vocab_size": (theirs.vocab_size, ours.vocab_size)}
    for field, (there, here) in {**pairs, **numbers}.items():
        if there != here:
            yield disagreement(FIELDS[field], field, there, here)


def compare_tokenizers(
    theirs: PreTrainedTokenizerBase, ours: PreTrainedTokenizerBase, texts: Sequence[str]
) -> Iterator[Finding]:
    """The tokenizer beside the engine's weights and that of the trainer: special ids, templates, ids of texts."""
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        there, here = getattr(theirs, name), getattr(ours, name)
        if there != here:
            yield disagreement(Fault.SPECIAL_TOKENS, name, there, here)
    if ours.chat_template and theirs.chat_template:
        there, here = (t.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True) for t in (theirs, ours))
        if there != here:
            yield disagreement(Fault.TEMPLATE_MISMATCH, "a chat through the template", there, here)
    elif bool(ours.chat_template) != bool(theirs.chat_template):
        there, here = bool(theirs.chat_template), bool(ours.chat_template)
        yield disagreement(Fault.TEMPLATE_MISMATCH, "having a chat template", there, here)
    for text in texts:
        there, here = theirs(text).input_ids, ours(text).input_ids
        if there != here:
            yield disagreement(Fault.TEMPLATE_MISMATCH, f"the ids of {text[:40]!r}", there[:20], here[:20])


def check_answers(
    requests: Sequence[Request], answers: Sequence[Completion], sampling: Sampling, version: int, vocabulary: int
) -> Iterator[Finding]:
    """Each answer against its request: count, prompt, order, ids, log-probs, the token that ended it, version."""
    yield from check_count(requests, answers, sampling)
    asked, told = [request.prompt_ids for request in requests], [answer.prompt_ids for answer in answers]
    if asked != told and Counter(asked) == Counter(told):
        places = [place for place, pair in enumerate(zip(asked, told, strict=True)) if pair[0] != pair[1]]
        yield Finding(
            fault=Fault.COMPLETION_ORDER,
            sentence=f"the answers at places {places} belong to other prompts: the engine returns them in another order than"
            " it was asked. Put them in the order of the requests, by request id.",
        )
    if asked != told:
        lost, extra = Counter(asked) - Counter(told), Counter(told) - Counter(asked)
        yield Finding(
            fault=Fault.MISSING_PROMPT,
            sentence=f"{lost.total()} of {len(asked)} requests have no answer to their prompt and {extra.total()} answers are to"
            " prompts that were not asked, or not so often: a prompt was dropped, repeated or changed.",
        )
    for place, answer in enumerate(answers):
        yield from check_answer(place, answer, sampling, version, vocabulary)


def check_count(requests: Sequence[Request], answers: Sequence[Completion], sampling: Sampling) -> Iterator[Finding]:
    short = all(len(answer.token_ids) == 1 for answer in answers)
    cut = any(answer.finish_reason == "length" or answer.token_ids[-1] not in sampling.stop_ids for answer in answers if short)
    if answers and short and cut and sampling.max_tokens > 1:
        yield Finding(
            fault=Fault.FLATTENED_COMPLETIONS,
            sentence=f"every one of {len(answers)} answers to {len(requests)} requests has a single token, and not every one was"
            " ended by it: a list of completions was flattened into a list of tokens.",
        )
    if len(answers) != len(requests):
        yield Finding(
            fault=Fault.MISSING_PROMPT,
            sentence=f"{len(requests)} completions were asked for, {len(answers)} came: a prompt was dropped or repeated.",
        )


def check_answer(place: int, answer: Completion, sampling: Sampling, version: int, vocabulary: int) -> Iterator[Finding]:
    ids, ended = answer.token_ids, answer.finish_reason == "stop"
    if ended and (not ids or ids[-1] not in sampling.stop_ids):
        yield Finding(
            fault=Fault.DROPPED_STOP_TOKEN,
            sentence=f"answer {place} says that it was ended by a stop token, but its last id is {ids[-1] if ids else 'none'}:"
            " without that token the model never learns to stop. Make the engine keep it.",
        )
    if len(answer.logp) != len(ids) or not all(value <= 1e-6 for value in answer.logp):
        yield Finding(
            fault=Fault.MISSING_LOGPROBS,
            sentence=f"answer {place} has {len(ids)} ids and {sum(value <= 1e-6 for value in answer.logp)} log-probs: each id"
            " needs the one that it was sampled with, the stop token too.",
        )
    if not all(0 <= token < vocabulary for token in ids):
        yield disagreement(Fault.ENGINE_SETTINGS, "the largest id of an answer", max(ids), f"below {vocabulary}")
    if answer.weight_version != version:
        yield disagreement(Fault.WRONG_VERSION, "the weight version of an answer", answer.weight_version, version)


def disagreement(fault: Fault, field: str, there: object, here: object) -> Finding:
    return Finding(
        fault=fault,
        sentence=f"Engine and trainer do not see the same tokens: {field} is {there!r} there, {here!r} here. Open both from the"
        " same files with the same settings.",
    )
