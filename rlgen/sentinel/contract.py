"""Implements check 0: engine and trainer see the same tokens. Compares settings, tokenizers and answers, and no log-probs."""

from collections.abc import Sequence
from dataclasses import fields, replace

from transformers import PreTrainedTokenizerBase

from rlgen.engines.base import Settings
from rlgen.errors import Fault, SentinelError
from rlgen.models.load import load_tokenizer
from rlgen.rollout.answers import check_answers
from rlgen.rollout.sample import sample_seed
from rlgen.sentinel.probe import Probe
from rlgen.sentinel.verdict import Outcome, Rung
from rlgen.types import WHOLE, Request

PROMPTS, SAMPLES, TOKENS = 3, 2, 8
CHAT = [{"role": "user", "content": "Sort 3 1 2, then say: done."}]


def contract(probe: Probe) -> Rung:
    """Compares settings, tokenizers, and six answers with their requests; then six answers with stop ids that are sure to occur.

    Raises:
        SentinelError: names the first difference.
    """
    facts = probe.engine.facts()
    for field in fields(Settings):
        there, here = getattr(facts.settings, field.name), getattr(probe.expected, field.name)
        if there != here:
            fault = Fault.RAW_LOGPROBS if field.name == "logprobs_mode" else Fault.ENGINE_SETTINGS
            raise disagreement(fault, field.name, there, here)
    theirs = load_tokenizer(facts.model, facts.revision)
    theirs.chat_template = probe.template or theirs.chat_template
    compare_tokenizers(theirs, probe.tokenizer, [prompt.text for prompt in probe.prompts[:PROMPTS]])
    if set(facts.stop_ids) - set(probe.sampling.stop_ids):
        raise disagreement(Fault.SPECIAL_TOKENS, "the ids that end a completion", facts.stop_ids, probe.sampling.stop_ids)
    by_length = sorted(probe.prompts, key=lambda prompt: len(prompt.prompt_ids))
    uneven = [by_length[0], by_length[-1], by_length[len(by_length) // 2]]
    requests = [
        Request(prompt_ids=prompt.prompt_ids, seed=sample_seed(probe.seed, prompt.position, index), images=prompt.images)
        for prompt in uneven
        for index in range(SAMPLES)
    ]
    sampling = probe.plain(WHOLE, TOKENS)
    answers = probe.engine.generate(requests, sampling)
    check_answers(requests, answers, sampling, probe.version)
    # Few models end an answer this early. Ids that have just been sampled become stop ids, so that stopping is tested.
    occurring = {int(answer.token_ids[len(answer.token_ids) // 2]) for answer in answers}
    sampling = replace(sampling, stop_ids=tuple(sorted({*sampling.stop_ids, *occurring})))
    answers = probe.engine.generate(requests, sampling)
    check_answers(requests, answers, sampling, probe.version)
    if not any(answer.finish_reason == "stop" for answer in answers):
        raise SentinelError(
            Fault.DROPPED_STOP_TOKEN,
            "no completion ended, although ids that it must sample were set as stop ids: the engine ignores stop ids or seeds",
        )
    return Rung(number=0, name="contract", verdict=Outcome.OK, sentence="Engine and trainer see the same tokens.")


def compare_tokenizers(theirs: PreTrainedTokenizerBase, ours: PreTrainedTokenizerBase, texts: Sequence[str]) -> None:
    """Compares the engine's tokenizer with the trainer's: special ids, chat templates, and the ids of `texts`.

    Raises:
        SentinelError: names the first difference.
    """
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        there, here = getattr(theirs, name), getattr(ours, name)
        if there != here:
            raise disagreement(Fault.SPECIAL_TOKENS, name, there, here)
    if bool(ours.chat_template) != bool(theirs.chat_template):
        there, here = bool(theirs.chat_template), bool(ours.chat_template)
        raise disagreement(Fault.TEMPLATE_MISMATCH, "whether there is a chat template", there, here)
    if ours.chat_template:
        there, here = (t.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True) for t in (theirs, ours))
        if there != here:
            raise disagreement(Fault.TEMPLATE_MISMATCH, "a chat through the template", there, here)
    for text in texts:
        there, here = theirs(text).input_ids, ours(text).input_ids
        if there != here:
            raise disagreement(Fault.TEMPLATE_MISMATCH, f"the ids of {text[:40]!r}", there[:20], here[:20])


def disagreement(fault: Fault, field: str, there: object, here: object) -> SentinelError:
    return SentinelError(
        fault,
        f"engine and trainer do not see the same tokens: {field} is {there!r} in the engine, {here!r} in the trainer; open"
        " both from the same files with the same settings",
    )
