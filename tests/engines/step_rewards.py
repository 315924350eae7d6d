"""Rewards of `test_equivalence`, in a file that imports nothing: the processes that run them start quickly."""

PLACES = (0.25, 1.0, -0.5, 0.0)  # by place in the group: best 1, worst 0 of two and 2 of four


def by_place(completions: list[str]) -> list[float]:
    """A reward of the group: tells equal completions apart."""
    return list(PLACES[: len(completions)])


def by_text(completion: str) -> float:
    return sum(completion.encode()) % 17 / 17
