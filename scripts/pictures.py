"""`make pictures`: those of rlgen/docs/look.md and watch.md, of runs that are trained for them, in a few minutes on two cores.

A tiny model learns to reverse words, with GRPO and RLOO, two seeds each, evaluated every ten steps. Their report and their
comparison are opened in chromium without a window (Debian: apt-get install chromium chromium-driver). Runs that are in
runs/pictures/ already are not trained again.
"""

import base64
import subprocess
import sys
from pathlib import Path

from helpers.browser import browser, open_page
from live_picture import draw

from rlgen.metrics import Metric

ROOT = Path(__file__).parent.parent
RUNS, OUT = ROOT / "runs" / "pictures", ROOT / "rlgen" / "docs" / "pictures"
STEPS, SEEDS, TRAINERS = 50, (0, 1), ("grpo", "rloo")
WIDTH, HEIGHT = 1280, 1000  # of a picture
MOST = 200_000  # bytes of one


def rlgen(*words: object) -> None:
    """Runs a command of rlgen."""
    subprocess.run([sys.executable, "-m", "rlgen", *map(str, words)], check=True, cwd=ROOT)


def train() -> None:
    """Trains the runs that are not there yet."""
    warm = RUNS / "warm"
    if not warm.exists():
        rlgen("recipes", "warm-start", "recipes/demo-grpo.yaml", "--out", warm)
    places = {f"{trainer}-{seed}": (trainer, seed) for trainer in TRAINERS for seed in SEEDS}
    for name, (trainer, seed) in places.items():
        if not (RUNS / name).exists():
            settings = {"run.dir": RUNS, "run.name": name, "run.seed": seed, "run.steps": STEPS, "model.path": warm}
            settings |= {"engine": "{kind: transformers}", "eval": "{every: 10, limit: 100}"}
            rlgen("train", f"recipes/demo-{trainer}.yaml", *(f"--set={key}={value}" for key, value in settings.items()))


def report(out: Path) -> None:
    """Takes the picture of a report: its head and its first curves."""
    page = RUNS / "report.html"
    rlgen("report", RUNS / "grpo-0", "--out", page)
    shoot(page, out)


def comparison(out: Path) -> None:
    """Takes the picture of a comparison: verdict, differences, and the curve with its bands."""
    page = RUNS / "comparison.html"
    names = [RUNS / f"{trainer}-{seed}" for trainer in TRAINERS for seed in SEEDS]
    rlgen("compare", *names, "--html", "--metric", Metric.EVAL_REWARD_MEAN, "--out", page)
    shoot(page, out)


def live(out: Path) -> None:
    """Draws the live view of a run at its last step."""
    draw(RUNS / "grpo-0", out)
    print(f"{out} written")


def shoot(page: Path, out: Path) -> None:
    """Writes what a browser shows of the top of a page. Ends with an error if the file is too large for the documentation."""
    with browser(WIDTH, HEIGHT) as driver:
        open_page(driver, page)
        out.write_bytes(base64.b64decode(driver.get_screenshot_as_base64()))
    size = out.stat().st_size
    if size > MOST:
        raise SystemExit(f"{out} has {size:,} bytes, more than {MOST:,}: lower WIDTH or HEIGHT")
    print(f"{out} written, {size:,} bytes")


# What makes each picture, by its file; called with the file to write.
PICTURES = {"report.png": report, "comparison.png": comparison, "live.svg": live}


def main() -> None:
    train()
    OUT.mkdir(exist_ok=True)
    for name, take in PICTURES.items():
        take(OUT / name)


if __name__ == "__main__":
    main()
