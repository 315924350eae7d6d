"""Says what a completion is worth. Arguments are filled by name: completion, prompt, and every column of the data."""


def correct(completion: str, answer: str) -> float:
    """Returns 1 if the completion is the answer, else 0."""
    return float(completion.strip() == answer)


def digits(completion: str, answer: str) -> float:
    """Returns how much it looks like an answer, from 0 to 1: digits, as many as the answer has, and nothing more."""
    found = sum(character in "0123456789" for character in completion[: len(answer)])
    return found / max(len(completion), len(answer))
