"""A step that is computed again, from a checkpoint or from the start: the same to the last bit, or what a change does to it."""

import hashlib
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import RECIPE, read_jsonl
from helpers.before import before
from helpers.damage import flip
from helpers.recipes import written
from helpers.rollouts import rollout_rows
from helpers.torchrun import ALONE, TESTS, launch, torchrun, train_words
from helpers.waiting import HANGS

from rlgen.analysis.run import read_run
from rlgen.cli.replay import replay_command
from rlgen.cli.train import train_command
from rlgen.errors import RecipeError, RlgenError, UsageError
from rlgen.files import read_json, write_json
from rlgen.processes import Processes
from rlgen.setup.change import with_changes
from rlgen.setup.replay import Past, Replay, ranges, replay, replayable
from rlgen.trainers import loop

STEPS = 5
REWARD = "def f(completion_ids): return float(sum(completion_ids) % 7)\n"
PLAIN = ["engine={kind: transformers}", f"run.steps={STEPS}", "checkpoint={every: 2, keep: 9}", "rewards=[{use: 'r.py:f'}]"]
# Between them: every trainer, each place of a KL, several updates, an adapter, a schedule, further prompts.
KINDS = {
    "grpo": ["trainer={kind: grpo, beta: 0.05, updates_per_rollout: 3}", "optim={learning_rate: 1.0e-2, max_grad_norm: 0.5}"],
    "rloo": ["trainer={kind: rloo}", "rollout.dynamic_sampling=1", "rollout.group_size=2", "optim.learning_rate=1.0e-2"],
    "online_dpo": [
        "trainer={kind: online_dpo, updates_per_rollout: 2}",
        "model.lora={rank: 4}",
        "optim={learning_rate: 1.0e-2, schedule: linear, warmup_steps: 2}",
    ],
}


def write(folder: Path) -> Path:
    (folder / "r.py").write_text(REWARD)
    return written(folder, RECIPE)


def train(folder: Path, *overrides: str, resume: bool = False) -> Path:
    train_command(write(folder), [*PLAIN, *overrides], resume, False, None, folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run of each kind, trained when it is first asked for. Nobody writes into it."""
    made: dict[str, Path] = {}

    def run(kind: str) -> Path:
        if kind not in made:
            made[kind] = train(tmp_path_factory.mktemp(kind), *KINDS[kind])
        return made[kind]

    return run


@pytest.fixture
def copied(runs: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of the run of RLOO, to be changed."""
    return Path(shutil.copytree(runs("rloo"), tmp_path / "copy"))


def replayed(run: Path, step: int, *overrides: str) -> Replay:
    read = read_run(run)
    past = Past.of(read.path, read.recipe, read.attempts, read.metrics)
    changed = with_changes(run / "resolved.yaml", past.recipe, overrides)[0] if overrides else None
    return replay(past, step, changed, print, Processes.alone())


def recorded(run: Path, step: int) -> dict[str, Any]:
    return next(record for record in read_jsonl(run / "metrics.jsonl") if record["step"] == step)


def files(run: Path) -> dict[Path, tuple[int, str]]:
    every = [path for path in run.rglob("*") if path.is_file()]
    return {path: (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest()) for path in every}


@pytest.mark.parametrize("step, start", [(1, 0), (2, 0), (3, 2), (4, 2), (5, 4)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_the_same_to_the_last_bit(runs: Callable[[str], Path], kind: str, step: int, start: int) -> None:
    run = runs(kind)
    before, record = files(run), recorded(run, step)
    found = replayed(run, step)
    assert files(run) == before
    assert found.metrics["loss"] == record["loss"] != 0 and found.metrics["grad_norm"] == record["grad_norm"] > 0
    assert {key: record[key] for key in found.metrics} == found.metrics and len(found.metrics) > 25
    assert (found.start, found.differences, found.first_off, found.other, found.change) == (start, {}, None, [], None)


def test_further_prompts_and_clipped_tokens_are_there_to_be_replayed(runs: Callable[[str], Path]) -> None:
    """Otherwise the tests around this one would say less than they seem to."""
    assert any(record["groups/resampled"] > 0 for record in read_jsonl(runs("rloo") / "metrics.jsonl"))
    assert recorded(runs("grpo"), 3)["clip/region"] > 0
    rates = [record["learning_rate"] for record in read_jsonl(runs("online_dpo") / "metrics.jsonl")]
    assert rates == [0.0, 0.005, 0.01, pytest.approx(0.02 / 3), pytest.approx(0.01 / 3)]


def test_a_changed_clip_changes_the_updates_after_the_first_and_nothing_else(runs: Callable[[str], Path]) -> None:
    found = replayed(runs("grpo"), 3, "trainer.clip_low=0.0001", "trainer.clip_high=0.0001")
    change = found.change
    assert found.differences == {} and change is not None
    (was, now), record = change.metrics_changed["clip/region"], recorded(runs("grpo"), 3)
    assert was == record["clip/region"] < now
    assert change.cosine_first == 1.0 and change.cosine is not None and change.cosine < 0.999
    norm = change.metrics_changed["grad_norm"]
    assert norm[0] == record["grad_norm"] != norm[1] and change.relative_norm == norm[1] / norm[0]
    assert (change.advantages_changed, change.rows_trained) == (0, (16, 16))
    first_pass = [key for key in change.metrics if key.startswith(("sampler/", "is/", "tokens/", "updates/", "learning_rate"))]
    assert len(first_pass) > 20 and not set(first_pass) & set(change.metrics_changed)


def test_a_changed_clip_gives_what_a_run_with_it_has_recorded(runs: Callable[[str], Path], tmp_path: Path) -> None:
    """Both runs take step 1 from the same weights, on the same samples."""
    other = train(tmp_path, *KINDS["grpo"], "trainer.clip_high=0.4", "run.steps=1")
    change = replayed(runs("grpo"), 1, "trainer.clip_high=0.4").change
    record = recorded(other, 1)
    assert change is not None and change.metrics == {key: record[key] for key in change.metrics}
    assert {"loss", "grad_norm", "clip/high"} <= set(change.metrics_changed)
    was, now = change.metrics_changed["clip/high"]
    assert was == recorded(runs("grpo"), 1)["clip/high"] > now == record["clip/high"]
    lowest, highest = change.ratio["min"], change.ratio["max"]
    assert change.cosine_first == 1.0 and lowest[0] != lowest[1] and highest[0] != highest[1]


def test_settings_of_the_optimizer_change_what_is_after_the_gradient(runs: Callable[[str], Path]) -> None:
    change = replayed(runs("rloo"), 4, "optim.learning_rate=0.02", "optim.warmup_steps=4").change
    assert change is not None and change.metrics_changed == {"learning_rate": (0.01, 0.015)}, "three quarters of the warm-up"
    assert (change.cosine, change.cosine_first, change.relative_norm) == (1.0, 1.0, 1.0)
    lowest, highest = change.ratio["min"], change.ratio["max"]
    assert lowest[1] < lowest[0] < 1 < highest[0] < highest[1]  # type: ignore[operator]


def test_other_advantages_are_counted(runs: Callable[[str], Path]) -> None:
    change = replayed(runs("grpo"), 3, "trainer.scale_rewards=none").change
    assert change is not None and change.rows == 16 and change.advantages_flipped == 0
    rows = rollout_rows(runs("grpo"), 3)
    assert change.advantages_changed == sum(row["advantage"] != 0 for row in rows)
    assert 0.5 < change.advantages_largest_change < 7 and change.cosine_first != 1.0


def test_a_reference_that_the_run_had_not_is_the_model_that_it_began_with(runs: Callable[[str], Path]) -> None:
    kl = []
    for step in (1, 4):
        change = replayed(runs("rloo"), step, "trainer.beta=0.1", "trainer.kl=k3_is").change
        assert change is not None
        kl.append(change.metrics["kl/ref_k3"])
    assert abs(kl[0]) < 1e-9 and kl[1] > 1e-6


@pytest.mark.parametrize(
    "error, override, said",
    [
        (UsageError, "rollout.temperature=0.5", "--set rollout.temperature: it decides what is sampled, and nothing is sampled"),
        (UsageError, "rewards.0.weight=2.0", "--set rewards.0.weight: the rewards are those that the run has recorded"),
        (UsageError, "run.seed=1", "it is not part of the computation of a step; a replay can change trainer.* and optim.*"),
        (UsageError, "trainer.updates_per_rollout=1", "the run used this already"),
        (RecipeError, "trainer.clip_high=0.4", "trainer.clip_high has no effect when trainer.updates_per_rollout is 1"),
        (RecipeError, "trainer.clip_hgih=0.4", "did you mean `clip_high`?"),
    ],
)
def test_what_cannot_be_changed(runs: Callable[[str], Path], error: type[RlgenError], override: str, said: str) -> None:
    with pytest.raises(error) as caught:
        replay_command(runs("rloo"), 2, [override], False)
    assert said in str(caught.value) and (error is UsageError or str(caught.value).startswith("--set 1"))


def test_fewer_updates_leave_no_value_of_the_run_without_effect(runs: Callable[[str], Path]) -> None:
    """`resolved.yaml` says the clip, which then does nothing: nobody asked for it."""
    change = replayed(runs("grpo"), 3, "trainer.updates_per_rollout=1").change
    assert change is not None and change.metrics_changed["updates/done"] == (3, 1)
    assert change.metrics["clip/region"] == 0.0 and change.cosine_first == 1.0


def test_a_step_that_is_not_there(runs: Callable[[str], Path]) -> None:
    with pytest.raises(UsageError, match=r"--step 9: .*/run has no such step in metrics.jsonl, which has steps 1 to 5$"):
        replay_command(runs("rloo"), 9, [], False)
    assert ranges([5, 1, 2, 3, 7, 8]) == "steps 1 to 3, step 5, steps 7 to 8" and ranges([]) == "none"


def test_json_has_both_sides(runs: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    run = runs("grpo")
    replay_command(run, 4, ["trainer.clip_low=0.0"], True)
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    record = recorded(run, 4)
    assert (said["step"], said["from_step"], said["same"], said["differences"]) == (4, 2, True, {})
    assert (said["loss"], said["grad_norm"]) == (record["loss"], record["grad_norm"])
    changed = said["changed"]
    assert changed["set"] == {"trainer.clip_low": {"recorded": 0.2, "changed": 0.0}}
    assert changed["loss"] == changed["differences"]["loss"]["changed"] != said["loss"]
    assert changed["differences"]["loss"]["recorded"] == said["loss"]
    assert changed["gradient"]["cosine_first_update"] == 1.0 and changed["advantages"]["changed"] == 0


def test_a_terminal_of_80_columns_shows_it(runs: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    run = runs("grpo")
    replay_command(run, 3, [], False)
    plain, record = capsys.readouterr().out, recorded(run, 3)
    assert repr(record["loss"]) in plain and repr(record["grad_norm"]) in plain and "the same to the last bit" in plain
    replay_command(run, 3, ["trainer.clip_low=0.0", "trainer.beta=0.0"], False)
    shown = capsys.readouterr().out
    assert "trainer.clip_low: 0.2 -> 0.0" in shown and "clip/low" in shown and "gradient of the first update: cosine" in shown
    assert max(len(line) for line in (plain + shown).splitlines() if str(run) not in line) <= 80


def test_numbers_that_differ_are_said(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = read_jsonl(copied / "metrics.jsonl")
    lines[2]["loss"], lines[3]["grad_norm"] = lines[2]["loss"] + 0.25, lines[3]["grad_norm"] * 2
    (copied / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (first,) = read_json(copied / "provenance.json")
    write_json(copied / "provenance.json", [{**first, "packages": {**first["packages"], "torch": "1.0"}}])
    found = replayed(copied, 4)
    assert found.differences == {"grad_norm": (lines[3]["grad_norm"], lines[3]["grad_norm"] / 2)} and found.first_off == 3
    replay_command(copied, 4, [], False)
    shown = capsys.readouterr().out
    said = ("1 of ", "by 5.0e-01 of their size at most", "the first replayed step that differs is step 3", "torch 1.0, now")
    assert [words for words in said if words not in shown] == []


def test_a_damaged_checkpoint_is_left_out(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(copied / "checkpoints" / "step_000004" / "model.safetensors", 1)
    found = replayed(copied, 5)
    assert (found.start, found.differences) == (2, {}) and "DAMAGED CHECKPOINT" in capsys.readouterr().out


def test_other_weights_at_the_start_are_refused_where_they_matter(copied: Path) -> None:
    (first,) = read_json(copied / "provenance.json")
    write_json(copied / "provenance.json", [{**first, "weights": "0123"}])
    with pytest.raises(UsageError, match=r"have changed since the run began .*, or replay a step after a checkpoint$"):
        replayed(copied, 1)
    with pytest.raises(UsageError, match=r"they are the reference: bring them back$"):
        replayed(copied, 3, "trainer.beta=0.1")
    assert replayed(copied, 3).differences == {}


def test_a_step_without_its_samples(copied: Path) -> None:
    (copied / "rollouts" / "step_000003.parquet").unlink()
    with pytest.raises(UsageError) as caught:
        replayed(copied, 4)
    said = "--step 4: a replay starts from the checkpoint of step 2, but the samples of step 3 are no longer recorded"
    assert said in str(caught.value) and str(caught.value).endswith("steps that can be replayed: steps 1 to 2, step 5")
    assert replayed(copied, 5).differences == {}


def test_a_run_that_broke_off_is_replayed_from_its_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(trainer: loop.Trainer, step: int, *others: Any) -> None:
        if step == 5:
            raise RuntimeError("the machine went down")

    settings = ["rollouts.every=0", "checkpoint={every: 2, keep: 2}", *KINDS["rloo"]]
    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        before(loop.Trainer, "sync", breaks, patch.setattr)
        train(tmp_path, *settings)
    run = tmp_path / "run"
    assert [path.name for path in (run / "rollouts").iterdir()] == []
    found = replayed(run, 4)
    assert (found.start, found.differences, found.metrics["loss"]) == (2, {}, recorded(run, 4)["loss"])
    with pytest.raises(UsageError, match=r"has no such step in metrics.jsonl, which has steps 1 to 4$"):
        replayed(run, 5)
    with pytest.raises(UsageError, match=r"samples of steps 1 to 2 are no longer recorded .*: steps 3 to 4$"):
        replayed(run, 2)
    train(tmp_path, *settings, "run.steps=6", resume=True)
    read = read_run(run)
    assert replayable(Past.of(read.path, read.recipe, read.attempts, read.metrics)) == [5, 6]
    assert [replayed(run, step).differences for step in (5, 6)] == [{}, {}], "what step 5 sampled before it broke off"


KL = ("trainer.beta=0.1", "trainer.kl=k3_is")


@pytest.mark.slow
def test_a_step_of_two_processes_is_computed_by_two(tmp_path: Path) -> None:
    """Further prompts too, which both processes sample: the order of the rows is that of the prompts."""
    run = tmp_path / "run"
    assert started(2, *train_words(write(tmp_path), run, *PLAIN, *KINDS["rloo"], "run.steps=4")).returncode == 0
    assert any(record["groups/resampled"] > 0 for record in read_jsonl(run / "metrics.jsonl"))
    for step in (2, 4):  # from the start, and from a checkpoint
        said = started(2, "replay", run, "--step", step, "--json", "--set", KL[0], "--set", KL[1])
        assert said.returncode == 0, said.stderr
        (line,) = said.stdout.splitlines()
        found, record = json.loads(line), recorded(run, step)
        assert (found["same"], found["other"], found["grad_norm"]) == (True, [], record["grad_norm"])
        alone = replayed(run, step, *KL)
        assert alone.other == ["2 processes, now 1: `torchrun --nproc-per-node 2 -m rlgen replay …`"] and alone.change is not None
        assert alone.metrics["grad_norm"] == pytest.approx(record["grad_norm"], rel=1e-3)
        for name, (was, now) in alone.change.ratio.items():  # of the tokens of both processes
            assert found["changed"]["ratio"][name] == pytest.approx({"recorded": was, "changed": now}, rel=0.01)
    three = started(3, "replay", run, "--step", 3)
    assert three.returncode != 0
    assert three.stderr.count("error: step 3 was trained by 2 processes, but 3 run: start 2 with `torchrun --nproc-per") == 1


def started(processes: int, *words: object) -> subprocess.CompletedProcess[str]:
    """A command of rlgen in several processes, under torchrun."""
    return launch("-m", "rlgen", *words, launcher=torchrun(processes), timeout=HANGS)


@pytest.mark.slow
def test_a_killed_run(tmp_path: Path) -> None:
    """Killed between the metrics of step 3 and its rollouts: what these lack is in the journal."""
    instant = "before:rlgen.run.rollouts:RolloutWriter._write:1@3"
    words = train_words(write(tmp_path), tmp_path / "run", *PLAIN, *KINDS["rloo"])
    killed = launch(TESTS / "run" / "killed.py", instant, *words, launcher=ALONE, timeout=HANGS)
    assert killed.returncode == -9, killed.stderr
    for record in read_jsonl(tmp_path / "run" / "metrics.jsonl"):
        assert replayed(tmp_path / "run", record["step"]).differences == {}
