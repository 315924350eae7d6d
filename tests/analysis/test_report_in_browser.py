"""What a browser makes of the page of `rlgen report`."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers.browser import browser, console, needs_browser, open_page, requests, texts_of, wait
from helpers.rollouts import rollout_rows
from helpers.runs import Row, Words, make_run, write_rows
from selenium.webdriver import Chrome
from test_report import HOSTILE, report, run

from rlgen.analysis.pack import short

__all__ = ["run"]  # a fixture


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
