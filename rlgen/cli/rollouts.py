"""Prints rollouts of a run: `rlgen rollouts`."""

import json
import math
from pathlib import Path
from typing import Any

from rich.text import Text

from rlgen.analysis.rows import Query, find_rollouts, gap, read_rows, readable, text_of_message
from rlgen.cli.output import echo, page_for_terminal
from rlgen.errors import UsageError
from rlgen.redact import printable, printable_json
from rlgen.rollout.parquet import FIXED, OF_TURNS, has_turns
from rlgen.run.console import number_text
from rlgen.run.find import find_run
from rlgen.types import end_of_talk

LINES, CHARACTERS = 6, 600  # of a text that is not shown in full


def rollouts_command(name: Path, query: Query, limit: int, page: int, full: bool, as_json: bool) -> None:
    run = find_run(name)
    found = find_rollouts(run, query)
    pages = max(1, math.ceil(len(found) / limit))
    if page > pages:
        raise UsageError(f"--page {page}: {len(found)} rollouts match; the last page of {limit} (--limit) is {pages}")
    rows = read_rows(run, found, slice((page - 1) * limit, page * limit))
    if as_json:
        said = {"run": str(run), "total": found.total, "matched": len(found), "page": page, "pages": pages}
        echo(printable_json(json.dumps({**said, "rollouts": [as_json_value(row) for row in rows]})), exact=True)
        return
    first = (page - 1) * limit + 1
    which = f", {first} to {first + len(rows) - 1} shown" if pages > 1 else ""
    with page_for_terminal(whole_lines=True) as lines:
        lines.print(Text(printable(f"{run}: {len(found)} of {found.total} rollouts{which}"), style="bold"))
        for row in rows:
            lines.print(Text("\n").append_text(block(row, full)))
        if page < pages:
            lines.print(Text(f"\npage {page} of {pages}; next: --page {page + 1}", style="dim"))


def as_json_value(value: Any) -> Any:
    """Returns a value that JSON can hold: text for a number that is not finite ("nan", "inf"), and for types that JSON lacks."""
    if isinstance(value, dict):
        return {str(key): as_json_value(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [as_json_value(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def block(row: dict[str, Any], full: bool) -> Text:
    text = Text()
    text.append(f"step {row['step']}  group {row['group_id']}.{row['sample_index']}", style="bold")
    text.append("  reward ")
    text.append(number_text(row["reward"], ".3g"), style="bold red" if row["reward"] is None else "bold")
    text.append(f"  advantage {number_text(row['advantage'], '+.3g')}")
    text.append("" if row["trained"] else " (not trained)", style="yellow")
    tokens, sampled = len(row["completion_ids"]), sum(row["loss_mask"])
    text.append(f"  {tokens} token{'' if tokens == 1 else 's'}{'' if sampled == tokens else f', {sampled} sampled'}  ")
    text.append(row["finish_reason"], style="yellow" if row["finish_reason"] == "length" else "")
    text.append(f"  gap {number_text(gap(row['sampler_logp'], row['policy_logp']), '.1e')}", style="dim")
    rewards = "  ".join(f"{name} {number_text(value, '.3g')}" for name, value in row["rewards"].items())
    text.append(printable(f"\n  {rewards}") if rewards else "")
    for name, error in row["reward_errors"].items():
        text.append(printable(f"\n  {name} failed: {error}"), style="red")
    own = FIXED | OF_TURNS if has_turns(row) else FIXED
    data = {key: value for key, value in row.items() if key not in own}
    talk = spoken(row["messages"]) if has_turns(row) else {}
    for label, value in {"prompt": row["prompt"], **talk, "completion": row["completion"], **data}.items():
        text.append(f"\n  {printable(label)}", style="cyan")
        text.append(indented(readable(value), full))
    return text


def spoken(messages: list[dict[str, Any]]) -> dict[str, str]:
    """Returns the messages of a conversation without its last turn, by place and role: {"2: tool, not trained on": "4", ...}"""
    shown = {}
    last = end_of_talk(messages)
    for place, message in enumerate(messages, 1):
        if place == last:
            continue
        masked = "" if message["role"] == "assistant" else ", not trained on"
        shown[f"{place}: {message['role']}{masked}"] = text_of_message(message)
    return shown


def indented(value: str, full: bool) -> str:
    """Returns a text below its label, or beside it if it is one short line. A long one loses its middle, unless `full`."""
    lines = [printable(line) for line in (value if full else without_middle(value)).split("\n")]
    if len(lines) == 1 and len(lines[0]) < 60:
        return f"  {lines[0]}"
    return "".join(f"\n    {line}" for line in lines)


def without_middle(text: str) -> str:
    """Returns a text without its middle, if it is long: the question often stands at its end."""
    lines = text.split("\n")
    if len(lines) > LINES:
        text = "\n".join([*lines[:2], f"… ({len(lines) - LINES} lines; --full)", *lines[2 - LINES :]])
    if len(text) > CHARACTERS:
        left = CHARACTERS // 2
        text = f"{text[:left]} … ({len(text) - 2 * left} characters; --full) … {text[-left:]}"
    return text
