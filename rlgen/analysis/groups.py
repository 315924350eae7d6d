"""Groups runs whose recipes differ only in the seed, and lists the keys in which the recipes differ."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

from rlgen.analysis.run import Run
from rlgen.errors import UsageError
from rlgen.recipe import Recipe, effective
from rlgen.recipe.yaml import by_key

SEED = "run.seed"
PLACE = frozenset(["run.name", "run.dir"])  # where a run is stored, which is not a difference
ABSENT = "–"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Runs of one recipe with different seeds."""

    letter: str  # "A"
    runs: Sequence[Run]
    again: bool  # an earlier group has the same recipe and seeds

    @property
    def seeds(self) -> list[int]:
        return [run.recipe.run.seed for run in self.runs]


def groups_of(runs: Sequence[Run]) -> list[Group]:
    """Returns the runs by recipe, in the order in which they are given. Raises UsageError for more groups than letters.

    Two runs of the same recipe and seed are not independent: the second one begins a group of repetitions. Two seeds
    alone are two groups, so that each has its own curve.
    """
    found: dict[tuple[str, int], list[Run]] = {}
    seen: Counter[tuple[str, int]] = Counter()
    for run in runs:
        recipe = json.dumps({key: value for key, value in compared(run).items() if key != SEED}, sort_keys=True)
        seen[recipe, run.recipe.run.seed] += 1
        found.setdefault((recipe, seen[recipe, run.recipe.run.seed]), []).append(run)
    if len(found) > len(ascii_uppercase):
        raise UsageError(f"the runs have {len(found)} recipes, and compare shows {len(ascii_uppercase)} at most; name fewer runs")
    groups = [(members, times > 1) for (_, times), members in found.items()]
    if len(groups) == 1 and len(runs) == 2:
        groups = [([run], False) for run in runs]
    return [Group(letter=letter, runs=runs, again=again) for letter, (runs, again) in zip(ascii_uppercase, groups, strict=False)]


def compared(run: Run) -> dict[str, Any]:
    """Returns the values of a run's recipe that have an effect, by dotted key, without the names of its folder."""
    return {key: value for key, value in by_key(effective(run.recipe)).items() if key not in PLACE}


def differences_of(runs: Sequence[Run]) -> dict[str, dict[Run, Any]]:
    """Returns the keys in which the recipes differ, by section, each with its value in the runs where it has an effect.

    The kind of a section comes first, because other keys follow from it.
    """
    recipes = {run: compared(run) for run in runs}
    sections = list(Recipe.model_fields)
    keys = dict.fromkeys(key for recipe in recipes.values() for key in recipe)
    keys = dict.fromkeys(sorted(keys, key=lambda key: (sections.index(key.partition(".")[0]), not key.endswith(".kind"))))
    values = {key: {run: recipe[key] for run, recipe in recipes.items() if key in recipe} for key in keys}
    return {key: of_runs for key, of_runs in values.items() if len({shown(of_runs, run) for run in runs}) > 1}


def shown(values: Mapping[Run, Any], run: Run) -> str:
    if run not in values:
        return ABSENT
    value = values[run]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def shown_of_group(values: Mapping[Run, Any], group: Group) -> str:
    """Returns the value of a group as text; of the seed, those of its runs."""
    return ", ".join(dict.fromkeys(shown(values, run) for run in group.runs))
