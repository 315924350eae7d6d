"""`rlgen report`: what stands in the file, and what a browser makes of it."""

import base64
import gzip
import hashlib
import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Proof, read_jsonl
from helpers.browser import browser, console, needs_browser, open_page, requests, texts_of, wait
from helpers.rollouts import rollout_rows
from helpers.runs import Row, Words, bare_run, make_run, write_rows
from selenium.webdriver import Chrome
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


@pytest.fixture(scope="module")
def driver(run: Path) -> Iterator[Chrome]:
    with browser() as opened:
        yield opened


def put(driver: Chrome, name: str, value: str, event: str = "input") -> None:
    """Changes a control as a person does, and waits for the list."""
    driver.execute_script(
        "const e = find(arguments[0]); e.value = arguments[1]; e.dispatchEvent(new Event(arguments[2]))", name, value, event
    )


@needs_browser
def test_a_browser_shows_it(run: Path, driver: Chrome) -> None:
    """Opens the report, filters, clicks a bar and a curve, and reads a completion token by token. No error, no request."""
    requests(driver)
    open_page(driver, run / "report.html", "document.body.dataset.texts === 'ready'")
    assert texts_of(driver, "h1")[0].startswith("<b>mine") and driver.title.startswith("<b>mine")
    assert texts_of(driver, "#count")[0] == "66 of 66"
    put(driver, "reward-low", "0.5")
    stored = rollout_rows(run)
    high = [row for row in stored if row["reward"] is not None and row["reward"] >= 0.5]
    assert texts_of(driver, "#count")[0] == f"{len(high)} of 66"
    driver.execute_script("find('all').click()")
    put(driver, "text", "PWNED")
    wait(driver, "find('count').textContent === '2 of 66'")
    driver.execute_script("find('all').click()")
    driver.execute_script(
        "const full = (bar) => bar.querySelector('.fill').getAttribute('height') > 2;"
        "[...document.querySelectorAll('.bar')].find(full).dispatchEvent(new Event('click'))"
    )
    low = driver.execute_script("return [find('reward-low').value, find('reward-high').value, find('count').dataset.count]")
    inside = [row for row in stored if row["reward"] is not None and float(low[0]) <= short(row["reward"]) <= float(low[1])]
    assert int(low[2]) == len(inside) > 0
    driver.execute_script("find('all').click()")
    plot = "document.querySelector('figure[data-title=Reward] svg')"
    driver.execute_script(
        f"const box = {plot}.getBoundingClientRect(); {plot}.dispatchEvent(new MouseEvent('click', {{clientX: box.right - 12}}))"
    )
    assert (texts_of(driver, "#count")[0], driver.execute_script("return find('step-low').value")) == ("16 of 66", "4")
    driver.execute_script("find('all').click()")
    put(driver, "step-low", "5")
    driver.execute_script("document.querySelector('#list li').click()")
    wait(driver, "document.body.dataset.chosen === '5.4.0'")
    row = stored[-2]
    assert row["completion"] == HOSTILE
    shown = texts_of(driver, "pre.completion")[0]
    assert shown == HOSTILE.replace("\x1b", "\\x1b").replace("\u2028", "\\u2028").replace("\u202e", "\\u202e")
    tokens = texts_of(driver, ".tokens span")
    assert len(tokens) == len(row["completion_ids"]) and "".join(tokens[:-1]) == shown and tokens[-1] == "<|im_end|>"
    driver.execute_script("document.querySelectorAll('.tokens span')[2].click()")
    values = driver.execute_script(
        "const value = (one) => [one.dataset.quantity, Number(one.querySelector('dd').textContent)];"
        "return Object.fromEntries([...document.querySelectorAll('[data-quantity]')].map(value))"
    )
    engine, trainer = row["sampler_logp"][2], row["policy_logp"][2]
    ratio = np.exp(trainer - engine)
    expected = {"engine": engine, "trainer": trainer, "difference": trainer - engine, "ratio": ratio}
    expected |= {"mask": 1, "advantage": 0.5, "weight": min(ratio, 2.0)}
    assert {name: pytest.approx(value, rel=1e-2) for name, value in expected.items()} == values
    assert driver.title.startswith("<b>mine") and console(driver) == [] and requests(driver) == []


@needs_browser
def test_the_pane_shows_a_rollout_of_the_list(run: Path, driver: Chrome) -> None:
    open_page(driver, run / "report.html", "document.body.dataset.texts === 'ready'")
    for step in ("4", "2"):
        for end in ("low", "high"):
            put(driver, f"step-{end}", "")
        put(driver, "step-low", step)
        put(driver, "step-high", step)
        wait(driver, f"document.body.dataset.chosen.startsWith('{step}.')")
        assert texts_of(driver, "#detail h3")[0].startswith(f"Step {step},")
    driver.execute_script("find('all').click()")


@needs_browser
def test_labels_of_an_axis_differ_and_what_rounding_moves_is_flat(run: Path, driver: Chrome) -> None:
    open_page(driver, run / "report.html")
    labels = "return labelled(arguments[0]).map(([, label]) => label)"
    assert driver.execute_script(labels, [1.0, 1.0005, 1.001]) == ["1", "1.0005", "1.001"]
    chart = "new Chart({title: '', x: [1, 2], lines: [{label: '', values: arguments[0]}]}, {weight: 0, point() {}}).range()"
    low, high = driver.execute_script(f"return {chart}", [1.0, 1.0 + 1e-7])
    assert (low, high) == pytest.approx((0.888, 1.112), abs=1e-3)
    ticks = "[...plot.querySelectorAll('.grid + .tick')].map((one) => one.textContent)"
    axes = f"return [...document.querySelectorAll('.plot')].map((plot) => {ticks})"
    drawn = [texts for texts in driver.execute_script(axes) if texts]
    assert len(drawn) > 10 and all(len({*texts}) == len(texts) for texts in drawn)


@needs_browser
def test_a_value_between_gaps_is_a_dot(run: Path, driver: Chrome) -> None:
    open_page(driver, run / "report.html")
    chart = "new Chart({title: '', x: [1, 2, 3, 4], lines: []}, {weight: 0, point() {}})"
    draw = f"const chart = {chart}; chart.x = (x) => x; chart.y = (y) => y; return chart.line(arguments[0], '').getAttribute('d')"
    assert driver.execute_script(draw, [5, None, 6, 7]) == "M1.0 5.0h0M3.0 6.0h0L4.0 7.0"


@needs_browser
def test_a_narrower_window_cuts_no_bar_and_no_curve(run: Path) -> None:
    with browser() as driver:
        open_page(driver, run / "report.html")
        metrics = {"width": 500, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        cut = (
            "[...document.querySelectorAll('.plot, .histogram')].filter((one) => one.clientWidth"
            " && one.getBoundingClientRect().right > one.closest('.card').getBoundingClientRect().right).length"
        )
        wait(driver, f"{cut} === 0")
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
        assert driver.execute_script(f"return {cut}") == 0
        headings = "return [...document.querySelectorAll('h2, h3')].map((one) => getComputedStyle(one).breakAfter)"
        assert {*driver.execute_script(headings)} == {"avoid"}


@needs_browser
@pytest.mark.parametrize("width, dark", [(1280, False), (768, True), (375, False)])
def test_it_fits_the_screen(run: Path, width: int, dark: bool) -> None:
    with browser(width=width, dark=dark) as driver:
        open_page(driver, run / "report.html")
        assert driver.execute_script("return document.documentElement.scrollWidth") == width
        assert driver.execute_script("return document.querySelector('nav').clientHeight") < 56  # covers no heading
        ground = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert ground == ("rgb(17, 21, 27)" if dark else "rgb(246, 247, 249)")
        empty = "(plot) => !plot.closest('details') && !plot.querySelector('path, circle')"
        plots = f"return [...document.querySelectorAll('.plot')].filter({empty}).length"
        assert driver.execute_script(plots) == 0 and console(driver) == []


@needs_browser
@pytest.mark.slow
def test_ten_thousand_rollouts(tmp_path: Path) -> None:
    """Random words, which compress worse than any model's. Seconds of a core: on a busy host a browser waits."""
    path = make_run(tmp_path / "large", steps=1)
    rng, words = np.random.default_rng(0), Words()
    letters = np.array(list("etaoinshrdlucmfw"))
    vocabulary = np.array(["".join(rng.choice(letters, size=size)) for size in rng.integers(2, 9, 20_000)])
    chance = 1 / np.arange(1, len(vocabulary) + 1) ** 0.9
    for step in range(1, 51):
        texts = vocabulary[rng.choice(len(vocabulary), (200, 199), p=chance / chance.sum())]
        rows = [
            Row(prompt=f"Question {number // 8} {' '.join(text[:50])}", completion=" ".join(text), reward=float(rng.normal()))
            for number, text in enumerate(texts)
        ]
        write_rows(path, step, rows, 8, words)
    words.save(path / "checkpoints" / "step_000001")
    page = report(path)
    assert page.stat().st_size < 20e6
    with browser() as driver:
        driver.execute_cdp_cmd("Performance.enable", {})
        driver.get("about:blank")
        requests(driver)
        before = seconds(driver)
        open_page(driver, page)
        opened = seconds(driver) - before
        assert texts_of(driver, "#count")[0] == "10,000 of 10,000"
        wait(driver, "document.body.dataset.texts === 'ready'")
        before = seconds(driver)
        put(driver, "reward-low", "0")
        first = seconds(driver) - before
        assert 4500 < int(driver.execute_script("return find('count').dataset.count")) < 5500
        before = seconds(driver)
        put(driver, "text", "eta")
        searched = seconds(driver) - before
        assert console(driver) == [] and requests(driver) == []
    print(f"{page.stat().st_size / 1e6:.1f} MB, opened in {opened:.2f} s, first filter {first:.3f} s, text {searched:.3f} s")
    assert opened < 2 and first < 0.3 and searched < 0.3


def seconds(driver: Chrome) -> float:
    """Time of a core that the page has taken."""
    found = driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    return next(float(metric["value"]) for metric in found if metric["name"] == "ThreadTime")
