"""Twelve chat templates: every id that the engine saw is the id that is trained on, and only what was sampled is."""

import json
import random
from typing import Any

import numpy as np
import pytest
from tool_files import Scripted, boxes, turns_of
from tool_templates import FAMILIES, Family, tokenizer_of
from transformers import PreTrainedTokenizerBase

from rlgen.data.suffix import Suffixes
from rlgen.rollout.conversations import Dialogue, turn_seed
from rlgen.rollout.sample import rollout, sample_seed
from rlgen.types import Prompt, Sampling, ids_of, whole_conversation

__all__ = ["boxes"]
WORDS = ["sum", "naïve", "x-1", "日本", "a b", "9", "it's", '"q"', "back\\slash"]


def text_of(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, 4)))


def call_of(rng: random.Random, place: int) -> dict[str, Any]:
    if rng.random() < 0.5:
        name, given = "add", {"a": rng.randint(-99, 99), "b": rng.randint(-9, 9)}
    else:
        name, given = "echo", {"text": text_of(rng), "times": rng.randint(1, 3)}
    return {"type": "function", "id": f"call{place:05d}", "function": {"name": name, "arguments": given}}


def answer_of(call: dict[str, Any]) -> str:
    name, given = call["function"]["name"], call["function"]["arguments"]
    return str(given["a"] + given["b"]) if name == "add" else given["text"] * given["times"]


def as_template_takes(family: Family, message: dict[str, Any]) -> dict[str, Any]:
    """DeepSeek's template takes arguments as a text; a plain one takes calls as part of what is said."""
    if family.said and "tool_calls" in message:
        calls = [json.dumps(call["function"], ensure_ascii=False) for call in message["tool_calls"]]
        return {**message, "content": "\n".join([message["content"], *(f"<tool_call>{call}</tool_call>" for call in calls)])}
    if family.format != "deepseek" or "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def conversation(family: Family, rng: random.Random) -> list[dict[str, Any]]:
    """A question, turns with calls and their answers, and a last turn."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": text_of(rng)}]
    for _ in range(rng.randint(0, 3)):
        calls = [call_of(rng, place) for place in range(1 if family.one_call else rng.randint(1, 3))]
        said = f"{text_of(rng)} #said" if family.says and rng.random() < 0.5 else ""
        thought = {"reasoning_content": f"hm {text_of(rng)}"} if family.thinks else {}
        messages.append({"role": "assistant", "content": said, **thought, "tool_calls": calls})
        messages += [
            {"role": "tool", "name": call["function"]["name"], "tool_call_id": call["id"], "content": answer_of(call)}
            for call in calls
        ]
    thought = {"reasoning_content": "so"} if family.thinks else {}
    return [*messages, {"role": "assistant", "content": f"{text_of(rng)} #end", **thought}]


@pytest.mark.parametrize("conversations", [6, pytest.param(90, marks=pytest.mark.slow)])  # of twelve templates: 1,080
@pytest.mark.parametrize("name", FAMILIES)
def test_what_the_engine_saw_is_what_is_trained_on(
    name: str, conversations: int, boxes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, rng = FAMILIES[name], random.Random(name)
    tokenizer = tokenizer_of(family)
    box = boxes("add", "echo")
    turns = turns_of(box, tokenizer, family.ends, family.said)
    assert turns.format == family.format
    ends = {end: tokenizer.convert_tokens_to_ids(end) for end in family.ends}

    def render(messages: list[dict[str, Any]], ongoing: bool) -> str:
        taken = [as_template_takes(family, message) for message in messages]
        return tokenizer.apply_chat_template(taken, tools=list(box.schemas), tokenize=False, add_generation_prompt=ongoing)

    def said_in(user: dict[str, Any], turn: dict[str, Any]) -> list[int]:
        """The ids of a turn, with the stop token that ends it."""
        before, whole = render([user], True), render([user, turn], False)
        assert whole.startswith(before)
        last = "tool_calls" not in turn
        end = {
            "glm": "<|user|>" if last else "<|observation|>",
            "gemma": "<end_of_turn>" if last else "<start_function_response>",
        }
        stop = end.get(name, family.ends[0])
        text = whole[len(before) :]
        return [*tokenizer(text[: text.rindex(stop)] if stop in text else text, add_special_tokens=False).input_ids, ends[stop]]

    every = [conversation(family, rng) for _ in range(conversations)]
    prompts, script, texts = [], {}, []
    for place, messages in enumerate(every):
        text = render(messages[:1], True)
        ids = ids_of(tokenizer(text, add_special_tokens=False).input_ids)
        prompts.append(Prompt(position=place, row=place, text=text, prompt_ids=ids, columns={}))
        spoken = [said_in(messages[0], message) for message in messages if message["role"] == "assistant"]
        for number, ids_ in enumerate(spoken):
            script[turn_seed(sample_seed(7, place, 0), number)] = ids_
        texts.append(tokenizer(render(messages, False), add_special_tokens=False).input_ids)

    engine, sampling = Scripted(script), Sampling(max_tokens=4000, temperature=1.0, stop_ids=tuple(ends.values()))
    encoded: list[str] = []
    monkeypatch.setattr(Suffixes, "encode", counted(Suffixes.encode, encoded))
    monkeypatch.setattr(Suffixes, "as_plain", counted(Suffixes.as_plain, encoded))
    for method in ("__call__", "encode", "_encode_plus"):
        monkeypatch.setattr(type(tokenizer), method, never)
    dialogue = Dialogue(turns=turns, max_turns=8, reply_timeout=600.0)
    groups = rollout(engine, prompts, sampling, 1, 7, 0, tokenizer, dialogue)
    monkeypatch.undo()

    spoken_words = 0
    for messages, group, whole in zip(every, groups, texts, strict=True):
        (sample,) = group.samples
        row = np.concatenate([sample.prompt_ids, sample.completion_ids])
        # As the template writes the whole conversation, up to what stands behind the stop token of the last turn.
        if name in ("glm", "gemma"):  # the stop token of a last turn may begin what follows
            assert row[:-1].tolist() == whole[: len(row) - 1]
        else:
            assert row.tolist() == whole[: len(row)]
        requests = [request for request in engine.asked if request.seed in {turn_seed(sample.seed, turn) for turn in range(9)}]
        assert len(requests) == len(sample.spans) == sum(message["role"] == "assistant" for message in messages)
        mask = np.zeros(len(sample.completion_ids), dtype=bool)
        for number, (request, span) in enumerate(zip(requests, sample.spans, strict=True)):
            start, stop = len(sample.prompt_ids) + span.start, len(sample.prompt_ids) + span.stop
            assert request.prompt_ids.tolist() == row[:start].tolist()
            assert row[start:stop].tolist() == script[turn_seed(sample.seed, number)]
            mask[span.start : span.stop] = True
        assert sample.loss_mask.tolist() == mask.tolist() == (~np.isnan(sample.sampler_logp)).tolist()
        assert sample.finish_reason == "stop"
        assert whole_conversation(sample.messages, sample.completion)[:-1] == messages[1:-1]
        calls = sum(len(message.get("tool_calls", ())) for message in messages)
        assert sample.counts == ({"calls": calls} if calls else {})
        spoken_words += calls
    assert spoken_words > conversations / 2
    assert len({request.seed for request in engine.asked}) == len(engine.asked) == len(script)
    # What was encoded are suffixes: once each, and once with a word in place of each answer.
    replies = len(script) - conversations
    assert replies < len(encoded) <= 2 * replies
    assert not any("#said" in text or "#end" in text for text in encoded)


def counted(method: Any, texts: list[str]) -> Any:
    def call(self: Suffixes, text: str) -> list[int]:
        texts.append(text)
        return method(self, text)

    return call


def never(self: PreTrainedTokenizerBase, *_: Any, **__: Any) -> Any:
    raise AssertionError("something but a suffix was tokenised")
