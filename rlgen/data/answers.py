"""Classifies how the answers of a data set are written; a mixture usually means that a reward would be wrong."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

FINAL = re.compile(r"####\s*\S+\s*$")  # the final answer at the end of a text, in GSM8K and data made like it
A_TEXT, A_FINAL_TEXT = "a text", "a text that ends in #### and the final answer"
MOST = 0.9  # if at least this share of the texts ends in a final answer, all of them must


def usual_kinds(answers: Iterable[Any]) -> list[str]:
    """Returns the kinds of answer that most rows have or that are accepted beside them; an empty list if there is no answer."""
    kinds = Counter(map(kind_of, answers))
    del kinds[None]
    if not kinds:
        return []
    texts = kinds[A_TEXT] + kinds[A_FINAL_TEXT]
    if texts > kinds.total() / 2:
        return [A_FINAL_TEXT] if kinds[A_FINAL_TEXT] >= MOST * texts else [A_TEXT, A_FINAL_TEXT]
    return [str(kinds.most_common(1)[0][0])]


def kind_of(answer: Any) -> str | None:
    """Returns in words how an answer is written, such as "a number"; None if it is empty or NaN."""
    if answer is None or (isinstance(answer, str) and not answer.strip()) or answer != answer:  # NaN is a table's missing value
        return None
    if isinstance(answer, str):
        return A_FINAL_TEXT if FINAL.search(answer[-200:]) else A_TEXT
    if isinstance(answer, bool):
        return "true or false"
    if isinstance(answer, int | float):
        return "a number"
    return "a list" if isinstance(answer, Sequence) else f"a {type(answer).__name__}"
