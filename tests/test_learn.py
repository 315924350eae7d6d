"""`make learn`: what is equal on both sides, the table and its verdicts on made-up numbers, and one small cell of each tool."""

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import learn
import learn_cells
import pytest
from helpers.before import before
from learn_cells import TASKS, TOOLS, TRAIN, TRAINERS, Cell, Learned, Size, Tool, config_of, recipe_of, run_cell, training_rows
from learn_rewards import near
from trl_side import for_trl

from rlgen.models.tiny import build_tiny
from rlgen.recipe import load_recipe
from rlgen.setup.warm import TRAIN_SEED

TINY = Size(steps=2, samples=16, warmup_steps=1)


def cell(tool: Tool = "rlgen", **changes: Any) -> Cell:
    return Cell(**{"task": "reverse", "trainer": "grpo", "seed": 0, "tool": tool, "size": TINY, **changes})


def made_up(**after: Sequence[float]) -> dict[Cell, Learned]:
    """What seeds 0, 1, … of both tools came to."""
    return {
        cell(tool, seed=seed): Learned(rewards=[0.1] * 5 + [value] * 5, before=0.25, after=value, seconds=30.0, cpu=20.0)
        for tool in TOOLS
        for seed, value in enumerate(after[tool])
    }


# Means .85 and .55, variances .0025: error sqrt(2 * .0025 / 3) = .0408, freedom 4, t = 2.776: .3 ± .113
APART = made_up(rlgen=[0.9, 0.85, 0.8], TRL=[0.6, 0.55, 0.5])
BEHIND = made_up(rlgen=[0.6, 0.55, 0.5], TRL=[0.9, 0.85, 0.8])
ALIKE = made_up(rlgen=[0.9, 0.85, 0.8], TRL=[0.86, 0.9, 0.8])


def test_a_row_of_the_table() -> None:
    (row,) = learn.rows_of(APART)
    assert row.cells == ("reverse", "grpo", "0.250", "0.850", "0.550", "+0.300 (+0.187 to +0.413)", "ahead")
    assert row.verdict.sentence == "rlgen is better than TRL by 0.3 (0.187 to 0.413)"
    widest = {replace(of, task="arithmetic", trainer="online_dpo"): one for of, one in BEHIND.items()}
    assert max(map(len, learn.text(learn.rows_of(widest)).splitlines())) <= 80
    assert learn.markdown([row]) == (
        "| task | trainer | before | rlgen | TRL | rlgen less TRL | verdict |\n"
        "| --- | --- | --- | --- | --- | --- | --- |\n"
        "| reverse | grpo | 0.250 | 0.850 | 0.550 | +0.300 (+0.187 to +0.413) | ahead |\n"
    )


def test_only_an_interval_wholly_below_0_is_behind() -> None:
    assert [row.behind for found in (APART, BEHIND, ALIKE) for row in learn.rows_of(found)] == [False, True, False]
    assert learn.rows_of(ALIKE)[0].cells[-1] == "–"
    (row,) = learn.rows_of(made_up(rlgen=[0.1], TRL=[0.9]))  # one seed proves nothing
    assert row.cells[-2:] == ("-0.800", "–") and not row.behind
    assert "one seed each proves little" in row.verdict.basis


def test_a_curve_is_the_mean_over_seeds_of_five_steps_each() -> None:
    (chart,) = learn.charts_of(APART)
    assert chart.title == "reverse, grpo" and chart.x == [5, 10]
    ours, theirs = chart.lines
    assert ours.values == pytest.approx([0.1, 0.85]) and theirs.values == pytest.approx([0.1, 0.55])
    # of three seeds: s / sqrt(3) * t, with 2 degrees of freedom t = 4.303
    assert ours.low == pytest.approx([0.1, 0.85 - 0.05 / 3**0.5 * 4.303], abs=1e-3)


def run_main(found: dict[Cell, Learned], out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program, with cells that finish in another order than that of the grid."""

    def trained(cells: Sequence[Cell], out: Path, workers: int) -> Iterator[tuple[Cell, Learned]]:
        return ((of, found[cell(of.tool, seed=of.seed)]) for of in reversed(cells))

    monkeypatch.setattr(learn, "trained", trained)
    monkeypatch.setattr("sys.argv", ["learn.py", "--only", "reverse-grpo", "--out", str(out)])
    learn.main()


def test_the_program_ends_with_a_failure_where_rlgen_is_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which the program sets, too
    with pytest.raises(SystemExit, match=r"rlgen is behind: reverse with grpo: TRL is better than rlgen by 0\.3 "):
        run_main(BEHIND, tmp_path, monkeypatch)
    printed = capsys.readouterr().out
    assert "reverse  grpo     0.250   0.550  0.850  -0.300 (-0.413 to -0.187)  behind" in printed
    run_main(ALIKE, tmp_path, monkeypatch)
    facts = json.loads((tmp_path / "learn.json").read_text())
    assert facts["rows"][0]["after"] == {"rlgen": [0.9, 0.85, 0.8], "TRL": [0.86, 0.9, 0.8]}
    assert facts["cells"]["reverse-grpo-2-TRL"]["after"] == 0.8
    assert (tmp_path / "learn.md").read_text() == learn.markdown(learn.rows_of(ALIKE))
    assert (tmp_path / "learn.png").read_bytes().startswith(b"\x89PNG")


def test_the_grid_has_every_cell_once_and_ends_a_seed_before_it_begins_another() -> None:
    cells = learn.grid(3, Size(), "")
    assert len(set(cells)) == len(set(map(str, cells))) == len(learn_cells.TINY) * len(TRAINERS) * 3 * 2 == 72
    assert [of.seed for of in cells] == [0] * 24 + [1] * 24 + [2] * 24
    assert {of.trainer for of in learn.grid(1, Size(), "sort-rloo")} == {"rloo"}


def test_a_finished_cell_is_kept_as_long_as_its_settings_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[Cell] = []

    def train(of: Cell, model: Path, folder: Path) -> tuple[list[float], Path]:
        trained.append(of)
        return [0.5, 0.75], folder

    monkeypatch.setitem(TRAIN, "rlgen", train)
    monkeypatch.setattr(learn_cells, "accuracy", lambda task, model: 0.8)
    (tmp_path / "warm" / "reverse").mkdir(parents=True)
    (tmp_path / "warm" / "reverse" / "accuracy.json").write_text("0.25")
    first = run_cell(cell(), tmp_path)
    assert (first.rewards, first.before, first.after) == ([0.5, 0.75], 0.25, 0.8)
    assert run_cell(cell(), tmp_path) == first and len(trained) == 1
    run_cell(cell(size=replace(TINY, learning_rate=1e-3)), tmp_path)
    run_cell(cell(seed=1), tmp_path)
    assert len(trained) == 3


@pytest.mark.parametrize("task", TASKS)
def test_held_out_prompts_are_in_no_training_and_no_warm_start(task: str) -> None:
    rows = learn_cells.held_out(task)
    prompts = {row["prompt"] for row in rows}
    assert len(rows) == len(prompts) == learn_cells.HELD_OUT
    assert not prompts & {row["prompt"] for row in learn_cells.rows_of(task, TRAIN_SEED, learn_cells.WARM_ROWS)}
    for trainer, seed in ((trainer, seed) for trainer in TRAINERS for seed in (0, 1, 7)):
        of = cell(task=task, trainer=trainer, seed=seed, size=Size())
        taken = [row["prompt"] for row in training_rows(of)]
        assert len(set(taken)) == len(taken) == of.size.steps * of.prompts and not prompts & set(taken)
        assert training_rows(of) == training_rows(cell("TRL", task=task, trainer=trainer, seed=seed, size=Size()))
    assert training_rows(cell(seed=0)) != training_rows(cell(seed=1))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_both_tools_are_told_the_same(task: str, trainer: str, tmp_path: Path) -> None:
    of = cell(task=task, trainer=trainer, seed=3, size=Size())
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe_of(of)))
    recipe, config = load_recipe(tmp_path / "recipe.yaml").recipe, config_of(of)
    assert recipe.run.seed == config["seed"] and recipe.run.steps == config["max_steps"]
    assert recipe.rollout.temperature == config["temperature"] == 1
    assert recipe.optim.learning_rate == config["learning_rate"] and recipe.optim.schedule == config["lr_scheduler_type"]
    assert recipe.optim.warmup_steps == config["warmup_steps"] == 5
    assert recipe.optim.weight_decay == config["weight_decay"] and recipe.optim.max_grad_norm == config["max_grad_norm"]
    assert recipe.samples_per_step == 128 and recipe.trainer.updates_per_rollout == 1
    beta = config["beta"]
    assert recipe.trainer.beta == (beta[0] if trainer == "online_dpo" else beta)
    completions = config.get("max_completion_length") or config["max_new_tokens"]
    assert recipe.rollout.max_completion_tokens == completions
    prompts = config["per_device_train_batch_size"] // config.get("num_generations", 1)
    assert recipe.rollout.prompts_per_step == prompts
    assert recipe.rollout.group_size == config.get("num_generations", 2)


@pytest.mark.parametrize("task", TASKS)
def test_a_reward_is_the_same_in_both_tools(task: str) -> None:
    """Of right answers, of ones with a character too many, and of empty ones; the longest answer fits the limit with its stop."""
    rows = learn_cells.rows_of(task, 5, 50)
    texts = [row["answer"] if place % 3 else f"{row['answer']}1" if place % 2 else "" for place, row in enumerate(rows)]
    reward = learn_cells.reward_of(task)
    names = [name for name in ("answer", "numbers", "target") if name in reward.__code__.co_varnames]
    ours = [reward(text, **{name: row[name] for name in names}) for text, row in zip(texts, rows, strict=True)]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    messages = [[{"role": "assistant", "content": text}] for text in texts]
    theirs = for_trl(reward)(prompts=[], completions=messages, completion_ids=[], trainer_state=None, **columns)
    assert ours == theirs and [value == 1 for value in ours] == [bool(place % 3) for place in range(50)]
    assert max(len(row["answer"]) for row in rows) < TASKS[task].max_completion_tokens
    # Half of what is right is worth something: 3 of 4 places, 4 of 5, none: half of it each.
    assert [near(text, "1259") for text in ("1259", "1249", "12590", "", "9521")] == [1.0, 0.375, 0.4, 0.0, 0.0]


@pytest.mark.slow
@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.filterwarnings("ignore")  # of TRL
def test_both_tools_are_asked_the_same_prompts_in_the_same_order(
    trainer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import GenerationMixin

    from rlgen.engines.transformers import TransformersEngine

    ours: list[list[int]] = []
    theirs: list[list[int]] = []
    generate = GenerationMixin.generate

    def spy(model: Any, *arguments: Any, **named: Any) -> Any:
        pairs = zip(named["input_ids"], named["attention_mask"], strict=True)
        theirs.extend(ids[mask.bool()].tolist() for ids, mask in pairs)
        return generate(model, *arguments, **named)

    def note(engine: Any, requests: Any, *arguments: Any) -> None:
        ours.extend(request.prompt_ids.tolist() for request in requests)

    monkeypatch.setattr(GenerationMixin, "generate", spy)
    before(TransformersEngine, "generate", note, monkeypatch.setattr)
    monkeypatch.chdir(tmp_path)
    for tool in TOOLS:
        (tmp_path / tool).mkdir()
        rewards, model = TRAIN[tool](cell(tool, trainer=trainer), build_tiny("qwen3"), tmp_path / tool)
        assert len(rewards) == TINY.steps and (model / "model.safetensors").exists()
    # rlgen also samples for the sentinel, before step 1; TRL's Online DPO has the prompts of a step twice in a row
    asked = [prompts[-TINY.steps * TINY.samples :] for prompts in (ours, theirs)]
    steps = [[sorted(prompts[start : start + TINY.samples]) for start in (0, TINY.samples)] for prompts in asked]
    assert steps[0] == steps[1]
    assert len({tuple(prompt) for prompt in steps[0][0]}) == cell(trainer=trainer).prompts


@pytest.mark.slow
def test_cells_of_both_tools_by_a_worker(tmp_path: Path) -> None:
    """From the random model, which answers nothing right; what the worker prints is in log.txt."""
    model = tmp_path / "warm" / "reverse"
    shutil.copytree(build_tiny("qwen3"), model)
    (model / "accuracy.json").write_text("0.25")
    cells = [cell(tool) for tool in TOOLS]
    found = dict(learn.trained(cells, tmp_path, workers=1))
    assert {(one.before, one.after, len(one.rewards)) for one in found.values()} == {(0.25, 0.0, 2)}
    assert all(one.cpu > 0 for one in found.values())
    assert dict(learn.trained(cells, tmp_path, workers=1)) == found  # with their times: they were not trained again
    assert "step 2/2  reward 0.000" in (tmp_path / "log.txt").read_text()
