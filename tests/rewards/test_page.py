"""The page about rewards: its functions are called by workers as they are written, its recipes load, its commands run."""

import json
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from conftest import RECIPE, ROOT
from scoring import Build, group, opened
from typer.testing import CliRunner

from rlgen.cli.app import app
from rlgen.recipe import load_recipe
from rlgen.recipe.models import RewardRecipe, ScoringRecipe

__all__ = ["opened"]

PAGE = (ROOT / "rlgen" / "docs" / "rewards.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
TEST_OF_USER = "from rewards import"
FUNCTIONS = [text for kind, text in BLOCKS if kind == "python" and TEST_OF_USER not in text]
COLUMNS = {"question": "What is 3*4?", "answer": "12", "language": "en", "reward_model": {"style": "rule", "ground_truth": "32"}}
# What each function gives to "12", "13 please" and "Answer: 32", which are one, two and three tokens long.
GIVEN: dict[str, list[float | None]] = {
    "brevity": [-0.001, -0.002, -0.003],
    "near": [1.0, 0.0, 0.0],
    "right": [0.0, 0.0, 1.0],
    "polite": [0.0, 1.0, 0.0],
    "shortest": [1.0, 0.0, 0.0],
    "correct": [1.0, 0.0, 0.0],
    "judged": [2.0, 9.0, 10.0],
}


class Judge(BaseHTTPRequestHandler):
    """Gives a completion as many points as it has characters."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["prompt"] == "3+4="
        body = json.dumps({"score": len(asked["completion"])}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Keeps quiet."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the functions of the page, data, the package that it names, and a judge."""
    (tmp_path / "rewards.py").write_text("\n\n".join(FUNCTIONS))
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "judging.py").write_text("def clarity(completion): return float(len(completion))\n")
    rows = [{**COLUMNS, "question": f"What is {number}*4?"} for number in range(4)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "recipe.yaml").write_text(with_sections(next(text for kind, text in BLOCKS if kind == "yaml")))
    monkeypatch.syspath_prepend(str(tmp_path))  # workers have this process's path
    monkeypatch.chdir(tmp_path)
    server = HTTPServer(("127.0.0.1", 0), Judge)
    monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield tmp_path
    server.shutdown()
    thread.join()
    server.server_close()


def with_sections(text: str) -> str:
    """A whole recipe with these sections in place of its own."""
    data = {"source": "train.jsonl", "columns": {"prompt": "question", "answer": "answer"}, "chat": True}
    return yaml.safe_dump({**yaml.safe_load(RECIPE), "data": data, **yaml.safe_load(text)})


def test_the_page_has_no_other_blocks() -> None:
    assert [kind for kind, _ in BLOCKS if kind not in ("python", "yaml", "sh")] == []
    assert re.findall(r"^(?:async )?def (\w+)", "\n".join(FUNCTIONS), re.MULTILINE) == list(GIVEN)


def test_the_functions_give_what_they_say(folder: Path, opened: Build) -> None:
    entries: list[dict[str, Any]] = [{"use": f"{folder}/rewards.py:{name}"} for name in GIVEN]
    scorer = opened(entries, set(COLUMNS))
    (scored,) = scorer.score([group("12", "13 please", "Answer: 32", **{**COLUMNS, "answer": "12"})], 1)
    assert {name: [sample.rewards[name] for sample in scored.samples] for name in GIVEN} == GIVEN
    (other,) = scorer.score([group("12", "please", **{**COLUMNS, "language": "de"})], 1)
    assert [sample.rewards["polite"] for sample in other.samples] == [None, None]
    without = [sum(value for name, value in sample.rewards.items() if name != "polite") for sample in other.samples]  # type: ignore[misc]
    assert [sample.reward for sample in other.samples] == without


def test_what_the_recipe_says_of_a_function_reaches_it(folder: Path, opened: Build) -> None:
    recipe = load_recipe(folder / "recipe.yaml").recipe
    scorer = opened([entry.model_dump() for entry in recipe.rewards], set(COLUMNS))
    (scored,) = scorer.score([group("12.4", "12", **COLUMNS)], 1)
    assert [dict(sample.rewards) for sample in scored.samples] == [
        {"exact_match": 0.0, "brevity": -0.001, "near": 1.0, "clarity": 4.0},
        {"exact_match": 1.0, "brevity": -0.002, "near": 1.0, "clarity": 2.0},
    ]
    assert [sample.reward for sample in scored.samples] == [pytest.approx(0.9999), pytest.approx(1.9998)]
    (far,) = scorer.score([group("12.6", **COLUMNS)], 1)
    assert far.samples[0].rewards["near"] == 0.0  # further than the recipe's tolerance, not than the function's


def test_the_other_recipe_loads_and_its_defaults_are_those_of_the_page(folder: Path) -> None:
    _, text = [block for block in BLOCKS if block[0] == "yaml"]
    path = folder / "other.yaml"
    path.write_text(with_sections(text[1]))
    assert load_recipe(path).recipe.rewards[0].use == f"{folder}/rewards.py:judged"
    entry, scoring = RewardRecipe(use="exact_match"), ScoringRecipe()
    assert (entry.timeout, entry.max_error_fraction, entry.on_error, entry.weight) == (30, 0.05, "fail", 1)
    assert (scoring.memory_gib, scoring.import_timeout, scoring.workers) == (4, 60, None)


def test_the_commands_run(folder: Path) -> None:
    (script,) = (text for kind, text in BLOCKS if kind == "sh")
    for line in script.splitlines():
        result = CliRunner().invoke(app, line.split()[1:])
        assert result.exit_code == 0, (line, result.output, result.exception)


def test_the_users_test_passes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (test,) = (text for kind, text in BLOCKS if kind == "python" and TEST_OF_USER in text)
    rewards = ModuleType("rewards")
    exec((folder / "rewards.py").read_text(), vars(rewards))
    monkeypatch.setitem(sys.modules, "rewards", rewards)
    names: dict[str, Any] = {}
    exec(test, names)
    names["test_rewards"]()
