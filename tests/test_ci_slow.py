"""Which slow tests continuous integration runs, and that a file comes soon whatever the landings are."""

import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ci_slow
import conftest
import pytest
from conftest import ROOT
from helpers.slow import slow_but
from helpers.waiting import HANGS

FILES = {
    "tests/conftest.py": "from rlgen.engines.base import Engine\n",
    "tests/helpers/tiny.py": "import rlgen.models.tiny\n",
    "tests/engines/test_sleep.py": "from conftest import ROOT\n",
    "tests/losses/test_kl.py": "from rlgen.losses import kl\nfrom rlgen.errors import Fault\n",
    "tests/test_speed.py": "import time\nfrom helpers.tiny import build\n\ndef test():\n    from bench import rows\n",
    "scripts/bench.py": "import json\n",
}


def test_a_test_stands_near_its_room_and_what_it_imports() -> None:
    assert ci_slow.graph(FILES) == {
        "tests/engines/test_sleep.py": {"tests/engines/test_sleep.py", "engines"},
        "tests/losses/test_kl.py": {"tests/losses/test_kl.py", "losses", "errors"},
        "tests/test_speed.py": {"tests/test_speed.py", "tests/helpers/tiny.py", "helpers", "models", "scripts/bench.py"},
    }


@pytest.mark.parametrize(
    ("changed", "first"),
    [
        (["README.md", "rlgen/docs/lora.md", "tests/conftest.py"], []),
        (["rlgen/models/tiny.py"], ["tests/test_speed.py"]),
        (["rlgen/errors.py", "rlgen/engines/plan.py"], ["tests/losses/test_kl.py", "tests/engines/test_sleep.py"]),
        (["rlgen/engines/plan.py", "rlgen/errors.py"], ["tests/engines/test_sleep.py", "tests/losses/test_kl.py"]),
        (["scripts/bench.py", "tests/losses/test_kl.py"], ["tests/test_speed.py", "tests/losses/test_kl.py"]),
    ],
)
def test_what_is_near_the_newest_change_comes_first(changed: list[str], first: list[str]) -> None:
    assert ci_slow.order(ci_slow.graph(FILES), changed, 0)[0] == first


def test_every_file_is_in_the_order_once_and_soon_among_the_first_whenever_the_landings_are() -> None:
    near: dict[str, set[str]] = {f"tests/test_{index:02}.py": set() for index in range(23)}
    for hours in (1, 24, 7 * 24):  # between two landings
        seen = set()
        for landing in range(ci_slow.PARTS):
            _, rotating = ci_slow.order(near, [], 400_000 + landing * hours)
            assert sorted(rotating) == sorted(near)
            seen |= set(rotating[:5])
        assert seen == set(near)


def test_the_files_of_this_repository_have_tests_near_every_room() -> None:
    files = {str(p.relative_to(ROOT)): p.read_text() for folder in ("tests", "scripts") for p in (ROOT / folder).rglob("*.py")}
    near = ci_slow.graph(files)
    assert "tests/run/killed.py" in near["tests/run/test_resume.py"] and "cli" in near["tests/trainers/test_runs.py"]
    rooms = {path.relative_to(ROOT / "rlgen").parts[0].removesuffix(".py") for path in (ROOT / "rlgen").rglob("*.py")}
    assert {room for room in rooms if not room.startswith("__")} <= set().union(*near.values())


def test_the_last_commits_of_a_whole_and_of_a_shallow_clone(tmp_path: Path) -> None:
    def git(folder: Path, *arguments: str, day: int = 0) -> None:
        who = {f"GIT_{one}_{what}": "x" for one in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        dates = {f"GIT_{one}_DATE": f"{1_700_000_000 + day * 86_400} +0000" for one in ("AUTHOR", "COMMITTER")}
        subprocess.run(
            ["git", *arguments], cwd=folder, env={"PATH": "/usr/bin:/bin", **who, **dates}, check=True, capture_output=True
        )

    whole = tmp_path / "whole"
    whole.mkdir()
    git(whole, "init")
    for commit in range(14):
        (whole / f"{commit}.py").write_text("x")
        git(whole, "add", ".")
        git(whole, "commit", "-m", "x", day=max(0, commit - 1))  # the first two on one day, the others on a day each
    hour = (1_700_000_000 + 12 * 86_400) // 3600
    assert ci_slow.last_commits(whole) == ([f"{commit}.py" for commit in range(13, 3, -1)], 10, hour)
    git(tmp_path, "clone", "--depth", "3", whole.as_uri(), "shallow")
    assert ci_slow.last_commits(tmp_path / "shallow") == (["13.py", "12.py"], 3, hour)  # what 11 changed is not in the clone
    for _ in range(14):
        git(whole, "commit", "--allow-empty", "-m", "x", day=13)
    assert ci_slow.last_commits(whole)[1] == 15  # 14 on the last day, and the one just a day before the last


def test_no_test_begins_when_the_time_is_up() -> None:
    def item(until: float | None) -> Any:
        return SimpleNamespace(config=SimpleNamespace(getoption={"until": until}.__getitem__))

    conftest.pytest_runtest_setup(item(None))
    conftest.pytest_runtest_setup(item(time.time() + 100))
    with pytest.raises(pytest.skip.Exception, match="the time is up"):
        conftest.pytest_runtest_setup(item(time.time() - 1))


def test_what_was_run_and_left_out_is_read_from_the_report(tmp_path: Path) -> None:
    case = '<testcase classname="c" name="n" file="tests/{}.py" time="{}">{}</testcase>'
    late, other = '<skipped message="the time is up"/>', '<skipped message="no CUDA device"/>'
    cases = [("a", 1.5, ""), ("a", 2, "<failure/>"), ("a", 0, late), ("b", 0, late), ("c", 0.25, other)]
    (tmp_path / "r.xml").write_text(
        f"<testsuites><testsuite>{''.join(case.format(*one) for one in cases)}</testsuite></testsuites>"
    )
    found = {"tests/a.py": (2, 1, 3.5), "tests/b.py": (0, 1, 0.0), "tests/c.py": (1, 0, 0.25)}
    assert ci_slow.told(tmp_path / "r.xml") == found


@pytest.mark.parametrize("passes", slow_but([True, False], False))
def test_a_slow_test_that_fails_fails_all_and_timed_ones_are_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passes: bool
) -> None:
    options = (
        "def pytest_addoption(parser):\n    parser.addoption('--slow', action='store_true')\n    parser.addoption('--until')\n"
    )
    (tmp_path / "conftest.py").write_text(options)
    (tmp_path / "test_it.py").write_text(
        f"import pytest\n@pytest.mark.slow\ndef test_a():\n    assert {passes}\n"
        "@pytest.mark.slow\n@pytest.mark.timed\ndef test_b():\n    assert 0\ndef test_c():\n    assert 0\n"
    )
    monkeypatch.setattr(ci_slow, "ROOT", tmp_path)
    passed, found = ci_slow.run(["test_it.py"], time.time() + HANGS, tmp_path)
    assert passed is passes and [(path, ran, left) for path, (ran, left, _) in found.items()] == [("test_it.py", 1, 0)]
