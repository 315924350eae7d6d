"""Leads conversations with an environment, many at once, in worker processes. All calls of one go to the process that holds its
state, and none waits for another conversation.
"""

from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from rlgen.recipe.models import EnvironmentRecipe, ScoringRecipe
from rlgen.tools.box import CHARACTERS, Answered, Calls, answers_digest
from rlgen.tools.environment import EnvironmentSource
from rlgen.worker_pool.pool import Pool, limits_of


@dataclass(slots=True, eq=False)
class EnvPool:
    """The processes of an environment."""

    settings: EnvironmentRecipe
    digest: str  # of everything that decides what it answers: its code, arguments, limits
    calls: Calls  # in pools of one process each; conversation i is in pool i modulo their number
    _talks: "count[int]" = field(default_factory=count)

    def number(self) -> int:
        return next(self._talks)

    def first(self, begin: dict[str, Any], done: Answered, demonstrate: bool = False) -> None:
        """Asks what `reset` returns for a row, given what it may take: {"text": ...}. With `demonstrate` asks for a good first
        message and the answer to it, {"said": ..., "text": ...}; not every environment has them.

        As in all methods, `done` gets the answer from another thread; or why there is none; or an error that ends the run: the
        code has changed, or no process starts.
        """
        self._call(self.number(), {"begin": begin, "demonstrate": demonstrate}, done)

    def begin(self, talk: int, begin: dict[str, Any], expected: str | None, message: str, done: Answered) -> None:
        """Begins conversation `talk` with the model's first message; `expected` is what `first` returned. `done` as in `step`."""
        self._call(talk, {"begin": begin, "expected": expected, "message": message}, done)

    def step(self, talk: int, message: str, done: Answered) -> None:
        """Passes a message on. The answer is {"text": ..., "characters": ..., "reward": ..., "done": ...}; without one, the
        conversation has ended.
        """
        self._call(talk, {"message": message}, done)

    def end(self, talk: int) -> None:
        self._call(talk, {}, lambda answer: None)

    def close(self) -> None:
        self.calls.close()

    def _call(self, talk: int, given: dict[str, Any], done: Answered) -> None:
        self.calls.add(talk, 0, {"talk": talk, **given}, CHARACTERS * self.settings.max_output_tokens, done)


def open_arena(settings: EnvironmentRecipe, scoring: ScoringRecipe, output: Path | None = None) -> EnvPool:
    """Starts the processes of an environment, which import it. Raises ToolError if the class is not there or lacks a method, or
    its import fails or does not end.
    """
    limits = limits_of(scoring)
    source = EnvironmentSource(settings.use, settings.timeout, settings.args)
    pools = [Pool([source], replace(limits, workers=1), output) for _ in range(limits.workers)]
    try:
        for pool in pools:
            pool.start()  # all of them import at the same time
        found = [pool.facts()[0] for pool in pools]
        digest = answers_digest([settings], found[0].sha256)
        return EnvPool(settings, digest, Calls(pools, "environment answers"))
    except BaseException:
        for pool in pools:
            pool.close()
        raise
