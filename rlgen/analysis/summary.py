"""The few numbers that say how a run went, for the report and for the end of `rlgen train`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rlgen.analysis.charts import PHASES
from rlgen.analysis.run import Run, interval_of, mean_of, number, tenths
from rlgen.metrics import Metric
from rlgen.run.checkpoint_folder import CheckpointFolder
from rlgen.run.clock import as_clock
from rlgen.run.directory import Best
from rlgen.run.health import Rows, Rule, rows_after, rules_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One number with its explanation. Fact(label="Reward", value="0.861", note="0.214 at the start", tone="good")"""

    label: str
    value: str
    note: str
    tone: Literal["good", "bad", "plain"] = "plain"


State = Literal["well", "broken", "was broken", "not measured"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleVerdict:
    """The state of one rule after the last recorded step."""

    name: str
    state: State
    what: str  # "entropy of a token"
    bound: str  # the bad side: "below 0.01 for 5 steps"
    last: float | None  # the newest value
    steps: Sequence[int]  # at which the rule was broken
    remedy: str


def verdicts_of(run: Run) -> list[RuleVerdict]:
    """Returns the verdict of each rule of the recipe; broken ones come first."""
    rules = rules_of(run.recipe)
    rows: Rows = {}
    broken: dict[str, list[int]] = {rule.name: [] for rule in rules}
    for record in run.metrics:
        rows = rows_after(rows, rules, record)
        for rule in rules:
            if rule.broken(rows):
                broken[rule.name].append(record[Metric.STEP])
    found = [verdict_on(rule, rows, broken[rule.name]) for rule in rules]
    return sorted(found, key=lambda verdict: ("broken", "was broken", "well", "not measured").index(verdict.state))


def verdict_on(rule: Rule, rows: Rows, broken: Sequence[int]) -> RuleVerdict:
    measured = rows.get(rule.name, ())
    state: State = "broken" if rule.broken(rows) else "was broken" if broken else "well" if measured else "not measured"
    return RuleVerdict(
        name=rule.name,
        state=state,
        what=rule.sign.what,
        bound=f"{rule.sign.side} {rule.threshold:g} for {rule.steps} step{'' if rule.steps == 1 else 's'}",
        last=measured[-1] if measured else None,
        steps=broken,
        remedy=rule.sign.remedy,
    )


def phases_of(run: Run) -> dict[str, float]:
    """Returns the seconds of each phase over all steps; what the steps took beyond them is "other"."""
    phases = {name: sum(number(row, key) or 0.0 for row in run.metrics) for name, key in PHASES.items()}
    phases["other"] = run.seconds - sum(phases.values())
    return {name: seconds for name, seconds in phases.items() if seconds > 0.001 * run.seconds}


def summary_of(run: Run, verdicts: Sequence[RuleVerdict]) -> list[Fact]:
    found = [reward_fact(run), evaluation_fact(run), health_fact(verdicts), agreement_fact(run), *speed_facts(run)]
    return [fact for fact in found if fact is not None]


def reward_fact(run: Run) -> Fact | None:
    first, last = tenths(run.metrics)
    if first is None or last is None:
        return None
    change = f"{first:.3g} in the first tenth, {last - first:+.3g}"
    return Fact(label="Reward, last tenth", value=f"{last:.3g}", note=change, tone="good" if last > first else "plain")


def evaluation_fact(run: Run) -> Fact | None:
    """Returns the mean reward of the newest evaluation, with its interval."""
    measured = [row for row in run.evaluations if number(row, Metric.EVAL_REWARD_MEAN) is not None]
    if not measured:
        return None
    first, last = measured[0], measured[-1]
    value, before = number(last, Metric.EVAL_REWARD_MEAN), number(first, Metric.EVAL_REWARD_MEAN)
    interval = f"{found} at step {last[Metric.STEP]}; " if (found := interval_of(last, Metric.EVAL_REWARD_MEAN)) else ""
    then = f"{before:.3g} at step {first[Metric.STEP]}" if first is not last else f"step {last[Metric.STEP]}"
    return Fact(label="Evaluation, reward", value=f"{value:.3g}", note=f"{interval}{then}")


def health_fact(verdicts: Sequence[RuleVerdict]) -> Fact:
    broken = [verdict.name for verdict in verdicts if verdict.state == "broken"]
    past = sum(verdict.state == "was broken" for verdict in verdicts)
    well = sum(verdict.state == "well" for verdict in verdicts)
    if broken:
        return Fact(label="Health", value=f"{len(broken)} broken", note=", ".join(broken), tone="bad")
    note = f"{past} broken for a while" if past else "no rule was ever broken"
    return Fact(label="Health", value=f"{well + past} of {len(verdicts)} well", note=note, tone="plain" if past else "good")


def agreement_fact(run: Run) -> Fact | None:
    """Returns how far engine and trainer were apart: the mean over all steps, and the largest of all tokens."""
    mean = mean_of(number(row, Metric.SAMPLER_DELTA_MEAN) for row in run.metrics)
    largest = [value for row in run.metrics if (value := number(row, Metric.SAMPLER_DELTA_MAX)) is not None]
    if mean is None or not largest:
        return None
    note = f"mean of a token; largest {max(largest):.1e}"
    return Fact(label="Engine and trainer differ by", value=f"{mean:.1e} nats", note=note)


def speed_facts(run: Run) -> list[Fact]:
    tokens = sum(number(row, Metric.TOKENS_GENERATED) or 0.0 for row in run.metrics)
    if not run.seconds:
        return []
    phases = phases_of(run)
    longest = max(phases, key=lambda name: phases[name])
    share = f"{phases[longest] / run.seconds:.0%} {longest}, {run.seconds / len(run.metrics):.3g} s a step"
    return [
        Fact(label="Speed", value=f"{tokens / run.seconds:,.0f} tokens/s", note=f"{tokens:,.0f} tokens sampled"),
        Fact(label="Time of all steps", value=duration(run.seconds), note=share),
    ]


def duration(seconds: float) -> str:
    """Returns a time in words: "47 s", "12 min 5 s", "3 h 20 min"."""
    minutes, hours = round(seconds) // 60, round(seconds / 60) // 60
    if minutes < 1:
        return f"{seconds:.3g} s"
    return f"{minutes} min {round(seconds) % 60} s" if hours < 1 else f"{hours} h {round(seconds / 60) % 60} min"


def ending_of(run: Run, seconds: float, next_command: str) -> list[str]:
    """Returns at most six lines for a command's end: steps and its time, reward, evaluation, checkpoint, the next command."""
    step, steps = len(run.metrics), run.recipe.run.steps
    state = "done" if step >= steps else "stopped"
    lines = [f"{state}: {step} of {steps} steps, {as_clock(seconds)} since the command; {run.path}"]
    first, last = tenths(run.metrics)
    if first is not None and last is not None:
        of = "step" if step < 20 else f"{step // 10} steps"
        lines.append(f"reward: {first:.3f} in the first {of}, {last:.3f} in the last {of}")
    best = Best(run.evaluations).step
    found = {record[Metric.STEP]: number(record, Metric.EVAL_REWARD_MEAN) for record in run.evaluations}
    if known := {step: reward for step, reward in found.items() if reward is not None}:
        named = dict.fromkeys(step for step in (min(known), best, max(known)) if step is not None)
        at = [f"{known[step]:.3f} {'after' if step else 'before'} step {step or 1}{' (best)' * (step == best)}" for step in named]
        lines.append(f"evaluation: {', '.join(at)}")
    if checkpoints := CheckpointFolder(run.path / "checkpoints").steps():
        newest = f"newest checkpoint: {checkpoints[max(checkpoints)]}"
        lines.append(f"best checkpoint: {checkpoints[best]}" if best in checkpoints else newest)
    return [*lines, f"next: {next_command}"]
