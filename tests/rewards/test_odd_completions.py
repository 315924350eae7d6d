"""Built-in rewards on whatever a model may write."""

import math
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scoring import group

from rlgen.recipe.models import BUILT_IN_REWARDS, RewardRecipe, ScoringRecipe
from rlgen.rewards.score import open_scorer

ARGS = {
    "regex_match": {"pattern": r"\d+$"},
    "length": {"target": 10},
    "math_verify": {"seconds": 1},
}
ODD = {
    "empty": "",
    "white space": " \t\n\u2028 ",
    "100 k tokens": "word " * 100_000,
    "special tokens only": "<|im_end|><|endoftext|>" * 1000,
    "lone surrogates": "\ud800\udfff\x00" * 100,
    "LaTeX nested": "\\frac{" * 300 + "1" + "}" * 300,
    "parentheses nested": "\\boxed{" + "(" * 300 + "1" + ")" * 300 + "}",
    "tower of powers": "\\boxed{9^{9^{9^9}}}",
    "factorials": "\\boxed{100000!!}",
    "a long sum": "\\boxed{" + "1+" * 50_000 + "1}",
}
# What a model writes, in any order and number; and any text at all.
PIECES = st.sampled_from(
    ["\\boxed{", "}", "{", "\\frac{1}{2}", "9^{9^9}", "!", "(", ")", "$", "####", "1,000", "-", "7", "<think>"]
)
TEXTS = st.one_of(st.text(st.characters(), max_size=200), st.lists(PIECES, max_size=40).map("".join))


@pytest.fixture(scope="module")
def every_built_in():
    entries = [
        RewardRecipe(use=name, args=ARGS.get(name, {}), timeout=9.0, on_error="skip", max_error_fraction=1.0)
        for name in BUILT_IN_REWARDS
    ]
    scorer = open_scorer(entries, {"answer"}, 20, ScoringRecipe())
    yield scorer
    scorer.close()


@pytest.mark.fault(37)
@pytest.mark.parametrize("name", ODD)
def test_an_odd_completion_earns_a_finite_number(every_built_in, proof, name):
    start = time.monotonic()
    (scored,) = every_built_in.score([group(ODD[name])], 1)
    seconds = time.monotonic() - start
    (sample,) = scored.samples
    assert set(sample.rewards) == set(BUILT_IN_REWARDS) and not sample.reward_errors
    assert all(value is not None and math.isfinite(value) for value in sample.rewards.values())
    assert sample.rewards["exact_match"] == sample.rewards["math_verify"] == 0.0 and seconds < 10
    proof(f"{len(ODD[name])} characters, {len(sample.rewards)} built-ins, {seconds:.1f} s")


@pytest.mark.fault(37)
def test_any_completion_earns_a_finite_number_or_is_counted(every_built_in, proof):
    tried: list[int] = []

    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(st.lists(TEXTS, min_size=2, max_size=6))
    def check(texts):
        start = time.monotonic()
        (scored,) = every_built_in.score([group(*texts)], 1)
        assert time.monotonic() - start < 10 * len(texts)
        for sample in scored.samples:
            for name, value in sample.rewards.items():
                assert name in sample.reward_errors if value is None else math.isfinite(value)
        tried.append(len(texts))

    check()
    proof(f"{sum(tried)} generated completions")


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [
        ("\\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("so $x=3$", "3", 1.0),
        ("the answer is 72.", "48 + 24\n#### 72", 1.0),
        ("\\boxed{(a+b)^2}", "a^2+2ab+b^2", 1.0),
        ("$\\{1,2\\}$", "\\{2,1\\}", 1.0),
        ("the answer is 73.", "#### 72", 0.0),
        ("no idea", "72", 0.0),
    ],
)
def test_math_verify(every_built_in, completion, answer, value):
    (scored,) = every_built_in.score([group(completion, answer=answer)], 1)
    assert scored.samples[0].rewards["math_verify"] == value


@pytest.mark.fault(26)
def test_an_answer_that_cannot_be_read_is_a_failure_and_no_zero(every_built_in, proof):
    (scored,) = every_built_in.score([group("7", answer=None)], 1)
    said = scored.samples[0].reward_errors
    assert {"exact_match", "numeric_match"} <= set(said) and "data.columns.answer" in said["exact_match"]
    (scored,) = every_built_in.score([group("[7]", answer=["7", 8])], 1)  # its last number is 8
    assert not scored.samples[0].reward_errors and scored.samples[0].rewards["numeric_match"] == 0.0
    proof(f"answer None: {', '.join(sorted(said))} failed, none gave 0")
