import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rlgen.data import build_prompts, load_rows, prompts
from rlgen.errors import DataError
from rlgen.recipe.data import DataRecipe

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'developer' %}{{ raise_exception('no developers here') }}{% endif %}"
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


def stream(tmp_path, rows, tokenizer=None, seed=0, **settings):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataRecipe(source=str(path), **settings)
    return build_prompts(data, load_rows(data, seed), tokenizer or byte_tokenizer(), seed)


USER = {"role": "user", "content": "hi"}


def test_rows_without_a_prompt_are_left_out_and_counted(tmp_path):
    rows = [{"prompt": value} for value in ("a", " \n", None, [], "b")]
    built = stream(tmp_path, rows, shuffle=False)
    counts = {"read": 5, "empty": 3, "no_answer": 0, "odd_answer": 0, "over_long": 0, "duplicates": 0, "used": 2}
    assert built.counts == counts
    assert [(p.row, p.text) for p in built.take(0, 2)] == [(0, "a"), (1, "b")]


@pytest.mark.fault(21)
def test_no_row_left_gives_every_count(tmp_path, proof):
    with pytest.raises(DataError, match="2 read, 1 empty, 0 no_answer, 0 odd_answer, 1 over_long, 0 duplicates, 0 used"):
        stream(tmp_path, [{"prompt": "abcdef"}, {"prompt": ""}], max_prompt_tokens=3)
    proof("one row empty, one too long")


@pytest.mark.fault(26)
def test_a_few_rows_without_an_answer_are_left_out_and_more_are_an_error(tmp_path, proof):
    rows = [{"prompt": f"p{index}", "answer": None if index == 50 else "1"} for index in range(100)]
    built = stream(tmp_path, rows, columns={"answer": "answer"})
    assert (built.counts["no_answer"], built.counts["used"]) == (1, 99)
    assert all(p.columns["answer"] == "1" for p in built.take(0, 99))
    rows[7]["answer"] = None
    with pytest.raises(DataError, match="`answer` is empty in 2 of 100 rows"):
        stream(tmp_path, rows, columns={"answer": "answer"})
    proof("1 of 100 without an answer is counted, 2 are refused")


@pytest.mark.fault(22)
@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([{"role": "user", "content": " "}], "the message of the user has no text"),
        ([USER, {"role": "assistant", "content": "x", "tool_calls": [{"name": "f"}]}, USER], "calls tools"),
        ([{"role": "developer", "content": "x"}, USER], "no developers here"),
    ],
)
def test_more_bad_messages_name_the_row(tmp_path, value, said, proof):
    with pytest.raises(DataError) as caught:
        stream(tmp_path, [{"prompt": "fine"}, {"prompt": value}])
    assert "rows.jsonl, row 1" in str(caught.value) and said in str(caught.value)
    proof(said)


def test_two_system_messages_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"row 0.*beside data\.system"):
        stream(tmp_path, [{"prompt": [{"role": "system", "content": "a"}, USER]}], system="b")


def test_template_args_need_a_chat(tmp_path):
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


def test_an_epoch_is_shuffled_once_however_many_prompts_are_taken(tmp_path, monkeypatch):
    built = stream(tmp_path, [{"prompt": f"p{index}"} for index in range(11)], seed=123)
    shuffles = []

    class CountingRandom(prompts.Random):
        def shuffle(self, x):
            shuffles.append(len(x))
            super().shuffle(x)

    monkeypatch.setattr(prompts, "Random", CountingRandom)
    prompts.order.cache_clear()
    built.take(0, 22)
    assert shuffles == [11, 11]
