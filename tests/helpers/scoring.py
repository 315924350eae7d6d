"""Groups to score, and scorers that are closed when a test ends."""

import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.samples import make_sample
from helpers.waiting import HANGS
from rlgen.recipe.models import RewardRecipe, ScoringRecipe
from rlgen.rewards.load import RewardSource
from rlgen.rewards.resolve import RewardFunction, resolve
from rlgen.rewards.score import Scorer, open_scorer
from rlgen.types import Group, Prompt, ids_of
from rlgen.worker_pool import pool, process
from rlgen.worker_pool.pool import Pool
from rlgen.worker_pool.source import Loaded
from rlgen.worker_pool.worker import WorkerCall

Build = Callable[..., Scorer]
SKIPS = {"use": "f", "on_error": "skip", "max_error_fraction": 1.0}  # an entry whose failures cost nothing else
SOME_FAIL = "def f(completion):\n    if completion[0] == 'x':\n        raise ValueError('no ' + completion)\n    return 1.0\n"


def group(*completions: str, group_id: int = 17, answer: object = "7", **columns: Any) -> Group:
    """A group of samples; the first ends by itself, the others by the limit; each is as long as its number."""
    prompt = Prompt(position=group_id, row=0, text="3+4=", prompt_ids=ids_of((1, 2)), columns={"answer": answer, **columns})
    samples = tuple(
        make_sample(
            group_id=group_id,
            sample_index=index,
            prompt_ids=(1, 2),
            completion_ids=(5,) * (index + 1),
            sampler_logp=(-1.0,) * (index + 1),
            finish_reason="length" if index else "stop",
            seed=index,
            completion=text,
        )
        for index, text in enumerate(completions)
    )
    return Group(group_id=group_id, prompt=prompt, samples=samples)


def totals(groups: list[Group]) -> list[list[float | None]]:
    return [[sample.reward for sample in scored.samples] for scored in groups]


def loaded(use: object, columns: set[str] = frozenset(), **settings: Any) -> tuple[RewardFunction, Loaded]:  # type: ignore[assignment]
    """A reward as the trainer sees it and as a worker does, without a worker."""
    entry = RewardRecipe(use=str(use), **settings)
    one = RewardSource(entry.use, entry.timeout).load()
    return resolve(entry, one.facts, columns), one


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids: Iterable[int]) -> bool:
    deadline = time.monotonic() + HANGS
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, pids))


def without_haste(patch: pytest.MonkeyPatch) -> None:
    """Gives a worker as long as it takes to begin a call, to write where it hangs, and to end after it has closed its line."""
    patch.setattr(pool, "PATIENCE", HANGS)
    patch.setattr(pool, "ENDING", HANGS)
    patch.setattr(process, "TELLING", HANGS)


def overdue(patch: pytest.MonkeyPatch, late: Callable[[str], float | None]) -> None:
    """Gives each call the seconds that `late` says for its completion; None: as long as it takes.

    The timeout of the recipe holds for all calls, and on a busy machine a healthy one may exceed it, too.
    """

    def allowed(_: Pool, call: WorkerCall) -> float:
        seconds = late(call.arguments["completion"])
        return HANGS if seconds is None else seconds

    patch.setattr(Pool, "_allowed", allowed)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Build]:
    """Opens scorers of entries of a recipe."""
    without_haste(monkeypatch)
    scorers: list[Scorer] = []

    def build(entries: list[dict[str, Any]], columns: set[str], scoring: dict[str, Any] | None = None, **folders: Path) -> Scorer:
        recipes = [RewardRecipe(**entry) for entry in entries]
        scorers.append(open_scorer(recipes, columns, 20, ScoringRecipe(**scoring or {}), **folders))
        return scorers[-1]

    yield build
    for scorer in scorers:
        scorer.close()


@pytest.fixture
def scorer(opened: Build, tmp_path: Path) -> Build:
    """Opens scorers of functions in a file: of `f`, or of what the entries name."""

    def build(source: str, *entries: dict[str, Any] | str, **options: Any) -> Scorer:
        path = tmp_path / "rewards.py"
        path.write_text(textwrap.dedent(source))
        named = [{"use": entry} if isinstance(entry, str) else entry for entry in entries or ("f",)]
        return opened([{**entry, "use": f"{path}:{entry['use']}"} for entry in named], {"answer"}, **options)

    return build
