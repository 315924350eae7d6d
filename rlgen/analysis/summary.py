"""The few numbers that say how a run went: reward, evaluation, health, agreement, speed, time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rlgen.analysis.charts import EDGES, PHASES
from rlgen.analysis.health import Verdict
from rlgen.analysis.run import Run, number, tenth
from rlgen.metrics import Metric

HEADLINE = Metric.EVAL_REWARD_MEAN  # the evaluation that is shown first, if it was measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One number with its explanation. Fact(label="Reward", value="0.861", note="0.214 at the start", tone="good")"""

    label: str
    value: str
    note: str
    tone: Literal["good", "bad", "plain"] = "plain"


@dataclass(frozen=True, slots=True)
class Phase:
    """Where time went."""

    name: str
    seconds: float


def phases_of(run: Run) -> list[Phase]:
    """Returns the time of each phase over all steps; what the steps took beyond them is "other"."""
    phases = [Phase(name, sum(number(row, key) or 0.0 for row in run.metrics)) for name, key in PHASES.items()]
    other = run.seconds - sum(phase.seconds for phase in phases)
    return [phase for phase in (*phases, Phase("other", other)) if phase.seconds > 0.001 * run.seconds]


def facts_of(run: Run, verdicts: Sequence[Verdict]) -> list[Fact]:
    """Returns the numbers of a run, as far as they were measured."""
    found = [reward_fact(run), evaluation_fact(run), health_fact(verdicts), agreement_fact(run), *speed_facts(run)]
    return [fact for fact in found if fact is not None]


def reward_fact(run: Run) -> Fact | None:
    values = [number(row, Metric.REWARD_MEAN) for row in run.metrics]
    first, last = tenth(values, last=False), tenth(values, last=True)
    if first is None or last is None:
        return None
    change = f"{first:.3g} in the first tenth, {last - first:+.3g}"
    return Fact(label="Reward, last tenth", value=f"{last:.3g}", note=change, tone="good" if last > first else "plain")


def evaluation_fact(run: Run) -> Fact | None:
    """Returns the newest evaluation with its interval: of the mean reward, or of the first value that there is."""
    keys = list(dict.fromkeys(key for row in run.evaluations for key in row if key.startswith("eval/")))
    key = HEADLINE if HEADLINE in keys else keys[0] if keys else ""
    measured = [row for row in run.evaluations if number(row, key) is not None]
    if not measured:
        return None
    first, last = measured[0], measured[-1]
    low, high = (number(last, key + edge) for edge in EDGES)
    interval = "" if low is None or high is None else f"{low:.3g} to {high:.3g} at step {last[Metric.STEP]}; "
    before = f"{number(first, key):.3g} at step {first[Metric.STEP]}" if first is not last else f"step {last[Metric.STEP]}"
    named = key.removeprefix("eval/").removesuffix("/mean")
    return Fact(label=f"Evaluation, {named}", value=f"{number(last, key):.3g}", note=f"{interval}{before}")


def health_fact(verdicts: Sequence[Verdict]) -> Fact:
    broken = [verdict.name for verdict in verdicts if verdict.state == "broken"]
    past = sum(verdict.state == "was broken" for verdict in verdicts)
    well = sum(verdict.state == "well" for verdict in verdicts)
    if broken:
        return Fact(label="Health", value=f"{len(broken)} broken", note=", ".join(broken), tone="bad")
    note = f"{past} broken for a while" if past else "no rule was ever broken"
    return Fact(label="Health", value=f"{well + past} of {len(verdicts)} well", note=note, tone="plain" if past else "good")


def agreement_fact(run: Run) -> Fact | None:
    """Returns how far engine and trainer were apart: the mean over all steps, and the largest of all tokens."""
    means = [value for row in run.metrics if (value := number(row, Metric.SAMPLER_DELTA_MEAN)) is not None]
    largest = [value for row in run.metrics if (value := number(row, Metric.SAMPLER_DELTA_MAX)) is not None]
    if not means or not largest:
        return None
    mean = sum(means) / len(means)
    return Fact(
        label="Engine and trainer differ by", value=f"{mean:.1e} nats", note=f"mean of a token; largest {max(largest):.1e}"
    )


def speed_facts(run: Run) -> list[Fact]:
    tokens = sum(number(row, Metric.TOKENS_GENERATED) or 0.0 for row in run.metrics)
    if not run.seconds:
        return []
    longest = max(phases_of(run), key=lambda phase: phase.seconds)
    share = f"{longest.seconds / run.seconds:.0%} {longest.name}, {run.seconds / len(run.metrics):.3g} s a step"
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
