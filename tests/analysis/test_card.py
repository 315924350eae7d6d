"""The model card: what the hub reads, the reward up to the checkpoint, its recipe, versions; and how a command ends."""

import json
from pathlib import Path

from conftest import read_jsonl
from helpers.runs import bare_run, make_run

from rlgen.analysis.card import fenced, model_card, portable
from rlgen.analysis.run import read_run
from rlgen.analysis.summary import ending_of
from rlgen.cli.train import last_lines
from rlgen.recipe import yaml


def rows_of(card: str, section: str) -> list[list[str]]:
    """The cells of a section's table, the head first."""
    text = card.split(f"## {section}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|") and "---" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_rewards_up_to_the_checkpoint(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "mine", steps=25))
    head, *rows = rows_of(model_card(run, 20, "float32"), "Reward")
    assert head == ["steps", "`reward/mean`", "`reward/exact_match/mean`", "`reward/length/mean`", "`completions/mean_tokens`"]
    assert [row[0] for row in rows] == [f"{first} to {first + 1}" for first in range(1, 21, 2)]
    first_two = [record["reward/mean"] for record in run.metrics[:2]]
    assert rows[0][1] == f"{sum(first_two) / 2:.3g}"
    assert [row[0] for row in rows_of(model_card(run, 3, "float32"), "Reward")[1:]] == ["1 to 1", "2 to 2", "3 to 3"]


def test_the_evaluations_up_to_the_checkpoint(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "mine", steps=12))
    head, *rows = rows_of(model_card(run, 8, "float32"), "Evaluation")
    first, last = run.evaluations[0], [row for row in run.evaluations if row["step"] <= 8][-1]
    assert head == ["", "step 0", "step 8"] and [row[0] for row in rows] == ["`eval/reward/mean`", "`eval/completions/truncated`"]
    score, low, high = (last[f"eval/reward/mean{edge}"] for edge in ("", "_low", "_high"))
    assert rows[0][1:] == [f"{first['eval/reward/mean']:.3g}", f"{score:.3g} ({low:.3g} to {high:.3g})"]
    assert rows[1][1:] == ["0.02", "0.02"]
    without = read_run(make_run(tmp_path / "other", evaluates=False))
    assert "## Evaluation" not in model_card(without, 4, "float32")


def test_what_the_hub_reads(tmp_path: Path) -> None:
    hub = {"model": {"path": "Qwen/Qwen3-0.6B"}, "data": {"source": "openai/gsm8k", "chat": False}}
    card = model_card(read_run(make_run(tmp_path / "mine", recipe=hub)), 4, "bfloat16")
    head = yaml.parse(card.split("---\n")[1], "").data
    assert head["base_model"] == "Qwen/Qwen3-0.6B" and head["datasets"] == ["openai/gsm8k"]
    assert (head["library_name"], head["pipeline_tag"]) == ("transformers", "text-generation")
    assert head["tags"] == ["rlgen", "reinforcement-learning", "grpo"]
    assert "`Qwen/Qwen3-0.6B`, trained by rlgen with grpo on `openai/gsm8k`: step 4 of 4, weights in bfloat16." in card
    tiny = model_card(read_run(make_run(tmp_path / "tiny")), 4, "float32")
    assert set(yaml.parse(tiny.split("---\n")[1], "").data) == {"library_name", "pipeline_tag", "tags"}
    pictures = make_run(tmp_path / "pictures", recipe={"data": {"source": "task:colours", "columns": {"images": "images"}}})
    assert "pipeline_tag: image-text-to-text\n" in model_card(read_run(pictures), 4, "float32")


LOCAL = {
    "run": {"dir": "/home/me/runs"},
    "model": {"path": "/home/me/models/base"},
    "data": {"source": "/home/me/train.jsonl"},
    "rewards": [{"use": "/home/me/rewards.py:good"}, {"use": "regex_match", "args": {"pattern": "/a/b"}}],
    "engine": {"kind": "server", "url": "http://10.1.2.3:8000", "transfer_dir": "/home/me/shared"},
}


def test_no_folder_and_no_address_gets_out(tmp_path: Path) -> None:
    card = model_card(read_run(make_run(tmp_path / "mine", recipe=LOCAL)), 4, "float32")
    assert "/home/me" not in card and "10.1.2.3" not in card and "shared" not in card
    recipe = yaml.parse(card.split("```yaml\n")[1].split("```")[0], "").data
    assert (recipe["model"]["path"], recipe["data"]["source"], recipe["run"]["dir"]) == ("base", "train.jsonl", "runs")
    assert [reward["use"] for reward in recipe["rewards"]] == ["rewards.py:good", "regex_match"]
    assert recipe["rewards"][1]["args"] == {"pattern": "/a/b"} and recipe["engine"]["kind"] == "server"
    later = {"eval": {"source": "/home/me/held.jsonl", "rewards": [{"use": "/home/me/r.py:f"}]}}
    assert portable(later) == {"eval": {"source": "held.jsonl", "rewards": [{"use": "r.py:f"}]}}
    assert portable({"cluster": {"kind": "ray", "address": "10.1.2.3:6379"}}) == {"cluster": {"kind": "ray"}}


def test_versions_are_those_of_the_attempt_that_trained_the_step(tmp_path: Path) -> None:
    path = make_run(tmp_path / "mine")
    attempts = [
        {"rlgen": "0.1.0", "from_step": 0, "gpus": ["H200", "H200"], "packages": {"torch": "2.12"}, "command": ["secret"]},
        {"rlgen": "0.2.0", "from_step": 3, "gpus": [], "packages": {"torch": "2.13"}, "directory": "/home/me"},
    ]
    (path / "provenance.json").write_text(json.dumps(attempts))
    run = read_run(path)
    before = rows_of(model_card(run, 3, "float32"), "Provenance")[1:]
    assert before == [["rlgen", "0.1.0"], ["gpus", "H200, H200"], ["torch", "2.12"]]
    card = model_card(run, 4, "float32")
    assert rows_of(card, "Provenance")[1:] == [["rlgen", "0.2.0"], ["torch", "2.13"]]
    assert "secret" not in card and "/home/me" not in card


def test_a_recipe_cannot_end_its_block() -> None:
    text = "a: |\n  ```\n  # not a heading\n  `````\n"
    assert fenced(text) == f"``````yaml\n{text}``````\n"


def with_evaluations(run: Path, **rewards: float | None) -> Path:
    """Adds evaluations after these steps; that of step 0 is a record of its own."""
    found = {int(step.removeprefix("step")): {"eval/reward/mean": reward} for step, reward in rewards.items()}
    records = [{"step": 0}] * (0 in found) + read_jsonl(run / "metrics.jsonl")
    lines = [json.dumps(one | found.get(one["step"], {})) + "\n" for one in records]
    (run / "metrics.jsonl").write_text("".join(lines))
    return run


def test_a_run_that_is_done(tmp_path: Path) -> None:
    run = bare_run(tmp_path / "mine", [step / 40 for step in range(40)])
    with_evaluations(run, step0=0.1, step10=0.7, step20=0.6, step40=0.65)
    for step in (10, 40):
        (run / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
    assert ending_of(read_run(run), 3723.0, "rlgen report mine") == [
        f"done: 40 of 40 steps, 1h02m since the command; {run}",
        "reward: 0.038 in the first 4 steps, 0.938 in the last 4 steps",
        "evaluation: 0.100 before step 1, 0.700 after step 10 (best), 0.650 after step 40",
        f"best checkpoint: {run}/checkpoints/step_000010",
        "next: rlgen report mine",
    ]


def test_a_run_that_was_stopped(tmp_path: Path) -> None:
    run = bare_run(tmp_path / "mine", [0.25, None, 0.5], steps=100)
    (run / "checkpoints" / "step_000003").mkdir(parents=True)
    assert ending_of(read_run(run), 5.0, "rlgen train r.yaml --resume") == [
        f"stopped: 3 of 100 steps, 0:05 since the command; {run}",
        "reward: 0.250 in the first step, 0.500 in the last step",
        f"newest checkpoint: {run}/checkpoints/step_000003",
        "next: rlgen train r.yaml --resume",
    ]


def test_nothing_was_trained(tmp_path: Path) -> None:
    run = bare_run(tmp_path / "mine", [], steps=4)
    assert ending_of(read_run(run), 5.0, "x") == [f"stopped: 0 of 4 steps, 0:05 since the command; {run}", "next: x"]
    with_evaluations(bare_run(tmp_path / "other", [0.5], steps=4), step0=None)
    only = with_evaluations(bare_run(tmp_path / "third", [0.5], steps=1), step1=0.5)
    assert ending_of(read_run(only), 5.0, "x")[2] == "evaluation: 0.500 after step 1 (best)"


def test_a_folder_that_another_command_has_taken_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{")
    for run in (tmp_path / "gone", tmp_path):
        (said,) = last_lines(run, 1.0)
        why = f"perhaps because another command uses it: {run}/resolved.yaml: does not exist"
        assert said.startswith(f"the run has ended; {run} cannot be read now, {why}")
