"""Shows what each reward gives to answers whose quality is known: `rlgen rewards test`. Loads no model."""

import json
import random
import string
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rlgen.cli.output import echo, plain_table
from rlgen.errors import DataError, RewardError
from rlgen.recipe import Recipe, load_recipe
from rlgen.recipe.data import DataRecipe
from rlgen.rewards.resolve import RewardFunction
from rlgen.rewards.score import RewardCall, Scorer, call_name, open_scorer
from rlgen.types import Group, Prompt, Sample, ids_of, logp_of, one_span
from rlgen.worker_pool.failures import Failed
from rlgen.worker_pool.worker import WorkerCall

if TYPE_CHECKING:
    from rlgen.data.source import Rows

KINDS = ("gold", "empty", "garbage", "long")  # kinds of answers: the data's own, "", noise, and LONG characters of noise
LONG = 100_000  # characters


@dataclass(slots=True, kw_only=True)
class Results:
    """What one reward gave to answers of one kind."""

    reward: str
    answers: str
    values: list[float] = field(default_factory=list)
    not_applicable: int = 0
    failed: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of each call

    @property
    def mean(self) -> float | None:
        return fmean(self.values) if self.values else None


def rewards_test_command(path: Path, overrides: list[str], count: int, as_json: bool) -> None:
    """Scores answers to `count` rows of the data, and prints a table. A reward that fails or hangs, or gives right answers what
    it gives to wrong ones, is a RewardError.
    """
    recipe = load_recipe(path, overrides).recipe
    from rlgen.data.prompts import with_answer
    from rlgen.data.source import load_rows

    rows, named = load_rows(recipe.data, recipe.run.seed), recipe.data.columns
    columns = {*rows.columns, *(["answer"] if named.answer else [])}
    answered = ((number, with_answer(rows.rows[number], named.answer)) for number in range(len(rows.rows)))
    usable = (pair for pair in answered if pair[1][named.prompt] and pair[1].get("answer", "") is not None)
    prompts = [prompt_of(number, row, recipe.data, rows) for number, row in islice(usable, count)]
    if not prompts:
        raise DataError(f"data.source: {rows.source}: no row has a prompt and an answer")
    # Failures are only counted here, whatever `on_error` a run would use.
    entries = [entry.model_copy(update={"on_error": "skip"}) for entry in recipe.rewards]
    longest, turns = recipe.rollout.max_completion_tokens, recipe.talks
    with closing(open_scorer(entries, columns, longest, recipe.scoring, turns=turns, group_size=len(KINDS))) as scorer:
        groups = [group_of(prompt, recipe) for prompt in prompts]
        table, unsteady = tried(scorer, groups), dict[str, None]()  # labels, in order
        if not any(row.failed for row in table.values()):
            once, again = tried(scorer, groups[:1]), tried(scorer, groups[:1])
            unsteady = dict.fromkeys(label for (label, kind), row in once.items() if row.values != again[label, kind].values)
    problems, warnings = findings(scorer.rewards, table)
    warnings += [
        f"reward {label} gave the same answers other scores the second time: a resumed run will not be exact"
        for label in unsteady
    ]
    if as_json:
        report = {
            "rewards": [{**asdict(row), "mean": row.mean} for row in table.values()],
            "problems": problems,
            "warnings": warnings,
        }
        echo(json.dumps(report, indent=2))
    else:
        print_results(list(table.values()), len(prompts))
        for warning in warnings:
            echo(f"warning: {warning}")
    if problems:
        raise RewardError("; ".join(problems))


def prompt_of(position: int, columns: Mapping[str, Any], data: DataRecipe, rows: "Rows") -> Prompt:
    """Returns a data row as a prompt without any template; a chat becomes the text of its messages, images their references."""
    from rlgen.data.chats import as_messages
    from rlgen.data.images import encoded, with_parts

    prompt, where = columns[data.columns.prompt], f"data.source: {data.source}, row {position}"
    messages = as_messages(prompt, data, where)
    if data.columns.images is not None:
        images = encoded(columns[data.columns.images], rows, where)
        messages = with_parts(messages, len(images), where)
        columns = {**columns, data.columns.images: [image.reference for image in images]}
    text = prompt if isinstance(prompt, str) else "\n".join(str(message.get("content", "")) for message in prompt)
    return Prompt(
        position=position, row=position, text=text, prompt_ids=ids_of(text.encode()), columns=columns, messages=messages
    )


def group_of(prompt: Prompt, recipe: Recipe) -> Group:
    """Returns a group with one answer of each kind. Token ids are bytes, since there is no tokenizer without a model."""
    rng = random.Random(prompt.position)
    noise = "".join(rng.choices(string.ascii_letters + " .,{}\\$", k=60))
    texts = {"empty": "", "garbage": noise, "long": (noise * (LONG // len(noise) + 1))[:LONG]}
    if "answer" in prompt.columns:
        texts["gold"] = str(prompt.columns["answer"])
    samples = []
    for index, kind in ((index, kind) for index, kind in enumerate(KINDS) if kind in texts):
        ids = ids_of(texts[kind].encode()[: recipe.rollout.max_completion_tokens])
        samples.append(
            Sample(
                group_id=prompt.position,
                sample_index=index,
                prompt_ids=prompt.prompt_ids,
                completion_ids=ids,
                sampler_logp=logp_of([0.0] * len(ids)),
                spans=one_span(len(ids), 0),
                finish_reason="length" if kind == "long" else "stop",
                seed=0,
                completion=texts[kind],
                rewards={},
                reward=None,
            )
        )
    return Group(group_id=prompt.position, prompt=prompt, samples=tuple(samples))


def tried(scorer: Scorer, groups: Sequence[Group]) -> dict[tuple[str, str], Results]:
    """Runs the rewards, and returns their results by the reward's label and the kind of answer."""
    kinds = [KINDS[sample.sample_index] for sample in groups[0].samples]
    labels = [reward.label for reward in scorer.rewards]
    table = {(label, kind): Results(reward=label, answers=kind) for label in labels for kind in kinds}
    asks: list[RewardCall] = []
    calls: list[WorkerCall] = []
    for group in groups:
        of_group, its_calls = scorer.calls_of(group, step=0, first=len(asks))
        asks, calls = [*asks, *of_group], [*calls, *its_calls]
    with closing(scorer.run(calls)) as outcomes:
        for outcome in outcomes:
            ask = asks[outcome.id]
            result = outcome.value
            for place, sample in enumerate(ask.samples):
                row = table[ask.reward.label, KINDS[sample.sample_index]]
                row.seconds.append(outcome.seconds)
                if isinstance(result, Failed):
                    row.failed.append(f"{call_name(ask)}: {result.message}")
                elif (value := result[place]) is None:
                    row.not_applicable += 1
                else:
                    row.values.append(value)
    return table


def findings(rewards: Sequence[RewardFunction], table: Mapping[tuple[str, str], Results]) -> tuple[list[str], list[str]]:
    """Returns what is certainly wrong with the rewards (problems), and what may be wrong (warnings)."""
    problems: list[str] = []
    warnings: list[str] = []
    for reward in rewards:
        own = {kind: row for (label, kind), row in table.items() if label == reward.label}
        if failed := [row for row in own.values() if row.failed]:
            problems += [f"{row.failed[0]} ({len(row.failed)} of the {row.answers} answers failed)" for row in failed]
            continue
        values = {value for row in own.values() for value in row.values}
        # A reward of only the layout does not know the right answer.
        knows = reward.names is not None and "answer" in reward.names and "gold" in own
        if len(values) < 2:
            given = f"gives {values.pop():g} to every answer" if values else "returns None for each answer"
            (problems if knows else warnings).append(f"reward {reward.label} {given}, right or wrong")
            continue
        gold, garbage = own["gold"].values if knows else [], own["garbage"].values
        if gold and garbage and fmean(gold) <= fmean(garbage):
            warnings.append(
                f"reward {reward.label} gives the data's own answers {fmean(gold):g} on average, garbage {fmean(garbage):g}"
            )
    return problems, warnings


def print_results(rows: Sequence[Results], prompts: int) -> None:
    from rich.console import Console
    from rich.text import Text

    table = plain_table(["reward", "answers"], ["mean", "least", "most", "n/a", "failed", "ms", "slowest"])
    before = ""
    for row in rows:
        cells = [f"{number:.3g}" for number in (fmean(row.values), min(row.values), max(row.values))] if row.values else ["–"] * 3
        times = [f"{fmean(row.seconds) * 1000:.1f}", f"{max(row.seconds) * 1000:.1f}"]
        label = row.reward if row.reward != before else ""
        table.add_row(Text(label), row.answers, *cells, str(row.not_applicable), str(len(row.failed)), *times)
        before = row.reward
    echo(f"answers to {prompts} rows of the data")
    Console().print(table)
