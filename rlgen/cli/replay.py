"""Computes a step of a run again and prints what it finds: `rlgen replay`."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlgen.analysis.run import read_run
from rlgen.cli.output import echo, plain_table
from rlgen.metrics import Metric
from rlgen.recipe.processes import ProcessesRecipe
from rlgen.run.console import Terminal
from rlgen.run.directory import without_nonfinite
from rlgen.run.find import find_run
from rlgen.run.launch import Launch

if TYPE_CHECKING:
    from rlgen.setup.change import Change
    from rlgen.setup.replay import Replay

Changes = dict[str, tuple[Any, Any]]


def replay_command(name: Path, step: int, overrides: list[str], as_json: bool) -> None:
    """Computes the step, also with `overrides`, in each process that a launcher started. Messages go to standard error."""
    launched = Launch.of(os.environ).world > 1
    if not launched:
        find_run(name)  # a missing run is reported before torch is imported
    from transformers.utils.logging import disable_progress_bar

    from rlgen.processes import Processes
    from rlgen.setup.change import with_changes
    from rlgen.setup.replay import Past, replay

    disable_progress_bar()
    processes = Processes.open(ProcessesRecipe().timeout) if launched else Processes.alone()
    with processes.reporting_once():
        run = processes.run_all(lambda: read_run(find_run(name)))
        past = processes.run_all(lambda: Past.of(run.path, run.recipe, run.attempts, run.metrics))
        recipe, changes = processes.run_all(
            lambda: with_changes(run.path / "resolved.yaml", past.recipe, overrides) if overrides else (None, {})
        )
        found = replay(past, step, recipe, lambda text: echo(text, err=True) if processes.is_main else None, processes)
        if processes.is_main and as_json:
            echo(json.dumps(without_nonfinite(replay_object(run.path, found, changes))))
        elif processes.is_main:
            print_replay(run.path, found, changes)
    processes.close()


def replay_object(run: Path, found: "Replay", changes: Changes) -> dict[str, Any]:
    """Returns what `--json` prints."""
    return {
        "run": str(run),
        "step": found.step,
        "from_step": found.start,
        "loss": found.metrics[Metric.LOSS],
        "grad_norm": found.metrics[Metric.GRAD_NORM],
        "same": not found.differences,
        "differences": pairs("replayed", found.differences),
        "first_step_that_differs": found.first_off,
        "other": list(found.other),
        "metrics": dict(found.metrics),
        "changed": None if found.change is None else change_object(found.change, changes),
    }


def change_object(change: "Change", changes: Changes) -> dict[str, Any]:
    """Returns what `--json` prints about other settings."""
    return {
        "set": pairs("changed", changes),
        "loss": change.metrics[Metric.LOSS],
        "grad_norm": change.metrics[Metric.GRAD_NORM],
        "metrics": dict(change.metrics),
        "differences": pairs("changed", change.metrics_changed),
        "advantages": {
            "rows": change.rows,
            **pairs("changed", {"trained": change.rows_trained}),
            "changed": change.advantages_changed,
            "other_sign": change.advantages_flipped,
            "largest_change": change.advantages_largest_change,
        },
        "ratio": pairs("changed", change.ratio),
        "gradient": {"cosine": change.cosine, "cosine_first_update": change.cosine_first, "relative_norm": change.relative_norm},
    }


def pairs(second: str, values: Mapping[str, tuple[Any, Any]]) -> dict[str, Any]:
    return {key: {"recorded": was, second: now} for key, (was, now) in values.items()}


def print_replay(run: Path, found: "Replay", changes: Changes) -> None:
    """Prints the numbers for people, within 80 columns."""
    console = Terminal(quiet=False)
    start = f"the checkpoint of step {found.start}" if found.start else "the weights that the run began with"
    console.say(f"{run}, step {found.step}, from {start}")
    if found.differences or found.change is None:
        keys = [str(key) for key in dict.fromkeys([Metric.LOSS, Metric.GRAD_NORM, *found.differences])]
        table = plain_table([""], ["recorded", "replayed"], width=12)
        for key in keys:
            table.add_row(key, *map(exact, found.differences.get(key, (found.metrics[key], found.metrics[key]))))
        console.print(table)
    console.say("\n".join(result_lines(found)))
    if (change := found.change) is None:
        return
    said = [
        f"{key}: {' -> '.join('none' if value is None else json.dumps(value) for value in pair)}" for key, pair in changes.items()
    ]
    console.say("\n".join(["", *said]))
    rows = {str(key): (found.metrics[key], change.metrics[key]) for key in (Metric.LOSS, Metric.GRAD_NORM)}
    rows |= change.metrics_changed
    rows |= {"rows trained": change.rows_trained, **{f"ratio, {key}": pair for key, pair in change.ratio.items()}}
    table = plain_table([""], ["as it was", "changed"], width=12)
    for key, pair in rows.items():
        table.add_row(key, *map(in_short, pair))
    console.print(table)
    console.say("\n".join(effect(change)))


def result_lines(found: "Replay") -> list[str]:
    """Returns the lines that say whether the replay is what was recorded."""
    if not found.differences:
        return [f"the same to the last bit: all {len(found.metrics)} numbers of the update in metrics.jsonl"]
    numbers = [(was, now) for was, now in found.differences.values() if isinstance(was, float) and isinstance(now, float)]
    most = max((abs(now - was) / max(abs(was), 1e-300) for was, now in numbers), default=0.0)
    lines = [f"{len(found.differences)} of {len(found.metrics)} numbers differ, by {most:.1e} of their size at most"]
    if found.first_off is not None:
        lines.append(f"the first replayed step that differs is step {found.first_off}")
    if found.other:
        lines.append(f"not as it was in the run: {'; '.join(found.other)}")
    return lines


def effect(change: "Change") -> list[str]:
    """Returns the lines about advantages and gradients under the table of a change."""
    same = "unchanged" if not change.advantages_changed else f"changed in {change.advantages_changed} of {change.rows} rows"
    more = f", by {change.advantages_largest_change:.3g} at most" if change.advantages_changed else ""
    sign = f"; sign flipped in {change.advantages_flipped}" if change.advantages_flipped else ""
    lines = [f"advantages: {same}{more}{sign}"]
    if change.cosine is None:
        return [*lines, "gradient: none to compare, since one of the two made no update"]
    norm = "" if change.relative_norm is None else f", norm x {change.relative_norm:.4g}"
    lines.append(f"gradient of the last update: cosine {change.cosine:.6g}{norm}")
    if change.cosine_first != change.cosine:
        lines.append(f"gradient of the first update: cosine {in_short(change.cosine_first)}")
    return lines


def exact(value: Any) -> str:
    return "–" if value is None else repr(value)


def in_short(value: Any) -> str:
    return "–" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
