"""Functions that do something else first: they wait, fail, or are counted."""

from collections.abc import Callable
from typing import Any


def before(owner: Any, name: str, deed: Callable[..., object], replace: Callable[..., None] = setattr) -> None:
    """Has `owner.name` begin with a call of `deed`, which gets its arguments without names, and may raise."""
    real = getattr(owner, name)

    def then(*arguments: Any, **named: Any) -> Any:
        deed(*arguments)
        return real(*arguments, **named)

    replace(owner, name, then)
