"""Says what a completion is worth. Arguments are filled by name: completion, prompt, and every column of the data."""


def correct(completion: str, answer: str) -> float:
    """Returns 1 if the completion is the answer, else 0."""
    return float(completion.strip() == answer)


def digits(completion: str) -> float:
    """Returns the share of the completion's characters that are digits: a hint that a model can follow from the start."""
    return sum(character in "0123456789" for character in completion) / max(len(completion), 1)
