"""The tool of tools-tiny-grpo.yaml, in its folder."""

import ast
import asyncio
import hashlib
import operator

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.USub: operator.neg}


def calculator(e: str) -> str:
    """Computes an expression of whole numbers.

    Args:
        e: Numbers with + - * and parentheses, such as 37*(52-8).
    """
    return str(value_of(ast.parse(e.rstrip(" ="), mode="eval").body))


async def far_away(e: str) -> str:
    """Computes an expression of whole numbers. A call takes 50 to 500 ms; how long follows from the expression.

    Args:
        e: Numbers with + - * and parentheses, such as 37*(52-8).
    """
    share = hashlib.sha256(e.encode("utf-8", "replace")).digest()[0] / 255
    await asyncio.sleep(0.05 + 0.45 * share)
    return calculator(e)


def value_of(node: ast.expr) -> int:
    """Returns the value of a part of an expression. Nothing but numbers and operators is computed."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value_of(node.left), value_of(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value_of(node.operand))
    raise ValueError("only whole numbers with + - * and parentheses")
