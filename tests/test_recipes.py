"""The shipped recipes keep what their first lines promise: memory, columns of the data, and what is learned on a CPU."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from conftest import ROOT, read_jsonl
from helpers.samples import make_sample
from helpers.waiting import HANGS
from transformers import CONFIG_MAPPING

from rlgen.cli.estimate import memory_report
from rlgen.data.prompts import build_prompts
from rlgen.data.source import load_rows
from rlgen.models.load import load_tokenizer, locate
from rlgen.recipe import Recipe, load_recipe
from rlgen.recipe.data import DataRecipe
from rlgen.recipe.evaluation import data_of, eval_rewards, seed_of
from rlgen.recipe.models import RewardRecipe
from rlgen.rewards.score import open_scorer
from rlgen.types import Group

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
HEADER = re.compile(r"# .+\n#\n# Needs:  (.+)\n# Time:   (.+)\n# Expect: (.+)\n")
GPU = re.compile(r"one GPU with (\d+) GB; ")
EXPECTED = re.compile(r"(\w+) (-?\d+\.\d+)\.\.(-?\d+\.\d+) at step (\d+)")
CARDS = (8, 12, 16, 24, 40, 48, 80)  # usual sizes of GPUs, GB


def header(path: Path) -> tuple[str, str, str]:
    found = HEADER.match(path.read_text())
    assert found is not None, path
    return found[1], found[2], found[3]


ON_GPU = [path for path in RECIPES if header(path)[0].startswith("one GPU")]
ON_CPU = [path for path in RECIPES if path not in ON_GPU]
SMOLLM2 = ROOT / "recipes" / "smollm2.yaml"  # of a real model, on the CPU; `make real-learn` trains it


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_header_names_hardware_time_and_what_to_expect(path: Path) -> None:
    needs, time, expect = header(path)
    if path in ON_GPU:
        assert GPU.match(needs) and int(GPU.match(needs)[1]) in CARDS  # type: ignore[index]
        assert time == "not measured yet" and expect.endswith("not measured yet: no GPU with the hub was at hand")
    else:
        assert needs.startswith("two cores")
        assert "minute" in time and EXPECTED.fullmatch(expect), expect
    recipe = load_recipe(path).recipe
    assert expect.split()[0] in {reward.label for reward in recipe.rewards}
    assert recipe.eval is not None or path in ON_CPU


# --- memory ----------------------------------------------------------------------------------------------------------

# Shapes of the models, so that nothing is loaded from the hub.
SHAPE: dict[str, Any] = {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
SHAPE |= {"vocab_size": 151_936, "tie_word_embeddings": True}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-0.6B": {**SHAPE, "hidden_size": 1024, "intermediate_size": 3072},
    "Qwen/Qwen3-1.7B": {**SHAPE, "hidden_size": 2048, "intermediate_size": 6144},
}


# One of each kind; the others take the same sizes or more time.
QUICK = ("gsm8k-qwen3-0.6b-grpo", "gsm8k-qwen3-0.6b-grpo-lora", "gsm8k-qwen3-0.6b-online-dpo")
BY_SPEED = [pytest.param(path, id=path.stem, marks=() if path.stem in QUICK else pytest.mark.slow) for path in ON_GPU]


@pytest.mark.parametrize("path", BY_SPEED)
@pytest.mark.usefixtures("counted_once")
def test_it_fits_into_the_gpu_that_it_names_and_into_no_smaller_one(path: Path, tmp_path: Path) -> None:
    """A card of 24 GB has 24e9 bytes, or somewhat more."""
    size = int(GPU.match(header(path)[0])[1])  # type: ignore[index]
    name = load_recipe(path).recipe.model.path
    CONFIG_MAPPING["qwen3"](**MODELS[name]).save_pretrained(tmp_path)
    unsaid = [] if load_recipe(path).recipe.data.max_prompt_tokens else ["data.max_prompt_tokens=256"]
    recipe = load_recipe(path, [f"model.path={tmp_path}", *unsaid]).recipe
    assert memory_report(recipe, size * 10**9)["fits"] is True
    smaller = CARDS[CARDS.index(size) - 1]
    assert memory_report(recipe, smaller * 10**9)["fits"] is False, f"{smaller} GB are enough"


# --- data ------------------------------------------------------------------------------------------------------------

SYSTEM = "<|im_start|>system\n"
GSM8K = {
    "question": "Natalia sold clips to 48 of her friends in April, and then half as many in May. How many in all?",
    "answer": "In May she sold 48/2 = <<48/2=24>>24 clips.\nIn all 48+24 = <<48+24=72>>72.\n#### 72",
}
MATH = {
    "problem": "What is $\\frac{1}{2}+\\frac{1}{4}$?",
    "solution": "It is \\boxed{\\frac{3}{4}}.",
    "answer": "\\frac{3}{4}",
    "subject": "Prealgebra",
    "level": 1,
    "unique_id": "test/prealgebra/1.json",
}
DAPO = {
    "prompt": "Find the number of subsets of a set of five.",
    "solution": "32",
    "data_source": "math_dapo",
    "source_prompt": [{"role": "user", "content": "Solve the following math problem step by step. …"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "32", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
}
TLDR = {
    "prompt": "SUBREDDIT: r/tifu\n\nTITLE: I was late\n\nPOST: The clock had stopped, and so …\n\nTL;DR:",
    "completion": " My clock stopped, so I was late.",
}
# Rows of the hub's form, and what a right and a wrong answer look like. The second is of the evaluation.
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "openai/gsm8k": (GSM8K, GSM8K, "She sold 24 in May.\n#### 72", "She sold 72 in May.\n#### 96"),
    "hiyouga/math12k": (
        {key: MATH[key] for key in ("problem", "answer")},
        MATH,
        "So it is $\\boxed{0.75}$.",
        "So it is $\\boxed{\\frac{4}{3}}$.",
    ),
    "open-r1/DAPO-Math-17k-Processed": (DAPO, {**MATH, "answer": "32"}, "$2^5 = \\boxed{32}$", "$5^2 = \\boxed{25}$"),
    "trl-lib/tldr": (TLDR, TLDR, "my clock stopped, so I was late", "Yes!"),
}
ON_HUB = [path for path in ON_GPU if load_recipe(path).recipe.data.source in FORMS]
ONE_OF_EACH = {load_recipe(path).recipe.data.source: path for path in ON_HUB}.values()
BY_SOURCE = [pytest.param(path, id=path.stem, marks=() if path in ONE_OF_EACH else pytest.mark.slow) for path in ON_HUB]


def scores(data: DataRecipe, rewards: list[RewardRecipe], recipe: Recipe, *completions: str) -> list[dict[str, float | None]]:
    """Reads the data and scores completions of the first prompt, as training does."""
    rows = load_rows(data, recipe.run.seed)
    prompt = build_prompts(data, rows, load_tokenizer(locate("tiny:qwen3"), None), recipe.run.seed).at(0)
    assert prompt.text.startswith(SYSTEM) == (data.system is not None) and prompt.text.endswith("<|im_start|>assistant\n")
    samples = tuple(
        make_sample(sample_index=index, completion_ids=(5,) * 9, sampler_logp=(-1.0,) * 9, completion=text, finish_reason="stop")
        for index, text in enumerate(completions)
    )
    columns = {*rows.columns, *(("answer",) if data.columns.answer else ())}
    entries = [entry.model_copy(update={"timeout": HANGS}) for entry in rewards]
    with closing(open_scorer(entries, columns, recipe.rollout.max_completion_tokens, recipe.scoring)) as scorer:
        (group,) = scorer.score([Group(group_id=samples[0].group_id, prompt=prompt, samples=samples)], 1)
    return [dict(sample.rewards) for sample in group.samples]


def test_every_data_set_of_the_hub_has_its_form() -> None:
    assert {load_recipe(path).recipe.data.source for path in ON_GPU} == {*FORMS, "task:countdown", "task:gym"}


@pytest.mark.parametrize("path", BY_SOURCE)
def test_rows_of_the_hubs_form_are_prompts_and_are_scored(path: Path, tmp_path: Path) -> None:
    source = load_recipe(path).recipe.data.source
    training, held_out, right, wrong = FORMS[source]
    (tmp_path / "train.jsonl").write_text(json.dumps(training) + "\n")
    (tmp_path / "test.jsonl").write_text(json.dumps(held_out) + "\n")
    recipe = load_recipe(path).recipe
    assert recipe.eval is not None
    sections = {
        "train": (recipe.data, recipe.rewards),
        "test": (data_of(recipe.eval, recipe.data), eval_rewards(recipe.eval, recipe.rewards)),
    }
    for name, (data, rewards) in sections.items():
        local = data.model_copy(update={"source": f"{tmp_path}/{name}.jsonl"})  # `--set` would refuse it beside subset and split
        label = rewards[0].label
        assert [score[label] for score in scores(local, rewards, recipe, right, wrong)] == [1.0, 0.0]


def test_the_original_of_dapo_math_has_chats_and_every_row_many_times(tmp_path: Path) -> None:
    """Its answers are within a mapping: the page about rewards has the function."""
    row = {key: DAPO[key] for key in ("data_source", "ability", "reward_model", "extra_info")}
    (tmp_path / "train.jsonl").write_text((json.dumps({**row, "prompt": DAPO["source_prompt"]}) + "\n") * 3)
    data = DataRecipe(source=str(tmp_path / "train.jsonl"))
    rows = load_rows(data, 0)
    prompts = build_prompts(data, rows, load_tokenizer(locate("tiny:qwen3"), None), 0)
    assert (prompts.chats, prompts.counts["used"], prompts.counts["duplicates"]) == (3, 3, 2)
    assert prompts.at(0).columns["reward_model"]["ground_truth"] == "32"
    assert prompts.at(0).text.startswith("<|im_start|>user\nSolve the following math problem step by step.")


@pytest.mark.parametrize("name", ["countdown-qwen3-0.6b-grpo", "countdown-tiny-grpo"])
def test_any_right_expression_of_countdown_is_right(name: str) -> None:
    recipe = load_recipe(ROOT / "recipes" / f"{name}.yaml").recipe
    data = recipe.data.model_copy(update={"template_args": {}, "shuffle": False})
    row = load_rows(data, recipe.run.seed).rows[0]
    other = " + ".join(f"({number})" for number in row["numbers"])
    reached = row["target"] == sum(row["numbers"])
    answer = row["answer"]
    texts = [answer, f"So <answer>1</answer>, no: <answer> {answer} </answer>", f"{answer}+0", other, "", "x" * 999]
    given = [score["reaches"] for score in scores(data, recipe.rewards, recipe, *texts)]
    assert given == [1.0, 1.0, 0.0, float(reached), 0.0, 0.0]


def test_countdown_takes_each_number_once_and_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    from countdown import reaches  # type: ignore[import-not-found]

    right = ["(25-3)*2", "2*(25-3)"]
    wrong = ["25*2-3*2", "44", "__import__('os')", "(25-3)*2.0", "2**25**3", "(" * 5000]
    assert [reaches(text, [3, 25, 2], 44) for text in (*right, *wrong)] == [1.0] * 2 + [0.0] * 6


def test_a_summary_resembles_another_by_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    from tldr import resembles  # type: ignore[import-not-found]

    assert resembles("The clock stopped.", "My clock stopped twice") == 2 * 2 / (3 + 4)  # clock and stopped, of three and four
    assert resembles("late late late", "I was late") == 2 * 1 / (3 + 3)  # a word counts as often as both have it
    assert resembles("", "") == resembles("?", "yes") == 0.0


def test_the_gym_of_the_recipe_scores_its_own_answers() -> None:
    pytest.importorskip("reasoning_gym")
    recipe = load_recipe(ROOT / "recipes" / "gym-qwen3-0.6b-grpo.yaml").recipe
    options = {**recipe.data.options, "size": 3}
    data = recipe.data.model_copy(update={"template_args": {}, "shuffle": False, "options": options})
    answer = load_rows(data, recipe.run.seed).rows[0]["answer"]
    texts = [f"I count: <answer>{answer}</answer>", f"<answer>{int(answer) + 1}</answer>", "no idea"]
    right, *wrong = (score["reasoning_gym"] for score in scores(data, recipe.rewards, recipe, *texts))
    assert right == 1.0 and all(value is not None and value < 0.2 for value in wrong)


@pytest.mark.parametrize("kind", ["grpo", "rloo", "online_dpo"])
def test_a_real_model_gets_other_problems_with_each_trainer_when_it_is_evaluated(kind: str) -> None:
    recipe = load_recipe(SMOLLM2, [f"trainer.kind={kind}"]).recipe
    assert recipe.eval is not None and recipe.trainer.kind == kind
    trained = {row["prompt"] for row in load_rows(recipe.data, recipe.run.seed).rows}
    asked = {row["prompt"] for row in load_rows(data_of(recipe.eval, recipe.data), seed_of(recipe.run.seed)).rows}
    assert (len(trained), len(asked), trained & asked) == (1000, 64, set())
    assert recipe.samples_per_step == 64 and recipe.run.steps * recipe.rollout.prompts_per_step <= len(trained)


# --- what is learned on a CPU ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path | None]:
    """Makes the model that a recipe starts from, once for each folder that recipes name. None: it starts from a random one."""
    made: dict[str, Path] = {}

    def model_of(path: Path) -> Path | None:
        named = load_recipe(path).recipe.model.path
        if named.startswith("tiny:"):
            return None
        if named not in made:
            made[named] = tmp_path_factory.mktemp("warm") / "model"
            call("recipes", "warm-start", path, "--out", made[named])
        return made[named]

    return model_of


def call(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "rlgen", *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("path", [path for path in ON_CPU if path != SMOLLM2], ids=lambda path: path.stem)
def test_the_curve_lies_in_the_band(path: Path, seed: int, tmp_path: Path, warm: Callable[[Path], Path | None]) -> None:
    """The mean over the last five steps up to the one that is named, so that the noise of one step decides nothing."""
    found = EXPECTED.fullmatch(header(path)[2])
    assert found is not None
    name, low, high, step = found[1], float(found[2]), float(found[3]), int(found[4])
    model = warm(path)
    settings = [f"run.seed={seed}", *([f"model.path={model}"] if model else [])]
    call("train", path, "--run-dir", tmp_path / "run", *(part for setting in settings for part in ("--set", setting)))
    records = [record for record in read_jsonl(tmp_path / "run" / "metrics.jsonl") if max(0, step - 5) < record["step"] <= step]
    assert len(records) == min(5, step)
    assert low <= fmean(record[f"reward/{name}/mean"] for record in records) <= high
