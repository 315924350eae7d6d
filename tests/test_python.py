"""The Python interface, by the page `python`: its blocks are run as they stand."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import RECIPE, ROOT, read_jsonl
from helpers.rollouts import rollout_rows
from helpers.samples import make_sample
from helpers.slow import slow_but
from safetensors.torch import load_file

import rlgen
from rlgen.algorithms.own import OwnAlgorithm
from rlgen.api import train
from rlgen.callbacks import Callback, StopTraining
from rlgen.cli.doctor import doctor_command
from rlgen.errors import CodeError, RecipeError, Stopped, UsageError
from rlgen.files import read_json
from rlgen.processes import Processes
from rlgen.recipe import load_recipe
from rlgen.recipe.trainers import OwnRecipe
from rlgen.rollout.samples import Samples
from rlgen.rollout.table import RowTable
from rlgen.run.compare import first_difference
from rlgen.trainers.collect import silent_groups

PAGE = (ROOT / "rlgen" / "docs" / "python.md").read_text()
READ, WATCH, REINFORCE, SQUARED = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
OWN = """\
import torch
from rlgen.algorithms.base import PolicyGradient, Advantages
from rlgen.losses.advantages import group_advantages, without_signal
from rlgen.losses.masking import select

class Own(PolicyGradient):
    divides_by = "tokens"
    def advantages(self, scores):
        found = group_advantages(scores.rewards, scores.group_ids, "none")
        return Advantages.of_policy(found, without_signal(scores.rewards, scores.group_ids), scores, self.recipe)
    def loss(self, x):
        logp, mask = x.policy_logp, x.mask
        {body}
"""
PLAIN = "return -(x.advantages[:, None] * select(mask, logp)).sum() / x.totals.tokens, {}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a recipe on plain transformers, and an algorithm that learns."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE + "engine: {kind: transformers}\n")
    (tmp_path / "own.py").write_text(OWN.format(body=PLAIN))
    return tmp_path


class Noted(Callback):
    """Writes down what it sees, draws numbers, and spoils what it is given."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []

    def on_start(self, run: Path, recipe: Any) -> None:
        self.seen.append(("start", run.name))
        torch.manual_seed(99)

    def on_rollouts(self, step: int, rollouts: Any) -> None:
        self.seen.append(("rollouts", rollouts.to_pylist()))
        torch.rand(7)

    def on_update(self, step: int, metrics: Any) -> None:
        self.seen.append(("update", dict(metrics)))
        metrics["loss"] = "spoiled"

    def on_step(self, step: int, metrics: Any) -> None:
        self.seen.append(("step", dict(metrics)))
        metrics.clear()

    def on_end(self, error: BaseException | None) -> None:
        self.seen.append(("end", error))


def test_the_page_trains_evaluates_and_reads(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(READ, names)
    assert names["run"].name == "test"
    assert [record["step"] for record in names["run"].metrics] == [1, 2]
    assert names["row"].keys() >= {"prompt", "completion", "reward", "sampler_logp", "policy_logp", "advantage"}
    assert names["found"]["eval/prompts"] == 8 and -1 <= names["found"]["eval/reward/mean"] <= 1
    assert [row["step"] for row in rlgen.rollouts("test")] == [1] * 16 + [2] * 16


def test_the_page_watches(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exec(WATCH, {})
    said = capsys.readouterr().out
    assert "1 longest: " in said and "2 gradient norm: " in said
    best = max(record["reward/mean"] for record in read_jsonl(folder / "runs" / "test" / "metrics.jsonl"))
    assert f"best reward: {best} None" in said


def test_a_callback_sees_five_points_and_changes_nothing(folder: Path) -> None:
    noted = Noted()
    watched = train("recipe.yaml", run_dir="watched", callbacks=[noted])
    alone = train("recipe.yaml", run_dir="alone")
    assert first_difference(watched.path, alone.path) is None
    assert [name for name, _ in noted.seen] == ["start", *["rollouts", "update", "step"] * 2, "end"]
    assert noted.seen[-1] == ("end", None)
    rows = rollout_rows(watched.path, 1)
    for seen, written in zip(noted.seen[1][1], rows, strict=True):
        seen["reward_errors"] = dict(seen["reward_errors"])
        assert seen == {name: written[name] for name in seen}
        assert written.keys() - seen.keys() == {"policy_logp", "advantage", "trained"}
    assert noted.seen[2][1]["grad_norm"] == watched.metrics[0]["grad_norm"]
    assert noted.seen[3][1] == watched.metrics[0]


@pytest.mark.parametrize("point", slow_but(["on_start", "on_rollouts", "on_update", "on_step"], "on_update"))
def test_a_callback_that_fails_ends_the_run_and_it_goes_on(folder: Path, point: str) -> None:
    class Fails(Callback):
        ended: BaseException | None = None

        def on_end(self, error: BaseException | None) -> None:
            self.ended = error

    def fail(self: Any, *given: Any) -> None:
        if point == "on_start" or given[0] == 2:
            raise ZeroDivisionError("of mine")

    setattr(Fails, point, fail)
    fails, settings = Fails(), ["checkpoint.every=1"]
    where = "before the first step" if point == "on_start" else "step 2"
    said = rf"{where}: callback Fails\.{point} raised ZeroDivisionError: of mine \(.*test_python\.py:\d+\); mend it"
    with pytest.raises(CodeError, match=said) as caught:
        train("recipe.yaml", settings, run_dir="run", callbacks=[fails])
    assert fails.ended is caught.value and caught.value.exit_code == 5
    assert read_json(folder / "run" / "status.json")["exit_code"] == 5
    again = train("recipe.yaml", settings, run_dir="run", resume=True)
    assert first_difference(again.path, train("recipe.yaml", settings, run_dir="alone").path) is None


def test_a_callback_stops_the_run_which_saves(folder: Path) -> None:
    class Enough(Callback):
        def on_step(self, step: int, metrics: Any) -> None:
            raise StopTraining("enough")

        def on_end(self, error: BaseException | None) -> None:
            raise KeyError("lost beside the error that ended the run")

    with pytest.raises(Stopped, match=r"stopped by Enough\.on_step \(enough\) after step 1 of 2; go on with --resume"):
        train("recipe.yaml", run_dir="run", callbacks=[Enough()])
    assert (folder / "run" / "checkpoints" / "step_000001").is_dir()
    assert [record["step"] for record in train("recipe.yaml", run_dir="run", resume=True).metrics] == [1, 2]


def test_the_interface_is_imported_at_first_use() -> None:
    code = "import sys, rlgen; assert 'rlgen.api' not in sys.modules; rlgen.load_recipe; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    with pytest.raises(AttributeError, match="module rlgen has no training; it has Callback"):
        _ = rlgen.training


# --- algorithms of one's own -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "settings"), [pytest.param(REINFORCE, "{floor: 0.1}", marks=pytest.mark.slow), (SQUARED, "{}")])
def test_algorithms_of_the_page_train(folder: Path, text: str, settings: str) -> None:
    (folder / "mine.py").write_text(text)
    name = re.findall(r"^class (\w+)", text, re.MULTILINE)[0]
    own = f'trainer={{use: "mine.py:{name}", args: {settings}}}'
    run = train("recipe.yaml", [own, "trainer.updates_per_rollout=2"] if name == "SquaredRatio" else [own], run_dir="run")
    assert all(record["grad_norm"] > 0 and record["loss"] is not None for record in run.metrics)
    assert run.recipe.trainer.kind == "own" and f"trainer/{name}" in run.attempts[-1]["rewards"]
    if name == "SquaredRatio":
        assert "policy_loss" in run.metrics[0]
        (folder / "mine.py").write_text(text + "\n# changed\n")
        with pytest.raises(UsageError, match=r"trainer\.use SquaredRatio"):
            train("recipe.yaml", [own, "trainer.updates_per_rollout=2"], run_dir="run", resume=True, max_steps=3)


@pytest.mark.slow
def test_an_own_loss_that_is_rloo_learns_what_rloo_learns(folder: Path) -> None:
    (folder / "mine.py").write_text(
        "from rlgen.algorithms.rloo import RLOO\nfrom rlgen.recipe.trainers import RLOORecipe\n"
        "def same(recipe): return RLOO(RLOORecipe(kind='rloo'))\n"
    )
    ours = train("recipe.yaml", ['trainer={use: "mine.py:same"}'], run_dir="ours")
    theirs = train("recipe.yaml", ["trainer={kind: rloo}"], run_dir="theirs")
    one, other = (load_file(run.path / "checkpoints" / "step_000002" / "model.safetensors") for run in (ours, theirs))
    assert all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("return -(x.advantages[:, None] * select(mask, logp)).sum() / mask.sum(), {}", r"the split.* by \d\.\d+ of its"),
        ("return -(x.advantages[:, None] * select(mask, logp)).mean(), {}", r"the split.*divide by a count of x.totals"),
        ("return -torch.rand(()) * select(mask, logp).sum() / x.totals.tokens, {}", "computed twice it differs"),
        ("return -(x.advantages[:, None] * logp).sum() / x.totals.tokens, {}", "gradient is .* outside of the mask"),
        ("return select(mask, logp.detach()).sum() / x.totals.tokens, {}", "its gradient is zero"),
        ("return select(mask, logp), {}", "must return a scalar tensor and a dict"),
        ("return 1 / 0", r"Own\.loss raised ZeroDivisionError: division by zero \(.*own\.py:13\)"),
    ],
)
def test_a_loss_that_is_wrong_is_refused_with_the_numbers(folder: Path, body: str, why: str) -> None:
    (folder / "own.py").write_text(OWN.format(body=body))
    with pytest.raises(CodeError, match=why):
        OwnAlgorithm.load(OwnRecipe(kind="own", use=f"{folder / 'own.py'}:Own"))


def test_doctor_refuses_a_loss_that_depends_on_the_split(folder: Path) -> None:
    (folder / "own.py").write_text(OWN.format(body=PLAIN.replace("x.totals.tokens", "mask.sum()")))
    with pytest.raises(CodeError, match="depends on the split"):
        doctor_command(folder / "recipe.yaml", ['trainer={use: "own.py:Own"}'], True, False)


def test_a_class_that_lacks_something_is_refused(folder: Path) -> None:
    (folder / "own.py").write_text("class Own:\n    def __init__(self, recipe): pass\n    def loss(self, x): pass\n")
    with pytest.raises(CodeError, match=r"lacks reference, .*advantages; derive the class from rlgen\.algorithms\.base"):
        OwnAlgorithm.load(OwnRecipe(kind="own", use=f"{folder / 'own.py'}:Own"))
    (folder / "own.py").write_text(OWN.format(body=PLAIN).replace('"tokens"', '"rows"'))
    with pytest.raises(CodeError, match="divides_by is 'rows'; set it to one of sequences, tokens, prompts, pairs"):
        OwnAlgorithm.load(OwnRecipe(kind="own", use=f"{folder / 'own.py'}:Own"))


@pytest.mark.parametrize(
    "wrong",
    [
        *("trained=found.advantages", "trained=found.trained[:1]", "counted=found.counted.long()"),
        *("pair_id=None", "advantages=found.advantages / 0"),
    ],
)
def test_advantages_of_another_shape_are_refused(folder: Path, wrong: str) -> None:
    good = "found = Advantages.of_policy(found, found == 2, scores, self.recipe)"
    made = re.sub(r"return Advantages.*", f"{good}; import dataclasses; return dataclasses.replace(found, {wrong})", OWN)
    (folder / "own.py").write_text(made.format(body=PLAIN))
    with pytest.raises(CodeError, match=r"own\.py:Own\.advantages must return Advantages with a finite advantage for each row"):
        OwnAlgorithm.load(OwnRecipe(kind="own", use=f"{folder / 'own.py'}:Own"))


def test_rows_in_pairs_beside_rows_in_none_are_refused(folder: Path) -> None:
    """Only pairs would get a micro-batch."""
    paired = "found = Advantages.of_policy(found, found == 2, scores, self.recipe); found.pair_id[:2] = 0; return found"
    (folder / "own.py").write_text(re.sub(r"return Advantages.*", paired, OWN).format(body=PLAIN))
    with pytest.raises(CodeError, match=r"own\.py:Own\.advantages trains rows in pairs and rows in none; train one kind only"):
        OwnAlgorithm.load(OwnRecipe(kind="own", use=f"{folder / 'own.py'}:Own"))


def test_groups_without_signal_are_found_without_their_kl(folder: Path) -> None:
    """With `rollout.dynamic_sampling` groups are replaced before the reference has computed anything."""
    less_kl = "group_advantages(scores.rewards - self.recipe.beta * scores.kl"
    (folder / "own.py").write_text(OWN.format(body=PLAIN).replace("group_advantages(scores.rewards", less_kl))
    recipe = OwnRecipe(kind="own", use=f"{folder / 'own.py'}:Own", beta=0.1, kl="k1_in_reward")
    rewards = {3: (0.5, 0.5), 5: (0.0, 1.0)}
    rows = [make_sample(group_id=g, sample_index=place, reward=r) for g in rewards for place, r in enumerate(rewards[g])]
    table = RowTable.gather(Samples.of(rows, ()), Processes.alone())
    assert silent_groups(table, OwnAlgorithm.load(recipe), {}).tolist() == [3]


def test_the_recipe_names_a_place(folder: Path) -> None:
    with pytest.raises(RecipeError, match=r"`mine` is not a file.py:function or pkg.mod:function"):
        load_recipe(folder / "recipe.yaml", ["trainer={use: mine}"])
    with pytest.raises(RecipeError, match=r"trainer\.use.*rollout\.stream"):
        load_recipe(folder / "recipe.yaml", ['trainer={use: "own.py:Own"}', "rollout.stream=true"])
