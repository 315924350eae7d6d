"""What continuous integration runs after `make test`: slow tests, as many as its time allows.

First come the test files that stand near what the last commits changed, the newest change first, in at most `NEAR` of the time.
Then comes all that is left, in an order that moves on with the hour of the last commit: whatever the landings of a week are, each
file is soon among the first. A test whose time does not come is skipped, and said to be left out.

To run more of them, add to `MARKS` and `OPTIONS`: the tests on real models, say.
"""

import argparse
import ast
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parent.parent
MARKS, OPTIONS = "slow and not timed", ["--slow"]
LAST = 10 * 60  # seconds at the end in which no test is begun, so that those that run can end
NEAR = 0.6  # of the time to begin tests, for what stands near the changes
COMMITS, DAY = 10, 24 * 3600  # the last ones are so many, or those of so many seconds if these are more
PARTS = 5  # no divisor of a day's hours or of a week's: landings at one hour of the day or the week go through all parts


def names_of(path: Path, text: str, known: Mapping[str, str]) -> set[str]:
    """What a file stands for and imports: the paths of tests and scripts, and rooms of `rlgen/`.

    `known` maps the names that modules of tests/ and scripts/ are imported by to their paths.
    """
    found = {str(path)}
    if path.parts[0] == "tests" and len(path.parts) > 2:
        found.add(path.parts[1])  # tests/engines/ tests the room `engines`
    for node in ast.walk(ast.parse(text)):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        if isinstance(node, ast.Constant) and str(node.value).endswith(".py"):  # a program that the test starts
            modules = [Path(str(node.value)).stem]
        for module in modules:
            if module.startswith("rlgen."):
                found.add(module.split(".")[1])
            elif module in known:
                found.add(known[module])
    return found


def graph(files: Mapping[str, str]) -> dict[str, set[str]]:
    """For each test file all that it stands near: its own names, and those of the helpers that it imports, and of theirs.

    `files` maps the paths of tests/ and scripts/ to their texts. `conftest.py` is near to all, so it is left out.
    """
    known = {}
    for path in files:
        parts = Path(path).with_suffix("").parts[1:]
        known |= {".".join(parts): path, parts[-1]: path}
    known.pop("conftest", None)
    direct = {path: names_of(Path(path), text, known) for path, text in files.items()}
    near = {}
    for path in (path for path in files if Path(path).name.startswith("test_")):
        found, new = set(), {path}
        while new:
            found |= new
            new = {name for one in new for name in direct.get(one, ())} - found
        near[path] = found
    return near


def order(near: Mapping[str, set[str]], changed: Sequence[str], hour: int) -> tuple[list[str], list[str]]:
    """(files near what changed, all files), each in the order in which they are run.

    near: of each test file, as `graph` gives it. changed: paths, the newest change first. hour: since the epoch.
    """
    names = [re.sub(r"^rlgen/(\w+).*", r"\1", path) for path in changed]
    ages = {path: min(names.index(name) for name in near[path] & set(names)) for path in near if near[path] & set(names)}
    first, paths = sorted(ages, key=lambda path: (ages[path], path)), sorted(near)
    return first, [path for part in range(PARTS) for path in paths[(hour + part) % PARTS :: PARTS]]


def last_commits(repository: Path) -> tuple[list[str], int, int]:
    """(paths that the last commits changed, newest first; how many commits they are; the hour of the last since the epoch).

    The oldest commit of a shallow clone has no parent there, so it counts and says nothing of what it changed.
    """

    def log(*arguments: str) -> list[str]:
        command = ["git", "-c", "log.showRoot=false", "log", *arguments]
        return subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True).stdout.split("\n")

    now = int(log("-1", "--format=%ct")[0])
    count = max(COMMITS, len(log(f"--since={now - DAY}", "--format=%H")) - 1)
    commits = len(log(f"-{count}", "--format=%H")) - 1
    return list(dict.fromkeys(filter(None, log(f"-{count}", "--name-only", "--format=")))), commits, now // 3600


def run(files: Sequence[str], until: float, folder: Path) -> tuple[bool, dict[str, tuple[int, int, float]]]:
    """Runs the slow tests of `files` that begin before `until`. (whether all passed, what `told` says)."""
    report = folder / f"{until}.xml"
    command = [sys.executable, "-m", "pytest", "-q", f"--until={until}", f"--junitxml={report}", "-o", "junit_family=xunit1"]
    command += ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-m", MARKS, *OPTIONS, *files]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # as `make test` does it
    try:
        code = subprocess.run(command, cwd=ROOT, env=environment, timeout=until + LAST - time.time()).returncode
    except subprocess.TimeoutExpired:
        print(f"FAILED: a test had not ended {LAST / 60:.0f} minutes after the last one was begun", flush=True)
        return False, {}
    return code in (0, 5), told(report)  # 5: none of these files has such a test


def told(report: Path) -> dict[str, tuple[int, int, float]]:
    """What a report of pytest says of each file: tests run, tests left out because the time was up, seconds."""
    found: dict[str, tuple[int, int, float]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        skipped = case.find("skipped")
        late = skipped is not None and "the time is up" in skipped.get("message", "")
        ran, left, seconds = found.get(case.attrib["file"], (0, 0, 0.0))
        found[case.attrib["file"]] = (ran + (not late), left + late, seconds + float(case.attrib["time"]))
    return found


def say(what: str, lines: Iterable[str]) -> None:
    print("\n  ".join([f"ci_slow: {what}", *lines]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=3300, help="when all has ended, at the latest")
    parser.add_argument("--list", action="store_true", help="say what would be run, in its order, and run nothing")
    options = parser.parse_args()
    began, time_to_begin = time.time(), max(0, options.seconds - LAST)
    changed, commits, hour = last_commits(ROOT)
    files = {str(p.relative_to(ROOT)): p.read_text() for room in ("tests", "scripts") for p in (ROOT / room).rglob("*.py")}
    first, rotating = order(graph(files), changed, hour)
    say(f"{len(changed)} files changed in the last commits ({commits} of them), near them", first)
    say(f"all that is left after these, from part {hour % PARTS} of {PARTS}", rotating)
    good, done = True, set[str]()
    with TemporaryDirectory() as folder:
        for some, share in ((first, NEAR), (rotating, 1.0)) if not options.list else ():
            some = [path for path in some if path not in done]
            passed, found = run(some, began + share * time_to_begin, Path(folder)) if some else (True, {})
            good &= passed
            done |= {path for path, (_, left, _) in found.items() if not left}
            say("ran", [f"{path}: {ran} in {seconds:.0f} s" for path, (ran, _, seconds) in found.items() if ran])
            say("left out, the time was up", [f"{path}: {left}" for path, (_, left, _) in found.items() if left])
    sys.exit(not good)


if __name__ == "__main__":
    main()
