"""Signs of a run that goes wrong: rules over the metrics of its steps. What the recipe says about them is `health`.

A rule is broken once its value has been beyond the threshold for so many steps in a row, or, of rewards that do not differ, in
most of so many. Steps that do not measure the value neither count nor end the row: a rule about what a recipe never measures
stays silent. Everything follows from the metrics alone, so that a run that is resumed, and reads them again, finds what the run
would have found.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from rlgen.errors import DivergedError
from rlgen.recipe import Recipe
from rlgen.recipe.models import HealthRule
from rlgen.recipe.rules import inert

Record: TypeAlias = Mapping[str, Any]  # one object of metrics.jsonl
Rows: TypeAlias = Mapping[str, tuple[float, ...]]  # by rule that was measured: the values of its last steps, newest last
Side: TypeAlias = Literal["above", "at or above", "below", "at or below"]
BEYOND: dict[Side, Callable[[float, float], bool]] = {
    "above": lambda value, threshold: value > threshold,
    "at or above": lambda value, threshold: value >= threshold,
    "below": lambda value, threshold: value < threshold,
    "at or below": lambda value, threshold: value <= threshold,
}
SHOWN = 3  # of the values of a row
MOSTLY = ("reward_std",)  # broken by most of the steps: a step in which rewards differ now and then changes little


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One sign: where its value is in the metrics, which side of the threshold is wrong, and what to do about it."""

    name: str
    side: Side
    value: Callable[[Record], float | None]  # None: not measured in this step
    threshold: float
    steps: int
    action: Literal["warn", "stop", "checkpoint_and_stop"]
    what: str
    remedy: str

    def beyond(self, rows: Rows) -> int:
        """In how many of its last steps."""
        return sum(BEYOND[self.side](value, self.threshold) for value in rows.get(self.name, ()))

    def broken(self, rows: Rows) -> bool:
        needed = self.steps // 2 + 1 if self.name in MOSTLY else self.steps
        return len(rows.get(self.name, ())) == self.steps and self.beyond(rows) >= needed

    def words(self, rows: Rows, step: int) -> str:
        """`entropy of a token 0.004, 0.003, 0.003: below 0.01 for 5 steps, to step 12 (health.entropy); lower ...`"""
        last = ", ".join(f"{value:.3g}" for value in rows[self.name][-SHOWN:])
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        how_long = f"in {self.beyond(rows)} of {steps}" if self.name in MOSTLY else f"for {steps}"
        beyond = f"{self.side} {self.threshold:g} {how_long}"
        return f"{self.what} {last}: {beyond}, to step {step} (health.{self.name}); {self.remedy}"


def rules_of(recipe: Recipe) -> tuple[Rule, ...]:
    """The rules that apply to this recipe and are not ignored."""
    limit = recipe.rollout.max_completion_tokens
    stale = "run `rlgen doctor`: look at sync, head precision and log-prob mode"
    signs: dict[str, tuple[Side, Callable[[Record], float | None], str, str]] = {
        "reward": (
            "at or below",
            lambda record: None if record.get("reward/mean") is None else abs(record["reward/mean"]),
            "mean reward",
            "read rollouts/, see whether the rewards score good answers at all, or take easier prompts",
        ),
        "reward_std": (
            "at or below",
            lambda record: record.get("reward/std"),
            "standard deviation of rewards",
            "the reward is too coarse, or the prompts are too easy or too hard",
        ),
        "reward_failed": (
            "above",
            failed_rewards,
            "failed rewards of samples",
            "the first traceback is in the log",
        ),
        "zero_std": (
            "at or above",
            lambda record: record.get("groups/zero_std"),
            "share of groups of equal rewards",
            "drop prompts that are always or never solved, raise rollout.group_size or rollout.temperature",
        ),
        "no_update": (
            "at or below",
            lambda record: record.get("updates/done"),
            "optimizer steps",
            "no sample taught anything: see groups/zero_std, completions/truncated and reward/unscored",
        ),
        "entropy": (
            "below",
            lambda record: record.get("entropy"),
            "entropy of a token",
            "it collapses: lower optim.learning_rate, widen trainer.clip_high, or set trainer.beta",
        ),
        "ref_kl": (
            "above",
            lambda record: record.get("kl/ref_k3", record.get("kl/ref_k1")),
            "KL to the reference",
            "raise trainer.beta or lower optim.learning_rate",
        ),
        "grad_norm": (
            "above",
            lambda record: record.get("grad_norm"),
            "norm of the gradient",
            "lower optim.learning_rate or optim.max_grad_norm",
        ),
        "clipped": (
            "above",
            lambda record: record.get("clip/region", record.get("cispo/clipped")),
            "share of clipped ratios",
            "lower trainer.updates_per_rollout",
        ),
        "truncated": (
            "above",
            lambda record: record.get("completions/truncated"),
            "share of truncated completions",
            "raise rollout.max_completion_tokens, or add the reward `overlong`",
        ),
        "length": (
            "above",
            lambda r: None if r.get("completions/mean_tokens") is None else r["completions/mean_tokens"] / limit,
            "mean length as a share of the limit",
            "read rollouts/: long answers may be how the reward is won",
        ),
        "sampler_delta": (
            "above",
            lambda record: record.get("sampler/delta_mean"),
            "mean difference of engine's and trainer's log-probs",
            stale,
        ),
        "sampler_kl": ("above", lambda record: record.get("sampler/kl"), "KL between engine and trainer", stale),
        "ess": (
            "below",
            lambda record: record.get("is/ess_raw"),  # of capped weights one absurd ratio would leave no trace
            "effective share of the samples",
            "lower optim.learning_rate, or look at what parts engine and trainer with `rlgen doctor`",
        ),
    }
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


def failed_rewards(record: Record) -> float | None:
    counts = [value for name, value in record.items() if name.startswith("reward/") and name.endswith("/failed")]
    return sum(counts) if counts else None


def rows_after(rows: Rows, rules: Iterable[Rule], record: Record) -> Rows:
    """The rows once `record` is the newest step."""
    changed = dict(rows)
    for rule in rules:
        value = rule.value(record)
        if value is not None:
            changed[rule.name] = (*rows.get(rule.name, ()), float(value))[-rule.steps :]
    return changed


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkup:
    """What the rules find after one step."""

    metrics: dict[str, bool]  # {"health/entropy": True}: whether each measured rule is broken
    broken: tuple[str, ...]  # in words, one rule each
    news: tuple[str, ...]  # lines for the console: rules that have just been broken, and those that are well again
    ends: DivergedError | None  # the run, as the recipe wants it
    saves: bool  # with a checkpoint


class Health:
    """The rules of a run and what they have seen.

    Args:
        earlier: the metrics of the steps before, if the run goes on.
    """

    def __init__(self, rules: tuple[Rule, ...], earlier: Iterable[Record] = ()) -> None:
        self._rules = rules
        self._rows: Rows = {}
        for record in earlier:
            self._rows = rows_after(self._rows, rules, record)

    def __call__(self, record: Record) -> Checkup:
        """Takes down the metrics of one more step."""
        before, rows = self._rows, rows_after(self._rows, self._rules, record)
        self._rows = rows
        step: int = record["step"]
        broken = [rule for rule in self._rules if rule.broken(rows)]
        began = [f"health: {rule.words(rows, step)}" for rule in broken if not rule.broken(before)]
        well = [
            f"health: {rule.what} is well again at step {step} (health.{rule.name})"
            for rule in self._rules
            if rule.broken(before) and not rule.broken(rows)
        ]
        ending = [rule for rule in broken if rule.action != "warn"]
        ends = None
        if ending:
            words = "; ".join(rule.words(rows, step) for rule in ending)
            ends = DivergedError(
                f"health: {words}. To go on all the same, change its threshold or set its action to warn, and start with --resume"
            )
        return Checkup(
            metrics={f"health/{rule.name}": rule.broken(rows) for rule in self._rules if rule.name in rows},
            broken=tuple(rule.words(rows, step) for rule in broken),
            news=(*began, *well),
            ends=ends,
            saves=any(rule.action == "checkpoint_and_stop" for rule in ending),
        )
