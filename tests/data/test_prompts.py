"""Rows to prompts: the template once, order by position, counts, bad rows."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlgen.data import build_prompts, load_rows
from rlgen.data.prompts import PromptStream
from rlgen.data.tasks import generate
from rlgen.errors import DataError
from rlgen.models.tiny import byte_tokenizer
from rlgen.recipe.data import TASKS, ColumnsRecipe, DataRecipe

TOKENIZER = byte_tokenizer()


def stream(rows: list[dict[str, Any]], tmp_path: Path, seed: int = 0, **settings: Any) -> PromptStream:
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataRecipe(source=str(path), **settings)
    return build_prompts(data, load_rows(data, seed), TOKENIZER, seed)


def test_text_is_used_as_it_is(tmp_path: Path) -> None:
    prompt = stream([{"prompt": "hé", "x": 3}], tmp_path).take(0, 1)[0]
    assert TOKENIZER.decode(list(prompt.prompt_ids)) == "hé" == prompt.text and len(prompt.prompt_ids) == 3
    assert prompt.columns == {"prompt": "hé", "x": 3}


@pytest.mark.parametrize(
    "prompt, settings",
    [
        ("hi", {"system": "be"}),
        ([{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}], {}),
        ([{"role": "user", "content": "hi"}], {"system": "be"}),
    ],
)
def test_chats_are_templated_once(tmp_path: Path, prompt: Any, settings: dict[str, Any]) -> None:
    made = stream([{"prompt": prompt}], tmp_path, **settings).take(0, 1)[0]
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
    whole = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert list(made.prompt_ids) == whole
    assert made.text == "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


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
def test_over_long_prompts_are_counted_or_refused(tmp_path: Path, proof: Any) -> None:
    rows = [{"prompt": "ab"}, {"prompt": "abcdef"}, {"prompt": "ab"}]
    made = stream(rows, tmp_path, max_prompt_tokens=4)
    assert dict(made.counts) == {
        "read": 3,
        "empty": 0,
        "no_answer": 0,
        "odd_answer": 0,
        "over_long": 1,
        "duplicates": 1,
        "used": 2,
    }
    with pytest.raises(DataError, match=r"row 1: 6 tokens, but data.max_prompt_tokens is 4"):
        stream(rows, tmp_path, max_prompt_tokens=4, overlong="error")
    with pytest.raises(DataError, match=r"no row is left: .*3 over_long"):
        stream(rows, tmp_path, max_prompt_tokens=1)
    proof("3 of 3 rows too long; 1 duplicate counted")


@pytest.mark.fault(22)
@pytest.mark.parametrize(
    "prompt, part",
    [
        ([{"role": "wizard", "content": "x"}], "row 0: a message must have one of the roles"),
        ([{"role": "user"}], "the message of the user has no text"),
        (
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
            "the last message is the assistant's",
        ),
        (7, "the prompt is int"),
        ("", "no row is left: 1 read, 1 empty"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, prompt: Any, part: str, proof: Any) -> None:
    with pytest.raises(DataError, match=part):
        stream([{"prompt": prompt}], tmp_path)
    proof(part)


def test_columns(tmp_path: Path) -> None:
    rows = [{"question": "q", "solution": "a"}]
    made = stream(rows, tmp_path, columns=ColumnsRecipe(prompt="question", answer="solution"))
    assert made.take(0, 1)[0].columns == {"question": "q", "solution": "a", "answer": "a"}
    with pytest.raises(DataError, match="no column `questoin`; did you mean `question`"):
        stream(rows, tmp_path, columns=ColumnsRecipe(prompt="questoin"))


def test_files(tmp_path: Path) -> None:
    import datasets

    rows = [{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}]
    (tmp_path / "x.csv").write_text("prompt,n\na,07\n")
    (tmp_path / "x.json").write_text(json.dumps(rows))
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "x.parquet"))
    assert list(load_rows(DataRecipe(source=str(tmp_path / "x.csv")), 0).rows) == [{"prompt": "a", "n": "07"}]
    for name in ("x.json", "x.parquet"):
        assert list(load_rows(DataRecipe(source=str(tmp_path / name)), 0).rows) == rows
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"prompt"\n')
    with pytest.raises(DataError, match=r"bad.jsonl:2: the line is not JSON"):
        load_rows(DataRecipe(source=str(tmp_path / "bad.jsonl")), 0)
    with pytest.raises(DataError, match="there is no such file"):
        load_rows(DataRecipe(source=str(tmp_path / "*.jsonl.gone.jsonl")), 0)


@pytest.mark.parametrize("name", sorted(TASKS.keys() - {"gym"}))  # of another package
def test_tasks_follow_from_seed_and_index(name: str) -> None:
    options = TASKS[name](size=60)
    rows = generate(name, options, 1)
    assert rows == generate(name, options, 1) != generate(name, options, 2)
    assert rows[:20] == generate(name, TASKS[name](size=20), 1)
    assert len({(row["prompt"], *row.get("images", ())) for row in rows}) == 60
