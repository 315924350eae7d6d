"""`rlgen report`: what stands in the file, and what a browser makes of it."""

import base64
import gzip
import hashlib
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Proof, read_jsonl
from helpers.rollouts import rollout_rows
from helpers.runs import Row, Words, bare_run, make_run, write_rows
from typer.testing import CliRunner

from rlgen.analysis.charts import charts_of
from rlgen.analysis.pack import BYTES, Code, choose, halves, piece, short, tokenizer_of, weights_of
from rlgen.analysis.report import ASSETS, SCRIPTS, island
from rlgen.analysis.run import read_run
from rlgen.analysis.summary import duration, summary_of, verdicts_of
from rlgen.cli.app import app
from rlgen.cli.compare import report_command
from rlgen.errors import UsageError
from rlgen.recipe.trainers import CorrectionRecipe
from rlgen.rollout.samples import Ragged

HOSTILE = (
    "</script><script>document.title='pwned'</script><img src=x onerror=\"document.title='pwned'\">"
    " \x1b[31m \u2028 \u202e &amp; é€"
)


def report(run: Path, *options: str) -> Path:
    done = CliRunner().invoke(app, ["report", str(run), *options])
    assert done.exit_code == 0, (done.output, done.exception)
    return run / "report.html"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps, and a fifth whose rollouts try to be markup, as does the folder's name."""
    folder = tmp_path_factory.mktemp("runs")
    path = make_run(folder / "mine", steps=4).rename(folder / "<b>mine")
    words = Words.of(path / "checkpoints" / "step_000004")
    failed = Row(completion="", reward=None, trained=False, error=f"error: {HOSTILE}")
    write_rows(path, 5, [Row(completion=HOSTILE, answer=HOSTILE, reward=0.5, gap=0.3), failed], 2, words)
    words.save(path / "checkpoints" / "step_000005")
    report(path)
    return path


def parts(page: Path) -> dict[str, str]:
    return dict(re.findall(r'<script type="(?:text/plain|application/json)" id="([\w-]+)">([^<]*)</script>', page.read_text()))


def unpacked(text: str) -> bytes:
    return gzip.decompress(base64.b64decode(text))


@pytest.mark.fault(83)
def test_the_page_asks_for_nothing_and_runs_its_own_script_only(run: Path, proof: Proof) -> None:
    text = (run / "report.html").read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    script, style = re.search(r"<script>(.*)</script>\n</body>", text, re.S), re.search(r"<style>(.*)</style>", text, re.S)
    assert policy and script and style
    for directive, content in {"script-src": script[1], "style-src": style[1]}.items():
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}';" in policy[1]
    assert "default-src 'none'" in policy[1] and "unsafe" not in policy[1]
    assert re.findall(r'(?:src|href)="(?!data:)', text) == [] and "@import" not in text and "url(" not in text
    proof(f"a page of {len(text) >> 10} KiB names no address, and its policy allows none")


@pytest.mark.fault(81)
def test_what_the_model_wrote_is_never_markup(run: Path, proof: Proof) -> None:
    text = (run / "report.html").read_text()
    assert "pwned" not in text and "\u2028" not in text and "<b>mine" not in text and text.isascii() is False
    assert len(re.findall("<script", text)) == len(parts(run / "report.html")) + 1
    texts = json.loads(unpacked(parts(run / "report.html")["texts-0"]))
    assert HOSTILE in texts["completions"] and texts["prompts"][-1]["data"] == {"answer": HOSTILE}
    parses = r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function"
    assert not any(re.search(parses, (ASSETS / name).read_text()) for name in SCRIPTS)
    proof(f"a completion of {len(HOSTILE)} characters of markup is in the page's data, and nowhere in its markup")


def test_numbers_that_a_browser_cannot_read_are_texts(tmp_path: Path) -> None:
    """JSON.parse refuses NaN, and rounds integers of more than 53 bits: in the data set, and in the call of a tool."""
    run = make_run(tmp_path / "mine", steps=1)
    call = {"function": {"name": "add", "arguments": {"a": float("nan"), "b": 2**60 + 1}}}
    talk = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "name": "add", "content": "é"}]
    write_rows(
        run,
        1,
        [Row()],
        1,
        Words.of(run / "checkpoints" / "step_000001"),
        score=[float("nan")],
        id=[2**60 + 1],
        nested=[{"a": [0.5, float("inf")]}],
        messages=[json.dumps(talk)],
        tool_counts=[[]],
    )
    found = json.loads(unpacked(parts(report(run))["texts-0"]), parse_constant=pytest.fail)
    assert found["prompts"][0]["data"] == {
        "answer": "2",
        "score": "NaN",
        "id": "1152921504606846977",
        "nested": '{"a": [0.5, Infinity]}',
    }
    said = '{"name": "add", "arguments": {"a": NaN, "b": 1152921504606846977}}'
    assert [(one["role"], one["name"], one["text"]) for one in found["messages"][0]] == [
        ("assistant", None, said),
        ("tool", "add", "é"),
    ]


def test_an_island_holds_any_text() -> None:
    value = {"a": "</script>\u2028\ud800<!--&", "b": [1.5, None, True]}
    text = island(value)
    assert text.isascii() and not set("<>&") & set(text) and json.loads(text) == value


def test_the_tokens_are_what_was_stored(run: Path) -> None:
    """Every number of every token, decoded as the scripts do it."""
    found = parts(run / "report.html")
    facts, rows = json.loads(found["facts"])["rollouts"], json.loads(unpacked(found["rows"]))
    pieces = json.loads(unpacked(found["pieces"]))
    stored = rollout_rows(run)
    assert facts["count"] == facts["total"] == len(stored) == 66 and facts["chunks"] == [66] and facts["tokenizer"]
    raw = np.frombuffer(unpacked(found["tokens-0"]), np.uint8)
    count = len(raw) // 9
    planes = raw.reshape(9, count)
    ids = np.array(pieces["ids"])[planes[:4].T.copy().view("<u4")[:, 0]]
    engine, delta = (planes[place : place + 2].T.copy().view("<f2")[:, 0].astype(float) / 256 for place in (4, 6))
    flat = {name: np.concatenate([row[name] for row in stored]) for name in ("completion_ids", "sampler_logp", "loss_mask")}
    policy = np.concatenate([row["policy_logp"] or [np.nan] * len(row["completion_ids"]) for row in stored])
    assert (ids == flat["completion_ids"]).all() and (planes[8] & 1 == flat["loss_mask"]).all()
    np.testing.assert_allclose(engine, flat["sampler_logp"], rtol=2.5e-3, atol=1e-9)
    np.testing.assert_allclose(delta, policy - flat["sampler_logp"], rtol=2.5e-3, atol=1e-9)
    assert rows["length"] == [len(row["completion_ids"]) for row in stored]
    assert rows["reward"] == [short(row["reward"]) for row in stored] and rows["reward"][-1] is None
    assert rows["trained"] == [1] * 65 + [0]


def test_halves_are_exact_to_a_four_hundredth() -> None:
    values = np.array([1e-6, 0.3333, -1.2345, 77.7, 0.0, -254.9], np.float32)
    np.testing.assert_allclose(halves(values).astype(float) / 256, values, rtol=2.5e-3)
    odd = halves(np.array([-np.inf, np.nan, 1e9], np.float32))
    assert odd[0] == -np.inf and np.isnan(odd[1]) and odd[2].astype(float) / 256 == 255
    assert (halves(values).view(np.uint16) & 3 == 0).all()


@pytest.mark.parametrize(
    "correction, codes, row",
    [
        ({"mode": "token_truncate", "max": 2.0}, [Code.RATIO, Code.HIGH, Code.RATIO, Code.NONE], None),
        ({"mode": "token_truncate", "min": 0.9, "max": 2.0}, [Code.LOW, Code.HIGH, Code.RATIO, Code.NONE], None),
        ({"mode": "token_mask", "min": 0.9, "max": 2.0}, [Code.ZERO, Code.ZERO, Code.RATIO, Code.NONE], None),
        ({"mode": "sequence_truncate", "max": 2.0}, [Code.ROW] * 3 + [Code.NONE], 2.0),
        ({"mode": "sequence_mask", "max": 2.0}, [Code.ROW] * 3 + [Code.NONE], 0.0),
        ({"mode": "none"}, [Code.ROW] * 3 + [Code.NONE], 1.0),
    ],
    ids=lambda value: value.get("mode") if isinstance(value, dict) else None,
)
def test_weights_are_those_of_the_loss(correction: dict[str, Any], codes: list[Code], row: float | None) -> None:
    """Ratios 0.5, 4 and 1 of the sampled tokens: 2 for the whole completion."""
    beyond = 1.00001 if correction["mode"] == "sequence_mask" else 1.0
    policy = np.log([0.5, 4.0, 1.0, 9.0]).astype(np.float32) * np.float32(beyond)
    offsets = np.array([0, 4, 6])
    sampler = Ragged(np.zeros(6, np.float32), offsets)
    mask = Ragged(np.array([True, True, True, False, True, True]), offsets)
    found, rows = weights_of(CorrectionRecipe(**correction), Ragged(policy, np.array([0, 4, 4])), sampler, mask)
    assert found.tolist() == [*codes, Code.NONE, Code.NONE], "the second row was not trained"
    assert rows.tolist() == pytest.approx([np.nan if row is None else row, np.nan], nan_ok=True)


def test_a_pipe_is_written_to_and_stays_a_pipe(run: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor() as reader:
        read = reader.submit(pipe.read_bytes)
        report(run, "--out", str(pipe))
        assert b"<html" in read.result() and pipe.is_fifo()


def test_a_folder_that_is_not_there_is_said(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^--out: there is no folder .*nonexist; make it, or name another$"):
        report_command(run, tmp_path / "nonexist" / "x.html", png=False, rollouts=10, as_json=False)


def test_a_run_of_many_rollouts_is_thinned_evenly(run: Path) -> None:
    assert choose(run, 10_000)[0] == [1, 2, 3, 4, 5]
    assert choose(run, 50)[0] == [1, 3, 5] and choose(run, 0)[0] == [5]
    assert choose(run, 20) == ([2, 5], 5, 66)


def test_a_report_without_rollouts_or_without_tokens(tmp_path: Path) -> None:
    run = make_run(tmp_path / "mine", steps=1)
    assert json.loads(parts(report(run, "--rollouts", "0"))["facts"])["rollouts"]["count"] == 0
    empty = Row(completion="", finish_reason="length")
    write_rows(run, 1, [empty, empty], 2, Words.of(run / "checkpoints" / "step_000001"))
    page = parts(report(run))
    assert json.loads(page["facts"])["rollouts"]["count"] == 2 and unpacked(page["tokens-0"]) == b""


def test_the_text_of_a_token(run: Path) -> None:
    tokenizer = tokenizer_of(read_run(run))
    assert tokenizer is not None
    vocabulary = tokenizer.get_vocab()
    letter = {byte: one for one, byte in BYTES.items()}
    assert len(BYTES) == 256
    assert piece(tokenizer, vocabulary[letter[32] + "answer"]) == " answer" and piece(tokenizer, 0) == "<|im_end|>"
    euro = "".join(letter[byte] for byte in "€".encode())
    assert piece(tokenizer, vocabulary[euro]) == "€" and piece(tokenizer, 10**6) == "#1000000"


def test_charts_and_numbers_of_a_run(run: Path) -> None:
    made = read_run(run)
    charts = {chart.title: chart for chart in charts_of(made)}
    reward = charts["Reward"].lines[0]
    assert list(reward.values) == [record["reward/mean"] for record in made.metrics]
    third = made.metrics[2]
    assert reward.low is not None and reward.low[2] == pytest.approx(third["reward/mean"] - third["reward/std"])
    evaluated = [title for title, chart in charts.items() if chart.group == "Evaluation"]
    assert evaluated == ["Evaluation: reward", "Evaluation: truncated completions"]
    evaluation = charts["Evaluation: reward"]
    assert (evaluation.group, list(evaluation.x)) == ("Evaluation", [0, 2, 3, 4])
    assert evaluation.lines[0].high == [record["eval/reward/mean_high"] for record in made.evaluations]
    assert [line.label for line in charts["Rewards by name"].lines] == ["exact_match", "length"]
    assert charts["Speed"].lines[0].values[0] == pytest.approx(made.metrics[0]["tokens/generated"] / made.metrics[0]["time/step"])
    facts = {fact.label: fact for fact in summary_of(made, verdicts_of(made))}
    assert facts["Reward, last tenth"].value == f"{made.metrics[-1]['reward/mean']:.3g}"
    low, high = (made.evaluations[-1][f"eval/reward/mean{edge}"] for edge in ("_low", "_high"))
    assert facts["Evaluation, reward"].note.startswith(f"{low:.3g} to {high:.3g} at step 4; ")
    assert facts["Evaluation, reward"].value == f"{made.evaluations[-1]['eval/reward/mean']:.3g}"
    assert [duration(seconds) for seconds in (7.25, 125, 12_000)] == ["7.25 s", "2 min 5 s", "3 h 20 min"]


def test_counts_of_failures_that_stay_0_are_not_drawn(tmp_path: Path) -> None:
    path = make_run(tmp_path / "evaluated", steps=2)
    for failed in (0, 3):
        lines = read_jsonl(path / "metrics.jsonl")
        counts = {"eval/reward/unscored": failed, "eval/reward/exact_match/failed": 0, "eval/pass@1": 0.0}
        found = [line | counts if "eval/reward/mean" in line else line for line in lines]
        (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in found))
        titles = [chart.title for chart in charts_of(read_run(path)) if chart.group == "Evaluation"]
        assert titles[0] == "Evaluation: reward" and "Evaluation: pass@1" in titles and not any("failed" in one for one in titles)
        assert ("Evaluation: completions without a reward" in titles) == (failed > 0)


def test_verdicts_are_those_of_the_rules(tmp_path: Path) -> None:
    health = {"entropy": {"threshold": 0.5, "steps": 2}, "truncated": {"threshold": 0.0, "steps": 1}}
    path = make_run(tmp_path / "ill", steps=8, recipe={"health": health})
    lines = read_jsonl(path / "metrics.jsonl")
    for line in lines:
        line["entropy"] = 0.1 if line["step"] in (3, 4, 5) else 1.0
        line["completions/truncated"] = float(line["step"] == 8)
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 9, "lo')
    verdicts = verdicts_of(read_run(path))
    bad = [(one.name, one.state, list(one.steps)) for one in verdicts[:2]]
    assert bad == [("truncated", "broken", [8]), ("entropy", "was broken", [4, 5])]
    assert {one.state for one in verdicts[2:]} == {"well", "not measured"}
    assert summary_of(read_run(path), verdicts)[2].note == "truncated"


def test_a_run_that_was_killed_is_not_running(tmp_path: Path) -> None:
    """Its status still says so. The lock that the kernel has freed says better."""
    page = report(bare_run(tmp_path / "dead", [0.1] * 3, steps=9, state="running"))
    state = json.loads(parts(page)["facts"])["state"]
    assert (state["name"], state["step"], state["steps"]) == ("killed", 3, 9) and "--resume" in state["message"]


@pytest.mark.fault(83)
def test_the_curves_as_png(run: Path, monkeypatch: pytest.MonkeyPatch, proof: Proof) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    report(run, "--png")
    content = (run / "report.png").read_bytes()
    width = int.from_bytes(content[16:20], "big")
    assert content.startswith(b"\x89PNG") and width == 3 * 4.6 * 150
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    done = CliRunner().invoke(app, ["report", str(run), "--png"])
    assert done.exit_code == 1 and "pip install 'rlgen[report]'" in str(done.exception)
    proof("drawn without a display")
