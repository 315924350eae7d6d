"""The verdicts of the health rules on a whole run, computed from its metrics as the run itself did."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rlgen.analysis.run import Run
from rlgen.metrics import Metric
from rlgen.run.health import Rows, Rule, rows_after, rules_of

State = Literal["well", "broken", "was broken", "not measured"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The state of one rule after the last recorded step."""

    name: str
    state: State
    what: str  # "entropy of a token"
    bound: str  # the bad side: "below 0.01 for 5 steps"
    last: float | None  # the newest value
    steps: Sequence[int]  # at which the rule was broken
    remedy: str


def verdicts_of(run: Run) -> list[Verdict]:
    """Returns the verdict of each rule of the recipe; broken ones come first."""
    rules = rules_of(run.recipe)
    rows: Rows = {}
    broken: dict[str, list[int]] = {rule.name: [] for rule in rules}
    for record in run.metrics:
        rows = rows_after(rows, rules, record)
        for rule in rules:
            if rule.broken(rows):
                broken[rule.name].append(record[Metric.STEP])
    order: tuple[State, ...] = ("broken", "was broken", "well", "not measured")
    return sorted((verdict(rule, rows, broken[rule.name]) for rule in rules), key=lambda found: order.index(found.state))


def verdict(rule: Rule, rows: Rows, broken: Sequence[int]) -> Verdict:
    """Returns the verdict of one rule after the last step."""
    measured = rows.get(rule.name, ())
    state: State = "broken" if rule.broken(rows) else "was broken" if broken else "well" if measured else "not measured"
    return Verdict(
        name=rule.name,
        state=state,
        what=rule.what,
        bound=f"{rule.side} {rule.threshold:g} for {rule.steps} step{'' if rule.steps == 1 else 's'}",
        last=measured[-1] if measured else None,
        steps=broken,
        remedy=rule.remedy,
    )
