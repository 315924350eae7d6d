import math
import random
import time
from functools import partial

import pytest

from rlgen.recipe.models import BUILT_IN_REWARDS
from rlgen.rewards.builtin import BUILTIN, exact_match, last_number, layout, length, numeric_match, overlong, regex_match


def test_the_recipe_knows_the_built_in_rewards():
    assert set(BUILT_IN_REWARDS) == set(BUILTIN)


def test_a_missing_answer_is_an_error_and_no_zero():
    with pytest.raises(ValueError, match=r"data\.columns\.answer"):
        exact_match("52", None)
    with pytest.raises(ValueError, match="holds no number"):
        numeric_match("52", "fifty-two")


@pytest.mark.parametrize(
    ("reward", "completion", "answer", "value"),
    [
        *((exact_match, *case) for case in [(" 52\n", "52", 1.0), ("52", 52, 1.0), ("5 2", "52", 0.0), ("", "52", 0.0)]),
        (exact_match, "Yes", "yes", 0.0),
        (numeric_match, "so it is 72.", "#### 72", 1.0),
        (numeric_match, "#### 72\nThat took 5 steps.", "72", 1.0),  # right behind the marker goes before the last
        (numeric_match, "#### Step 1\n the sum is 72", "72", 1.0),
        (numeric_match, "first 72, then 73", "72", 0.0),
        (numeric_match, "$1,234.50", "1234.5", 1.0),
        (numeric_match, "1,000,000 people", "1000000", 1.0),
        (numeric_match, "1, 2, 3", "3", 1.0),
        (numeric_match, "10-3=7", "7", 1.0),
        (numeric_match, "10-3", "3", 1.0),  # the minus subtracts
        (numeric_match, "x = -3", "-3", 1.0),
        (numeric_match, "-3", "3", 0.0),
        (numeric_match, "−3", "-3", 1.0),  # the minus of typography
        (numeric_match, "-$5", "-5", 1.0),
        (numeric_match, "50%", "50", 1.0),
        (numeric_match, "1/2", "0.5", 1.0),
        (numeric_match, r"\boxed{\frac{-3}{4}}", "-0.75", 1.0),
        (numeric_match, r"\boxed{-\frac{3}{4}}", "-0.75", 1.0),
        (numeric_match, r"$-\dfrac{3}{4}$", "0.75", 0.0),
        (numeric_match, r"5-\frac{3}{4}", "0.75", 1.0),
        (numeric_match, "1{,}234", "1234", 1.0),
        (numeric_match, ".5", "1/2", 1.0),
        (numeric_match, "1e-3", "0.001", 1.0),
        (numeric_match, "3.14159", "3.14160", 0.0),
        (numeric_match, "0.3333333", "1/3", 1.0),  # 3.3e-8 away
        (numeric_match, "9007199254740993", "9007199254740992", 0.0),  # equal as 64-bit floats
        (numeric_match, "5/0", "5", 0.0),
        (numeric_match, "no number", "5", 0.0),
        (numeric_match, "", "5", 0.0),
        (numeric_match, "9" * 1000, "9", 0.0),
        (partial(numeric_match, tolerance=0.5), "1000.4", "1000", 1.0),  # it is absolute
        (partial(numeric_match, tolerance=0.5), "1000.6", "1000", 0.0),
        (regex_match, "ab12", r"\d+", 1.0),
        (partial(regex_match, full=True), "ab12", r"\d+", 0.0),
        (partial(regex_match, full=True), "12", r"\d+", 1.0),
        (layout, "a\nb", "a.b", 1.0),
        (layout, "a\nbc", "a.b", 0.0),
    ],
)
def test_what_a_completion_earns(reward, completion, answer, value):
    assert reward(completion, answer) == value


def test_length_falls_by_the_distance_to_the_target():
    assert [length([0] * n, target=4) for n in (0, 3, 4, 6, 12)] == [-1.0, -0.25, 0.0, -0.5, -2.0]
    with pytest.raises(ValueError, match="target is 0"):
        length([1], target=0)


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ("<think>a\nb</think>\n<answer>c</answer>", 1.0),
        (" <think></think><answer></answer>\n", 1.0),
        ("<think>a</think><answer>b", 0.0),
        ("<think>a</think> so <answer>b</answer>", 0.0),
        ("x<think>a</think><answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer>x", 0.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a</think></think><answer>b</answer>", 0.0),
        ("<think><answer>b</answer></think><answer>b</answer>", 0.0),
    ],
)
def test_the_layout_of_thoughts_and_answer(completion, value):
    assert layout(completion) == value


def hostile_texts():
    rng = random.Random(0)
    alphabet = [*"19,.-$/e{} \n", "\\frac{", "####", "<think>", "</think>", "<answer>"]
    yield from ("", " \n\t", "\ufffd" * 50, "<|im_end|>" * 3, "\\frac{" * 300 + "1" + "}" * 300, "\x00\ud800")
    further = ["1,000", ",000", "1/", "\\frac{1}", "</think><answer>", "</think> ", "-1", "1e", "#### 1 "]
    for unit in (*alphabet, *further):
        yield unit * (100_000 // len(unit))
    for size in (10, 1000, 100_000):
        yield from ("".join(rng.choices(alphabet, k=size)) for _ in range(10))
    yield "".join(map(chr, rng.choices([*range(0xD800), *range(0xE000, 0x110000)], k=100_000)))


def test_overlong_falls_over_the_buffer():
    # DAPO eq. 13 with M = 20, C = 4: from 16 tokens on 1/4 a token, -1 beyond 20
    assert [overlong(range(n), 20, 4) for n in (15, 16, 18, 20, 21)] == [0.0, 0.0, -0.5, -1.0, -1.0]
    assert overlong(range(19), 20) == -0.75  # a fifth of 20 is 4
    assert [overlong(range(n), 20, 0) for n in (20, 21)] == [0.0, -1.0]
    with pytest.raises(ValueError, match="buffer is 21"):
        overlong(range(3), 20, 21)


def test_every_built_in_is_finite_and_fast_for_any_text():
    """In CPU time, and 200 times what it takes: what takes quadratic time would take hours."""
    calls = {
        "exact_match": lambda text: exact_match(text, "52"),
        "numeric_match": lambda text: numeric_match(text, "52"),
        "regex_match": lambda text: regex_match(text, r"\d+$"),
        "length": lambda text: length(range(len(text)), target=100),
        "overlong": lambda text: overlong(range(len(text)), max_completion_tokens=500),
        "format": layout,
    }
    assert set(calls) == set(BUILTIN) - {"math_verify", "environment"}
    for text in hostile_texts():
        for name, call in calls.items():
            start = time.process_time()
            assert math.isfinite(call(text)), name
            assert time.process_time() - start < 20, (name, text[:20], len(text))


def test_what_was_written_as_a_number_is_read_back():
    rng = random.Random(1)
    for _ in range(500):
        value = rng.randint(-(10 ** rng.randint(1, 12)), 10 ** rng.randint(1, 12))
        text = rng.choice(["{:,}", "{}", "${:,}.", "is {} %", "\\boxed{{{:,}}}", "**{}**"]).format(value)
        assert last_number(text) == value, text
