"""Tests the rewards: `python test_rewards.py` ends without an error, or pytest."""

from rewards import correct, digits


def test_only_the_answer_is_correct() -> None:
    assert correct("12", answer="12") == correct(" 12\n", answer="12") == 1.0
    assert correct("12.", answer="12") == correct("", answer="12") == 0.0


def test_digits_count_as_far_as_the_answer_has_them() -> None:
    assert digits("98", answer="12") == 1.0
    assert digits("9", answer="12") == digits("9x", answer="12") == digits("9876", answer="12") == 0.5
    assert digits("", answer="12") == digits("xy", answer="12") == 0.0


if __name__ == "__main__":
    test_only_the_answer_is_correct()
    test_digits_count_as_far_as_the_answer_has_them()
