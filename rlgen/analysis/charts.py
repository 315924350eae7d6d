"""The curves of a run: which metrics are drawn together, in which order. A metric that no chart names gets one of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from rlgen.analysis.run import EDGES, Record, Run, number
from rlgen.metrics import Family, Metric

MOST_POINTS = 2000  # of a curve; of a longer run every n-th step is drawn
SPEED = "tokens per second"  # derived from two metrics, as are the next two
SPREAD = ("reward less its spread", "reward and its spread")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One curve. `low` and `high` are its band, if it has one."""

    label: str
    values: Sequence[float | None]
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One chart. Its lines have a value for each place of `x`."""

    group: str
    title: str
    unit: str
    what: str  # one sentence
    x: Sequence[float]
    lines: Sequence[Line]
    axis: str = "step"  # what `x` counts
    log: bool = False  # logarithmic axis
    stacked: bool = False  # areas that add up


@dataclass(frozen=True, slots=True)
class ChartPlan:
    """Metrics that share a chart, by their labels."""

    group: str
    title: str
    keys: Mapping[str, str]  # label -> key of metrics.jsonl
    band: tuple[str, str] | None = None  # keys of the lower and upper edge of the first line's band
    log: bool = False
    stacked: bool = False


PHASES = {  # of a step, as the report names them
    "sample": Metric.TIME_GENERATE,
    "reward": Metric.TIME_REWARD,
    "train": Metric.TIME_TRAIN,
    "sync": Metric.TIME_SYNC,
    "save": Metric.TIME_SAVE,
    "evaluate": Metric.TIME_EVAL,
}
LENGTHS = (Metric.COMPLETIONS_MIN_TOKENS, Metric.COMPLETIONS_MAX_TOKENS)
WEIGHTS = (Metric.IS_WEIGHT_MIN, Metric.IS_WEIGHT_MAX)
DELTAS = {"mean": Metric.SAMPLER_DELTA_MEAN, "99.9 %": Metric.SAMPLER_DELTA_P999, "largest": Metric.SAMPLER_DELTA_MAX}
TOKENS = {"sampled": Metric.TOKENS_GENERATED, "trained": Metric.TOKENS_TRAINED, "padding": Metric.TOKENS_PADDING}
AGREEMENT = "Agreement of engine and trainer"
PLANS = (
    ChartPlan("Learning", "Reward", {"mean": Metric.REWARD_MEAN}, band=SPREAD),
    ChartPlan("Learning", "Loss", {"loss": Metric.LOSS}),
    ChartPlan("Learning", "Gradient norm", {"norm": Metric.GRAD_NORM}),
    ChartPlan("Learning", "Groups of equal rewards", {"share": Metric.GROUPS_ZERO_STD}),
    ChartPlan("Learning", "Preference accuracy", {"share": Metric.DPO_ACCURACY}),
    ChartPlan("Learning", "Preference margin", {"margin": Metric.DPO_MARGIN}),
    ChartPlan("Stability", "Completion length", {"mean": Metric.COMPLETIONS_MEAN_TOKENS}, band=LENGTHS),
    ChartPlan("Stability", "Truncated completions", {"share": Metric.COMPLETIONS_TRUNCATED}),
    ChartPlan("Stability", "Entropy", {"entropy": Metric.ENTROPY}),
    ChartPlan("Stability", "KL to the reference", {"k1": Metric.KL_REF_K1, "k3": Metric.KL_REF_K3}),
    ChartPlan("Stability", "Clipped ratios", {"share": Metric.CLIP_REGION, "cispo": Metric.CISPO_CLIPPED}),
    ChartPlan(AGREEMENT, "Difference of log-probs", DELTAS, log=True),
    ChartPlan(AGREEMENT, "KL of engine and trainer", {"k3": Metric.SAMPLER_KL}, log=True),
    ChartPlan(AGREEMENT, "Importance weight", {"mean": Metric.IS_WEIGHT_MEAN}, band=WEIGHTS),
    ChartPlan(AGREEMENT, "Effective share of the samples", {"tokens": Metric.IS_ESS_RAW, "completions": Metric.IS_ESS_SEQ}),
    ChartPlan("Throughput", "Speed", {"sampled": SPEED}),
    ChartPlan("Throughput", "Tokens of a step", TOKENS),
    ChartPlan("Throughput", "Time of a step", PHASES, stacked=True),
)
# What evaluations are called. A single reward has its name, and so has pass@k.
EVALUATED: dict[str, str] = {
    Metric.EVAL_REWARD_MEAN: "reward",
    Metric.EVAL_REWARD_UNSCORED: "completions without a reward",
    Metric.EVAL_MEAN_TOKENS: "completion length",
    Metric.EVAL_TRUNCATED: "truncated completions",
    Metric.EVAL_TURNS_MEAN: "turns",
    Metric.EVAL_DELTA_MEAN: "difference of log-probs, mean",
    Metric.EVAL_DELTA_MAX: "difference of log-probs, largest",
}
UNDRAWN = frozenset([Metric.STEP, Metric.TIME_STEP, Metric.REWARD_STD, Metric.WEIGHTS_VERSION, Metric.CLIP_LOW, Metric.CLIP_HIGH])


def charts_of(run: Run) -> list[Chart]:
    """Returns the charts of a run: evaluations first, then those of `PLANS` that were measured, then all other metrics."""
    rows = [{**row, **derived(row)} for row in thinned(run.metrics)]
    planned = [chart for plan in plans(rows) if (chart := drawn(plan, rows)) is not None]
    return [*evaluation_charts(run.evaluations), *planned, *unplanned_charts(rows)]


T = TypeVar("T")


def thinned(records: Sequence[T]) -> Sequence[T]:
    """Returns at most about `MOST_POINTS` of the records, evenly spaced, with the last."""
    every = max(1, -(-len(records) // MOST_POINTS))
    return records[(len(records) - 1) % every :: every]


def derived(row: Record) -> dict[str, float | None]:
    tokens, seconds = number(row, Metric.TOKENS_GENERATED), number(row, Metric.TIME_STEP)
    mean, std = number(row, Metric.REWARD_MEAN), number(row, Metric.REWARD_STD)
    low, high = (None, None) if mean is None or std is None else (mean - std, mean + std)
    return {SPEED: tokens / seconds if tokens is not None and seconds else None, SPREAD[0]: low, SPREAD[1]: high}


def plans(rows: Sequence[Record]) -> list[ChartPlan]:
    """Returns `PLANS`, with one more if there are several rewards."""
    names = {key.split("/")[1]: key for row in rows for key in Family.REWARD_MEAN.keys(row)}
    by_name = ChartPlan("Learning", "Rewards by name", names)
    return [*PLANS[:1], *([by_name] if len(names) > 1 else []), *PLANS[1:]]


def chart_of(key: str, group: str, title: str, x: Sequence[float] = (), lines: Sequence[Line] = ()) -> Chart:
    """Returns the chart of one metric, with its unit and meaning if the glossary has it."""
    known = next((metric for metric in Metric if metric == key), None)
    return Chart(group=group, title=title, unit=known.unit if known else "", what=known.what if known else "", x=x, lines=lines)


def drawn(plan: ChartPlan, rows: Sequence[Record]) -> Chart | None:
    """Returns the chart of a plan; None if no step has measured any of its metrics."""
    lines: list[Line] = []
    for label, key in plan.keys.items():
        values = [number(row, key) for row in rows]
        if any(value is not None for value in values):
            low, high = ([number(row, edge) for row in rows] for edge in plan.band) if plan.band and not lines else (None, None)
            lines.append(Line(label=label, values=values, low=low, high=high))
    if not lines:
        return None
    keys = plan.keys.values()
    known = next((metric for metric in Metric if metric in keys), "")
    chart = chart_of(known, plan.group, plan.title, [row[Metric.STEP] for row in rows], lines)
    unit = chart.unit if known else "tokens/s" if SPEED in keys else "reward"
    return replace(chart, unit=unit, log=plan.log, stacked=plan.stacked)


def evaluated_keys(evaluations: Sequence[Record]) -> list[str]:
    """Returns the keys of all values of evaluations, without the edges of their intervals and the size, which never changes."""
    keys = dict.fromkeys(key for row in evaluations for key in row)
    return [key for key in keys if key.startswith("eval/") and not key.endswith(EDGES) and key != Metric.EVAL_PROMPTS]


def evaluation_charts(evaluations: Sequence[Record]) -> list[Chart]:
    """Returns one chart for each value of the evaluations: those with intervals first, and no count of failures that stayed 0."""
    keys = evaluated_keys(evaluations)
    failures = {Metric.EVAL_REWARD_UNSCORED, *Family.EVAL_FAILED.keys(dict.fromkeys(keys))}
    steps = [row[Metric.STEP] for row in evaluations]
    charts = []
    for key in keys:
        values, low, high = ([number(row, key + edge) for row in evaluations] for edge in ("", *EDGES))
        if all(value is None for value in values) or (key in failures and not any(values)):
            continue
        has_band = any(edge is not None for edge in low)
        line = Line(label="evaluation", values=values, low=low if has_band else None, high=high if has_band else None)
        title = EVALUATED.get(key) or key.removeprefix("eval/").removeprefix("reward/").removesuffix("/mean")
        charts.append(chart_of(key, "Evaluation", f"Evaluation: {title}", steps, [line]))
    return sorted(charts, key=lambda chart: chart.lines[0].low is None)


def unplanned_charts(rows: Sequence[Record]) -> list[Chart]:
    """Returns a chart for each number that no plan names, so that a new metric is seen without a change here."""
    named = {key for plan in plans(rows) for key in (*plan.keys.values(), *(plan.band or ()))} | UNDRAWN
    keys = dict.fromkeys(key for row in rows for key in row if key not in named and not key.startswith(("health/", "eval/")))
    steps = [row[Metric.STEP] for row in rows]
    charts = []
    for key in keys:
        values = [None if isinstance(row.get(key), bool) else number(row, key) for row in rows]
        if len({value for value in values if value is not None}) > 1:  # a number that never moves tells nothing
            charts.append(chart_of(key, "Other metrics", key, steps, [Line(label=key, values=values)]))
    return charts
