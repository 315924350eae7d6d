"""`rlgen recipes warm-start`: a copied demo gets the model that it starts from."""

from pathlib import Path

import pytest
from conftest import RECIPE, read_jsonl

from rlgen.cli.inspect import copy_command, warm_start_command
from rlgen.errors import SetupError, UsageError
from rlgen.setup.attempt import train
from rlgen.setup.reopen import TrainOptions

TINY = "tiny:qwen3"


def test_what_is_refused(recipe_file: Path, tmp_path: Path) -> None:
    path = recipe_file
    with pytest.raises(UsageError, match=r"model\.path tiny:qwen3 is not a folder that can be written; name one with --out"):
        warm_start_command(path, TINY, None, 0.35)
    with pytest.raises(UsageError, match="exists already; name another folder with --out"):
        warm_start_command(path, TINY, tmp_path, 0.35)
    path.write_text(RECIPE.replace("task:sort", "train.jsonl"))
    with pytest.raises(UsageError, match=r"data\.columns\.answer names no column of answers"):
        warm_start_command(path, TINY, tmp_path / "warm", 0.35)


def test_what_is_not_learned_is_not_written(recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlgen.setup import warm

    monkeypatch.setattr(warm, "MOST_STEPS", 5)
    monkeypatch.setattr(warm, "TESTED", 8)
    with pytest.raises(SetupError, match=r"0% of the answers are right after 5 steps, not 90%; lower --accuracy"):
        warm_start_command(recipe_file, TINY, tmp_path / "warm", 0.9)
    assert not (tmp_path / "warm").exists()


def test_answers_of_a_file_are_learned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recipe.yaml"
    rows = "".join(f'{{"say": "{letter}", "reply": "{letter}{letter}"}}\n' for letter in "abcd")
    (tmp_path / "train.jsonl").write_text(rows)
    data = '"train.jsonl", columns: {prompt: say, answer: reply}'
    path.write_text(RECIPE.replace('"task:sort"', data).replace("prompts_per_step: 4", "prompts_per_step: 2"))
    warm_start_command(path, TINY, tmp_path / "warm start", 0.9)
    *_, last = capsys.readouterr().out.splitlines()
    assert (tmp_path / "warm start" / "config.json").is_file()
    assert last.endswith(f"next: rlgen train {path} --set model.path='{tmp_path}/warm start'")


def test_train_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    copy_command("demo-grpo", None)
    with pytest.raises(SetupError, match=rf"there is no folder {tmp_path}/runs/warm/qwen3; .* `rlgen recipes warm-start RECIPE`"):
        train(Path("demo-grpo.yaml"))
    assert [path.name for path in tmp_path.iterdir()] == ["demo-grpo.yaml"]


@pytest.mark.slow
def test_a_copied_demo_runs_where_it_lands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    copy_command("demo-rloo", None)
    warm_start_command(Path("demo-rloo.yaml"), TINY, None, 0.35)
    train(Path("demo-rloo.yaml"), TrainOptions(overrides=["engine={kind: transformers}"], max_steps=3))
    rewards = [record["reward/exact_match/mean"] for record in read_jsonl(tmp_path / "runs/demo-rloo/metrics.jsonl")]
    assert len(rewards) == 3 and min(rewards) > 0.2
