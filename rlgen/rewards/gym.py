"""Scores answers to `task:gym` by the scorers of reasoning-gym: `use: "rlgen.rewards.gym:reasoning_gym"`."""

import json


def reasoning_gym(completion: str, answer: str | None, metadata: str) -> float:
    """Returns what the data set's own scorer gives the answer: from 0.0 to 1.0, which is for a right one.

    The answer is what stands in the last `<answer>...</answer>`, or the whole completion where there is none.

    Args:
        answer: the data set's own; None where it knows none, and only judges.
        metadata: JSON text of the column that `task:gym` makes; it names the data set.

    Raises:
        ImportError: the package is not installed.
    """
    from reasoning_gym import get_score_answer_fn  # takes seconds: it imports every data set
    from reasoning_gym.utils import extract_answer

    facts = json.loads(metadata)
    score = get_score_answer_fn(facts["source_dataset"])
    found = extract_answer(completion)
    text = completion.strip() if found is None else found
    return float(score(text, {"answer": answer, "metadata": facts}))
