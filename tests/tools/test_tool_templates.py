"""Twelve chat templates: every id that the engine saw is the id that is trained on, and only what was sampled is."""

import json
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from helpers.before import before
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


def written(
    family: Family, tokenizer: Any, schemas: Sequence[Any], every: list[list[dict[str, Any]]]
) -> tuple[list[Prompt], dict[int, list[int]], list[list[int]]]:
    """The prompts of conversations, the ids that the model says by the seed of a turn, and the ids of each whole conversation."""

    def render(messages: list[dict[str, Any]], ongoing: bool) -> str:
        taken = [as_template_takes(family, message) for message in messages]
        return tokenizer.apply_chat_template(taken, tools=list(schemas), tokenize=False, add_generation_prompt=ongoing)

    def said_in(user: dict[str, Any], turn: dict[str, Any]) -> list[int]:
        """The ids of a turn, with the stop token that ends it."""
        before, whole = render([user], True), render([user, turn], False)
        assert whole.startswith(before)
        stop = family.ends[0]
        if family.format == "glm":
            stop = "<|observation|>" if "tool_calls" in turn else "<|user|>"
        if family.format == "gemma":
            stop = "<start_function_response>" if "tool_calls" in turn else "<end_of_turn>"
        text = whole[len(before) :]
        ids = tokenizer(text[: text.rindex(stop)] if stop in text else text, add_special_tokens=False).input_ids
        return [*ids, tokenizer.convert_tokens_to_ids(stop)]

    prompts, script, wholes = [], {}, []
    for place, messages in enumerate(every):
        text = render(messages[:1], True)
        ids = ids_of(tokenizer(text, add_special_tokens=False).input_ids)
        prompts.append(Prompt(position=place, row=place, text=text, prompt_ids=ids, columns={}))
        spoken = [said_in(messages[0], message) for message in messages if message["role"] == "assistant"]
        script |= {turn_seed(sample_seed(7, place, 0), number): said for number, said in enumerate(spoken)}
        wholes.append(tokenizer(render(messages, False), add_special_tokens=False).input_ids)
    return prompts, script, wholes


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
    every = [conversation(family, rng) for _ in range(conversations)]
    prompts, script, wholes = written(family, tokenizer, box.schemas, every)
    stops = tuple(map(tokenizer.convert_tokens_to_ids, family.ends))
    engine, sampling = Scripted(script), Sampling(max_tokens=4000, temperature=1.0, stop_ids=stops)
    encoded: list[str] = []
    for method in ("encode", "as_plain"):
        before(Suffixes, method, lambda suffixes, text: encoded.append(text), monkeypatch.setattr)
    for method in ("__call__", "encode", "_encode_plus"):
        monkeypatch.setattr(type(tokenizer), method, never)
    dialogue = Dialogue(turns=turns, max_turns=8, reply_timeout=600.0)
    groups = rollout(engine, prompts, sampling, 1, 7, 0, tokenizer, dialogue)
    monkeypatch.undo()

    for messages, group, whole in zip(every, groups, wholes, strict=True):
        (sample,) = group.samples
        row = np.concatenate([sample.prompt_ids, sample.completion_ids])
        # As the template writes the whole conversation, up to what stands behind the stop token of the last turn. In glm and
        # gemma that token may begin what follows.
        same = len(row) - (name in ("glm", "gemma"))
        assert row[:same].tolist() == whole[:same]
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
        assert sum(sample.counts.values()) == sum(len(message.get("tool_calls", ())) for message in messages)
        assert sample.counts.keys() <= {"calls"}
    assert sum(sum(sample.counts.values()) for group in groups for sample in group.samples) > conversations / 2
    assert len({request.seed for request in engine.asked}) == len(engine.asked) == len(script)
    # What was encoded are suffixes: once each, and once with a word in place of each answer.
    replies = len(script) - conversations
    assert replies < len(encoded) <= 2 * replies
    assert not any("#said" in text or "#end" in text for text in encoded)


def never(self: PreTrainedTokenizerBase, *_: Any, **__: Any) -> Any:
    raise AssertionError("something but a suffix was tokenised")
