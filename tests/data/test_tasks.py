import ast
import re

import pytest

from rlgen.data.tasks import TASKS, generate
from rlgen.recipe.models import TASKS as OPTIONS
from rlgen.recipe.models import ArithmeticOptions, CountdownOptions, ReverseOptions, SortOptions


def numbers_in(expression: str) -> list[int]:
    return [node.value for node in ast.walk(ast.parse(expression)) if isinstance(node, ast.Constant)]


def test_every_task_of_the_recipe_has_a_generator():
    assert TASKS.keys() == OPTIONS.keys()


@pytest.mark.parametrize("name", sorted(TASKS))
def test_rows_follow_from_seed_and_index(name):
    small, large = OPTIONS[name](size=50), OPTIONS[name](size=200)
    assert generate(name, small, 7) == generate(name, large, 7)[:50]
    assert generate(name, small, 7) != generate(name, small, 8)


@pytest.mark.parametrize("name", sorted(TASKS))
def test_no_prompt_twice_while_there_are_others(name):
    rows = generate(name, OPTIONS[name](size=1000), 0)
    assert len({row["prompt"] for row in rows}) == 1000


def test_a_small_space_is_used_up_before_anything_repeats():
    rows = generate("arithmetic", ArithmeticOptions(size=150, digits=1, operators="+"), 3)
    assert len(rows) == 150
    assert {row["prompt"] for row in rows} == {f"{a}+{b}=" for a in range(10) for b in range(10)}


def test_arithmetic_answers_are_the_values_of_the_questions():
    rows = generate("arithmetic", ArithmeticOptions(size=300, digits=2, terms=4, operators="+-*"), 1)
    assert len(rows) == 300
    for row in rows:
        question = row["prompt"].removesuffix("=")
        assert str(eval(question)) == row["answer"]
        assert re.fullmatch(r"[1-9]\d([-+*][1-9]\d){3}", question)


def test_reverse_and_sort():
    reversed_ = generate("reverse", ReverseOptions(size=100, min_length=2, max_length=4, alphabet="xyz"), 0)
    sorted_ = generate("sort", SortOptions(size=100), 0)
    assert len(reversed_) == len(sorted_) == 100
    for row in reversed_:
        assert re.fullmatch(r"reverse: [xyz]{2,4}", row["prompt"])
        assert row["answer"] == row["prompt"].removeprefix("reverse: ")[::-1]
    for row in sorted_:
        assert "".join(sorted(row["prompt"].removeprefix("sort: "))) == row["answer"]


@pytest.mark.parametrize("count", [2, 3, 6])
def test_countdown_answers_reach_the_target_with_each_number_once(count):
    rows = generate("countdown", CountdownOptions(size=200, numbers=count, largest=30), 5)
    assert len(rows) == 200
    for row in rows:
        assert eval(row["answer"]) == row["target"]
        assert sorted(numbers_in(row["answer"])) == sorted(row["numbers"])
        assert set(row["answer"]) <= set("0123456789()+-*")
        assert 1 <= row["target"] <= count * 30
        assert all(str(number) in row["prompt"] for number in (*row["numbers"], row["target"]))
