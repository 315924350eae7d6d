"""A reward of summaries: the words that it shares with one that a person wrote."""

import re
from collections import Counter


def resembles(completion: str, answer: str) -> float:
    """Returns the F1 score of words (ROUGE-1): 1.0 if both have the same words, 0.0 if they share none."""
    found, wanted = (Counter(re.findall(r"\w+", text.lower())) for text in (completion, answer))
    return 2 * (found & wanted).total() / max(1, found.total() + wanted.total())
