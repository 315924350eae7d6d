"""Detects runs that go wrong by rules over the metrics of their steps. The section `health` of a recipe sets the rules.

A rule is broken once its value has been beyond the threshold for `steps` steps in a row; the rule on equal rewards
(`reward_std`), once it has been so in most of `steps` steps. Steps that do not measure the value are skipped: they neither count
nor interrupt the row, so a rule about a value that a recipe never measures is never broken. The state depends on the metrics
alone, so that a resumed run, which reads them again, finds the same.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import ge, gt, le, lt
from typing import Any, Literal, NamedTuple, TypeAlias

from rlgen.errors import DivergedError
from rlgen.metrics import Family, Metric
from rlgen.recipe import Recipe
from rlgen.recipe.health import HealthRule
from rlgen.recipe.inert import inert

Record: TypeAlias = Mapping[str, Any]  # one object of metrics.jsonl
Rows: TypeAlias = Mapping[str, tuple[float, ...]]  # by rule: the values of its last measured steps, newest last
Side: TypeAlias = Literal["above", "at or above", "below", "at or below"]
Measured: TypeAlias = Callable[[Record], float | None]  # None: not measured in this step
BEYOND: dict[Side, Callable[[float, float], bool]] = {"above": gt, "at or above": ge, "below": lt, "at or below": le}
SHOWN = 3  # number of values that are shown in a message
MOSTLY = ("reward_std",)  # broken by most of the steps: an occasional step in which rewards differ does not help


class Sign(NamedTuple):
    """What a rule says of itself; a metric stands for its value in the record."""

    side: Side
    value: Metric | Measured
    what: str
    remedy: str


def value_in(value: Metric | Measured, record: Record) -> float | None:
    return value(record) if callable(value) else record.get(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One health check: how to read its value from the metrics, which side of the threshold is wrong, and what to do about it."""

    name: str
    sign: Sign
    whole: int | None  # of which the value is a share, at most 1; None: of nothing
    threshold: float
    steps: int
    action: Literal["warn", "stop", "checkpoint_and_stop"]

    def value(self, record: Record) -> float | None:
        found = value_in(self.sign.value, record)
        return found if found is None or self.whole is None else min(1.0, found / self.whole)

    def is_beyond(self, value: float) -> bool:
        return BEYOND[self.sign.side](value, self.threshold)

    def beyond(self, rows: Rows) -> int:
        """Returns in how many of its last steps the value was beyond the threshold."""
        return sum(self.is_beyond(value) for value in rows.get(self.name, ()))

    def broken(self, rows: Rows) -> bool:
        needed = self.steps // 2 + 1 if self.name in MOSTLY else self.steps
        return len(rows.get(self.name, ())) == self.steps and self.beyond(rows) >= needed

    def words(self, rows: Rows, step: int) -> str:
        """Returns `entropy of a token 0.004, 0.003, 0.003: below 0.01 for 5 steps, up to step 12 (health.entropy); lower ...`."""
        last = ", ".join(f"{value:.3g}" for value in rows[self.name][-SHOWN:])
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        how_long = f"in {self.beyond(rows)} of {steps}" if self.name in MOSTLY else f"for {steps}"
        beyond = f"{self.sign.side} {self.threshold:g} {how_long}"
        return f"{self.sign.what} {last}: {beyond}, up to step {step} (health.{self.name}); {self.sign.remedy}"


def mean_reward(record: Record) -> float | None:
    value = record.get(Metric.REWARD_MEAN)
    return None if value is None else abs(value)


def failed_rewards(record: Record) -> float | None:
    counts = [record[key] for key in Family.REWARD_FAILED.keys(record)]
    return sum(counts) if counts else None


def unscored(record: Record) -> float | None:
    """Returns the share of the step's samples without a reward. Resampled groups count, too: all tokens by their mean."""
    lost, tokens, mean = map(record.get, (Metric.REWARD_UNSCORED, Metric.TOKENS_GENERATED, Metric.COMPLETIONS_MEAN_TOKENS))
    return None if lost is None or not tokens or not mean else lost / round(tokens / mean)


def ref_kl(record: Record) -> float | None:
    return record.get(Metric.KL_REF_K3, record.get(Metric.KL_REF_K1))


def clipped(record: Record) -> float | None:
    return record.get(Metric.CLIP_REGION, record.get(Metric.CISPO_CLIPPED))


STALE = "run `rlgen doctor`: look at sync, head precision and log-prob mode"
# By the name of the rule.
SIGNS = {
    "reward": Sign(
        "at or below",
        mean_reward,
        "mean reward",
        "read rollouts/, see whether the rewards score good answers at all, or take easier prompts",
    ),
    "reward_std": Sign(
        "at or below",
        Metric.REWARD_STD,
        "standard deviation of rewards",
        "the reward is too coarse, or the prompts are too easy or too hard",
    ),
    "reward_failed": Sign("above", failed_rewards, "failed rewards of samples", "the first traceback is in the log"),
    "unscored": Sign(
        "at or above",
        unscored,
        "share of samples without a reward",
        "a reward returned None, as a function without `return` does, or failed: try it with `rlgen rewards test`",
    ),
    "zero_std": Sign(
        "at or above",
        Metric.GROUPS_ZERO_STD,
        "share of groups with equal rewards",
        "drop prompts that are always or never solved, raise rollout.group_size or rollout.temperature",
    ),
    "no_update": Sign(
        "at or below",
        Metric.UPDATES_DONE,
        "optimizer steps",
        f"no sample taught anything: see {Metric.GROUPS_ZERO_STD}, {Metric.COMPLETIONS_TRUNCATED}, {Metric.REWARD_UNSCORED} and"
        f" {Metric.ROLLOUT_DROPPED_STALE}; `rlgen rewards test RECIPE` finds rewards that give None or the same to every answer",
    ),
    "entropy": Sign(
        "below",
        Metric.ENTROPY,
        "entropy of a token",
        "it collapses: lower optim.learning_rate, widen trainer.clip_high, or set trainer.beta",
    ),
    "ref_kl": Sign("above", ref_kl, "KL to the reference", "raise trainer.beta or lower optim.learning_rate"),
    "grad_norm": Sign("above", Metric.GRAD_NORM, "norm of the gradient", "lower optim.learning_rate or optim.max_grad_norm"),
    "clipped": Sign("above", clipped, "share of clipped ratios", "lower trainer.updates_per_rollout"),
    "truncated": Sign(
        "above",
        Metric.COMPLETIONS_TRUNCATED,
        "share of truncated completions",
        "raise rollout.max_completion_tokens, or add the reward `overlong`",
    ),
    "length": Sign(
        "above",
        Metric.COMPLETIONS_MEAN_TOKENS,  # as a share of the limit, see `Rule.whole`
        "mean length as a share of the limit",
        "read rollouts/: the reward may favour long answers",
    ),
    "sampler_delta": Sign("above", Metric.SAMPLER_DELTA_MEAN, "mean difference of engine's and trainer's log-probs", STALE),
    "sampler_kl": Sign("above", Metric.SAMPLER_KL, "KL between engine and trainer", STALE),
    "ess": Sign(
        "below",
        Metric.IS_ESS_RAW,  # uncapped: with capped weights a single extreme ratio would not show
        "effective share of the samples",
        "lower optim.learning_rate, or find out with `rlgen doctor` why engine and trainer differ",
    ),
}


def rules_of(recipe: Recipe) -> tuple[Rule, ...]:
    """Returns the rules that apply to this recipe and are not set to ignore."""
    useless = {finding.path for finding in inert(recipe)}
    return tuple(
        Rule(
            name=name,
            sign=SIGNS[name],
            whole=recipe.rollout.max_completion_tokens if name == "length" else None,
            threshold=setting.threshold,
            steps=setting.steps,
            action=setting.action or recipe.health.action,
        )
        for name, setting in recipe.health
        if isinstance(setting, HealthRule) and setting.action != "ignore" and f"health.{name}" not in useless
    )


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
    """Checks the rules of a run, and keeps the last values of each. `earlier`: metrics of the steps before a resume."""

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
            f"health: {rule.sign.what} has recovered at step {step} (health.{rule.name})"
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
