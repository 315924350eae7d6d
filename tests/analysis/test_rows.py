"""`rlgen rollouts`: which rollouts are found, in which order, and how they are shown."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.rollouts import rollout_rows
from helpers.runs import Row, Words, write_rows
from typer.testing import CliRunner

from rlgen.analysis.rows import Query, Range, find_rollouts, gap
from rlgen.cli.app import app
from rlgen.errors import UsageError

HOSTILE = "\x1b[31mred\x1b]0;title\x07 \u202eturned\u2028line </script><script>alert(1)</script>"
ROWS = {
    1: [
        Row(completion="one", reward=0.25),
        Row(completion="one two", reward=0.75, gap=0.5),
        Row(completion="one two three", reward=None, trained=False, error="timeout: no answer within 30 s"),
        Row(completion="ONE two three four", reward=1.0, finish_reason="length"),
    ],
    2: [Row(prompt="Say one", completion=HOSTILE, reward=0.25), Row(prompt="Say one", completion="five", reward=0.5, answer="5")],
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "mine"
    words = Words()
    for step, rows in ROWS.items():
        write_rows(path, step, rows, 2, words)
    (path / "resolved.yaml").write_text("run: {}\n")
    return path


@pytest.mark.parametrize(
    "query, places",
    [
        (Query(), [(1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 1)]),
        (Query(sort="-step"), [(2, 0), (2, 1), (1, 0), (1, 1), (1, 2), (1, 3)]),
        (Query(steps=Range(2, 9)), [(2, 0), (2, 1)]),
        (Query(newest=True, reward_above=0.25), [(2, 1)]),
        (Query(reward_below=0.5), [(1, 0), (2, 0)]),
        (Query(reward_above=0.25, reward_below=1.0), [(1, 1), (2, 1)]),
        (Query(sort="reward"), [(1, 0), (2, 0), (2, 1), (1, 1), (1, 3), (1, 2)]),
        (Query(sort="-reward"), [(1, 3), (1, 1), (2, 1), (1, 0), (2, 0), (1, 2)]),
        (Query(finish="length"), [(1, 3)]),
        (Query(text="ONE TWO"), [(1, 1), (1, 2), (1, 3)]),
        (Query(text="say"), [(2, 0), (2, 1)]),
        (Query(text=".*"), []),
        (Query(length=Range(3, 4), sort="-length"), [(1, 2), (1, 3), (1, 1)]),
        (Query(steps=Range(2, 7), text="no such words"), []),
    ],
    ids=str,
)
def test_what_is_found(run: Path, query: Query, places: list[tuple[int, int]]) -> None:
    found = find_rollouts(run, query)
    assert list(zip(found.step.tolist(), found.row.tolist(), strict=True)) == places


@pytest.mark.parametrize("text, found", [("ÉTÉ", 1), ('"n": 2', 1), ("role", 0)])
def test_a_conversation_is_searched_as_it_is_read(tmp_path: Path, text: str, found: int) -> None:
    """The file has its messages as JSON, with escapes and names of fields."""
    calls = [{"function": {"name": "add", "arguments": {"n": 2}}}]
    talk = json.dumps([{"role": "assistant", "content": None, "tool_calls": calls}, {"role": "tool", "content": "été"}])
    write_rows(tmp_path, 1, [Row()], 1, Words(), messages=[talk], tool_counts=[[]])
    assert len(find_rollouts(tmp_path, Query(text=text))) == found


def test_the_largest_gap_comes_first(run: Path) -> None:
    found = find_rollouts(run, Query(sort="-gap"))
    assert (found.step[0], found.row[0], found.total) == (1, 1, 6)
    assert gap([-1.0, float("nan"), -2.0], [-1.5, -9.0, -2.25]) == 0.5
    assert gap([-1.0], None) is None


def test_ranges() -> None:
    ends = {"12": (12, 12), "10:20": (10, 20), "10:": (10, np.inf), ":20": (-np.inf, 20), ":": (-np.inf, np.inf)}
    assert {text: Range.of(text, "--step") for text in ends} == {text: Range(*pair) for text, pair in ends.items()}
    for text, said in {"a": "give a number or a range", "1.5": "give a number", "9:3": "the range is empty"}.items():
        with pytest.raises(UsageError, match=f"--length {text}: {said}"):
            Range.of(text, "--length")


def invoke(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["rollouts", *arguments])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


def test_a_page_for_people(run: Path) -> None:
    shown = invoke(str(run), "--sort", "-reward", "--limit", "2", "--page", "2")
    assert shown == (
        f"{run}: 6 of 6 rollouts, 3 to 4 shown\n\n"
        "step 2  group 1.1  reward 0.5  advantage +0.5  2 tokens  stop  gap " + gap_of(run, 2, 1) + "\n"
        "  exact_match 0.5  length -0.00333\n"
        "  prompt  Say one\n  completion  five\n  answer  5\n\n"
        "step 1  group 0.0  reward 0.25  advantage +0.5  2 tokens  stop  gap " + gap_of(run, 1, 0) + "\n"
        "  exact_match 0.25  length -0.00333\n"
        "  prompt  What is 1 + 1?\n  completion  one\n  answer  2\n\n"
        "page 2 of 3; next: --page 3\n"
    )


def gap_of(run: Path, step: int, row: int) -> str:
    values = rollout_rows(run, step)[row]
    value = np.abs(np.subtract(values["sampler_logp"], values["policy_logp"])).max()
    return f"{value:.1e}"


def test_a_reward_that_failed_and_a_row_that_was_not_trained(run: Path) -> None:
    shown = invoke(str(run), "--text", "one two three", "--limit", "1")
    assert "reward –  advantage +0.5 (not trained)  4 tokens" in shown
    assert "\n  exact_match failed: timeout: no answer within 30 s\n" in shown


def test_what_a_model_or_a_person_wrote_gives_the_terminal_no_orders(run: Path, tmp_path: Path) -> None:
    shown = invoke(str(run), "--step", "last", "--reward-below", "0.3")
    assert "\\x1b[31mred\\x1b]0;title\\x07 \\u202eturned\\u2028line </script>" in shown
    assert not set(shown) & {"\x1b", "\x07", "\u202e", "\u2028"}
    odd = shutil.copytree(run, tmp_path / "a\u202e[red]\x1b[31m")
    shown = invoke(str(odd), "--limit", "1")
    assert "a\\u202e[red]\\x1b[31m: 6 of 6 rollouts" in shown and not set(shown) & {"\x1b", "\u202e"}


def test_json_is_one_line_with_every_value(run: Path) -> None:
    output = invoke(str(run), "--step", "1:1", "--sort", "reward", "--limit", "3", "--json")
    got = json.loads(output.splitlines()[-1])
    assert (got["total"], got["matched"], got["page"], got["pages"]) == (4, 4, 1, 2) and len(output.splitlines()) == 1
    first = got["rollouts"][0]
    assert (first["completion"], first["reward"]) == ("one", 0.25)
    assert first["rewards"] == {"exact_match": 0.25, "length": pytest.approx(-1 / 300)}
    assert len(first["completion_ids"]) == len(first["sampler_logp"]) == len(first["policy_logp"]) == 2
    hostile = json.loads(invoke(str(run), "--text", "script", "--json"))["rollouts"]
    assert [row["completion"] for row in hostile] == [HOSTILE]


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--sort", "rewrad"], "--sort rewrad: there is no such order; there are step, reward"),
        (["--page", "9"], "--page 9: 6 rollouts match; the last page of 10 (--limit) is 1"),
        (["--step", "x"], "--step x: give a number or a range"),
        (["--step", "7"], "has rollouts of 2 steps from 1 to 2, but none in this range"),
    ],
)
def test_what_cannot_be_shown(run: Path, arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["rollouts", str(run), *arguments])
    assert isinstance(done.exception, UsageError) and said in str(done.exception) and done.output == ""


def test_a_run_without_rollouts(tmp_path: Path) -> None:
    (tmp_path / "resolved.yaml").write_text("run: {}\n")
    with pytest.raises(UsageError, match="has no rollouts yet"):
        find_rollouts(tmp_path, Query())


def test_nothing_heavy_is_imported(run: Path) -> None:
    code = f"""
import sys
from typer.testing import CliRunner
from rlgen.cli.app import app
assert CliRunner().invoke(app, ["rollouts", "{run}"]).exit_code == 0
print(sorted({{"torch", "transformers", "vllm", "datasets"}} & set(sys.modules)))
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
