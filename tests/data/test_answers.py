"""Answers of one data set are alike, or its reward is wrong: odd ones are counted, many are an error."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlgen.data import build_prompts, load_rows
from rlgen.data.prompts import PromptStream
from rlgen.errors import DataError
from rlgen.models.tiny import byte_tokenizer
from rlgen.recipe.data import ColumnsRecipe, DataRecipe

Proof = Callable[[str], None]


def stream(tmp_path: Path, answers: list[Any]) -> PromptStream:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{i}", "answer": answer}) + "\n" for i, answer in enumerate(answers)))
    data = DataRecipe(source=str(path), columns=ColumnsRecipe(answer="answer"))
    return build_prompts(data, load_rows(data, 0), byte_tokenizer(), 0)


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
    built = stream(tmp_path, [usual] * 99 + [odd])
    assert (built.counts["odd_answer"], built.counts["used"]) == (1, 99)
    assert all(prompt.columns["answer"] == usual for prompt in built.take(0, 99))
    with pytest.raises(DataError) as error:
        stream(tmp_path, [usual] * 98 + [odd] * 2)
    assert f"`answer` is {kind} in most rows, but not in 2 of 100" in str(error.value) and error.value.exit_code == 4
    proof(f"{odd!r} among {usual!r}")


@pytest.mark.fault(26)
def test_no_answer_is_none_whatever_it_looks_like(tmp_path: Path, proof: Proof) -> None:
    built = stream(tmp_path, ["7"] * 298 + [None, " "])
    assert (built.counts["no_answer"], built.counts["odd_answer"], built.counts["used"]) == (2, 0, 298)
    with pytest.raises(DataError, match="is empty in 4 of 4 rows"):
        stream(tmp_path, [None, "", float("nan"), None])
    proof("None, a blank text, NaN")


@pytest.mark.parametrize("answers", [["#### 7", "8"] * 5, ["7", "-8.5"], [1, 2.5], [[1], [2, 3]], ["a #### heading\nx", "b"]])
def test_answers_that_are_alike_are_all_used(tmp_path: Path, answers: list[Any]) -> None:
    assert stream(tmp_path, answers).counts["used"] == len(answers)
