"""Built-in rewards on whatever a model may write."""

import math

import pytest
from helpers.scoring import SKIPS, group
from helpers.waiting import HANGS
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rlgen.recipe.models import BUILT_IN_REWARDS, ENVIRONMENT_REWARD, RewardRecipe, ScoringRecipe
from rlgen.rewards.score import open_scorer

ARGS = {"regex_match": {"pattern": r"\d+$"}, "length": {"target": 10}}
ODD = {
    "empty": "",
    "white space": " \t\n\u2028 ",
    "100 k tokens": "word " * 100_000,
    "special tokens only": "<|im_end|><|endoftext|>" * 1000,
    "lone surrogates": "\ud800\udfff\x00" * 100,
    "LaTeX nested": "\\frac{" * 300 + "1" + "}" * 300,
    "fractions nested": "\\boxed{" + "\\frac{" * 300 + "1" + "}{2}" * 300 + "}",
    "parentheses nested": "\\boxed{" + "(" * 300 + "1" + ")" * 300 + "}",
}
ODD_REWARDS = [name for name in BUILT_IN_REWARDS if name != ENVIRONMENT_REWARD]  # which reads no completion
# What a model writes, in any order and number; and any text at all.
PIECES = st.sampled_from(
    ["\\boxed{", "}", "{", "\\frac{1}{2}", "9^{9^9}", "!", "(", ")", "$", "####", "1,000", "-", "7", "<think>"]
)
TEXTS = st.one_of(st.text(st.characters(), max_size=200), st.lists(PIECES, max_size=40).map("".join))


def built_ins(seconds):
    """A scorer of all of them; math_verify has so many seconds for each of reading and comparing."""
    args = {**ARGS, "math_verify": {"seconds": seconds}}
    entries = [
        RewardRecipe(use=name, args=args.get(name, {}), timeout=HANGS, on_error="skip", max_error_fraction=1.0)
        for name in ODD_REWARDS
    ]
    return open_scorer(entries, {"answer"}, 20, ScoringRecipe())


@pytest.fixture(scope="module")
def every_built_in():
    scorer = built_ins(seconds=int(HANGS))
    yield scorer
    scorer.close()


@pytest.fixture(scope="module")
def hurried():
    """For what takes longer than any machine has time for; what it reads first takes longer than what follows."""
    scorer = built_ins(seconds=2)
    scorer.score([group("\\boxed{7}")], 1)
    yield scorer
    scorer.close()


@pytest.mark.fault(37)
@pytest.mark.parametrize("name", ODD)
def test_an_odd_completion_earns_a_finite_number(every_built_in, proof, name):
    (scored,) = every_built_in.score([group(ODD[name])], 1)
    (sample,) = scored.samples
    assert set(sample.rewards) == set(ODD_REWARDS) and not sample.reward_errors
    assert all(value is not None and math.isfinite(value) for value in sample.rewards.values())
    assert sample.rewards["exact_match"] == sample.rewards["math_verify"] == 0.0
    proof(f"{len(ODD[name])} characters, {len(sample.rewards)} built-ins, a number each")


@pytest.mark.fault(28, 37)
@pytest.mark.parametrize(
    "completion",
    ["\\boxed{9^{9^{9^9}}}", "\\boxed{100000!!}", "\\boxed{" + "{" * 30 + "1" + "}" * 30 + "}"],
    ids=["tower of powers", "factorials", "braces nested"],
)
def test_what_math_verify_cannot_compute_in_time_is_a_failure_and_no_zero(hurried, proof, completion):
    (scored,) = hurried.score([group(completion, "\\boxed{7}")], 1)
    odd, other = scored.samples
    assert (odd.rewards["math_verify"], other.rewards["math_verify"]) == (None, 1.0)
    assert list(odd.reward_errors) == ["math_verify"] and odd.reward is None
    said = odd.reward_errors["math_verify"]
    assert said.startswith("error: TimeoutError: the completion was not read, or not compared with '7', within 2 s (")
    assert sum(value is not None and math.isfinite(value) for value in odd.rewards.values()) == len(ODD_REWARDS) - 1
    proof(f"{completion[:25]}: one failure, no 0.0; {len(odd.rewards) - 1} other built-ins gave numbers")


@pytest.mark.parametrize(
    ("error", "said"), [("MemoryError()", "memory: MemoryError"), ("TypeError('odd')", "error: TypeError: odd")]
)
def test_what_math_verify_raises_is_a_failure_and_no_zero(scorer, error, said):
    source = f"""
        import math_verify.grader
        from rlgen.rewards.builtin import math_verify as f

        def compare(*arguments):
            raise {error}

        math_verify.grader.sympy_expr_eq = compare
    """
    (scored,) = scorer(source, SKIPS).score([group("8", "no idea")], 1)
    assert [sample.rewards["f"] for sample in scored.samples] == [None, 0.0]
    assert scored.samples[0].reward_errors["f"].startswith(said)


@pytest.mark.fault(37)
def test_any_completion_earns_a_finite_number_or_is_counted(hurried, proof):
    tried: list[int] = []

    @settings(max_examples=15, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(st.lists(TEXTS, min_size=2, max_size=6))
    @example(["\\boxed{" + "1+" * 50_000 + "1}", ""])
    def check(texts):
        (scored,) = hurried.score([group(*texts)], 1)
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
