"""The reward of `make learn` where an answer is one text: partly right is worth something, so that few completions are equal."""


def near(completion: str, answer: str) -> float:
    """Returns 1.0 for the answer, else half the share of places that hold the answer's characters.

    near("1249", "1259") -> 0.375
    """
    if completion == answer:
        return 1.0
    right = sum(ours == theirs for ours, theirs in zip(completion, answer, strict=False))
    return 0.5 * right / max(len(completion), len(answer))
