"""Rows to prompts: the template once, order by position, counts, bad rows, odd answers."""

from pathlib import Path
from typing import Any

import pytest
from conftest import Proof
from helpers.rows import byte_tokenizer as templated
from helpers.rows import prompts_of, write_lines

from rlgen.data import prompts
from rlgen.data.prompts import PromptStream
from rlgen.errors import DataError
from rlgen.models.tiny import byte_tokenizer
from rlgen.recipe.data import ColumnsRecipe

TOKENIZER = byte_tokenizer()
USER = {"role": "user", "content": "hi"}


def stream(rows: list[dict[str, Any]], folder: Path, tokenizer: Any = None, seed: int = 0, **settings: Any) -> PromptStream:
    return prompts_of(write_lines(folder / "rows.jsonl", rows), tokenizer, seed, **settings)


def test_text_is_used_as_it_is(tmp_path: Path) -> None:
    likes = ["[1]", "[]", '[{"role": "x"}]', "[INST] a"]  # no chat
    assert [p.text for p in stream([{"prompt": p} for p in likes], tmp_path, shuffle=False).take(0, 4)] == likes
    prompt = stream([{"prompt": "hé", "x": 3}], tmp_path).take(0, 1)[0]
    assert TOKENIZER.decode(list(prompt.prompt_ids)) == "hé" == prompt.text and len(prompt.prompt_ids) == 3
    assert prompt.columns == {"prompt": "hé", "x": 3}


@pytest.mark.parametrize(
    "prompt, settings", [("hi", {"system": "be"}), ([{"role": "system", "content": "be"}, USER], {}), ([USER], {"system": "be"})]
)
def test_chats_are_templated_once(tmp_path: Path, prompt: Any, settings: dict[str, Any]) -> None:
    made = stream([{"prompt": prompt}], tmp_path, **settings).take(0, 1)[0]
    messages = [{"role": "system", "content": "be"}, USER]
    whole = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert list(made.prompt_ids) == whole
    assert made.text == "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_key_without_a_value_is_not_there(tmp_path: Path) -> None:
    """A column of Parquet has every key in every message."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.name + ': ' if 'name' in m else '' }}{{ m.content }} {% if 'tool_calls' in m %}"
        "{{ m.tool_calls | length }}{% endif %}{% endfor %}"
    )
    chat = [{**USER, "name": "Ann", "tool_calls": None}, {"role": "user", "content": "yes?", "name": None, "tool_calls": None}]
    (made,) = stream([{"prompt": chat}], tmp_path, tokenizer).take(0, 1)
    assert made.text == "Ann: hi yes? " and made.messages == [{**USER, "name": "Ann"}, {"role": "user", "content": "yes?"}]


def test_a_position_is_one_integer(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i}"} for i in range(7)]
    made = stream(rows, tmp_path, seed=3)
    taken = made.take(0, 21)
    for epoch in range(3):
        assert sorted(p.row for p in taken[7 * epoch : 7 * epoch + 7]) == list(range(7))
    assert [p.row for p in taken[:7]] != [p.row for p in taken[7:14]]
    assert made.take(0, 5) + made.take(5, 16) == taken
    assert [p.position for p in taken] == list(range(21))
    assert [p.row for p in stream(rows, tmp_path, seed=4).take(0, 21)] != [p.row for p in taken]
    assert [p.row for p in stream(rows, tmp_path, shuffle=False).take(0, 9)] == [0, 1, 2, 3, 4, 5, 6, 0, 1]


@pytest.mark.fault(21, 24)
def test_over_long_prompts_are_counted_or_refused(tmp_path: Path, proof: Proof) -> None:
    rows = [{"prompt": "ab"}, {"prompt": "abcdef"}, {"prompt": "ab"}]
    counts = {"read": 3, "empty": 0, "no_answer": 0, "odd_answer": 0, "over_long": 1, "duplicates": 1, "used": 2}
    assert stream(rows, tmp_path, max_prompt_tokens=4).counts == counts
    with pytest.raises(DataError, match=r"row 1: 6 tokens, but data.max_prompt_tokens is 4"):
        stream(rows, tmp_path, max_prompt_tokens=4, overlong="error")
    every = "no row is left: 4 read, 1 empty, 0 no_answer, 0 odd_answer, 3 over_long, 0 duplicates, 0 used"
    with pytest.raises(DataError, match=every):
        stream([*rows, {"prompt": ""}], tmp_path, max_prompt_tokens=1)
    proof("3 of 4 rows too long, one empty; 1 duplicate counted")


def test_rows_without_a_prompt_are_left_out_and_counted(tmp_path: Path) -> None:
    built = stream([{"prompt": value} for value in ("a", " \n", None, [], "b")], tmp_path, shuffle=False)
    counts = {"read": 5, "empty": 3, "no_answer": 0, "odd_answer": 0, "over_long": 0, "duplicates": 0, "used": 2}
    assert built.counts == counts
    assert [(p.row, p.text) for p in built.take(0, 2)] == [(0, "a"), (1, "b")]


@pytest.mark.fault(22)
@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([{"role": "wizard", "content": "x"}], "a message must have one of the roles"),
        ([{"role": "user"}], "the message of the user has no text"),
        ([{"role": "user", "content": " "}], "the message of the user has no text"),
        ([USER, {"role": "assistant", "content": "y"}], "the last message is the assistant's"),
        ([USER, {"role": "assistant", "content": "x", "tool_calls": [{"name": "f"}]}, USER], "calls tools"),
        ([{"role": "developer", "content": "x"}, USER], "no developers here"),
        (7, "the prompt is int"),
        ('[{"role": "user", "content": "x"}]', "the prompt is a text with a chat as JSON"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, value: Any, said: str, proof: Proof) -> None:
    with pytest.raises(DataError) as caught:
        stream([{"prompt": "fine"}, {"prompt": value}], tmp_path, templated())
    assert "rows.jsonl, row 1" in str(caught.value) and said in str(caught.value)
    proof(said)


def test_two_system_messages_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"row 0.*beside data\.system"):
        stream([{"prompt": [{"role": "system", "content": "a"}, USER]}], tmp_path, system="b")


def test_a_tokenizer_that_goes_round_its_template_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_tokenizer()
    render = tokenizer.apply_chat_template

    def other_ids(messages: Any, tokenize: bool, **settings: Any) -> Any:
        return [1, 2, 3] if tokenize else render(messages, tokenize=False, **settings)

    monkeypatch.setattr(tokenizer, "apply_chat_template", other_ids)
    with pytest.raises(DataError, match="differently from its template's text"):
        stream([{"prompt": [USER]}], tmp_path, tokenizer)


def test_an_epoch_is_shuffled_once_however_many_prompts_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = stream([{"prompt": f"p{index}"} for index in range(11)], tmp_path, seed=123)
    shuffles = []

    class CountingRandom(prompts.Random):
        def shuffle(self, x: Any) -> None:
            shuffles.append(len(x))
            super().shuffle(x)

    monkeypatch.setattr(prompts, "Random", CountingRandom)
    prompts.order.cache_clear()
    built.take(0, 22)
    assert shuffles == [11, 11]


def test_columns(tmp_path: Path) -> None:
    rows = [{"question": "q", "solution": "a"}]
    made = stream(rows, tmp_path, columns=ColumnsRecipe(prompt="question", answer="solution"))
    assert made.take(0, 1)[0].columns == {"question": "q", "solution": "a", "answer": "a"}


def answered(tmp_path: Path, answers: list[Any]) -> PromptStream:
    rows = [{"prompt": f"p{place}", "answer": answer} for place, answer in enumerate(answers)]
    return stream(rows, tmp_path, columns={"answer": "answer"})


@pytest.mark.fault(26)
def test_a_few_rows_without_an_answer_are_left_out_and_more_are_an_error(tmp_path: Path, proof: Proof) -> None:
    answers = [None if place == 50 else "1" for place in range(100)]
    built = answered(tmp_path, answers)
    assert (built.counts["no_answer"], built.counts["used"]) == (1, 99)
    assert all(prompt.columns["answer"] == "1" for prompt in built.take(0, 99))
    answers[7] = None
    with pytest.raises(DataError, match="`answer` is empty in 2 of 100 rows"):
        answered(tmp_path, answers)
    proof("1 of 100 without an answer is counted, 2 are refused")


@pytest.mark.fault(26)
@pytest.mark.parametrize(
    "usual, odd, kind",
    [
        ("7", 7, "a text"),
        (7, "7", "a number"),
        ("7", ["7"], "a text"),
        (["7"], "7", "a list"),
        ("7", True, "a text"),
        ("7", {"a": 1}, "a text"),
        ("so\n#### 7", "no final one", "a text that ends in #### and the final answer"),
    ],
)
def test_one_odd_answer_in_a_hundred_is_counted_and_two_are_refused(
    tmp_path: Path, usual: Any, odd: Any, kind: str, proof: Proof
) -> None:
    built = answered(tmp_path, [usual] * 99 + [odd])
    assert (built.counts["odd_answer"], built.counts["used"]) == (1, 99)
    assert all(prompt.columns["answer"] == usual for prompt in built.take(0, 99))
    with pytest.raises(DataError) as error:
        answered(tmp_path, [usual] * 98 + [odd] * 2)
    assert f"`answer` is {kind} in most rows, but not in 2 of 100" in str(error.value) and error.value.exit_code == 4
    proof(f"{odd!r} among {usual!r}")


@pytest.mark.fault(26)
def test_no_answer_is_none_whatever_it_looks_like(tmp_path: Path, proof: Proof) -> None:
    built = answered(tmp_path, ["7"] * 298 + [None, " "])
    assert (built.counts["no_answer"], built.counts["odd_answer"], built.counts["used"]) == (2, 0, 298)
    with pytest.raises(DataError, match="is empty in 4 of 4 rows"):
        answered(tmp_path, [None, "", float("nan"), None])
    proof("None, a blank text, NaN")


@pytest.mark.parametrize("answers", [["#### 7", "8"] * 5, ["7", "-8.5"], [1, 2.5], [[1], [2, 3]], ["a #### heading\nx", "b"]])
def test_answers_that_are_alike_are_all_used(tmp_path: Path, answers: list[Any]) -> None:
    assert answered(tmp_path, answers).counts["used"] == len(answers)
