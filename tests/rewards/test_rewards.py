"""Rewards: built-ins, functions by parameter name, None apart from zero, failures apart from both."""

import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from helpers.samples import make_sample
from scoring import loaded

from rlgen.errors import DataError, RewardError
from rlgen.recipe.models import RewardRecipe, ScoringRecipe
from rlgen.rewards.builtin import exact_match, layout, length, numeric_match, regex_match
from rlgen.rewards.score import open_scorer, weighted_sums
from rlgen.types import Group, Prompt


def group(*completions: str, group_id: int = 4, **columns: Any) -> Group:
    prompt = Prompt(position=group_id, row=0, text="ask", prompt_ids=(5, 6), columns=columns)
    samples = [
        make_sample(group_id=group_id, sample_index=i, completion=text, completion_ids=tuple(text.encode()))
        for i, text in enumerate(completions)
    ]
    return Group(group_id=group_id, prompt=prompt, samples=tuple(samples))


def score(entries: list[dict[str, Any]], *groups: Group) -> list[tuple[dict[str, Any], float | None]]:
    columns = set(groups[0].prompt.columns)
    scorer = open_scorer([RewardRecipe(**entry) for entry in entries], columns, 20, ScoringRecipe())
    with closing(scorer):
        scored = scorer.score(groups, step=3)
    return [(dict(sample.rewards), sample.reward) for g in scored for sample in g.samples]


@pytest.mark.parametrize(
    "completion, answer, value",
    [
        ("so it is 1,234.50.", "1234.5", 1.0),
        ("= 72", "48/2 = 24\n#### 72", 1.0),
        ("\\frac{1}{2}", "0.5", 1.0),
        ("-3", "3", 0.0),
        ("5-3", "3", 1.0),
        ("no number", "3", 0.0),
        ("#### 7 or 8", "7", 1.0),
        ("$40", 40, 1.0),
    ],
)
def test_numeric_match(completion: str, answer: object, value: float) -> None:
    assert numeric_match(completion, answer) == value


def test_other_built_ins() -> None:
    assert (exact_match(" a ", "a"), exact_match("A", "a")) == (1.0, 0.0)
    assert (regex_match("x12", r"\d+"), regex_match("x12", r"\d+", full=True)) == (1.0, 0.0)
    assert [length([0] * n, 4) for n in (4, 2, 8)] == [0.0, -0.5, -1.0]
    assert [layout(t) for t in ("<think>a</think>\n<answer>b</answer>", "<answer>b</answer>", "")] == [1.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="holds no number"):
        numeric_match("3", "none")


def test_built_ins_are_finite_on_any_text() -> None:
    rng = random.Random(0)
    texts = [
        "",
        " ",
        "\\frac{" * 300,
        "9" * 100_000,
        "<think>" * 20_000,
        "$" * 100_000,
        "\ufffd" * 1000,
        "#### " * 20_000,
    ]
    texts += ["".join(rng.choices("0123456789.,-/e$ #<>th\\{}", k=2000)) for _ in range(50)]
    for text in texts:
        for value in (numeric_match(text, "3"), exact_match(text, "3"), layout(text), length(text.encode(), 10)):
            assert abs(value) < 1e6


def test_weighted_sum_keeps_none_apart() -> None:
    # columns: a applies everywhere, b to nobody (dropped), c to one of two (the other cannot be compared)
    weights = {"a": 1.0, "b": 5.0}
    assert weighted_sums([{"a": 1.0, "b": None}, {"a": 0.0, "b": None}], weights) == [1.0, 0.0]
    assert weighted_sums([{"a": 1.0, "b": 0.5}, {"a": 0.0, "b": None}], weights) == [3.5, None]
    assert weighted_sums([{"a": None, "b": None}], weights) == [None]
    assert weighted_sums([{"a": 1.0, "b": 0.5}, {"a": 0.0, "b": 2.0}], {"a": 1.0, "b": 0.5}) == [1.25, 1.0]


FILE = """
async def slow(completion, answer): return float(completion == answer)
def spread(completions, prompts, completion_ids, answer):
    return [len(set(completions)) + len(completion_ids[i]) for i in range(len(prompts))]
def half(completion, step): return None if completion == "b" else 0.5 * step
def everything(completion, **rest): return float(len(rest))
def needy(completion, difficulty): return 0.0
def wrong(completion): return "high"
def nan(completion): return float("nan")
def short(completions): return [1.0]
def fails(completion): return 1 / 0
limited = lambda completion, limit=3: float(len(completion) > limit)
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(FILE)
    return str(tmp_path / "mine.py")


def test_functions_are_called_by_parameter_name(file: str) -> None:
    entries = [{"use": f"{file}:{name}"} for name in ("slow", "spread", "everything")]
    entries += [{"use": f"{file}:limited", "args": {"limit": 0}, "weight": 0.5, "name": "long"}]
    scored = score(entries, group("a", "bb", answer="a"))
    # everything: prompt, answer, prompt_ids, completion_ids, finish_reason, max_completion_tokens, step,
    # prompt_messages
    assert scored[0] == ({"slow": 1.0, "spread": 3.0, "everything": 8.0, "long": 1.0}, 12.5)
    assert scored[1] == ({"slow": 0.0, "spread": 4.0, "everything": 8.0, "long": 1.0}, 12.5)


def test_none_is_not_zero(file: str) -> None:
    entries = [{"use": f"{file}:half"}, {"use": "exact_match"}]
    scored = score(entries, group("a", "b", answer="a"), group("b", "b", group_id=9, answer="b"))
    assert [reward for _, reward in scored] == [2.5, None, 1.0, 1.0]
    assert scored[1][0] == {"half": None, "exact_match": 0.0}


@pytest.mark.parametrize(
    "name, part",
    [
        ("wrong", "reward wrong, prompt at position 4, sample 0: returned 'high'"),
        ("nan", "a reward is a finite number, or None"),
        ("short", "not a list of 2 rewards"),
        ("fails", r"ZeroDivisionError: division by zero \(.*mine.py:11\)"),
        ("slwo", "did you mean `slow`"),
    ],
)
def test_failures_are_named(file: str, name: str, part: str) -> None:
    with pytest.raises(RewardError, match=part):
        score([{"use": f"{file}:{name}"}], group("a", "b", answer="a"))


@pytest.mark.fault(20)
def test_a_column_that_is_missing_is_a_fault_of_the_data(file: str, proof: Callable[[str], None]) -> None:
    with pytest.raises(DataError, match="needs `difficulty`, which is no column") as caught:
        score([{"use": f"{file}:needy"}], group("a", "b", answer="a"))
    assert caught.value.exit_code == 4
    proof(str(caught.value)[-80:])


def test_modules_that_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("x = 1\nimport no_such_module\n")
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(RewardError, match=r"no_such_module.*broken.py:2"):
        loaded(f"{tmp_path}/broken.py:f")
    with pytest.raises(RewardError, match=r"SystemExit.*leaves.py:2"):
        loaded(f"{tmp_path}/leaves.py:f")
    with pytest.raises(RewardError, match="has no parameter `patern`"):
        loaded("regex_match", args={"patern": "x"})
