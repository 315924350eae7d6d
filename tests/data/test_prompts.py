import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rlgen.data import build_prompts, load_rows
from rlgen.errors import DataError
from rlgen.recipe.models import DataRecipe

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'developer' %}{{ raise_exception('no developers here') }}{% endif %}"
    "<s>{{ m['role'] }}: {{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% if think %} hm{% endif %}{% endif %}"
)
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
BOS = len(ALPHABET)


def byte_tokenizer(template=TEMPLATE):
    """One token a byte and one special token, <s>, which the tokenizer puts before plain texts."""
    core = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(ALPHABET)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<s>"])
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", chat_template=template)


def byte_ids(text):
    return tuple(ALPHABET.index(char) for char in text)  # of ASCII without spaces


def stream(tmp_path, rows, tokenizer=None, seed=0, **settings):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataRecipe(source=str(path), **settings)
    return build_prompts(data, load_rows(data, seed), tokenizer or byte_tokenizer(), seed)


def numbered(count):
    return [{"prompt": f"p{index}"} for index in range(count)]


def test_a_text_is_used_as_it_is_with_the_tokens_that_the_tokenizer_adds(tmp_path):
    (prompt,) = stream(tmp_path, [{"prompt": "ab", "answer": "x"}]).take(0, 1)
    assert prompt.text == "ab"
    assert prompt.prompt_ids == (BOS, *byte_ids("ab"))
    assert prompt.columns == {"prompt": "ab", "answer": "x"}


@pytest.mark.parametrize(
    ("value", "settings", "text"),
    [
        ([{"role": "user", "content": "hi"}], {}, "<s>user: hi<s>assistant:"),
        ("hi", {"chat": True}, "<s>user: hi<s>assistant:"),
        ("hi", {"system": "be brief"}, "<s>system: be brief<s>user: hi<s>assistant:"),
        ([{"role": "user", "content": "hi"}], {"system": "go"}, "<s>system: go<s>user: hi<s>assistant:"),
        ("hi", {"chat": True, "template_args": {"think": True}}, "<s>user: hi<s>assistant: hm"),
    ],
)
def test_a_chat_goes_through_the_template_and_gets_no_second_start_token(tmp_path, value, settings, text):
    tokenizer = byte_tokenizer()
    (prompt,) = stream(tmp_path, [{"prompt": value}], tokenizer, **settings).take(0, 1)
    assert prompt.text == text
    assert prompt.prompt_ids == tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert tokenizer.decode(prompt.prompt_ids) == text
    assert prompt.prompt_ids.count(BOS) == text.count("<s>")


def test_texts_and_chats_of_one_file_keep_their_order(tmp_path):
    rows = [{"prompt": "a"}, {"prompt": [{"role": "user", "content": "b"}]}, {"prompt": "c"}]
    prompts = stream(tmp_path, rows, shuffle=False).take(0, 3)
    assert [p.text for p in prompts] == ["a", "<s>user: b<s>assistant:", "c"]
    assert [p.prompt_ids[1:] for p in (prompts[0], prompts[2])] == [byte_ids("a"), byte_ids("c")]


def test_the_answer_column_is_given_under_both_names(tmp_path):
    rows = [{"q": "a", "solution": "42", "answer": "no"}]
    built = stream(tmp_path, rows, columns={"prompt": "q", "answer": "solution"})
    assert built.take(0, 1)[0].columns == {"q": "a", "solution": "42", "answer": "42"}
    assert built.columns == {"q", "solution", "answer"}


def test_each_epoch_is_a_permutation_of_its_own(tmp_path):
    built = stream(tmp_path, numbered(20), seed=5)
    epochs = [[p.row for p in built.take(20 * epoch, 20)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != list(range(20))
    assert epochs[0] != [p.row for p in stream(tmp_path, numbered(20), seed=6).take(0, 20)]


def test_a_position_alone_decides_the_prompt(tmp_path):
    built = stream(tmp_path, numbered(7))
    assert [p.position for p in built.take(0, 30)] == list(range(30))
    assert built.take(0, 4) + built.take(4, 13) == built.take(0, 17)
    assert stream(tmp_path, numbered(7)).take(11, 9) == built.take(0, 20)[11:]
    assert sorted(p.row for p in built.take(0, 14)) == sorted([*range(7)] * 2)


def test_without_shuffling_every_epoch_has_the_order_of_the_file(tmp_path):
    assert [p.row for p in stream(tmp_path, numbered(3), shuffle=False).take(0, 7)] == [0, 1, 2, 0, 1, 2, 0]


def test_what_is_left_out_is_counted(tmp_path):
    rows = [
        {"prompt": "abc"},  # 4 tokens with <s>: just short enough
        {"prompt": "abcd"},
        {"prompt": " \n"},
        {"prompt": None},
        {"prompt": []},
        {"prompt": "x"},
        {"prompt": "x"},
    ]
    built = stream(tmp_path, rows, max_prompt_tokens=4, shuffle=False)
    assert built.counts == {
        "read": 7, "empty": 3, "no_answer": 0, "over_long": 1, "used": 3, "duplicates": 1
    }  # fmt: skip
    assert [(p.row, p.text) for p in built.take(0, 3)] == [(0, "abc"), (1, "x"), (2, "x")]


def test_an_over_long_prompt_can_be_an_error(tmp_path):
    with pytest.raises(DataError, match=r"row 1: the prompt has 5 tokens, data\.max_prompt_tokens allows 4"):
        stream(tmp_path, [{"prompt": "a"}, {"prompt": "abcd"}], max_prompt_tokens=4, overlong="error")


def test_no_row_left_is_an_error_with_the_counts(tmp_path):
    with pytest.raises(DataError, match="2 read, 1 empty, 0 no_answer, 1 over_long, 0 used"):
        stream(tmp_path, [{"prompt": "abcdef"}, {"prompt": ""}], max_prompt_tokens=3)


def test_a_few_rows_without_an_answer_are_left_out_and_more_are_an_error(tmp_path):
    rows = [{"prompt": f"p{index}", "answer": None if index == 50 else "1"} for index in range(100)]
    built = stream(tmp_path, rows, columns={"answer": "answer"})
    assert (built.counts["no_answer"], built.counts["used"]) == (1, 99)
    assert all(p.columns["answer"] == "1" for p in built.take(0, 99))
    rows[7]["answer"] = None
    with pytest.raises(DataError, match="`answer` is empty in 2 of 100 rows"):
        stream(tmp_path, rows, columns={"answer": "answer"})


USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([{"role": "robot", "content": "hi"}], "message 0 has the role 'robot'"),
        ([{"content": "hi"}], "message 0 has the role None"),
        ([USER, {"role": "user"}], "message 1 (user) has no text"),
        ([{"role": "user", "content": " "}], "message 0 (user) has no text"),
        ([{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "message 0 (user) has no text"),
        ([USER, {"role": "assistant", "content": "hello"}], "the last message is the assistant's"),
        (
            [USER, {"role": "assistant", "content": "x", "tool_calls": [{"name": "f"}]}],
            "message 1 calls tools",
        ),
        ([{"role": "developer", "content": "x"}, USER], "no developers here"),
        (["hi"], "is list"),
        (7, "is int"),
        ({"role": "user", "content": "hi"}, "is dict"),
    ],
)
def test_bad_messages_name_the_row(tmp_path, value, said):
    with pytest.raises(DataError) as caught:
        stream(tmp_path, [{"prompt": "fine"}, {"prompt": value}])
    assert "rows.jsonl: row 1" in str(caught.value) and said in str(caught.value)


def test_two_system_messages_are_refused(tmp_path):
    with pytest.raises(DataError, match="row 0.*beside data.system"):
        stream(tmp_path, [{"prompt": [{"role": "system", "content": "a"}, USER]}], system="b")


def test_a_chat_needs_a_template_and_template_args_need_a_chat(tmp_path):
    with pytest.raises(DataError, match="no chat template"):
        stream(tmp_path, [{"prompt": "a"}], byte_tokenizer(template=None), chat=True)
    assert stream(tmp_path, [{"prompt": "a"}], byte_tokenizer(template=None)).take(0, 1)[0].text == "a"
    with pytest.raises(DataError, match=r"data\.template_args: no prompt is a chat"):
        stream(tmp_path, [{"prompt": "a"}], template_args={"think": True})


def test_a_tokenizer_that_goes_round_its_template_is_refused(tmp_path, monkeypatch):
    tokenizer = byte_tokenizer()
    render = tokenizer.apply_chat_template

    def other_ids(messages, tokenize, **settings):
        return [1, 2, 3] if tokenize else render(messages, tokenize=False, **settings)

    monkeypatch.setattr(tokenizer, "apply_chat_template", other_ids)
    with pytest.raises(DataError, match="other ids than the text of its template"):
        stream(tmp_path, [{"prompt": [USER]}], tokenizer)
