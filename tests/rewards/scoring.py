"""Groups to score, and scorers that are closed when a test ends."""

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlgen.recipe.models import RewardRecipe, ScoringRecipe
from rlgen.rewards.resolve import RewardFunction, resolve
from rlgen.rewards.score import Scorer, open_scorer
from rlgen.rewards.worker import Loaded, Source, load
from rlgen.types import Group, Prompt, Sample

Build = Callable[..., Scorer]


def group(*completions: str, group_id: int = 17, answer: object = "7", **columns: Any) -> Group:
    """A group of samples; the first ends by itself, the others by the limit; each is as long as its number."""
    prompt = Prompt(position=group_id, row=0, text="3+4=", prompt_ids=(1, 2), columns={"answer": answer, **columns})
    samples = tuple(
        Sample(
            group_id=group_id,
            sample_index=index,
            prompt_ids=(1, 2),
            completion_ids=(5,) * (index + 1),
            sampler_logp=(-1.0,) * (index + 1),
            loss_mask=(True,) * (index + 1),
            finish_reason="length" if index else "stop",
            weight_version=0,
            seed=index,
            completion=text,
            rewards={},
            reward=None,
        )
        for index, text in enumerate(completions)
    )
    return Group(group_id=group_id, prompt=prompt, samples=samples)


def totals(groups: list[Group]) -> list[list[float | None]]:
    return [[sample.reward for sample in scored.samples] for scored in groups]


def loaded(use: object, columns: set[str] = frozenset(), **settings: Any) -> tuple[RewardFunction, Loaded]:  # type: ignore[assignment]
    """A reward as the trainer sees it and as a worker does, without a worker."""
    entry = RewardRecipe(use=str(use), **settings)
    one = load(Source(entry.use, entry.timeout))
    return resolve(entry, one.facts, columns), one


@pytest.fixture
def opened() -> Iterator[Build]:
    """Opens scorers of entries of a recipe."""
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
