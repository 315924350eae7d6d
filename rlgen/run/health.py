"""Detects runs that go wrong by rules over the metrics of their steps. The section `health` of a recipe sets the rules.

A rule is broken once its value has been beyond the threshold for `steps` steps in a row; the rule on equal rewards
(`reward_std`), once it has been so in most of `steps` steps. Steps that do not measure the value are skipped: they neither count
nor interrupt the row, so a rule about a value that a recipe never measures is never broken. The state depends on the metrics
alone, so that a resumed run, which reads them again, finds the same.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from rlgen.errors import DivergedError
from rlgen.metrics import Family, Metric
from rlgen.recipe import Recipe
from rlgen.recipe.inert import inert
from rlgen.recipe.models import HealthRule

Record: TypeAlias = Mapping[str, Any]  # one object of metrics.jsonl
Rows: TypeAlias = Mapping[str, tuple[float, ...]]  # by rule: the values of its last measured steps, newest last
Side: TypeAlias = Literal["above", "at or above", "below", "at or below"]
Sign: TypeAlias = tuple[Side, Callable[[Record], float | None], str, str]  # `side`, `value`, `what` and `remedy` of a Rule
BEYOND: dict[Side, Callable[[float, float], bool]] = {
    "above": lambda value, threshold: value > threshold,
    "at or above": lambda value, threshold: value >= threshold,
    "below": lambda value, threshold: value < threshold,
    "at or below": lambda value, threshold: value <= threshold,
}
SHOWN = 3  # number of values that are shown in a message
MOSTLY = ("reward_std",)  # broken by most of the steps: an occasional step in which rewards differ does not help


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One health check: how to read its value from the metrics, which side of the threshold is wrong, and what to do about it."""

    name: str
    side: Side
    value: Callable[[Record], float | None]  # None: not measured in this step
    threshold: float
    steps: int
    action: Literal["warn", "stop", "checkpoint_and_stop"]
    what: str
    remedy: str

    def beyond(self, rows: Rows) -> int:
        """Returns in how many of its last steps the value was beyond the threshold."""
        return sum(BEYOND[self.side](value, self.threshold) for value in rows.get(self.name, ()))

    def broken(self, rows: Rows) -> bool:
        needed = self.steps // 2 + 1 if self.name in MOSTLY else self.steps
        return len(rows.get(self.name, ())) == self.steps and self.beyond(rows) >= needed

    def words(self, rows: Rows, step: int) -> str:
        """Returns `entropy of a token 0.004, 0.003, 0.003: below 0.01 for 5 steps, up to step 12 (health.entropy); lower ...`."""
        last = ", ".join(f"{value:.3g}" for value in rows[self.name][-SHOWN:])
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        how_long = f"in {self.beyond(rows)} of {steps}" if self.name in MOSTLY else f"for {steps}"
        beyond = f"{self.side} {self.threshold:g} {how_long}"
        return f"{self.what} {last}: {beyond}, up to step {step} (health.{self.name}); {self.remedy}"


def rules_of(recipe: Recipe) -> tuple[Rule, ...]:
    """Returns the rules that apply to this recipe and are not set to ignore."""
    signs = (
        reward_signs(recipe.samples_per_step)
        | update_signs()
        | completion_signs(recipe.rollout.max_completion_tokens)
        | sampler_signs()
    )
    useless = {finding.path for finding in inert(recipe)}
    rules = []
    for name, setting in recipe.health:
        if isinstance(setting, HealthRule) and setting.action != "ignore" and f"health.{name}" not in useless:
            side, value, what, remedy = signs[name]
            rules.append(
                Rule(
                    name=name,
                    side=side,
                    value=value,
                    threshold=setting.threshold,
                    steps=setting.steps,
                    action=setting.action or recipe.health.action,
                    what=what,
                    remedy=remedy,
                )
            )
    return tuple(rules)


def reward_signs(samples: int) -> dict[str, Sign]:
    """Returns the signs about rewards, by the name of their rule. `samples`: of a step."""

    def unscored(record: Record) -> float | None:
        count = record.get(Metric.REWARD_UNSCORED)
        return None if count is None else min(1.0, count / samples)

    return {
        "reward": (
            "at or below",
            lambda record: None if record.get(Metric.REWARD_MEAN) is None else abs(record[Metric.REWARD_MEAN]),
            "mean reward",
            "read rollouts/, see whether the rewards score good answers at all, or take easier prompts",
        ),
        "reward_std": (
            "at or below",
            lambda record: record.get(Metric.REWARD_STD),
            "standard deviation of rewards",
            "the reward is too coarse, or the prompts are too easy or too hard",
        ),
        "reward_failed": (
            "above",
            failed_rewards,
            "failed rewards of samples",
            "the first traceback is in the log",
        ),
        "unscored": (
            "at or above",
            unscored,
            "share of samples without a reward",
            "a reward returned None, as a function without `return` does, or failed: try it with `rlgen rewards test`",
        ),
        "zero_std": (
            "at or above",
            lambda record: record.get(Metric.GROUPS_ZERO_STD),
            "share of groups with equal rewards",
            "drop prompts that are always or never solved, raise rollout.group_size or rollout.temperature",
        ),
    }


def update_signs() -> dict[str, Sign]:
    """Returns the signs about the optimizer's updates and the policy, by the name of their rule."""
    return {
        "no_update": (
            "at or below",
            lambda record: record.get(Metric.UPDATES_DONE),
            "optimizer steps",
            f"no sample taught anything: see {Metric.GROUPS_ZERO_STD}, {Metric.COMPLETIONS_TRUNCATED} and"
            f" {Metric.REWARD_UNSCORED}; `rlgen rewards test RECIPE` finds rewards that give None or the same to every answer",
        ),
        "entropy": (
            "below",
            lambda record: record.get(Metric.ENTROPY),
            "entropy of a token",
            "it collapses: lower optim.learning_rate, widen trainer.clip_high, or set trainer.beta",
        ),
        "ref_kl": (
            "above",
            lambda record: record.get(Metric.KL_REF_K3, record.get(Metric.KL_REF_K1)),
            "KL to the reference",
            "raise trainer.beta or lower optim.learning_rate",
        ),
        "grad_norm": (
            "above",
            lambda record: record.get(Metric.GRAD_NORM),
            "norm of the gradient",
            "lower optim.learning_rate or optim.max_grad_norm",
        ),
        "clipped": (
            "above",
            lambda record: record.get(Metric.CLIP_REGION, record.get(Metric.CISPO_CLIPPED)),
            "share of clipped ratios",
            "lower trainer.updates_per_rollout",
        ),
    }


def completion_signs(limit: int) -> dict[str, Sign]:
    """Returns the signs about the lengths of completions, by the name of their rule. `limit`: most tokens of a completion."""
    return {
        "truncated": (
            "above",
            lambda record: record.get(Metric.COMPLETIONS_TRUNCATED),
            "share of truncated completions",
            "raise rollout.max_completion_tokens, or add the reward `overlong`",
        ),
        "length": (
            "above",
            lambda r: None if r.get(Metric.COMPLETIONS_MEAN_TOKENS) is None else r[Metric.COMPLETIONS_MEAN_TOKENS] / limit,
            "mean length as a share of the limit",
            "read rollouts/: the reward may favour long answers",
        ),
    }


def sampler_signs() -> dict[str, Sign]:
    """Returns the signs about the difference between engine and trainer, by the name of their rule."""
    stale = "run `rlgen doctor`: look at sync, head precision and log-prob mode"
    return {
        "sampler_delta": (
            "above",
            lambda record: record.get(Metric.SAMPLER_DELTA_MEAN),
            "mean difference of engine's and trainer's log-probs",
            stale,
        ),
        "sampler_kl": ("above", lambda record: record.get(Metric.SAMPLER_KL), "KL between engine and trainer", stale),
        "ess": (
            "below",
            lambda record: record.get(Metric.IS_ESS_RAW),  # uncapped: with capped weights a single extreme ratio would not show
            "effective share of the samples",
            "lower optim.learning_rate, or find out with `rlgen doctor` why engine and trainer differ",
        ),
    }


def failed_rewards(record: Record) -> float | None:
    counts = [record[key] for key in Family.REWARD_FAILED.keys(record)]
    return sum(counts) if counts else None


def rows_after(rows: Rows, rules: Iterable[Rule], record: Record) -> Rows:
    """Returns the last values of each rule after `record` has been added as the newest step."""
    changed = dict(rows)
    for rule in rules:
        value = rule.value(record)
        if value is not None:
            changed[rule.name] = (*rows.get(rule.name, ()), float(value))[-rule.steps :]
    return changed


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkup:
    """The result of all rules after one step."""

    metrics: dict[str, bool]  # {"health/entropy": True}: whether each measured rule is broken
    broken: tuple[str, ...]  # one message per broken rule
    news: tuple[str, ...]  # lines for the console: rules that broke at this step, and rules that are no longer broken
    ends: DivergedError | None  # the error to end the run with; None: it goes on
    saves: bool  # whether to save a checkpoint before the run ends


class Health:
    """Checks the rules of a run, and keeps the last values of each.

    Args:
        earlier: metrics of the earlier steps, if the run is resumed.
    """

    def __init__(self, rules: tuple[Rule, ...], earlier: Iterable[Record] = ()) -> None:
        self._rules = rules
        self._rows: Rows = {}
        for record in earlier:
            self._rows = rows_after(self._rows, rules, record)

    def __call__(self, record: Record) -> Checkup:
        """Adds the metrics of one more step, and returns which rules are broken."""
        before, rows = self._rows, rows_after(self._rows, self._rules, record)
        self._rows = rows
        step: int = record[Metric.STEP]
        broken = [rule for rule in self._rules if rule.broken(rows)]
        began = [f"health: {rule.words(rows, step)}" for rule in broken if not rule.broken(before)]
        well = [
            f"health: {rule.what} has recovered at step {step} (health.{rule.name})"
            for rule in self._rules
            if rule.broken(before) and not rule.broken(rows)
        ]
        ending = [rule for rule in broken if rule.action != "warn"]
        ends = None
        if ending:
            words = "; ".join(rule.words(rows, step) for rule in ending)
            ends = DivergedError(
                f"health: {words}. To go on anyway, change the threshold of the rule or set its action to warn, then start with"
                " --resume"
            )
        return Checkup(
            metrics={Family.HEALTH.of(rule.name): rule.broken(rows) for rule in self._rules if rule.name in rows},
            broken=tuple(rule.words(rows, step) for rule in broken),
            news=(*began, *well),
            ends=ends,
            saves=any(rule.action == "checkpoint_and_stop" for rule in ending),
        )
