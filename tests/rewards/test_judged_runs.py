"""Whole runs whose rewards ask a model, and what `validate`, `rewards test` and the recipe say of such rewards."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import read_jsonl
from helpers.judge_server import JudgeServer, lines_of, serving
from helpers.recipes import problems
from helpers.reward_model import make_reward_model
from helpers.rollouts import rollout_rows
from helpers.waiting import HANGS
from typer.testing import CliRunner

from rlgen.cli.app import app
from rlgen.cli.train import train_command
from rlgen.cli.validate import validate_command
from rlgen.errors import RecipeError, UsageError
from rlgen.files import read_json
from rlgen.recipe import load_recipe
from rlgen.recipe.judges import RewardModelArgs
from rlgen.rewards.reward_model import RewardModel

SMALL = ("engine={kind: transformers}", "run.steps=2", "rollout={prompts_per_step: 2, group_size: 2, max_completion_tokens: 6}")
STEPS = "checkpoint={every: 1, keep: 1}"


def rating(question: str) -> str:
    """A score that depends on every character of the answer."""
    return f"Score: {sum(question.rpartition('Answer:')[2].encode()) % 101 / 10}"


def comparing(question: str) -> str:
    """The greater text is better."""
    _, _, rest = question.partition("Answer A:\n")
    first, _, second = rest.partition("\n\nAnswer B:\n")
    second = second.removesuffix("\n")
    return "[[C]]" if first == second else "[[A]]" if first > second else "[[B]]"


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with serving(rating) as judge:
        yield judge


def run(recipe: Path, name: str, *overrides: str, resume: bool = False) -> Path:
    train_command(recipe, [*SMALL, *overrides], resume, False, None, recipe.parent / name)
    return recipe.parent / name


def entry(server: JudgeServer, **further: str) -> str:
    more = "".join(f", {name}: {value}" for name, value in further.items())
    return f"{{use: judge, timeout: 60.0, args: {{url: '{server.url}', model: m{more}}}}}"


@pytest.mark.slow
def test_a_run_with_a_judge_killed_in_the_middle_and_resumed_asks_nothing_twice(recipe_file: Path, server: JudgeServer) -> None:
    """Killed while a step is scored: what was answered is in the run's folder, and the resumed run has the same rewards."""
    whole = run(recipe_file, "whole", f"rewards=[{entry(server)}]", STEPS)
    asked = len(server.questions)
    assert asked == len(set(server.questions)) and len(lines_of(whole / "judge" / "judge@0.jsonl")) == asked
    rows = rollout_rows(whole)
    assert [row["reward"] for row in rows] == [
        float(rating(question).removeprefix("Score: ")) for question in (f"Answer:\n{row['completion']}\n" for row in rows)
    ]
    # The same run again, killed by the judge when it is asked for the third time in the second step.
    server.bodies.clear()
    command = [sys.executable, "-m", "rlgen", "train", str(recipe_file), "--run-dir", str(recipe_file.parent / "killed")]
    options = [word for one in (f"rewards=[{entry(server, concurrency='1')}]", STEPS, *SMALL) for word in ("--set", one)]
    first_step = len({(row["prompt"], row["completion"]) for row in rows if row["step"] == 1})
    process = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def kill_later(question: str) -> str:
        if len(server.bodies) == first_step + 2:
            asking = psutil.Process(process.pid).children(recursive=True)
            os.kill(process.pid, signal.SIGKILL)
            psutil.wait_procs(asking, HANGS)  # the worker too, which waits for this answer: it ends without it
        return rating(question)

    server.answer = kill_later
    assert process.wait(HANGS) == -signal.SIGKILL
    known = {line["request"] for line in lines_of(recipe_file.parent / "killed" / "judge" / "judge@0.jsonl")}
    assert len(known) == first_step + 1 < asked
    before, server.answer = len(server.questions), rating
    resumed = run(recipe_file, "killed", f"rewards=[{entry(server, concurrency='1')}]", STEPS, resume=True)
    again = rollout_rows(resumed)
    assert [(row["completion"], row["reward"]) for row in again] == [(row["completion"], row["reward"]) for row in rows]
    assert len(server.questions) - before == asked - len(known), "only what it had not been told"


@pytest.mark.slow
def test_online_dpo_learns_from_the_pairs_that_a_judge_prefers(recipe_file: Path, server: JudgeServer) -> None:
    server.answer = comparing
    found = run(recipe_file, "pairs", f"rewards=[{entry(server, pairwise='true')}]", "trainer={kind: online_dpo}", "run.steps=1")
    groups: dict[int, list[dict[str, Any]]] = {}
    for row in rollout_rows(found):
        groups.setdefault(row["group_id"], []).append(row)
    for one, other in groups.values():
        better = (one["completion"] > other["completion"]) - (one["completion"] < other["completion"])
        assert (one["reward"], other["reward"]) == (0.5 + 0.5 * better, 0.5 - 0.5 * better)


@pytest.mark.slow
def test_a_run_with_a_reward_model(recipe_file: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = make_reward_model(tmp_path_factory.mktemp("model"))
    rewards = f"rewards=[{{use: reward_model, timeout: 600.0, args: {{path: '{folder}', dtype: float32}}}}]"
    found = run(recipe_file, "scored", rewards, STEPS)
    rows = rollout_rows(found)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlgen.rewards.reward_model.limit_memory", lambda further: None)
        model = RewardModel(RewardModelArgs(path=str(folder), dtype="float32"), 0)
    for row in rows:
        said = row["prompt"].partition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
        messages = [{"role": "user", "content": said}]
        (score,) = model.score(prompts=[""], completions=[row["completion"]], prompt_messages=[messages])
        assert row["reward"] == pytest.approx(score, abs=1e-4)
    (attempt,) = read_json(found / "provenance.json")
    assert attempt["rewards"] == {"reward_model": model.sha256}
    assert len(read_jsonl(found / "metrics.jsonl")) == 2
    (folder / "tokenizer_config.json").write_text((folder / "tokenizer_config.json").read_text() + "\n")
    with pytest.raises(UsageError, match="reward_model"):
        run(recipe_file, "scored", rewards, STEPS, "run.steps=3", resume=True)


# --- the recipe ------------------------------------------------------------------------------------------------------

AT = "url: 'http://127.0.0.1:1/v1', model: m"


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        ("{use: judge, args: {url: 'ftp://x', model: m}}", "must be the address of an API such as"),
        ("{use: judge, args: {url: 'http://me:pw@x/v1', model: m}}", "without a user, password or query"),
        (f"{{use: judge, args: {{{AT}, key_env: MINE}}}}", "must be a name that rlgen treats as a secret"),
        (f"{{use: judge, args: {{{AT}, pattern: '(a'}}}}", "must be a regular expression of Python"),
        (f"{{use: judge, args: {{{AT}, pattern: 'a'}}}}", "must have one group, which is the score; this one has 0"),
        (f"{{use: judge, args: {{{AT}, prompt: 'x', pattern: '(.)'}}}}", "the question has no {completion}"),
        (f"{{use: judge, args: {{{AT}, prompt: '{{completion}}'}}}}", "needs `pattern` or `field`"),
        (f"{{use: judge, args: {{{AT}, field: score}}}}", "`field` needs `prompt` or `prompt_file`"),
        (f"{{use: judge, args: {{{AT}, low: 3.0, high: 3.0}}}}", "`low` 3 is not below `high` 3"),
        (f"{{use: judge, args: {{{AT}, pairwise: true, prompt: '{{completion}}', pattern: '(.)'}}}}", "has no {first}"),
        (f"{{use: judge, args: {{{AT}, modell: x}}}}", "`modell` is not a key of `rewards.0.args`; did you mean `model`?"),
        (f"{{use: judge, args: {{{AT}, prompt: '{{completion}} {{anser}}', pattern: '(.)'}}}}", "did you mean `answer`?"),
        (f"{{use: judge, args: {{{AT}, prompt_file: no.txt, pattern: '(.)'}}}}", "no.txt"),
        ("{use: reward_model}", "`rewards.0.args.path` is missing"),
        ("{use: reward_model, args: {path: ./nowhere}}", "nowhere is not a folder"),
        ("{use: reward_model, args: {path: ./two}}", "has 2 labels; a reward model has one, which is its score"),
        ("{use: reward_model, args: {path: ./policy}}", "is a Qwen3ForCausalLM, but a reward model is one for sequence"),
        ("{use: reward_model, args: {path: ./one, dtype: fp16}}", "'fp16' is not one of float32, bfloat16"),
        ("{use: reward-model, args: {path: ./one}}", "did you mean `reward_model`?"),
    ],
)
def test_mistakes_are_found_before_anything_is_loaded(recipe_file: Path, rewards: str, said: str) -> None:
    for name, config in CONFIGS.items():
        (recipe_file.parent / name).mkdir()
        (recipe_file.parent / name / "config.json").write_text(config)
    with pytest.raises(RecipeError) as caught:
        validate_command(recipe_file, [f"rewards=[{rewards}]"], False, 0)
    assert said in str(caught.value) and caught.value.exit_code == 2


CONFIGS = {
    "one": '{"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}',
    "two": '{"architectures": ["Qwen3ForSequenceClassification"]}',  # transformers then takes two
    "policy": '{"architectures": ["Qwen3ForCausalLM"]}',
}


def test_what_is_right_is_valid_and_paths_start_at_the_recipe(recipe_file: Path) -> None:
    (recipe_file.parent / "one").mkdir()
    (recipe_file.parent / "one" / "config.json").write_text(CONFIGS["one"])
    (recipe_file.parent / "ask.txt").write_text("{completion} of {answer}")
    rewards = (
        "rewards=[{use: reward_model, args: {path: ./one}}, {use: reward_model, name: hub, args: {path: user/model}},"
        f" {{use: judge, args: {{{AT}, prompt_file: ask.txt, pattern: '(.)', key_env: JUDGE_API_KEY}}}}]"
    )
    validate_command(recipe_file, [rewards], False, 0)
    model, hub, judge = load_recipe(recipe_file, [rewards]).recipe.rewards
    assert model.args["path"] == f"{recipe_file.parent}/one" and hub.args["path"] == "user/model"
    assert judge.args["prompt_file"] == f"{recipe_file.parent}/ask.txt"


def test_a_pairwise_reward_of_an_evaluation_needs_two_completions(recipe_file: Path) -> None:
    pairs = f"rewards=[{{use: judge, args: {{{AT}, pairwise: true}}}}]"
    (said,) = problems(recipe_file, pairs, "eval={options: {size: 8}}")
    assert "rewards.0 is pairwise: it compares completions of a prompt, but eval.group_size is 1" in said
    load_recipe(recipe_file, [pairs, "eval={options: {size: 8}, group_size: 2}"])


def test_rewards_test_asks_the_judge(recipe_file: Path, server: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.answer = lambda question: "Score: 9" if question.endswith("345\n") else rating(question)
    result = CliRunner().invoke(app, ["rewards", "test", str(recipe_file), "--set", f"rewards=[{entry(server)}]", "--rows", "2"])
    assert result.exit_code == 0, (result.output, result.exception)
    assert "judge" in result.output and len(server.questions) == 8  # two rows, four kinds of answers
    assert all("Sort" in question or "sort" in question for question in server.questions)
