"""Tests the rewards: `python test_rewards.py` ends without an error, or pytest."""

from rewards import correct, digits


def test_only_the_answer_is_correct() -> None:
    assert correct("12", answer="12") == correct(" 12\n", answer="12") == 1.0
    assert correct("12.", answer="12") == correct("", answer="12") == 0.0


def test_digits_are_counted() -> None:
    assert digits("1234") == 1.0
    assert digits("a1b2") == 0.5
    assert digits("") == digits("none") == 0.0


if __name__ == "__main__":
    test_only_the_answer_is_correct()
    test_digits_are_counted()
