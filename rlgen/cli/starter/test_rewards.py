"""Tests the reward: `python test_rewards.py` ends without an error, or pytest."""

from rewards import correct


def test_only_the_answer_is_correct() -> None:
    assert correct("348", answer="348") == correct(" 348\n", answer="348") == 1.0
    assert correct("348.", answer="348") == correct("349", answer="348") == correct("", answer="348") == 0.0


if __name__ == "__main__":
    test_only_the_answer_is_correct()
