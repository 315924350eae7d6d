"""Says what a completion is worth. Arguments are filled by name: completion, prompt, and every column of the data."""


def correct(completion: str, answer: str) -> float:
    """Returns 1 if the completion is the answer, else 0."""
    return float(completion.strip() == answer)
