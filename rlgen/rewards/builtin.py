"""Holds the rewards that come with rlgen. Each is called with arguments by name, like a user's own, and returns a finite number.

All but two take time linear in the length of the completion, so that no model output can stall them. `regex_match` and `format`
with a `pattern` take as long as the user's pattern takes. `math_verify` does algebra, and raises TimeoutError after some seconds.
"""

import logging
import re
from collections import deque
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

# A number as models write it: -1,234.5  $3  .5  2/3  1e-3. A minus after a digit or a bracket is not a sign.
NUMBER = re.compile(
    r"""(?P<minus>(?<![\w)\]}.])-)? \\?\$?
        (?P<digits>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+)
        (?P<tail>/\d+|[eE][+-]?\d{1,3}(?!\w))?""",
    re.ASCII | re.VERBOSE,
)
LATEX_FRACTION = re.compile(r"((?<![\w)\]}.])-)?\\[dt]?frac\{(-?\d+)\}\{(\d+)\}", re.ASCII)
# Longer literals are ignored: exact arithmetic on them would take more than linear time.
MAX_LITERAL = 300
# The parser of math-verify takes exponential time in the depth of nested brackets; no real answer is that deep.
MAX_NESTING = 50
INNERMOST = re.compile(r"[({\[][^(){}\[\]]*[)}\]]")
THINK_ANSWER_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def exact_match(completion: str, answer: object) -> float:
    """Returns 1.0 if the completion equals the answer, apart from white space around both; else 0.0.

    Raises:
        ValueError: there is no answer.
    """
    if answer is None:
        raise ValueError("the answer is empty; name the data set's column of answers in data.columns.answer")
    return float(completion.strip() == str(answer).strip())


def numeric_match(completion: str, answer: object, tolerance: float = 1e-6) -> float:
    """Returns 1.0 if the last number of the completion equals the last number of the answer, else 0.0.

    If a number follows the last `####`, that number is taken instead. `$`, `%` and thousands separators are dropped; fractions,
    also in LaTeX, are compared by value: 1/2 equals 0.5.

    Args:
        completion: a text without a number earns 0.0.
        answer: text or number.
        tolerance: numbers that differ by at most this are equal.

    Raises:
        ValueError: the answer holds no number.
    """
    expected = last_number(str(answer))
    if expected is None:
        raise ValueError(f"the answer {str(answer)[:80]!r} holds no number; use exact_match to compare texts")
    found = last_number(completion)
    return float(found is not None and abs(found - expected) <= Fraction(tolerance))


def regex_match(completion: str, pattern: str, full: bool = False) -> float:
    """Returns 1.0 if `pattern` is found in the completion (with `full`: if it matches all of it), else 0.0.

    Args:
        completion: text of the model.
        pattern: a regular expression of Python.
        full: whether it must match the whole completion.
    """
    return float(bool(re.fullmatch(pattern, completion) if full else re.search(pattern, completion)))


def length(completion_ids: Sequence[int], target: int) -> float:
    """Returns -|n - target| / target for n tokens: 0.0 at the target, -0.5 if half as long, -1 if twice as long.

    Args:
        completion_ids: the tokens that are counted.
        target: the number of tokens that is best.

    Raises:
        ValueError: the target is not positive.
    """
    if target < 1:
        raise ValueError(f"target is {target}; it counts tokens and is at least 1")
    return -abs(len(completion_ids) - target) / target


def overlong(completion_ids: Sequence[int], max_completion_tokens: int, buffer: int | None = None) -> float:
    """Returns DAPO's soft length penalty (arXiv 2503.14476, eq. 13): 0, then a line down to -1 at `max_completion_tokens`.

    Args:
        max_completion_tokens: `rollout.max_completion_tokens`.
        buffer: length of this line in tokens. None: a fifth of `max_completion_tokens`, as in the paper.

    Raises:
        ValueError: the buffer is not within the limit.
    """
    width = round(0.2 * max_completion_tokens) if buffer is None else buffer
    if not 0 <= width <= max_completion_tokens:
        raise ValueError(f"buffer is {width} tokens; set it from 0 to rollout.max_completion_tokens {max_completion_tokens}")
    over = len(completion_ids) - (max_completion_tokens - width)
    if over <= 0:
        return 0.0
    return max(-over / width, -1.0) if width else -1.0


def layout(completion: str, pattern: str | None = None) -> float:
    """Returns 1.0 if the completion is `<think>...</think><answer>...</answer>` with each tag once; else 0.0.

    Args:
        completion: white space around it and between the two parts is allowed.
        pattern: another form: a regular expression for the whole completion; its dot matches line ends too.
    """
    if pattern is not None:
        return float(re.fullmatch(pattern, completion, re.DOTALL) is not None)
    text = completion.strip()
    # Counted tags instead of a pattern: `.*?` twice would take quadratic time on a text full of tags.
    if any(text.count(tag) != 1 for tag in THINK_ANSWER_TAGS):
        return 0.0
    between = text[text.index("</think>") + len("</think>") :].lstrip()
    return float(text.startswith("<think>") and between.startswith("<answer>") and text.endswith("</answer>"))


def math_verify(completion: str, answer: object, seconds: int = 5, longest: int = 5_000) -> float:
    """Returns 1.0 if the completion's final answer equals the answer mathematically (package math-verify), else 0.0.

    Reads LaTeX, \\boxed{} and plain expressions: \\frac{1}{2} equals 0.5, (a+b)^2 equals a^2+2ab+b^2.

    Args:
        completion: what cannot be read, as brackets more than fifty deep, earns 0.0.
        answer: text or number; behind the last `####` if one stands there. A text without $ or \\boxed{} is read as LaTeX too.
        seconds: time limit for reading, the same for comparing.
        longest: only this many characters are read, at the end of the completion.

    Raises:
        ValueError: the answer cannot be read.
        TimeoutError: reading or comparing takes longer than `seconds`, as that of 9^{9^{9^9}} does.
        Exception: whatever else the package raises. A comparison that failed says nothing about the completion: it is no 0.0.
    """
    # Imported here because it takes two seconds. Its timeout is an alarm signal, which needs the main thread of a process.
    from math_verify import parse, verify
    from math_verify.errors import TimeoutException

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs whole completions
    gold = str(answer).rpartition("####")[2].strip()
    text = completion[-longest:].encode("utf-8", "replace").decode()
    try:
        expected = parse(gold if "$" in gold or "\\boxed" in gold else f"${gold}$", parsing_timeout=seconds, raise_on_error=True)
        if not expected:
            raise ValueError(f"the answer {gold[:80]!r} is not a mathematical expression; use exact_match to compare texts")
        found = [] if too_deep(text) else parse(text, parsing_timeout=seconds, raise_on_error=True)
        return float(verify(expected, found, timeout_seconds=seconds, raise_on_error=True))
    except TimeoutException:  # the package's message holds the whole completion
        raise TimeoutError(f"the completion was not read, or not compared with {gold[:80]!r}, within {seconds} s") from None


def too_deep(text: str) -> bool:
    """Returns whether more than `MAX_NESTING` pairs of brackets are nested in each other."""
    for _ in range(MAX_NESTING):
        text = INNERMOST.sub("", text)
    return INNERMOST.search(text) is not None


def last_number(text: str) -> Fraction | None:
    """Returns the last number of a text as an exact fraction, or the number that follows the last `####`. None: there is no
    number.

    last_number("so 3 apples cost $1,234.50.") -> Fraction(2469, 2)
    """
    text = LATEX_FRACTION.sub(r" \1\2/\3", text.replace("−", "-").replace("{,}", ","))
    _, marker, rest = text.rpartition("####")
    match = NUMBER.match(rest.lstrip()) if marker else None
    if match is None:
        last = deque(NUMBER.finditer(text), maxlen=1)
        if not last:
            return None
        match = last[0]
    if len(match[0]) > MAX_LITERAL:
        return None
    literal, tail = match["digits"].replace(",", ""), match["tail"] or ""
    if not tail.startswith("/"):
        value = Fraction(literal + tail)
    elif int(tail[1:]) == 0:
        return None
    else:
        value = Fraction(literal) / int(tail[1:])
    return -value if match["minus"] else value


def environment(messages: Sequence[dict[str, Any]]) -> float:
    """Returns the sum of the rewards that the recipe's `environment` gave for the turns of a conversation.

    Args:
        messages: the conversation; a message of the environment has its `reward`.

    Raises:
        RuntimeError: it failed: it raised, took too long, or its process died.
    """
    if "error" in messages[-1]:
        raise RuntimeError(messages[-1]["error"])
    return sum((float(message.get("reward", 0.0)) for message in messages), 0.0)


BUILTIN: dict[str, Callable[..., Any]] = {
    "exact_match": exact_match,
    "numeric_match": numeric_match,
    "regex_match": regex_match,
    "length": length,
    "overlong": overlong,
    "format": layout,
    "math_verify": math_verify,
    "environment": environment,
}
