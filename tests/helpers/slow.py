"""Which cases of a test run in `make test`, and which in `make test-all` only."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """The cases of a parametrised test; all but the `quick` ones are marked as slow."""
    listed = list(cases)
    assert all(case in listed for case in quick), "a quick case is none of the cases"
    slow = [pytest.param(*(case if isinstance(case, tuple) else [case]), marks=pytest.mark.slow) for case in listed]
    return [case if case in quick else marked for case, marked in zip(listed, slow, strict=True)]
