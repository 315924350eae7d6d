"""The trainings of `make learn` and `make real-learn`: one task, one algorithm and one seed, with rlgen or with TRL 1.16.0.

Both get the same model, rows in the same order, reward function, chat template, number of prompts and completions, temperature,
limit of a completion, loss and optimizer; every setting in which their defaults differ is said to both. In `make learn` both
sample with transformers: on models this small vLLM only takes longer to start. What they learned is asked for by `plain.answers`,
which is neither tool's.

A cell is a file in the folder `cells`. It holds what it was made with: settings, start and versions. It is kept as long as these
are the same; a change of rlgen's own code does not show there: delete the folder.
"""

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from random import Random
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import yaml
from plain import answers
from pydantic import BaseModel
from trl_side import logged_rewards, trainer_of

from rlgen.data.tasks import Row, generate
from rlgen.files import write_text
from rlgen.metrics import Metric
from rlgen.recipe import Recipe
from rlgen.recipe.data import ArithmeticOptions, CountdownOptions, ReverseOptions, SortOptions, WordProblemsOptions
from rlgen.rewards.builtin import BUILTIN
from rlgen.rewards.load import REWARDS
from rlgen.setup.attempt import train
from rlgen.setup.reopen import TrainOptions
from rlgen.setup.warm import TRAIN_SEED, warm_start
from rlgen.worker_pool.find import find_function

ROOT = Path(__file__).parent.parent
MODEL = "tiny:qwen3"
POOL_SEED, POOL = 4242, 3200  # rows; as many as Online DPO takes in 50 steps
HELD_OUT_SEED, HELD_OUT = 31337, 512
WARM_ROWS = 1000
PACKAGES = ("rlgen", "trl", "transformers", "torch")
Tool = Literal["rlgen", "TRL"]
TOOLS: tuple[Tool, ...] = ("rlgen", "TRL")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task, made so that a tiny model has something to learn within a minute."""

    options: BaseModel
    max_completion_tokens: int
    reward: str = "scripts/learn_rewards.py:near"  # file:function in this checkout, or a built-in name; 1 is right
    start: float | None = 0.25  # share of sampled answers that are right before training; None: of a model as it is


TASKS = {
    "arithmetic": Task(options=ArithmeticOptions(digits=2, operators="+-"), max_completion_tokens=6),
    "reverse": Task(options=ReverseOptions(), max_completion_tokens=8),
    "countdown": Task(
        options=CountdownOptions(numbers=2, largest=50), max_completion_tokens=8, reward="recipes/countdown.py:reaches"
    ),
    "sort": Task(options=SortOptions(), max_completion_tokens=8),
    "word_problems": Task(options=WordProblemsOptions(), max_completion_tokens=24, reward="numeric_match", start=None),
}
TINY = [task for task, of in TASKS.items() if of.start is not None]  # those of `make learn`


class Words(NamedTuple):
    """One algorithm, as rlgen's recipe says it and as TRL's config does, and how many completions it takes of a prompt."""

    rlgen: dict[str, Any]
    trl: dict[str, Any]
    group_size: int


# As the cells of tests/oracle/matrix.py pair them, in which loss and gradient are equal.
TRAINERS = {
    "grpo": Words(
        {"kind": "grpo", "loss": "dapo", "scale_rewards": "group", "beta": 0.0, "correction": {"mode": "none"}},
        {"loss_type": "dapo", "scale_rewards": "group", "beta": 0.0, "epsilon": 0.2, "epsilon_high": 0.28},
        8,
    ),
    # With one update a rollout the ratio is 1, and the gradient that of TRL's ratio of a whole completion.
    "rloo": Words(
        {"kind": "rloo", "beta": 0.0, "correction": {"mode": "none"}},
        {"beta": 0.0, "epsilon": 0.2, "epsilon_high": 0.2, "normalize_advantages": False},
        8,
    ),
    # TRL's pair is always two completions, and of two that are worth the same it prefers the first.
    "online_dpo": Words(
        {"kind": "online_dpo", "loss": "sigmoid", "beta": 0.1, "ties": "first"},
        {"loss_type": "sigmoid", "beta": [0.1], "missing_eos_penalty": None},
        2,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much a cell trains on."""

    steps: int = 50
    samples: int = 128  # completions of a step
    learning_rate: float = 5e-4
    schedule: str = "linear"
    warmup_steps: int = 5  # Adam's first steps are large whatever the gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Cell(task="reverse", trainer="grpo", seed=0, tool="rlgen", size=Size())"""

    task: str
    trainer: str
    seed: int
    tool: Tool
    size: Size

    def __str__(self) -> str:
        return f"{self.task}-{self.trainer}-{self.seed}-{self.tool}"

    @property
    def prompts(self) -> int:
        """Returns the prompts of a step."""
        return self.size.samples // TRAINERS[self.trainer].group_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What one training came to."""

    rewards: list[float]  # mean of each step's completions
    before: float  # held-out accuracy, greedy
    after: float
    seconds: float  # wall time of the whole cell
    cpu: float  # seconds of the processor


def rows_of(task: str, seed: int, count: int) -> list[Row]:
    """Returns rows of a task, which depend on nothing but the seed."""
    return generate(task, TASKS[task].options.model_copy(update={"size": count}), seed)


@cache
def pool(task: str) -> list[Row]:
    """Returns the rows that trainings of a task take theirs from."""
    return rows_of(task, POOL_SEED, POOL)


def training_rows(cell: Cell) -> list[Row]:
    """Returns the rows of a cell in the order in which both tools see them: others for each seed, and none twice."""
    return Random(cell.seed).sample(pool(cell.task), cell.size.steps * cell.prompts)


@cache
def held_out(task: str) -> list[Row]:
    """Returns rows whose prompts are in no training and in no warm start of the task."""
    seen = {row["prompt"] for row in (*pool(task), *rows_of(task, TRAIN_SEED, WARM_ROWS))}
    rows = {row["prompt"]: row for row in rows_of(task, HELD_OUT_SEED, 8 * HELD_OUT) if row["prompt"] not in seen}
    return list(rows.values())[:HELD_OUT]


def reward_of(task: str) -> Callable[..., float]:
    """Returns the function that both tools call."""
    use = TASKS[task].reward
    return BUILTIN[use] if use in BUILTIN else find_function(str(ROOT / use), REWARDS)[0]


def recipe_of(cell: Cell) -> dict[str, Any]:
    """Returns the recipe of a cell; TRL's cells say the same in the words of its config."""
    task, words, size = TASKS[cell.task], TRAINERS[cell.trainer], cell.size
    return {
        "run": {"name": f"{cell.task}-{cell.trainer}-{cell.seed}", "seed": cell.seed, "steps": size.steps},
        "model": {"path": "./model", "dtype": "float32"},
        "data": {"source": "rows.jsonl", "columns": {"answer": "answer"}, "chat": True, "shuffle": False},
        "rewards": [{"use": task.reward}],
        "scoring": {"workers": 1},
        "rollout": {
            "prompts_per_step": cell.prompts,
            "group_size": words.group_size,
            "max_completion_tokens": task.max_completion_tokens,
            "temperature": 1.0,
        },
        "engine": {"kind": "transformers", "max_num_seqs": size.samples},
        "trainer": words.rlgen,
        "optim": {
            "learning_rate": size.learning_rate,
            "schedule": size.schedule,
            "warmup_steps": size.warmup_steps,
            "weight_decay": 0.0,
            "max_grad_norm": 1.0,
        },
        "checkpoint": {"every": size.steps, "keep": 1},
        "rollouts": {"every": 0},
    }


def config_of(cell: Cell) -> dict[str, Any]:
    """Returns the settings of TRL's config that are what `recipe_of` says."""
    task, words, size = TASKS[cell.task], TRAINERS[cell.trainer], cell.size
    settings = {
        "seed": cell.seed,
        "max_steps": size.steps,
        "gradient_accumulation_steps": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "learning_rate": size.learning_rate,
        "lr_scheduler_type": size.schedule,
        "warmup_steps": size.warmup_steps,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_dropout": True,
        "use_vllm": False,
        **words.trl,
    }
    if cell.trainer == "online_dpo":  # two completions of each prompt of a batch
        of_batch = {"per_device_train_batch_size": cell.prompts, "train_sampling_strategy": "sequential"}
        return {**settings, **of_batch, "max_new_tokens": task.max_completion_tokens, "max_length": 512}
    return {
        **settings,
        "per_device_train_batch_size": size.samples,
        "num_generations": words.group_size,
        "max_completion_length": task.max_completion_tokens,
        "num_iterations": 1,
        "mask_truncated_completions": False,
        "shuffle_dataset": False,
    }


def write_recipe(cell: Cell, model: Path, folder: Path, recipe: dict[str, Any]) -> Path:
    """Writes the recipe of a cell with its rows into a folder, beside links to what it names, and returns it."""
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in training_rows(cell)))
    for name, place in {
        "model": model,
        "recipes": ROOT / "recipes",
        "scripts": ROOT / "scripts",
        "tests": ROOT / "tests",
    }.items():
        if not (folder / name).exists():
            (folder / name).symlink_to(place)
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return path


def train_with_rlgen(cell: Cell, model: Path, folder: Path) -> tuple[list[float], Path]:
    """Returns the mean reward of each step, and the folder of the trained model."""
    run = train(write_recipe(cell, model, folder, recipe_of(cell)), TrainOptions(run_dir=folder / "run"))
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record[Metric.REWARD_MEAN] for record in records], run / "checkpoints" / f"step_{cell.size.steps:06d}"


def train_with_trl(cell: Cell, model: Path, folder: Path) -> tuple[list[float], Path]:
    """Returns the mean reward of each step, and the folder of the trained model."""
    settings = {"save_strategy": "no", **config_of(cell)}
    trainer = trainer_of(cell.trainer, settings, model, training_rows(cell), reward_of(cell.task), folder / "trl")
    trainer.train()
    trainer.save_model(str(folder / "trl"))
    return logged_rewards(trainer), folder / "trl"


TRAIN: dict[Tool, Callable[[Cell, Path, Path], tuple[list[float], Path]]] = {"rlgen": train_with_rlgen, "TRL": train_with_trl}


def accuracy(task: str, model: Path) -> float:
    """Returns the share of held-out prompts that a saved model answers right, greedily."""
    return fmean(right(task, model, held_out(task), 0))


def right(task: str, model: Path, rows: list[Row], sampled: int) -> list[float]:
    """Returns for each row the share of a saved model's answers that are right: of one, greedily, or of `sampled` at
    temperature 1.
    """
    asked, reward = rows * max(1, sampled), reward_of(task)
    texts = answers(model, [row["prompt"] for row in asked], TASKS[task].max_completion_tokens, sampled=sampled > 0)
    taken = [name for name in signature(reward).parameters if name in rows[0]]
    worth = [reward(completion=text, **{name: row[name] for name in taken}) for text, row in zip(texts, asked, strict=True)]
    return [fmean(value == 1.0 for value in worth[place :: len(rows)]) for place in range(len(rows))]


def warm(task: str, folder: Path) -> None:
    """Makes the model that all cells of a task of `TINY` start from, unless it is there."""
    share = TASKS[task].start
    if (folder / "accuracy.json").exists() or share is None:
        return
    shutil.rmtree(folder, ignore_errors=True)
    cell = Cell(task=task, trainer="grpo", seed=0, tool="rlgen", size=Size())
    options = TASKS[task].options.model_copy(update={"size": WARM_ROWS}).model_dump()
    recipe = recipe_of(cell) | {
        "model": {"path": MODEL, "dtype": "float32"},
        "data": {"source": f"task:{task}", "options": options, "chat": True},
    }
    warm_start(Recipe.model_validate(recipe), folder, share, print)
    write_text(folder / "accuracy.json", json.dumps(accuracy(task, folder)))


def run_cell(cell: Cell, out: Path) -> Learned:
    """Trains one cell, or reads what it came to if it was trained before with the same settings, and returns that."""
    place, model = out / "cells" / f"{cell}.json", out / "warm" / cell.task
    before = json.loads((model / "accuracy.json").read_text())
    said = recipe_of(cell) if cell.tool == "rlgen" else config_of(cell)
    versions = {name: version(name) for name in PACKAGES}
    made_with = json.loads(json.dumps({"settings": said, "before": before, "versions": versions}))
    if (kept := kept_cell(place, made_with)) is not None:
        return kept
    began, used = time.perf_counter(), sum(os.times()[:4])
    with TemporaryDirectory() as folder:
        rewards, trained = TRAIN[cell.tool](cell, model, Path(folder))
        after = accuracy(cell.task, trained)
    learned = Learned(
        rewards=rewards, before=before, after=after, seconds=time.perf_counter() - began, cpu=sum(os.times()[:4]) - used
    )
    place.parent.mkdir(parents=True, exist_ok=True)
    write_text(place, json.dumps({"made_with": made_with, "learned": asdict(learned)}, indent=1))
    return learned


def kept_cell(place: Path, made_with: dict[str, Any]) -> Learned | None:
    """Returns what an earlier training of a cell came to; None if there is none with these settings, start and versions."""
    if not place.exists():
        return None
    found = json.loads(place.read_text())
    return Learned(**found["learned"]) if found["made_with"] == made_with else None
