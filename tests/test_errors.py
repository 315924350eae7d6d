"""Errors cross process boundaries: whatever one process raises, the others are told."""

import inspect
import pickle
from pathlib import Path

import pytest

from rlgen import errors

MADE = {
    errors.RecipeError: ([errors.Problem("a.yaml:1:1", "is wrong", "mend it")],),
    errors.ServerLost: ("http://127.0.0.1:1", "closed the connection"),
    errors.SentinelError: (errors.Fault.DRIFT, "seen", "step 3"),
    errors.Stopped: ("said", Path("runs/mine")),
}
KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.RlgenError)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_is_the_same_in_another_process(kind: type[errors.RlgenError]) -> None:
    error = kind(*MADE.get(kind, ("said",)))
    error.args = (f"process 1: {error}", *error.args[1:])  # as the other processes raise it
    told = pickle.loads(pickle.dumps(error))
    assert type(told) is kind and str(told) == str(error) and told.exit_code == error.exit_code
    assert {name: value for name, value in vars(told).items() if name != "args"} == vars(error)


def test_every_exit_code_has_its_words() -> None:
    assert set(errors.EXIT_CODES) == {kind.exit_code for kind in KINDS} | {0, 130}
