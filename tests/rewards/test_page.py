"""The pages about rewards and judges: functions are called by workers as they are written, recipes load, commands run."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from aiohttp import web
from conftest import RECIPE, ROOT
from helpers.judge_server import serving
from helpers.scoring import Build, group
from helpers.web_app import serving_route
from typer.testing import CliRunner

from rlgen.cli.app import app
from rlgen.cli.validate import validate_command
from rlgen.recipe import load_recipe
from rlgen.recipe.models import RewardRecipe, ScoringRecipe

REWARDS, JUDGES = (
    re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / "rlgen" / "docs" / page).read_text(), re.MULTILINE | re.DOTALL)
    for page in ("rewards.md", "judges.md")
)
TEST_OF_USER = "from rewards import"
FUNCTIONS = [text for kind, text in REWARDS if kind == "python" and TEST_OF_USER not in text]
JUDGED = [text for kind, text in JUDGES if kind == "yaml"]
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


async def judged(request: web.Request) -> web.Response:
    """Gives a completion as many points as it has characters."""
    asked = await request.json()
    assert asked["prompt"] == "3+4="
    return web.json_response({"score": len(asked["completion"])})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the functions of the page, data, what the recipes name, and a judge."""
    (tmp_path / "rewards.py").write_text("\n\n".join(FUNCTIONS))
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "judging.py").write_text("def clarity(completion): return float(len(completion))\n")
    rows = [{**COLUMNS, "question": f"What is {number}*4?"} for number in range(4)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "scores").mkdir()
    config = '{"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}'
    (tmp_path / "scores" / "config.json").write_text(config)
    (tmp_path / "recipe.yaml").write_text(with_sections(next(text for kind, text in REWARDS if kind == "yaml")))
    monkeypatch.syspath_prepend(str(tmp_path))  # workers have this process's path
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JUDGE_API_KEY", "not-a-real-key")
    with serving_route("POST", "/", judged) as port:
        monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{port}")
        yield tmp_path


def with_sections(text: str) -> str:
    """A whole recipe with these sections in place of its own."""
    data = {"source": "train.jsonl", "columns": {"prompt": "question", "answer": "answer"}, "chat": True}
    return yaml.safe_dump({**yaml.safe_load(RECIPE), "data": data, **yaml.safe_load(text)})


def run_commands(blocks: list[tuple[str, str]]) -> None:
    (script,) = (text for kind, text in blocks if kind == "sh")
    for line in script.splitlines():
        result = CliRunner().invoke(app, line.split()[1:])
        assert result.exit_code == 0, (line, result.output, result.exception)


def test_the_page_has_no_other_blocks() -> None:
    assert [kind for kind, _ in REWARDS if kind not in ("python", "yaml", "sh")] == []
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


def test_the_other_recipes_are_valid_and_defaults_are_those_of_the_page(folder: Path) -> None:
    _, text = [text for kind, text in REWARDS if kind == "yaml"]
    (folder / "other.yaml").write_text(with_sections(text))
    assert load_recipe(folder / "other.yaml").recipe.rewards[0].use == f"{folder}/rewards.py:judged"
    entry, scoring = RewardRecipe(use="exact_match"), ScoringRecipe()
    assert (entry.timeout, entry.max_error_fraction, entry.on_error, entry.weight) == (30, 0.05, "fail", 1)
    assert (scoring.memory_gib, scoring.import_timeout, scoring.workers) == (4, 60, None)
    assert len(JUDGED) == 3  # of a reward model, of a judge, and of preferences
    for judged_by in JUDGED:
        (folder / "other.yaml").write_text(yaml.safe_dump({**yaml.safe_load(RECIPE), **yaml.safe_load(judged_by)}))
        validate_command(folder / "other.yaml", [], False, 0)


def test_the_commands_run(folder: Path) -> None:
    run_commands(REWARDS)
    with serving(lambda question: f'{{"why": "It sorts.", "score": {1 + len(question) % 5}}}') as server:
        part = yaml.safe_load(JUDGED[1])
        part["rewards"][0]["args"]["url"] = server.url
        (folder / "recipe.yaml").write_text(yaml.safe_dump({**yaml.safe_load(RECIPE), **part}))
        run_commands(JUDGES)
    assert len(server.questions) == 4 and server.keys[0] == "Bearer not-a-real-key"
    assert server.questions[0].startswith("A pupil was asked: ") and '{"why": "a sentence"' in server.questions[0]


def test_the_users_test_passes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (test,) = (text for kind, text in REWARDS if kind == "python" and TEST_OF_USER in text)
    rewards = ModuleType("rewards")
    exec((folder / "rewards.py").read_text(), vars(rewards))
    monkeypatch.setitem(sys.modules, "rewards", rewards)
    names: dict[str, Any] = {}
    exec(test, names)
    names["test_rewards"]()
