"""Requests that are added while an engine samples others: the next turns of conversations."""

import threading
from collections.abc import Callable

from rlgen.types import Request


class FollowUpQueue:
    """Further requests for one call of `Engine.generate`. Their indices continue those of the call, in the order of `put`.

    If another request may follow a finished completion, the callback `finished` calls `expect` before it returns. Later, either
    `put` or `drop` is called, from any thread. The engine takes the requests that are there. It is done when it has answered all
    of them and expects no more.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards the fields below
        self._there: list[Request] = []
        self._expected = 0
        self._failure: BaseException | None = None
        self._wake: Callable[[], object] | None = None

    def expect(self) -> None:
        """Announces that a `put` or a `drop` will follow."""
        with self._changed:
            self._expected += 1

    def put(self, request: Request) -> None:
        self._change([request])

    def drop(self) -> None:
        self._change([])

    def fail(self, error: BaseException) -> None:
        """Makes the engine give up: `take` raises the error. Only the first one counts."""
        with self._changed:
            self._failure = self._failure or error
            self._notify()

    def _change(self, requests: list[Request]) -> None:
        with self._changed:
            self._expected -= 1
            self._there += requests
            self._notify()

    def _notify(self) -> None:  # the lock is held
        self._changed.notify_all()
        if self._wake is not None:
            self._wake()

    @property
    def expected(self) -> bool:
        """Returns whether there are requests that nobody has taken, or more may come."""
        with self._changed:
            return bool(self._expected or self._there or self._failure)

    def take(self) -> list[Request]:
        """Returns the requests that have come since the last call, without waiting. Raises the error of `fail`."""
        with self._changed:
            if self._failure is not None:
                raise self._failure
            there, self._there = self._there, []
            return there

    def wait(self, whole: bool = False) -> list[Request]:
        """Waits until a request is there, or with `whole` until none is expected any more, and returns as `take` does."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure or not self._expected or (self._there and not whole))
        return self.take()

    def call(self, wake: Callable[[], object] | None) -> None:
        """Sets a function that is called after each change, from any thread; None: no function. It must not wait or call back."""
        with self._changed:
            self._wake = wake
