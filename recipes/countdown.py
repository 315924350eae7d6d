"""A reward of countdown: any expression counts that uses each number once and comes to the target."""

import ast
import operator
import re

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
MARKED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
LONGEST = 200  # characters of an expression: no right one is longer


def reaches(completion: str, numbers: list[int], target: int) -> float:
    """Returns 1.0 if the expression uses each number exactly once and comes to the target, else 0.0.

    The expression is what stands in the last <answer>...</answer>, or the whole completion where there is none.
    """
    found = MARKED.findall(completion)
    text = (found[-1] if found else completion).strip()
    try:
        used: list[int] = []
        value = value_of(ast.parse(text[: LONGEST + 1], mode="eval").body, used)
    except (SyntaxError, ValueError):  # it is no expression: a wrong answer
        return 0.0
    return float(len(text) <= LONGEST and value == target and sorted(used) == sorted(numbers))


def value_of(node: ast.expr, used: list[int]) -> int:
    """Returns the value of an expression of whole numbers with + - * and parentheses, and adds its numbers to `used`.

    Raises:
        ValueError: there is anything else in it.
    """
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value_of(node.left, used), value_of(node.right, used))
    raise ValueError("no expression of whole numbers with + - * and parentheses")
